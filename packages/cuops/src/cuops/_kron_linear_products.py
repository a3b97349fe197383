"""Gradients of Kronecker-factored layers of few products: of a factor, and of what it was applied to, in one launch."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ._kron_linear_fused import DTYPES, apply, library

# Predicted nanoseconds of a launch up to which nothing else is faster, as measured on an H200: by the bytes of an
# element, without columns beyond the factor's and with them.
MOST = {2: (10000, 17000), 4: (17000, 18000), 8: (14500, 18500)}
START, AGAIN = 4300, 1800  # of a launch, which others hide; and the forward of a factor
# The least nanoseconds that the kernels for two factors of a size take, by the bytes of an element.
LEAST_OF_SQUARES = {
    2: {16: 5200, 32: 6200, 64: 10400, 96: 15900, 128: 16400},
    4: {16: 6900, 32: 10900, 64: 14100, 96: 25400, 128: 21400},
}


@functools.lru_cache(4096)
def _times(dtype: torch.dtype, rows: int, sizes: tuple[tuple[int, int], ...], device: int) -> list[int]:
    """The predicted nanoseconds of the launch of each factor; empty where other ways are faster."""
    times, inner = [], math.prod(o for o, _ in sizes)
    for o, i in sizes:
        inner //= o
        time = library().kron_linear_bwd_product_time(DTYPES[dtype], rows, inner, o, i, True, True, device)
        if not 0 < time <= MOST[dtype.itemsize][inner > 1]:
            return []
        times.append(time)
        rows *= i
    return times


def are_few_products(x: Tensor, factors: Sequence[Tensor], squares: tuple[int, int] | None) -> bool:
    """Whether `backward_of_products` takes less time than GEMMs, and than what `two_of_a_size` found."""
    sizes = tuple(tuple(w.shape) for w in factors)
    times = _times(x.dtype, x.numel() // x.shape[-1], sizes, x.device.index)
    if squares is None or not times:
        return bool(times)
    return sum(times) - START * len(times) + AGAIN * (len(times) - 1) < LEAST_OF_SQUARES[x.element_size()][squares[1]]


def backward_of_products(
    dy: Tensor, x: Tensor, factors: Sequence[Tensor], needs_x: bool, needs_factors: Sequence[bool]
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
    grad, dfactors = dy.contiguous(), [None] * len(factors)
    for k, w in enumerate(factors):
        (o, i), inner = w.shape, beyond[k + 1]
        needs_state = needs_x or any(needs_factors[k + 1 :])
        if not (needs_state or needs_factors[k]):
            break
        before = grad.reshape(rows, o, inner)
        state = states[k].reshape(rows, i, inner) if needs_factors[k] else before.new_empty(rows, i, inner)
        dfactors[k] = w.new_empty(o, i) if needs_factors[k] else None
        grad = torch.empty_like(state) if needs_state else None
        library().kron_linear_bwd_product(grad, dfactors[k], before, state, w)
        rows *= i
    return grad.reshape(x.shape) if needs_x else None, dfactors
