"""Gradients of Kronecker-factored layers by the library's fused kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ._kron_linear_fibers_bwd import backward_of_fibers, groups_of_fibers, time_of_fibers
from ._kron_linear_fused import DTYPES, apply, fused_chain, library, plan, tf32_allowed
from ._kron_linear_gemm import chain_of_matmuls_backward
from ._kron_linear_product_bwd import backward_of_products, time_of_products
from ._kron_linear_slices_bwd import backward_of_slices, time_of_slices
from ._kron_linear_squares_bwd import TOGETHER, backward_of_squares, time_of_squares, two_of_a_size, unmerge

MANY, FEW = 4, 8  # factors of at least 8, or twice as many, from which on gradients are faster in the fused kernels
ENOUGH = 1 << 22  # elements, from which on they are with fewer factors
NARROW = 16  # the largest factors that are faster one by one than as a part of two of a size
FEW_ROWS = 64  # float32, for fewer than which a gradient in the library's kernel is faster than by a batched GEMM
MERGED = 64  # the largest product of small factors, whose gradients are found together


@functools.lru_cache(4096)
def _partial_rows(dtype: torch.dtype, rows: int, inner: int, out: int, in_: int, device: int) -> int:
    return library().kron_linear_bwd_partial_rows(DTYPES[dtype], rows, inner, out, in_, device)


def _merged(factors: Sequence[Tensor]) -> list[slice]:
    """Neighbours whose Kronecker product is small count as one factor, the last ones first."""
    slices: list[slice] = []
    o = i = MERGED + 1
    for k in reversed(range(len(factors))):
        w = factors[k]
        if max(o * w.shape[0], i * w.shape[1]) <= MERGED and slices[0].stop - k <= TOGETHER:
            o, i, slices[0] = o * w.shape[0], i * w.shape[1], slice(k, slices[0].stop)
        else:
            o, i = w.shape
            slices.insert(0, slice(k, k + 1))
    return slices


def _worth_fusing(dy: Tensor, factors: Sequence[Tensor]) -> bool:
    """Whether gradients take less time in the fused kernels: as measured, where many factors make few groups."""
    if len(factors) < 2 * MANY and max(factors[0].shape) < FEW:
        return False
    if 3 * len(_merged(factors)) > 2 * len(factors) or (len(factors) < MANY and dy.numel() < ENOUGH):
        return False
    rows, device = dy.numel() // dy.shape[-1], dy.device.index
    if _partial_rows(dy.dtype, rows, 1, 1, 1, device) == 0:
        return False
    sizes = [(w.shape[1], w.shape[0]) for w in factors]

    def is_fused(rows: int, part: Sequence[tuple[int, int]], inner: int) -> bool:
        flat = tuple(size for pair in part for size in pair)
        groups = plan(dy.dtype, rows, flat, inner, tf32_allowed(dy), device, False) if part else []
        return all(fused for *_, fused in groups)

    for group in _merged(factors):
        before, own, after = sizes[: group.start], sizes[group], sizes[group.stop :]
        o, rest = math.prod(i for _, i in own), math.prod(i for _, i in after)
        rows_after = rows * math.prod(size for size, _ in before) * o
        if not (is_fused(rows, before, o * rest) and is_fused(rows_after, after, 1)):
            return False
    return is_fused(rows, sizes, 1)


def fused_backward(
    dy: Tensor, x: Tensor, factors: Sequence[Tensor], needs_x: bool, needs_factors: Sequence[bool]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients for x and the factors, None where not needed. Nothing is empty.

    A factor's gradient is the product, summed over all that it does not touch, of x and of what dy becomes by the
    transposes of all other factors.
    """
    transposed = [w.mT for w in factors]
    if any(needs_factors):
        squares = two_of_a_size(x, factors)
        by_products, by_slices = time_of_products(x, factors), time_of_slices(x, factors)
        groups = [] if len(factors) == 1 and by_products < math.inf else groups_of_fibers(x, factors)
        otherwise = time_of_fibers(groups) if groups else time_of_squares(x, squares)
        if by_slices < min(by_products, otherwise):
            return backward_of_slices(dy, x, factors, needs_x, needs_factors)
        if by_products < otherwise:
            return backward_of_products(dy, x, factors, needs_x, needs_factors)
        if groups:
            return backward_of_fibers(dy, x, factors, groups, needs_x, needs_factors)
        if squares:
            return backward_of_squares(dy, x, factors, *squares, needs_x, needs_factors)
        if cut := _cut_before_squares(x, factors):
            return _backward_in_two(dy, x, factors, cut, needs_x, needs_factors)
    if not _worth_fusing(dy, factors):
        return chain_of_matmuls_backward(dy, x, factors, needs_x, needs_factors)
    dx = fused_chain(dy, transposed, None) if needs_x else None
    dfactors: list[Tensor | None] = [None] * len(factors)
    if not any(needs_factors):
        return dx, dfactors
    x, dy = x.contiguous(), dy.contiguous()
    for group in _merged(factors):
        if not any(needs_factors[group]):
            continue
        before, after = factors[: group.start], factors[group.stop :]
        o, i = math.prod(w.shape[0] for w in factors[group]), math.prod(w.shape[1] for w in factors[group])
        rest = math.prod(w.shape[0] for w in after)
        grad = dy.reshape(-1, dy.shape[-1])
        if before:
            grad = apply(grad, transposed[: group.start], o * rest)
        if after:
            grad = apply(grad.reshape(-1, rest), transposed[group.stop :], 1)
        rest = math.prod(w.shape[1] for w in after)
        dw = _sum_of_products(grad.reshape(-1, o, rest), x.reshape(-1, i, rest), group.stop - group.start > 1)
        dfactors[group] = unmerge(dw, factors[group], needs_factors[group])
    return dx, dfactors


def _cut_before_squares(x: Tensor, factors: Sequence[Tensor]) -> int:
    """How many factors come before two of a size: 0 where there are none, 2 or more if these are two of a size as well.

    Which takes less time only in float32 and beyond 16, as measured on an H200: x and its gradient are rearranged.
    """
    cuts = [k for k in range(1, len(factors) - 1) if two_of_a_size(x, factors[k:])]
    if x.dtype == torch.float32 and min(min(w.shape) for w in factors) > NARROW:
        return next((k for k in cuts if k > 1 and two_of_a_size(x, factors[:k])), 1 if cuts else 0)
    return 1 if cuts else 0


def _backward_in_two(
    dy: Tensor, x: Tensor, factors: Sequence[Tensor], cut: int, needs_x: bool, needs_factors: Sequence[bool]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """`fused_backward` of the factors from `cut` on, for what those before make of x; then of these."""
    first, others = factors[:cut], factors[cut:]
    rest, o = math.prod(w.shape[1] for w in others), math.prod(w.shape[0] for w in first)
    state = x.contiguous().reshape(-1, x.shape[-1])
    needs_before, before, dothers = needs_x or any(needs_factors[:cut]), None, [None] * len(others)
    dy = dy.reshape(-1, math.prod(w.shape[0] for w in others))
    if any(needs_factors[cut:]):
        after = apply(state, first, rest).reshape(-1, rest)
        before, dothers = fused_backward(dy, after, others, needs_before, needs_factors[cut:])
    elif needs_before:
        before = fused_chain(dy, [w.mT for w in others], None)
    if before is None:
        return None, [*[None] * cut, *dothers]
    before, state = before.reshape(-1, o, rest), state.reshape(len(state), -1, rest)
    if cut == 1:
        dw = _first_gradient(before, state) if needs_factors[0] else None
        dx = apply(before.reshape(len(before), -1), [first[0].mT], rest).reshape(x.shape) if needs_x else None
        return dx, [dw, *dothers]
    dx, dfirst = fused_backward(
        before.mT.reshape(-1, o), state.mT.reshape(-1, state.shape[1]), first, needs_x, needs_factors[:cut]
    )
    if dx is not None:
        dx = dx.reshape(len(state), rest, -1).mT.reshape(x.shape)
    return dx, [*dfirst, *dothers]


def _first_gradient(g: Tensor, x: Tensor) -> Tensor:
    """`_sum_of_products` of a first factor: what takes less time, as measured on an H200."""
    if x.dtype == torch.float32 and len(x) < FEW_ROWS:
        return _sum_of_products(g.contiguous(), x, False)
    return torch.bmm(g, x.mT).sum(0)


def _sum_of_products(g: Tensor, x: Tensor, wide: bool) -> Tensor:
    """The sum over the first and last dimension of g (rows, o, rest) times x (rows, i, rest): (o, i)."""
    (rows, o, rest), i = g.shape, x.shape[1]
    sums = torch.float64 if x.dtype == torch.float64 else torch.float32
    dw = x.new_empty(o, i, dtype=sums if wide else x.dtype)
    stride = -(-o * i // 4) * 4
    partial = x.new_empty(_partial_rows(x.dtype, rows, rest, o, i, x.device.index), stride, dtype=sums)
    library().kron_linear_bwd(dw, partial, g, x, tf32_allowed(x))
    return dw
