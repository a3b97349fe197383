"""The gradient of one factor by the vendor's GEMM: a sum of products over all that the factor does not touch."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._transforms import is_batched
from .copies import summed, swapped

TILE, LAUNCH = 64, 1.5e6  # rows and columns of results that a block finds; a launch, as bytes that are moved
# What a batch of a product a row takes beside one GEMM of copies, as bytes that are moved, fitted to 1300 problems a
# dtype on an H100: for each tile of a row's product; for a byte of these, which are then added up; by an element's
# bytes, for a term of a row's sum, one of which comes after the other.
OF_TILE_ADDED, ADDED, TERM = 1300, 0.45, {2: 1e4, 4: 2e4, 8: 5e3}
ROOM = 3 << 19  # elements of these products, which otherwise are no more than those of x or of dy
# Of few rows with long sums, each is added by a GEMM of its own: of up to how many, by an element's bytes, as 16 bits
# round each; and from how many bytes of a row of both operands on.
ROWS_ADDED, BYTES_ADDED = {2: 2, 4: 16, 8: 16}, 12e6


class Parting(NamedTuple):
    """How a sum along one axis is divided: of so many terms, for up to so many sums, into a batch of parts.

    A part's terms are added up one after the other, then the parts are, beside those of other tiles. So there are as
    many parts as `of_root` times the square root of the terms for a tile.
    """

    of_root: float
    least_terms: int
    most_sums: int
    tile: int = TILE
    most_terms: float = math.inf  # of larger gradients than a tile of TILE
    large: float = math.inf  # gradients, whose sums are to have `least_of_large` terms
    least_of_large: int = 0


ALIGNED = 0  # 16 bits, in a gradient of whole vectors either way: the vendor's GEMM divides such sums itself
# A sum along one axis, by an element's bytes or ALIGNED; terms that are wanted of a part at least; up to how many times
# more or fewer parts may be what divides the sum.
PARTINGS = {
    ALIGNED: Parting(0.6, 1500, 26_000),
    2: Parting(1.6, 0, 17_000),
    4: Parting(2.0, 0, 26_000),
    8: Parting(1.05, 300, 26_000, tile=32, most_terms=1e5, large=80 * 80, least_of_large=2500),
}
SHORTEST_PART, NEAR = 24, 4
HAS_WIDE_PRODUCTS = "dtype" in torch.ops.aten.mm.overloads()  # PyTorch 2.8 and newer: float32 of 16 bits, on a GPU


def tiles(o: int, i: int, tile: int = TILE) -> int:
    return -(-o // tile) * -(-i // tile)


@functools.lru_cache(4096)
def _parts(terms: int, o: int, i: int, kind: int) -> int:
    """Into how many equal parts to divide a sum along one axis, which one GEMM leaves to few multiprocessors."""
    by = PARTINGS[kind]
    wanted = min(terms / SHORTEST_PART, by.of_root * math.sqrt(terms / tiles(o, i, by.tile)))
    least = by.least_terms if o * i < by.large else by.least_of_large
    if wanted < 2 or terms < least or o * i > by.most_sums or (terms > by.most_terms and o * i > TILE * TILE):
        return 1
    most = min(wanted * NEAR, max(ROOM, terms * max(o, i)) / (o * i))
    near = [p for p in range(max(2, math.ceil(wanted / NEAR)), int(most) + 1) if terms % p == 0]
    return min(near, key=lambda p: max(p / wanted, wanted / p), default=1)


def _parted(t: Tensor, parts: int) -> Tensor:
    """(parts, size, terms of a part), of (terms, size, 1) or (1, size, terms)."""
    _, size, inner = t.shape
    return t.reshape(parts, -1, size).mT if inner == 1 else t.reshape(size, parts, -1).transpose(0, 1)


def _sums_in_float16() -> bool:
    """Whether the vendor's GEMM may add up in float16, which then gives nothing else."""
    return bool(getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False))


def _product(a: Tensor, b: Tensor, dtype: torch.dtype | None) -> Tensor:
    """a @ b, or a batch of such products, of this dtype where PyTorch has it for 16 bits."""
    if dtype in (None, a.dtype) or not HAS_WIDE_PRODUCTS or (a.dtype == torch.float16 and _sums_in_float16()):
        return a @ b
    return torch.mm(a, b, out_dtype=dtype) if a.ndim == 2 else torch.bmm(a, b, out_dtype=dtype)


def _row_after_row(g: Tensor, x: Tensor) -> Tensor:
    """`sum_of_products` by a GEMM for each row, which adds to those before."""
    dw = g[0] @ x[0].mT
    for k in range(1, len(g)):
        dw.addmm_(g[k], x[k].mT)
    return dw


def is_sum_in_batch(g: Tensor, x: Tensor) -> bool:
    """Whether a batch of products and their sum are faster than one GEMM of copies of what does not lie across."""
    (rows, o, inner), i, width = g.shape, x.shape[1], g.element_size()
    if min(o, i) > inner and rows * o * i > ROOM:
        return False
    cost = OF_TILE_ADDED * tiles(o, i) + ADDED * o * i * width
    copied = sum(t.numel() for t in (g, x) if not t.mT.is_contiguous())
    return rows * cost + TERM[width] * inner <= copied * width + 2 * LAUNCH


def sum_of_products(g: Tensor, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A factor's gradient: the sum over rows and inner of g (rows, o, inner) times x (rows, i, inner), (o, i).

    `dtype`: that of the sums, rather than x's, where PyTorch has such products.
    """
    (rows, o, inner), i, width = g.shape, x.shape[1], g.element_size()
    is_known = all(isinstance(n, int) for n in (rows * inner, o, i))  # and not what a graph leaves open
    if is_known and (rows == 1 or inner == 1):
        kind = ALIGNED if width == 2 and o % 8 == i % 8 == 0 else width
        if (parts := _parts(rows * inner, o, i, kind)) > 1:
            return summed(_product(_parted(g, parts), _parted(x, parts).mT, dtype))
    if rows == 1:
        return _product(g[0], x[0].mT, dtype)
    few_long = isinstance(rows, int) and rows <= ROWS_ADDED[width] and inner * (o + i) * width >= BYTES_ADDED
    if few_long and dtype in (None, g.dtype) and not is_batched(g):  # for which there is no rule to add in place
        return _row_after_row(g, x)
    if inner == 1:
        return _product(g.squeeze(-1).mT, x.squeeze(-1), dtype)
    if is_sum_in_batch(g, x):
        return summed(_product(g, x.mT, dtype))
    g, x = (swapped(t).reshape(rows * inner, -1, 1) for t in (g, x))
    return sum_of_products(g, x, dtype)
