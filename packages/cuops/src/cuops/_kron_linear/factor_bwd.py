"""Gradients of one factor of a Kronecker-factored layer: products summed over all that it does not touch, and dx."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .._arguments import sums_dtype
from .fused import DTYPES, VECTOR, library, tf32_allowed
from .sums import sum_of_products

# The largest factors that the library's kernel is faster for, by the bytes of an element, and of TF32: with both
# operands along the sum, with x across it, and with both across it.
MOST = {2: (128, 64, 32), 4: (128, 128, 48), 8: (128, 64, 32)}
MOST_TF32 = 48, 48, 32
MOST_OF_MANY = 128  # where a batched GEMM has a product of few columns a row
# The largest factors whose sums may be short, by an element's bytes; terms of others, with both operands along the sum
# for each element of the gradient, and with x across it for each of its rows.
SHORT, DEEP, DEEP_ACROSS = {2: 64, 4: 64, 8: 48}, {2: 4, 4: 2, 8: 2}, {2: 256, 4: 256, 8: 512}
SHORTEST = 4096  # terms of a sum along one axis, below which a GEMM is faster, of parts or not, as it needs no copy
# Of larger float64 factors, with both operands along the sum, one GEMM is faster for a single row: of up to MOST_ALONE,
# up to so many terms. Beyond, a batched one is from so many columns and rows on, of factors larger than WIDE fewer.
MOST_ALONE, TERMS_ALONE = 64, 1 << 16
COLUMNS_IN_BATCH, ROWS_IN_BATCH, WIDE, ROWS_OF_WIDE = 1024, 48, 96, 8
# The largest factors that one kernel for both gradients is faster for than two, and where columns beyond them are few.
MOST_BOTH, MOST_BOTH_OF_FEW = {2: 64, 8: 48}, 80
# Where rows along the sum are no whole vectors: terms for each row or column of a factor, and the largest factor where
# they are no whole words either.
DEEP_OF_PIECES, MOST_OF_HALVES = 40, 80


def _are_vectors(width: int, inner: int) -> bool:
    return inner * width % VECTOR == 0


def _is_deep_of_pieces(width: int, rows: int, inner: int, size: int) -> bool:
    most = MOST_OF_HALVES if inner * width % 4 else MOST_OF_MANY
    return size <= most and rows * inner >= DEEP_OF_PIECES * size


def _is_faster(width: int, most: Sequence[int], rows: int, inner: int, size: int, layout: int) -> bool:
    if layout == 0 and not _are_vectors(width, inner):
        return size <= most[layout] and _is_deep_of_pieces(width, rows, inner, size)
    if (rows == 1 or inner == 1) and rows * inner < SHORTEST:
        return False
    if inner > 1 and inner <= 2 * size and rows > 2 * size:
        return size <= MOST_OF_MANY
    if size <= SHORT[width]:
        return size <= most[layout]
    if width == 8 and layout == 0 and rows == 1:
        return size <= MOST_ALONE and inner > TERMS_ALONE
    is_batch = inner >= COLUMNS_IN_BATCH and rows >= (ROWS_OF_WIDE if size > WIDE else ROWS_IN_BATCH)
    if width == 8 and layout == 0 and size > MOST_ALONE and is_batch:
        return False
    terms = DEEP_ACROSS[width] * size if layout else DEEP[width] * size * size
    return size <= most[layout] and rows * inner >= terms


def _are_both_faster(width: int, rows: int, inner: int, size: int) -> bool:
    if not _are_vectors(width, inner):
        return _is_deep_of_pieces(width, rows, inner, size)
    return size <= MOST_BOTH[width] or (size <= MOST_BOTH_OF_FEW and 64 < inner <= 2 * size)


@functools.lru_cache(4096)
def _partial_rows(
    dtype: torch.dtype,
    rows: int,
    inner: int,
    o: int,
    i: int,
    across_g: bool,
    across_x: bool,
    with_dx: bool,
    tf32: bool,
    device: int,
) -> int:
    """How many partial sums the kernel wants; 0 where it is slower, or there is none."""
    if with_dx:
        takes = dtype != torch.float32 and _are_both_faster(dtype.itemsize, rows, inner, max(o, i))
    else:
        most = MOST_TF32 if tf32 else MOST[dtype.itemsize]
        takes = _is_faster(dtype.itemsize, most, rows, inner, max(o, i), across_g + across_x)
    if not takes:
        return 0
    return library().kron_linear_factor_bwd_partial_rows(
        DTYPES[dtype], rows, inner, o, i, across_g, across_x, with_dx, device
    )


def takes_both_of_first(x: Tensor, first: Tensor, second: Tensor) -> bool:
    """Whether `in_chain` finds dx and the first one's gradient of two factors whose state stays as it lies."""
    (o, i), (p, j) = first.shape, second.shape
    if p == 1 or _are_vectors(x.element_size(), p):
        return False
    rows, along = x.numel() // (i * j), {"across_g": False, "across_x": False}
    tf32, device = tf32_allowed(x), x.device.index
    return _partial_rows(x.dtype, rows, p, o, i, **along, with_dx=True, tf32=tf32, device=device) > 0


def by_kernel(
    g: Tensor, x: Tensor, w: Tensor | None, dtype: torch.dtype | None = None
) -> tuple[Tensor | None, Tensor] | None:
    """dx, the transpose of w (o, i) times g, where w is there, and the factor's gradient, of x's dtype or of this one.

    None where the library's kernel is slower, or cannot read them.
    """
    (rows, o, inner), i = g.shape, x.shape[1]
    # Rows lie along the sum, or across it.
    across = [inner == 1 or not t.is_contiguous() for t in (g, x)]
    in_place = all(not is_across or t.mT.is_contiguous() for t, is_across in zip((g, x), across, strict=True))
    if not in_place or not g.data_ptr() % VECTOR == x.data_ptr() % VECTOR == 0:
        return None
    tf32 = tf32_allowed(x)
    partial_rows = _partial_rows(x.dtype, rows, inner, o, i, *across, w is not None, tf32, x.device.index)
    if not partial_rows:
        return None
    sums = sums_dtype(x.dtype)
    dw, partial = x.new_empty(o, i, dtype=dtype), x.new_empty(partial_rows, -(-o * i // 4) * 4, dtype=sums)
    dx = None if w is None else torch.empty_like(x)
    library().kron_linear_factor_bwd(dw, dx, partial, g, x, None if w is None else w.contiguous(), tf32)
    return dx, dw


def in_chain(g: Tensor, x: Tensor, w: Tensor | None) -> tuple[Tensor | None, Tensor] | None:
    """`by_kernel` for a chain of GEMMs: dx, too, only where rows are no whole vectors, which these are slow for."""
    return None if w is not None and _are_vectors(g.element_size(), g.shape[2]) else by_kernel(g, x, w)


def factor_gradient(g: Tensor, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`sum_of_products`, by the library's kernel where that is faster."""
    found = by_kernel(g, x, None, dtype)
    return sum_of_products(g, x, dtype) if found is None else found[1]
