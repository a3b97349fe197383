"""RMSNorm of plain CUDA tensors without PyTorch's dispatcher, which takes longer than a kernel on a small array."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _backend, errors
from .._transforms import PLAIN, takes_formula
from .operators import bwd_cuda_rounded, bwd_plain, summands

_is_compiling, _peek = torch.compiler.is_compiling, torch._C._functorch.peek_interpreter_stack
_is_grad_enabled, _modes = torch.is_grad_enabled, torch._C._len_torch_dispatch_stack
_empty_like, _tracing_state, _promote_types = torch.empty_like, torch._C._get_tracing_state, torch.promote_types
_contiguous = torch.contiguous_format


@functools.cache
def _library_fwd() -> Any:
    return _backend.library().rms_norm_fwd


# Written out, without loops or helpers: each call runs this, which for small arrays is a good part of it.
def is_direct(x: Any, residual: Any, weight: Any, bias: Any) -> bool:
    """Whether the library may be called without PyTorch's dispatcher: plain CUDA tensors, nothing watches the call."""
    return (
        type(x) in PLAIN
        and not _is_compiling()
        and x.is_cuda
        and not x.is_neg()
        and (weight is None or (type(weight) in PLAIN and not weight.is_neg()))
        and (residual is None or (type(residual) in PLAIN and not residual.is_neg()))
        and (bias is None or (type(bias) in PLAIN and not bias.is_neg()))
        and _modes() == 0
        and _peek() is None
        and forward_ad._current_level < 0
        and _tracing_state() is None
    )


def direct(x, residual, weight, bias, eps, weight_offset):  # type: ignore[no-untyped-def]
    """y, or (y, h) with a residual, from the library. It refuses arguments that it cannot take as they are."""
    if _is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (residual is not None and residual.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        return _apply_direct(x, residual, weight, bias, eps, weight_offset)
    y = _empty_like(x) if x.is_contiguous() else _empty_like(x, memory_format=_contiguous)
    if residual is None:
        _library_fwd()(y, None, None, x, None, weight, bias, eps, weight_offset)
        return y
    h = _empty_sum(x, residual)
    _library_fwd()(y, h, None, x, residual, weight, bias, eps, weight_offset)
    return y, h


def _empty_sum(x: Tensor, residual: Tensor) -> Tensor:
    if x.dtype == residual.dtype and x.is_contiguous():
        return _empty_like(x)
    return _empty_like(x, dtype=_promote_types(x.dtype, residual.dtype), memory_format=_contiguous)


def direct_in_place(x: Tensor, weight: Any, bias: Any, eps: float, weight_offset: float) -> bool:
    """Whether the library has written y into x; it refuses arguments that it cannot take as they are."""
    try:
        _library_fwd()(x, None, None, x, None, weight, bias, eps, weight_offset)
    except errors.CuopsError:
        raise
    except (TypeError, ValueError, RuntimeError, BufferError):
        return False
    torch.autograd.graph.increment_version(x)
    return True


class _Direct(torch.autograd.Function):
    """The operator with its gradient, for eager calls."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, weight_offset):  # type: ignore[no-untyped-def]
        y = _empty_like(x) if x.is_contiguous() else _empty_like(x, memory_format=_contiguous)
        ctx.constants = None if bias is None else bias.dtype, eps, weight_offset
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        if residual is None:
            _library_fwd()(y, None, None, x, None, weight, bias, eps, weight_offset)
            ctx.save_for_backward(x, weight)
            return y
        h = _empty_sum(x, residual)
        _library_fwd()(y, h, None, x, residual, weight, bias, eps, weight_offset)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(h, weight)
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[1]):
            ctx.mark_non_differentiable(h)
        return y, h

    @staticmethod
    def backward(ctx, dy, dh=None):  # type: ignore[no-untyped-def]
        h, weight = ctx.saved_tensors
        _, _, wants_weight, wants_bias, _, _ = ctx.needs_input_grad
        if dy is None:
            return *summands(dh, ctx.dtypes, ctx.needs_input_grad), None, None, None, None
        dy, dh = dy.resolve_neg(), None if dh is None else dh.resolve_neg()
        bias_dtype, eps, weight_offset = ctx.constants
        watched = torch.is_grad_enabled() or _is_compiling() or _modes() > 0
        arguments = dy, dh, h, weight, bias_dtype if wants_bias else None, wants_weight, eps, weight_offset
        rounded = None
        if takes_formula(dy, dh):
            dx, dweight, dbias = bwd_plain(*arguments)
        elif watched:
            dx, dweight, dbias = torch.ops.cuops.rms_norm_bwd(*arguments)
        else:
            dx, dweight, dbias, rounded = bwd_cuda_rounded(*arguments, ctx.needs_input_grad[0])
        return (
            *summands(dx, ctx.dtypes, ctx.needs_input_grad, rounded),
            dweight if wants_weight else None, dbias if wants_bias else None, None, None,
        )  # fmt: skip


# Function.apply without its look for transforms of torch.func, which `is_direct` has had.
_apply_direct = super(torch.autograd.Function, _Direct).apply  # type: ignore[misc]
