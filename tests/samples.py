"""What the tests of all operators share: the dtypes, and random tensors of them."""

from __future__ import annotations

import torch

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def make(shape, dtype=torch.float32, device="cpu", seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)
