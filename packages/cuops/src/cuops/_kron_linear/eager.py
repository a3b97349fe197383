"""kron_linear of plain CUDA tensors without PyTorch's dispatcher, which takes longer than a kernel on a small array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._transforms import PLAIN, is_transformed, takes_formula
from .bwd import Kept
from .operators import bwd_cuda, bwd_plain, forward_and_states, fwd_cuda, restored

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_modes, _is_autocast_enabled = torch._C._len_torch_dispatch_stack, torch.is_autocast_enabled
_tracing_state, _unsafe_view = torch._C._get_tracing_state, torch.ops.aten._unsafe_view


# Written out, without loops or helpers: each call runs this, which for small arrays is a good part of it.
def is_direct(x: Any, factors: Sequence[Any], bias: Any) -> bool:
    """Whether PyTorch's dispatcher may be left out: plain CUDA tensors that go together, nothing watches the call."""
    if type(x) not in PLAIN or _is_compiling() or not x.is_cuda or x.is_nested or x.dim() == 0:
        return False
    if _tracing_state() is not None:
        return False
    dtype, device, rows, columns = x.dtype, x.device, 1, 1
    for w in factors:
        if type(w) not in PLAIN or w.dtype is not dtype or w.device != device or w.dim() != 2 or w.is_neg():
            return False
        o, i = w.shape
        rows, columns = rows * o, columns * i
    return (
        columns == x.shape[-1]
        and max(x.numel(), 1) * rows < 1 << 63
        and dtype in FLOATS
        and x.layout is torch.strided
        and not x.is_neg()
        and all(w.layout is torch.strided for w in factors)
        and (
            bias is None
            or (
                type(bias) in PLAIN
                and not bias.is_nested
                and bias.layout is torch.strided
                and bias.dtype is dtype
                and bias.device == device
                and bias.shape == (rows,)
                and not bias.is_neg()
            )
        )
        and not _is_autocast_enabled("cuda")
        and _modes() == 0
        and not is_transformed()
    )


def direct(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """The operator without the dispatcher, for arguments that `is_direct` found right."""
    if _is_grad_enabled() and (
        x.requires_grad or (bias is not None and bias.requires_grad) or any(w.requires_grad for w in factors)
    ):
        return _Direct.apply(x, bias, *factors)
    return fwd_cuda(x, factors, bias)


class _Direct(torch.autograd.Function):
    """The operator with its gradient, for eager calls."""

    @staticmethod
    def forward(ctx, x, bias, *factors):  # type: ignore[no-untyped-def]
        needs_x, _, *needs_factors = ctx.needs_input_grad
        y, kept = forward_and_states(x, factors, bias, needs_factors)
        ctx.parts, ctx.arrays, needs_any_factor = kept.parts, 1 + len(factors), any(needs_factors)
        if needs_x or needs_any_factor:
            ctx.sizes = [x.shape]
            ctx.save_for_backward(x if needs_any_factor else None, *factors, *kept.states)
        else:
            ctx.sizes = [t.shape for t in (x, *factors)]
            ctx.save_for_backward(*[None] * ctx.arrays)
        return _unsafe_view(y, y.shape) if y._is_view() else y  # autograd lets nobody write into a Function's views

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        saved, arrays = ctx.saved_tensors, ctx.arrays
        (x, *factors), kept = restored(dy, saved[:arrays], ctx.sizes), Kept([*saved[arrays:]], ctx.parts)
        needs_x, needs_bias, *needs_factors = ctx.needs_input_grad
        arguments = dy.resolve_neg(), x, factors, needs_x, needs_factors, needs_bias
        if takes_formula(dy):
            dx, dfactors, dbias = bwd_plain(*arguments)
        elif torch.is_grad_enabled() or _is_compiling() or _modes() > 0:
            dx, dfactors, dbias = torch.ops.cuops.kron_linear_bwd(*arguments)
        else:
            dx, dfactors, dbias = bwd_cuda(*arguments, kept)
        dfactors = [d if needed else None for d, needed in zip(dfactors, needs_factors, strict=True)]
        return dx if needs_x else None, dbias if needs_bias else None, *dfactors
