"""Gradients of Kronecker-factored layers of small factors: of a group of factors at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .._arguments import sums_dtype
from .fused import DTYPES, apply, library
from .gemm import Held
from .squares_bwd import two_of_a_size

SMALL = 12  # rows and columns of the largest factors that no GEMM is faster for, with columns beyond them
# By an element's bytes, from how many elements on other ways are faster: for multiples of 8, on tensor cores, and for
# others of more than 8, a factor or a product of two at a time.
MANY, MANY_OTHERS = {2: 1 << 21, 4: 1 << 22, 8: 1 << 21}, {2: 1 << 21, 4: math.inf, 8: 1 << 17}
ROWS, NARROW = 512, 12  # of a single factor, that no GEMM is faster for
START = 3600  # nanoseconds of a prediction that other work hides


@functools.lru_cache(4096)
def _groups(
    dtype: torch.dtype, rows: int, sizes: tuple[int, ...], inner: int, device: int
) -> list[tuple[int, int, int, int]]:
    groups = library().kron_linear_fibers_bwd_plan(DTYPES[dtype], rows, sizes, inner, device)
    return [(group[0], group[1], group[2], group[3]) for group in groups]


def are_small(factors: Sequence[Tensor]) -> bool:
    """Whether no GEMM is faster for any of the factors."""
    return all(max(w.shape) <= SMALL for w in factors)


def in_fours(factors: Sequence[Tensor]) -> bool:
    """Whether products of two have sizes that GEMMs in 16 bits are fast for, and make whole vectors of columns."""
    return all(size % 4 == 0 for w in factors for size in w.shape)


def plan_of_fibers(x: Tensor, factors: Sequence[Tensor], inner: int) -> list[tuple[int, int, int, int]]:
    """The groups of factors, with `inner` columns beyond them: first, count, elements of scratch, nanoseconds.

    Empty where there is no kernel.
    """
    sizes = tuple(size for w in factors for size in w.shape)
    return _groups(x.dtype, x.numel() // x.shape[-1], sizes, inner, x.device.index)


def groups_of_fibers(x: Tensor, factors: Sequence[Tensor]) -> list[tuple[int, int, int, int]]:
    """The groups that `backward_of_fibers` takes, or none where other ways are faster, as measured on an H200."""
    sizes = tuple(size for w in factors for size in w.shape)
    rows = x.numel() // x.shape[-1]
    if len(factors) == 1:
        use = rows >= ROWS and max(sizes) <= NARROW
    elif two_of_a_size(x, factors):
        use = len(factors) > 2
    elif all(size % 8 == 0 for size in sizes):  # tensor cores waste nothing
        use = min(sizes) < 16 and x.numel() < MANY[x.element_size()]
    elif min(sizes) > 8:
        if x.element_size() == 2:
            others = in_fours(factors) and (x.dtype == torch.bfloat16 or len(factors) > 2)
        else:
            others = two_of_a_size(x, factors[-2:]) is not None
        use = not (others and x.numel() >= MANY_OTHERS[x.element_size()])
    else:
        use = True
    return plan_of_fibers(x, factors, 1) if use else []


def time_of_fibers(groups: Sequence[tuple[int, int, int, int]]) -> float:
    """The predicted nanoseconds of `backward_of_fibers` behind other work, infinite without groups."""
    return sum(nanoseconds for *_, nanoseconds in groups) - START if groups else math.inf


def backward_of_fibers(
    held: Held,
    x: Tensor,
    factors: Sequence[Tensor],
    groups: Sequence[tuple[int, int, int, int]],
    inner: int,
    needs_x: bool,
    needs_factors: Sequence[bool],
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Back through `apply` of small factors: forward again to what groups start from, then back through them."""
    parts = [slice(first, first + count) for first, count, *_ in groups]
    beyond = [inner * math.prod(w.shape[1] for w in factors[part.stop :]) for part in parts]
    # x as the samples of each group.
    states, state = [], x.contiguous()
    for part, inner in zip(parts, beyond, strict=True):
        state = state.reshape(-1, math.prod(w.shape[1] for w in factors[part]) * inner)
        states.append(state)
        if part is not parts[-1]:
            state = apply(state, factors[part], inner)
    dy = held.pop().contiguous()
    needed = zip(factors, needs_factors, strict=True)
    dfactors = [w.new_empty(w.shape) if is_needed else None for w, is_needed in needed]
    for part, inner, (_, _, scratch, _) in reversed(list(zip(parts, beyond, groups, strict=True))):
        state, needs_state = states.pop(), needs_x or any(needs_factors[: part.start])
        dstate = torch.empty_like(state) if needs_state else None
        partial = x.new_empty(scratch, dtype=sums_dtype(x.dtype))
        dy = dy.reshape(len(state), -1)
        library().kron_linear_fibers_bwd(dfactors[part], dstate, partial, dy, state, factors[part], inner)
        if dstate is None:
            return None, dfactors
        dy = dstate
    return dy.reshape(x.shape) if needs_x else None, dfactors
