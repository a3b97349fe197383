"""Gradients of Kronecker-factored layers whose factors make two of the sizes that have a kernel."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._arguments import sums_dtype
from .fused import DTYPES, VECTOR, in_place, library, tf32_allowed
from .gemm import Held
from .merge import MOST, products_of, unmerge_groups

# By bytes of an element: the sizes of the kernels' tiles and the least nanoseconds that each takes; WIDE of wide ones.
SQUARES = {
    2: {16: 5200, 32: 6200, 64: 10400, 80: 13000, 96: 15900, 128: 16400},
    4: {16: 6900, 32: 10900, 64: 13500, 96: 25400, 128: 21400},
    8: {16: 3700, 24: 4200, 32: 5400, 48: 8800, 64: 14700},
}
WIDE = {2: {64: 5000, 80: 5600, 96: 6700, 128: 8200}, 4: {64: 9000, 96: 14000, 128: 16500}}
# Where they are products of several: the nanoseconds of making these and of taking their gradients apart, more for each
# factor, and for each element of a tile, by an element's bytes and of float64 beyond 32.
MERGING, OF_FACTOR, OF_ELEMENT, OF_LARGE_DOUBLE = 2000, 200, {2: 3e-3, 4: 5.5e-3, 8: 8e-3}, 16e-3
FILLED, PARTLY_FILLED = 0.45, 0.2  # the least part of one that is worth it: of the largest size, and else
# Of two factors and so many elements of tiles, where GEMMs are fast, the least part on the average of x and dy: of
# tiles from LARGE on, and by an element's bytes.
MANY, LARGE, MUCH, SOME = 1 << 22, 80, 0.33, {2: 0.1, 4: 0.1, 8: 0.36}
# Of two factors whose rows are no whole vectors: the largest that other kernels have; by bytes of an element, the sizes
# of the kernels' tiles with the least nanoseconds of each, and the least part of one that is worth it, below MANY, from
# there and from ODD_MANY of their elements on.
LEAST_ODD, ODD_MANY = 32, 1 << 24
ODD = {2: {64: 7000, 128: 11500}, 4: {64: 10000, 96: 15000, 128: 17500}}
ODD_FILLED: dict[int, dict[int, tuple[float, float, float]]] = {
    2: {64: (0, 0.15, 0.15), 128: (0, 0.2, 0.3)},
    4: {64: (0.05, 0.15, 0.2), 96: (0.15, 0.33, 0.38), 128: (0.15, 0.33, 0.38)},
}
BOTH = 3  # gradients of factors, as the library counts them


@functools.lru_cache(4096)
def _square_blocks(dtype: torch.dtype, rows: int, size: int, wanted: int, is_odd: bool, device: int) -> int:
    return library().kron_linear_squares_bwd_blocks(DTYPES[dtype], rows, size, wanted, is_odd, device)


class Two(NamedTuple):
    """What a kernel has as two factors: how many come first, in tiles of what size, whether rows are odd.

    `finds_both`: whether it has the gradients of both factors or none.
    """

    cut: int
    size: int
    is_odd: bool = False
    finds_both: bool = False


def two_of_a_size(x: Tensor, factors: Sequence[Tensor]) -> Two | None:
    """Which kernel has the product of the first factors and that of the others; none where these fill too little of it.

    What is missing counts as zeros.
    """
    if tf32_allowed(x):
        return None
    sizes = tuple(tuple(w.shape) for w in factors)
    return _two_of_a_size(x.dtype, x.numel() // math.prod(i for _, i in sizes), sizes, x.device.index)


@functools.lru_cache(4096)
def _two_of_a_size(dtype: torch.dtype, rows: int, sizes: tuple[tuple[int, int], ...], device: int) -> Two | None:
    width, best, found = VECTOR // dtype.itemsize, 0.0, None
    if len(sizes) == 2 and any(size % width for size in sizes[1]):
        return _odd_two(dtype, rows, sizes, device)
    tiles = tuple(SQUARES[dtype.itemsize])
    for cut in range(max(1, len(sizes) - MOST), min(len(sizes) - 1, MOST) + 1):
        (o, i), (p, j) = ([math.prod(s[d] for s in group) for d in (0, 1)] for group in (sizes[:cut], sizes[cut:]))
        size = next((size for size in tiles if size >= max(o, i, p, j)), 0)
        fill = max(o * p, i * j) / size**2 if size and p % width == j % width == 0 else 0.0
        few = len(sizes) > 2 or rows * size**2 < MANY
        if not few and math.sqrt(o * i * p * j) < (MUCH if size >= LARGE else SOME[dtype.itemsize]) * size**2:
            continue
        if fill > best and fill >= (FILLED if size == tiles[-1] else PARTLY_FILLED):
            best, found = fill, Two(cut, size)
    return found if found and _square_blocks(dtype, rows, found.size, 1, False, device) else None


def _odd_two(dtype: torch.dtype, rows: int, sizes: tuple[tuple[int, int], ...], device: int) -> Two | None:
    (o, i), (p, j) = sizes
    largest = max(o, i, p, j)
    size = next((size for size in ODD.get(dtype.itemsize, ()) if size >= largest > LEAST_ODD), 0)
    if not size:
        return None
    tiles = rows * size**2
    least = ODD_FILLED[dtype.itemsize][size][(tiles >= MANY) + (tiles >= ODD_MANY)]
    if max(o * p, i * j) < least * size**2:
        return None
    if not _square_blocks(dtype, rows, size, BOTH, True, device):
        return None
    return Two(1, size, is_odd=True, finds_both=dtype.itemsize == 2 and size == max(ODD[2]))


def time_of_squares(x: Tensor, factors: Sequence[Tensor], two: Two | None) -> float:
    """The predicted nanoseconds of `backward_of_squares` behind other work; infinite where there is no kernel.

    Of two factors, that of few samples.
    """
    if two is None:
        return math.inf
    if two.is_odd:
        return ODD[x.dtype.itemsize][two.size]
    least = _least_time(x.dtype, two.size, x.device.index)
    if len(factors) == 2:
        return least
    of_element = OF_LARGE_DOUBLE if x.dtype.itemsize == 8 and two.size > 32 else OF_ELEMENT[x.dtype.itemsize]
    elements = x.numel() // x.shape[-1] * two.size**2
    return least + MERGING + OF_FACTOR * len(factors) + of_element * elements


@functools.lru_cache(4096)
def _least_time(dtype: torch.dtype, size: int, device: int) -> float:
    times = WIDE if library().kron_linear_squares_bwd_is_wide(DTYPES[dtype], size, device) else SQUARES
    return times[dtype.itemsize][size]


def _aligned(w: Tensor) -> Tensor:
    """A factor that starts at a multiple of a vector."""
    return w.clone() if w.data_ptr() % VECTOR else w


def backward_of_squares(
    held: Held,
    x: Tensor,
    factors: Sequence[Tensor],
    two: Two,
    needs_x: bool,
    needs_factors: Sequence[bool],
) -> tuple[Tensor | None, list[Tensor | None]]:
    """`fused_backward` for two factors, or products of such: a kernel for all gradients, one to add up."""
    needs = any(needs_factors[: two.cut]), any(needs_factors[two.cut :])
    state, grad = (in_place(t.contiguous()).reshape(-1, t.shape[-1]) for t in (x, held.pop()))
    merges, scales, groups = len(factors) > 2, None, (factors[: two.cut], factors[two.cut :])
    if merges:
        pair, scales = products_of(groups)
    else:
        pair = [_aligned(w.contiguous()) for w in factors]
    dx = torch.empty_like(state) if needs_x else None
    sums = sums_dtype(x.dtype)
    dpair = [
        w.new_empty(w.shape, dtype=sums if merges else x.dtype) if two.finds_both or needed else None
        for w, needed in zip(pair, needs, strict=True)
    ]
    dw = [d for d in dpair if d is not None]
    wanted = sum(1 << k for k, d in enumerate(dpair) if d is not None) + 4 * needs_x
    blocks = _square_blocks(x.dtype, len(state), two.size, wanted, two.is_odd, x.device.index)
    partial = x.new_empty(blocks * len(dw), two.size**2, dtype=sums)
    library().kron_linear_squares_bwd(dw, dx, partial, grad, state, pair, wanted, two.size)
    if merges:
        dfactors = unmerge_groups(dpair, groups, needs_factors, scales)
    else:
        dfactors = [d if needed else None for d, needed in zip(dpair, needs, strict=True)]
    return None if dx is None else dx.reshape(x.shape), dfactors
