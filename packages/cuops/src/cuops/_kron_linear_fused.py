"""Kronecker-factored layers by the library's fused kernels, a group of factors at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _backend
from ._kron_linear_gemm import chain_of_matmuls, chain_of_matmuls_backward, out_shape

MANY, FEW = 4, 8  # factors of at least 8, or twice as many, from which on gradients are faster in the fused kernels
MERGED = 64  # the largest product of small factors, whose gradients are found together
_DTYPES = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}  # as csrc/dtype.h numbers them


@functools.cache
def _library() -> Any:
    return _backend.library()


@functools.lru_cache(4096)
def _plan(
    dtype: torch.dtype, rows: int, sizes: tuple[int, ...], inner: int, tf32: bool, device: int
) -> list[tuple[int, int, bool]]:
    """The groups of factors that are applied one after the other: first, count, whether the fused kernel does it."""
    plan = _library().kron_linear_plan(_DTYPES[dtype], rows, sizes, inner, tf32, device)
    return [(group[0], group[1], group[2] == 0) for group in plan]


@functools.lru_cache(4096)
def _partial_rows(dtype: torch.dtype, rows: int, inner: int, out: int, in_: int, device: int) -> int:
    return _library().kron_linear_bwd_partial_rows(_DTYPES[dtype], rows, inner, out, in_, device)


def _has_rows(x: Tensor) -> bool:
    """Whether the library can read x in place."""
    return x.is_contiguous() or (x.ndim <= 3 and x.stride(-1) == 1)


_precision = getattr(torch._C, "_get_fp32_precision_getter", None)


def _tf32(x: Tensor) -> bool:
    """Whether PyTorch may take TF32 for products of x; its own properties raise where settings were mixed."""
    if x.dtype != torch.float32:
        return False
    return bool(_precision("cuda", "matmul") == "tf32" if _precision else torch._C._get_cublas_allow_tf32())


def _plan_of(x: Tensor, factors: Sequence[Tensor], inner: int) -> list[tuple[int, int, bool]]:
    sizes = tuple(size for w in factors for size in w.shape)
    return _plan(x.dtype, x.numel() // x.shape[-1], sizes, inner, _tf32(x), x.device.index)


def fused_chain(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """y by the fused kernel, a group of factors at a time, and by a GEMM for factors beyond it. Nothing is empty."""
    if not any(is_fused for _, _, is_fused in _plan_of(x, factors, 1)):
        return chain_of_matmuls(x, factors, bias)
    state = x if _has_rows(x) else x.contiguous()
    bias = None if bias is None else bias.contiguous()
    return _apply(state, factors, 1, bias).reshape(out_shape(x, factors))


def _apply(x: Tensor, factors: Sequence[Tensor], inner: int, bias: Tensor | None = None) -> Tensor:
    """The factors on the last dimension, whose elements are `inner` neighbours each."""
    tf32, last, plan = _tf32(x), x.shape[-1], _plan_of(x, factors, inner)
    rows = x.numel() // last
    if len(plan) == 1 and plan[0][2]:
        y = x.new_empty(*x.shape[:-1], math.prod(w.shape[0] for w in factors) * inner)
        _library().kron_linear_fwd(y, x, factors, inner, bias, tf32)
        return y
    state, rest = x.reshape(rows, last), last
    for first, count, is_fused in plan:
        group = factors[first : first + count]
        i, o = math.prod(w.shape[1] for w in group), math.prod(w.shape[0] for w in group)
        rest //= i
        state = state.reshape(-1, i * rest)
        if is_fused:
            before, state = state, state.new_empty(len(state), o * rest)
            _library().kron_linear_fwd(state, before, group, rest, bias if rest == 1 else None, tf32)
        elif rest == 1:
            state = state @ group[0].mT
            if bias is not None:
                state = state.reshape(rows, -1) + bias
        else:
            state = torch.matmul(group[0], state.reshape(-1, i, rest))
    return state


def _merged(factors: Sequence[Tensor]) -> list[slice]:
    """Neighbours whose Kronecker product is small count as one factor."""
    slices: list[slice] = []
    o = i = MERGED + 1
    for k, w in enumerate(factors):
        if max(o * w.shape[0], i * w.shape[1]) <= MERGED:
            o, i, slices[-1] = o * w.shape[0], i * w.shape[1], slice(slices[-1].start, k + 1)
        else:
            o, i = w.shape
            slices.append(slice(k, k + 1))
    return slices


def _worth_fusing(dy: Tensor, factors: Sequence[Tensor]) -> bool:
    """Whether gradients take less time in the fused kernels: as measured, with many factors that all fit there."""
    if len(factors) < MANY or (len(factors) < 2 * MANY and max(factors[0].shape) < FEW):
        return False
    rows, device = dy.numel() // dy.shape[-1], dy.device.index
    sizes = [(w.shape[1], w.shape[0]) for w in factors]

    def is_fused(rows: int, part: Sequence[tuple[int, int]], inner: int) -> bool:
        flat = tuple(size for pair in part for size in pair)
        return not part or all(fused for *_, fused in _plan(dy.dtype, rows, flat, inner, _tf32(dy), device))

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
            grad = _apply(grad, transposed[: group.start], o * rest)
        if after:
            grad = _apply(grad.reshape(-1, rest), transposed[group.stop :], 1)
        rest = math.prod(w.shape[1] for w in after)
        dw = _sum_of_products(grad.reshape(-1, o, rest), x.reshape(-1, i, rest), group.stop - group.start > 1)
        dfactors[group] = _unmerge(dw, factors[group], needs_factors[group])
    return dx, dfactors


def _sum_of_products(g: Tensor, x: Tensor, wide: bool) -> Tensor:
    """The sum over the first and last dimension of g (rows, o, rest) times x (rows, i, rest): (o, i)."""
    (rows, o, rest), i = g.shape, x.shape[1]
    sums = torch.float64 if x.dtype == torch.float64 else torch.float32
    dw = x.new_empty(o, i, dtype=sums if wide else x.dtype)
    partial = x.new_empty(_partial_rows(x.dtype, rows, rest, o, i, x.device.index), o, i, dtype=sums)
    _library().kron_linear_bwd(dw, partial, g, x, _tf32(x))
    return dw


def _unmerge(dw: Tensor, factors: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of factors from that of their Kronecker product."""
    if len(factors) == 1:
        return [dw]
    found: list[Tensor | None] = []
    for k, (w, needed) in enumerate(zip(factors, needs, strict=True)):
        one = torch.ones(1, 1, dtype=dw.dtype, device=dw.device)
        before = functools.reduce(torch.kron, [f.to(dw.dtype) for f in factors[:k]], one)
        after = functools.reduce(torch.kron, [f.to(dw.dtype) for f in factors[k + 1 :]], one)
        outer = dw.reshape(before.shape[0], -1, before.shape[1], dw.shape[1] // before.shape[1])
        inner = torch.einsum("aobi,ab->oi", outer, before).reshape(w.shape[0], -1, w.shape[1], after.shape[1])
        found.append(torch.einsum("oaib,ab->oi", inner, after).to(w.dtype) if needed else None)
    return found
