"""Gradients of Kronecker-factored layers of few products: of a factor, and of what it was applied to, in one launch."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .fused import DTYPES, apply, library
from .gemm import Held

# Predicted nanoseconds of a launch up to which nothing else is faster, as measured on an H200: by the bytes of an
# element, without columns beyond the factor's and with them.
MOST_NANOSECONDS = {2: (10000, 17000), 4: (17000, 18000), 8: (12000, 18500)}
# Of these, what launches in a row share; the forward of a factor; the least of a launch, and of the last forward.
START, AGAIN, LEAST, LAST = 4300, 1800, 2900, 1700
SINGLES = {2: 2.5, 4: 1.3, 8: 1.3}  # times as long where elements move one by one


@functools.lru_cache(4096)
def _times(dtype: torch.dtype, rows: int, sizes: tuple[tuple[int, int], ...], device: int) -> list[int]:
    """The predicted nanoseconds of the launch of each factor; empty where other ways are faster."""
    times, inner = [], math.prod(o for o, _ in sizes)
    for o, i in sizes:
        inner //= o
        time = library().kron_linear_product_bwd_time(DTYPES[dtype], rows, inner, o, i, device)
        if not 0 < time <= MOST_NANOSECONDS[dtype.itemsize][inner > 1]:
            return []
        times.append(time)
        rows *= i
    return times


@functools.lru_cache(4096)
def _nanoseconds(dtype: torch.dtype, rows: int, sizes: tuple[tuple[int, int], ...], device: int) -> float:
    times = _times(dtype, rows, sizes, device)
    n = len(times)
    if n == 0:
        return math.inf
    singles = SINGLES[dtype.itemsize] if any(size % 4 for pair in sizes for size in pair) else 1
    return singles * max(sum(times) - START * n + AGAIN * (n - 1), LEAST * n - LAST)


def time_of_products(x: Tensor, factors: Sequence[Tensor]) -> float:
    """The predicted nanoseconds of `backward_of_products` behind other work; infinite where other ways are faster."""
    sizes = tuple(tuple(w.shape) for w in factors)
    return _nanoseconds(x.dtype, x.numel() // x.shape[-1], sizes, x.device.index)


def backward_of_products(
    held: Held, x: Tensor, factors: Sequence[Tensor], needs_x: bool, needs_factors: Sequence[bool]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """`fused_backward`, a factor at a time: forward again, the last one first, and then back from the first."""
    rows = x.numel() // x.shape[-1]
    beyond = [math.prod(w.shape[0] for w in factors[k:]) for k in range(len(factors) + 1)]
    state, states = x.contiguous(), [x] * len(factors)
    for k in reversed(range(len(factors))):
        states[k] = state
        if not any(needs_factors[:k]):
            break
        state = apply(state.reshape(-1, factors[k].shape[1] * beyond[k + 1]), [factors[k]], beyond[k + 1])
    grad, dfactors = held.pop().contiguous(), [None] * len(factors)
    for k, w in enumerate(factors):
        (o, i), inner = w.shape, beyond[k + 1]
        needs_state = needs_x or any(needs_factors[k + 1 :])
        if not (needs_state or needs_factors[k]):
            break
        before = grad.reshape(rows, o, inner)
        state = states[k].reshape(rows, i, inner) if needs_factors[k] else before.new_empty(rows, i, inner)
        dfactors[k] = w.new_empty(o, i) if needs_factors[k] else None
        grad = torch.empty_like(state) if needs_state else None
        library().kron_linear_product_bwd(grad, dfactors[k], before, state, w)
        rows *= i
    return grad.reshape(x.shape) if needs_x else None, dfactors
