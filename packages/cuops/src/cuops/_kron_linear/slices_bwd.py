"""Gradients of Kronecker-factored layers of few small samples, all in one short launch."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .fused import DTYPES, library
from .gemm import Held

MOST_NANOSECONDS = 25000  # predicted nanoseconds, beyond which other ways are faster, as measured on an H200
FAR = 1 << 16  # elements from row to row, or column to column, of a factor, that a kernel may not take


@functools.lru_cache(4096)
def _nanoseconds(dtype: torch.dtype, rows: int, sizes: tuple[int, ...], device: int) -> float:
    time = library().kron_linear_slices_bwd_time(DTYPES[dtype], rows, sizes, device)
    return time if 0 < time <= MOST_NANOSECONDS else math.inf


def time_of_slices(x: Tensor, factors: Sequence[Tensor]) -> float:
    """The predicted nanoseconds of all gradients behind other work; infinite where other ways are faster."""
    sizes = tuple(size for w in factors for size in w.shape)
    return _nanoseconds(x.dtype, x.numel() // x.shape[-1], sizes, x.device.index)


def backward_of_slices(
    held: Held, x: Tensor, factors: Sequence[Tensor], needs_x: bool, needs_factors: Sequence[bool]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """`fused_backward` in one launch."""
    state, grad = (t.contiguous().reshape(-1, t.shape[-1]) for t in (x, held.pop()))
    factors = [w.contiguous() if max(w.stride()) > FAR else w for w in factors]
    needed = zip(factors, needs_factors, strict=True)
    dfactors = [w.new_empty(w.shape) if is_needed else None for w, is_needed in needed]
    dx = torch.empty_like(state) if needs_x else None
    library().kron_linear_slices_bwd(dfactors, dx, grad, state, factors)
    return None if dx is None else dx.reshape(x.shape), dfactors
