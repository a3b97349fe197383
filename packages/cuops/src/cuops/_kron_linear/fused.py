"""Kronecker-factored layers by the library's fused kernels, a group of factors at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _backend
from .._arguments import TORCH_DTYPES
from ..kron_plan import GEMM
from .gemm import apply_along, chain_of_matmuls, out_shape
from .merge import merged

VECTOR, MOST_ROWS = 16, 1 << 32  # bytes that the kernels read at once; rows that they count
DTYPES = {dtype: number for number, dtype in enumerate(TORCH_DTYPES)}


@functools.cache
def library() -> Any:
    return _backend.library()


@functools.lru_cache(4096)
def plan(
    dtype: torch.dtype, rows: int, sizes: tuple[int, ...], inner: int, tf32: bool, device: int
) -> list[tuple[int, int, bool]]:
    """The groups of factors that are applied one after the other: first, count, whether the fused kernel does it."""
    groups = library().kron_linear_plan(DTYPES[dtype], rows, sizes, inner, tf32, device)
    return [(group[0], group[1], group[2] != GEMM) for group in groups]


def in_place(x: Tensor) -> Tensor:
    """x, or a copy where the library could not read it, or only slowly: not in vectors though its rows are whole ones.

    Other rows of 4 bytes an element or less have a fast kernel only where they are one stride apart and do not overlap.
    Of rows with two strides it counts up to MOST_ROWS.
    """
    size, contiguous = x.element_size(), x.is_contiguous()
    if contiguous and x.data_ptr() % VECTOR == 0:
        return x
    readable = contiguous or (x.ndim <= 3 and x.stride(-1) == 1)
    if readable and x.ndim == 3 and x.numel() >= MOST_ROWS * x.shape[-1]:
        readable = contiguous or x.stride(0) == x.shape[1] * x.stride(1)
    if readable and x.shape[-1] * size % VECTOR == 0:
        readable = x.data_ptr() % VECTOR == 0 and all(step * size % VECTOR == 0 for step in x.stride()[:-1])
    elif readable and not contiguous and size <= 4:
        readable = x.stride(-2) >= x.shape[-1] and (x.ndim == 2 or x.stride(0) == x.shape[1] * x.stride(1))
    return x if readable else x.clone(memory_format=torch.contiguous_format)


_precision = getattr(torch._C, "_get_fp32_precision_getter", None)


def tf32_allowed(x: Tensor) -> bool:
    """Whether PyTorch may take TF32 for products of x; its own properties raise where settings were mixed."""
    if x.dtype != torch.float32:
        return False
    return bool(_precision("cuda", "matmul") == "tf32" if _precision else torch._C._get_cublas_allow_tf32())


def plan_of(x: Tensor, factors: Sequence[Tensor], inner: int) -> list[tuple[int, int, bool]]:
    sizes = tuple([size for w in factors for size in w.shape])
    return plan(x.dtype, x.numel() // x.shape[-1], sizes, inner, tf32_allowed(x), x.get_device())


def are_gemms(groups: Sequence[tuple[int, int, bool]]) -> bool:
    """Whether a plan is that of `chain_of_matmuls`: a GEMM for each factor, the last one first."""
    first, count, is_fused = groups[0]
    return not is_fused and (first > 0 or count == len(groups) == 1)


def launch(x: Tensor, factors: Sequence[Tensor], inner: int, bias: Tensor | None) -> Tensor:
    """The factors by one launch of a fused kernel."""
    columns = inner
    for w in factors:
        columns *= w.shape[0]
    y = x.new_empty(*x.shape[:-1], columns)
    library().kron_linear_fwd(y, x, factors, inner, bias, tf32_allowed(x))
    return y


def fused_chain(
    x: Tensor, factors: Sequence[Tensor], bias: Tensor | None, states: list[Tensor] | None = None
) -> Tensor:
    """y by the fused kernel, a group of factors at a time, and by a GEMM where that is faster. Nothing is empty.

    `states`: as in `apply`, where it takes the groups in place.
    """
    groups = plan_of(x, factors, 1)
    if are_gemms(groups):
        return chain_of_matmuls(x, factors, bias)
    bias = None if bias is None else bias.contiguous()
    if len(groups) == 1 and groups[0][2]:
        return launch(in_place(x), factors, 1, bias)
    y, shape = apply(in_place(x), factors, 1, bias, states), out_shape(x, factors)
    return y if y.shape == shape else y.reshape(shape)


def apply(
    x: Tensor, factors: Sequence[Tensor], inner: int, bias: Tensor | None = None, states: list[Tensor] | None = None
) -> Tensor:
    """The factors on the last dimension, whose elements are `inner` neighbours each, the first group first.

    `states`: where what all groups but the first one are applied to goes.
    """
    last, groups = x.shape[-1], plan_of(x, factors, inner)
    if len(groups) == 1 and groups[0][2]:
        return launch(x, factors, inner, bias)
    if len(factors) > 1 and are_gemms(groups):  # in the other order
        return chain_of_matmuls(x, factors, bias)
    held, rest = [x.reshape(x.numel() // last, last)], last
    neighbours = [factors[first : first + count] for first, count, _ in groups]
    parts = merged(neighbours, [count > 1 and not is_fused for _, count, is_fused in groups])
    for (first, count, is_fused), (part, *_) in zip(groups, parts, strict=True):
        i = math.prod(w.shape[1] for w in part)
        rest //= i
        last_bias = bias if first + count == len(factors) else None
        held.append(held.pop().reshape(-1, i * rest))
        if is_fused:
            held.append(launch(held.pop(), part, rest, last_bias))
        else:
            held.append(apply_along(held, part[0], rest, last_bias))
        if states is not None and first + count < len(factors):
            states.append(held[0])
    return held[0]
