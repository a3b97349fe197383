"""Kronecker-factored layers in PyTorch: the operators cuops::kron_linear_fwd and kron_linear_bwd."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedTensorMixin

from .. import _higher_derivatives, reference
from .._transforms import is_transformed, takes_formula
from . import bwd
from . import kept as keeping
from .copies import summed
from .fused import fused_chain
from .gemm import chain_of_matmuls, chain_of_matmuls_backward, most_between, out_shape

library = torch.library.Library("cuops", "FRAGMENT")
library.define("kron_linear_fwd(Tensor x, Tensor[] factors, Tensor? bias) -> Tensor")
library.define(
    "kron_linear_bwd(Tensor dy, Tensor x, Tensor[] factors, bool needs_x, bool[] needs_factors, bool needs_bias) "
    "-> (Tensor dx, Tensor[] dfactors, Tensor dbias)"
)


def _is_empty(x: Tensor, factors: Sequence[Tensor]) -> bool:
    return x.numel() == 0 or any(w.numel() == 0 for w in factors)


def _fwd_empty(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    y = x.new_zeros(out_shape(x, factors))
    return y if bias is None else y.add_(bias)


def _bwd_empty(dy, x, factors, needs_x, needs_factors, needs_bias):  # type: ignore[no-untyped-def]
    dfactors = [w.new_zeros(w.shape) if needed else None for w, needed in zip(factors, needs_factors, strict=True)]
    return _bwd_results(
        dy, x.new_zeros(x.shape) if needs_x else None, dfactors, _sum_of_rows(dy) if needs_bias else None
    )


def fwd_cuda(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    if _is_empty(x, factors):
        return _fwd_empty(x, factors, bias)
    return fused_chain(x, factors, bias)


def forward_and_states(
    x: Tensor, factors: Sequence[Tensor], bias: Tensor | None, needs_factors: Sequence[bool]
) -> tuple[Tensor, bwd.Kept]:
    """y, and what is kept for the factors' gradients beside x and the factors."""
    if _is_empty(x, factors):
        return _fwd_empty(x, factors, bias), bwd.NOTHING
    return keeping.forward_and_states(x, factors, bias, needs_factors)


def bwd_cuda(dy, x, factors, needs_x, needs_factors, needs_bias, kept=bwd.NOTHING):  # type: ignore[no-untyped-def]
    if _is_empty(x, factors):
        return _bwd_empty(dy, x, factors, needs_x, needs_factors, needs_bias)
    gradients = bwd.fused_backward(dy, x, factors, needs_x, needs_factors, kept)
    return _bwd_results(dy, *gradients, _sum_of_rows(dy) if needs_bias else None)


def bwd_plain(dy, x, factors, needs_x, needs_factors, needs_bias):  # type: ignore[no-untyped-def]
    """The gradients by PyTorch's own operators, differentiable again."""
    by_gemm = x.is_cuda and not _is_empty(x, factors)
    backward = chain_of_matmuls_backward if by_gemm else reference.kron_linear_torch_backward
    gradients = backward(dy, x, factors, needs_x, needs_factors)
    return _bwd_results(dy, *gradients, _sum_of_rows(dy) if needs_bias else None)


def _fwd_cpu(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    if _is_empty(x, factors):
        return _fwd_empty(x, factors, bias)
    y, rows = x.new_empty(out_shape(x, factors)), x.numel() // x.shape[-1]
    flat, to, wide = x.reshape(rows, -1), y.view(rows, -1), [w.double() for w in factors]
    for part in reference.some_rows(rows, most_between(factors), reference.KRON_CHUNK):
        to[part] = chain_of_matmuls(flat[part].double(), wide, None if bias is None else bias.double())
    return y


def _bwd_cpu(dy, x, factors, needs_x, needs_factors, needs_bias):  # type: ignore[no-untyped-def]
    if _is_empty(x, factors):
        return _bwd_empty(dy, x, factors, needs_x, needs_factors, needs_bias)
    rows, wide = x.numel() // x.shape[-1], [w.double() for w in factors]
    flat, grads, dx = x.reshape(rows, -1), dy.reshape(rows, -1), x.new_empty(x.shape) if needs_x else None
    sums = [w.new_zeros(w.shape) if needed else None for w, needed in zip(wide, needs_factors, strict=True)]
    to, dbias = None if dx is None else dx.view(rows, -1), wide[0].new_zeros(dy.shape[-1]) if needs_bias else None
    for part in reference.some_rows(rows, most_between(factors), reference.KRON_CHUNK):
        grad = grads[part].double()
        some, more = chain_of_matmuls_backward(grad, flat[part].double(), wide, needs_x, needs_factors)
        if dbias is not None:
            dbias += grad.sum(0)
        if to is not None:
            to[part] = some
        for total, found in zip(sums, more, strict=True):
            if total is not None:
                total += found
    dfactors = [None if total is None else total.to(x.dtype) for total in sums]
    return _bwd_results(dy, dx, dfactors, None if dbias is None else dbias.to(dy.dtype))


def _sum_of_rows(dy: Tensor) -> Tensor:
    """The bias gradient."""
    rows = dy.reshape(math.prod(dy.shape[:-1]), dy.shape[-1])
    return summed(rows) if dy.is_cuda else rows.sum(0, dtype=torch.float64).to(dy.dtype)


def _bwd_results(dy, dx, dfactors, dbias):  # type: ignore[no-untyped-def]
    """dx, the factors' gradients and dbias as the operator returns them: what is not needed is empty."""
    dx, dbias, *dfactors = (dy.new_empty(0) if d is None else d for d in (dx, dbias, *dfactors))
    return dx, dfactors, dbias


library.impl("kron_linear_fwd", fwd_cuda, "CUDA")
library.impl("kron_linear_fwd", _fwd_cpu, "CPU")
library.impl("kron_linear_bwd", bwd_cuda, "CUDA")
library.impl("kron_linear_bwd", _bwd_cpu, "CPU")


@torch.library.register_fake("cuops::kron_linear_fwd", lib=library)
def _fwd_fake(x, factors, bias):  # type: ignore[no-untyped-def]
    return x.new_empty(out_shape(x, factors))


@torch.library.register_fake("cuops::kron_linear_bwd", lib=library)
def _bwd_fake(dy, x, factors, needs_x, needs_factors, needs_bias):  # type: ignore[no-untyped-def]
    dfactors = [w.new_empty(w.shape if needed else 0) for w, needed in zip(factors, needs_factors, strict=True)]
    return x.new_empty(x.shape if needs_x else 0), dfactors, x.new_empty(dy.shape[-1] if needs_bias else 0)


def _save_for_bwd(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, factors, bias = inputs
    ctx.has_bias, ctx.sizes = bias is not None, [t.shape for t in (x, *factors)]
    needs_factors = any(ctx.needs_input_grad[1 : 1 + len(factors)])  # which are not in a list of their own yet
    kept = factors if ctx.needs_input_grad[0] or needs_factors else [None] * len(factors)
    ctx.save_for_backward(x if needs_factors else None, *kept)


def restored(dy: Tensor, saved: Sequence[Tensor | None], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
    """x and the factors as they were saved, and a tensor that has its sizes alone in place of what was not.

    That is x in a backward without factors' gradients, and all in one with the bias's alone, which read nothing else.
    """
    return [dy.new_empty(()).expand(sizes[k]) if t is None else t for k, t in enumerate(saved)]


def _bwd_of_fwd(ctx, dy):  # type: ignore[no-untyped-def]
    x, *factors = restored(dy, ctx.saved_tensors, ctx.sizes)
    needs_x, needs_factors, needs_bias = ctx.needs_input_grad
    needs_bias = ctx.has_bias and needs_bias
    backward = bwd_plain if takes_formula(dy) else torch.ops.cuops.kron_linear_bwd
    dx, dfactors, dbias = backward(dy, x, factors, needs_x, list(needs_factors), needs_bias)
    dfactors = [d if needed else None for d, needed in zip(dfactors, needs_factors, strict=True)]
    return dx if needs_x else None, dfactors, dbias if needs_bias else None


def _save_for_second(ctx, inputs, output):  # type: ignore[no-untyped-def]
    dy, x, factors, *ctx.needs = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dy, x, *factors)


def _second(ctx, ddx, ddfactors, ddbias):  # type: ignore[no-untyped-def]
    """The gradient of the gradient, and those that follow, through the plain formula."""

    def formula(dy, x, *factors):  # type: ignore[no-untyped-def]
        dx, dfactors, dbias = bwd_plain(dy, x, factors, *ctx.needs)
        return dx, *dfactors, dbias

    found = _higher_derivatives.through(formula, ctx.saved_tensors, (ddx, *ddfactors, ddbias))
    return found[0], found[1], found[2:], None, None, None


torch.library.register_autograd("cuops::kron_linear_fwd", _bwd_of_fwd, setup_context=_save_for_bwd, lib=library)
torch.library.register_autograd("cuops::kron_linear_bwd", _second, setup_context=_save_for_second, lib=library)


def autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors in the dtype that autocast wants of a matmul, as PyTorch converts the arguments of its own."""
    device = next(t for t in tensors if t is not None).device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # which raises for meta
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    kept = UninitializedTensorMixin, type(None)  # lazy ones: torch.nn.parameter.is_lazy does not compile
    return [
        t if isinstance(t, kept) or not t.is_floating_point() or t.dtype == torch.float64 else t.to(dtype)
        for t in tensors
    ]


def forward_torch(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """The operator, and where transforms of torch.func are at work its formula, all of whose parts they know."""
    forward = reference.kron_linear_torch if is_transformed() else torch.ops.cuops.kron_linear_fwd
    return forward(x, factors, bias)
