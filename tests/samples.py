"""What the tests of all operators share: their names, the dtypes, and random tensors of them."""

from __future__ import annotations

from pathlib import Path

import cuops
import torch

OPERATORS = sorted({source.stem for source in Path(__file__).parents[1].glob("csrc/*.cu")} & set(cuops.__all__))
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def make(shape, dtype=torch.float32, device="cpu", seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)
