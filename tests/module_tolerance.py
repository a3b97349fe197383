"""How far what cuops.nn's RMSNorm returns may be from what PyTorch's does."""

from __future__ import annotations

import torch

# Both round, some of PyTorch's ways between their steps, too.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def close(got, want, dtype=None):
    tolerance = TOLERANCE[dtype or want.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
