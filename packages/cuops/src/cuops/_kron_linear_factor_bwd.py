"""The gradient of one factor of a Kronecker-factored layer: products summed over all that the factor does not touch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ._kron_linear_fused import DTYPES, VECTOR, library, tf32_allowed
from ._kron_linear_gemm import sum_of_products

# As measured on an H200, the largest factors that the library's kernel is faster for, by the bytes of an element (2 for
# TF32): with both operands along the sum, with x across it, and with both across it.
MOST = {2: (48, 48, 32), 4: (128, 64, 48), 8: (48, 48, 32)}
MOST_OF_MANY = 128  # where a batched GEMM has a product of few columns a row
DEEP = 32  # terms of a sum for each row of a factor, which those of more than 64 need


def _is_faster(width: int, rows: int, inner: int, size: int, layout: int) -> bool:
    if inner > 1 and inner <= 2 * size and rows > 2 * size:
        return size <= MOST_OF_MANY
    return size <= MOST[width][layout] and (size <= 64 or rows * inner >= DEEP * size)


@functools.lru_cache(4096)
def _partial_rows(
    dtype: torch.dtype, rows: int, inner: int, o: int, i: int, across_g: bool, across_x: bool, tf32: bool, device: int
) -> int:
    """How many partial sums the kernel wants; 0 where it is slower, or there is none."""
    if not _is_faster(2 if tf32 else dtype.itemsize, rows, inner, max(o, i), across_g + across_x):
        return 0
    return library().kron_linear_bwd_partial_rows(DTYPES[dtype], rows, inner, o, i, across_g, across_x, device)


def factor_gradient(g: Tensor, x: Tensor) -> Tensor:
    """`sum_of_products`, by the library's kernel where that is faster."""
    (rows, o, inner), i = g.shape, x.shape[1]
    # Rows lie along the sum, or across it.
    across = [inner == 1 or not t.is_contiguous() for t in (g, x)]
    in_place = all(not is_across or t.mT.is_contiguous() for t, is_across in zip((g, x), across, strict=True))
    if in_place and g.data_ptr() % VECTOR == x.data_ptr() % VECTOR == 0:
        tf32 = tf32_allowed(x)
        partial_rows = _partial_rows(x.dtype, rows, inner, o, i, *across, tf32, x.device.index)
        if partial_rows:
            sums = torch.promote_types(x.dtype, torch.float32)
            dw, partial = x.new_empty(o, i), x.new_empty(partial_rows, -(-o * i // 4) * 4, dtype=sums)
            library().kron_linear_bwd(dw, partial, g, x, tf32)
            return dw
    return sum_of_products(g, x)
