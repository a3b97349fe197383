"""Samples and tolerances that the tests of cuops.nn's RMSNorm share."""

from __future__ import annotations

import torch

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def make(shape, dtype=torch.float32, device="cpu", seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def close(got, want, dtype=None):
    tolerance = TOLERANCE[dtype or want.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
