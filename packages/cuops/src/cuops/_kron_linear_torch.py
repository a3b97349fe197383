"""Kronecker-factored layers in PyTorch: the operators cuops::kron_linear_fwd and kron_linear_bwd."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import reference
from ._transforms import is_transformed

PLAIN = (Tensor, torch.nn.Parameter)
FEW = 32  # columns, for which a batched GEMM is slower than one GEMM and a rearranging copy

library = torch.library.Library("cuops", "FRAGMENT")
library.define("kron_linear_fwd(Tensor x, Tensor[] factors, Tensor? bias) -> Tensor")
library.define(
    "kron_linear_bwd(Tensor dy, Tensor x, Tensor[] factors, bool needs_x, bool[] needs_factors, bool needs_bias) "
    "-> (Tensor dx, Tensor[] dfactors, Tensor dbias)"
)


def out_shape(x: Tensor, factors: Sequence[Tensor]) -> tuple[int, ...]:
    """y's shape."""
    return (*x.shape[:-1], math.prod(w.shape[0] for w in factors))


def _apply_factor(state: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """One factor on the last dimension inside `state`, (rows, ... i), which becomes the first: (rows, o ...).

    The transposed product comes out of the batched GEMM in this order, so nothing is ever rearranged.
    """
    o, i = w.shape
    rows, rest = len(state), state.shape[1] // i
    if rest == 1:
        return torch.nn.functional.linear(state, w, bias)
    bias = None if bias is None else bias.reshape(o, rest)
    if rest < FEW:
        y = (state.reshape(rows * rest, i) @ w.mT).reshape(rows, rest, o).mT
        return (y if bias is None else y + bias).reshape(rows, o * rest)
    matrices = w.expand(rows, o, i), state.reshape(rows, rest, i).mT
    return (torch.bmm(*matrices) if bias is None else torch.baddbmm(bias, *matrices)).reshape(rows, o * rest)


def chain_of_matmuls(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """y by a GEMM a factor, the last factor first: the path of factors that no fused kernel takes. Nothing is empty."""
    state = x.reshape(-1, x.shape[-1])
    for w in reversed(factors[1:]):
        state = _apply_factor(state, w)
    return _apply_factor(state, factors[0], bias).reshape(out_shape(x, factors))


def _apply_transposed(grad: Tensor, w: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Back through `_apply_factor(state, w)`: the gradient for state; and for w, where there is a state."""
    o, i = w.shape
    rows, rest = len(grad), grad.shape[1] // o
    grads = grad.reshape(rows, o, rest)
    if rest >= FEW and o <= rest:  # then a gradient a row is no larger than the state
        dw = None if state is None else torch.bmm(grads, state.reshape(rows, rest, i)).sum(0)
        return torch.bmm(grads.mT, w.expand(rows, o, i)).reshape(rows, rest * i), dw
    grad = grads.mT.reshape(rows * rest, o)
    dw = None if state is None else grad.mT @ state.reshape(rows * rest, i)
    return (grad @ w).reshape(rows, rest * i), dw


def chain_of_matmuls_backward(
    dy: Tensor, x: Tensor, factors: Sequence[Tensor], needs_x: bool, needs_factors: Sequence[bool]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients for x and the factors, None where not needed: `chain_of_matmuls` again, then back through it."""
    state, states = x.reshape(-1, x.shape[-1]), {}
    for k in reversed(range(len(factors))):
        if needs_factors[k]:
            states[k] = state
        if not any(needs_factors[:k]):
            break
        state = _apply_factor(state, factors[k])
    grad, dfactors = dy.reshape(len(state), -1), [None] * len(factors)
    for k, w in enumerate(factors):
        if needs_x or any(needs_factors[k:]):
            grad, dfactors[k] = _apply_transposed(grad, w, states.pop(k, None))
    return grad.reshape(x.shape) if needs_x else None, dfactors


def _is_empty(x: Tensor, factors: Sequence[Tensor]) -> bool:
    return x.numel() == 0 or any(w.numel() == 0 for w in factors)


def _fwd_cuda(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    if _is_empty(x, factors):
        return reference.kron_linear_torch(x, factors, bias)
    return chain_of_matmuls(x, factors, bias)


def _bwd(dy, x, factors, needs_x, needs_factors, needs_bias):  # type: ignore[no-untyped-def]
    """dx, the factors' gradients and dbias; what is not needed is empty. Differentiable."""
    if x.is_cuda and not _is_empty(x, factors):
        dx, dfactors = chain_of_matmuls_backward(dy, x, factors, needs_x, needs_factors)
    else:
        dx, dfactors = reference.kron_linear_torch_backward(dy, x, factors, needs_x, needs_factors)
    dbias = dy.flatten(0, -2) if dy.ndim > 1 else dy[None]
    dbias = dbias.sum(0, dtype=_sums_dtype(dy)).to(dy.dtype) if needs_bias else x.new_empty(0)
    empty = [x.new_empty(0) if d is None else d for d in (dx, *dfactors)]
    return empty[0], empty[1:], dbias


def _sums_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.is_cuda and x.dtype != torch.float64 else torch.float64


library.impl("kron_linear_fwd", _fwd_cuda, "CUDA")
library.impl("kron_linear_fwd", reference.kron_linear_torch, "CPU")
library.impl("kron_linear_bwd", _bwd, "CUDA")
library.impl("kron_linear_bwd", _bwd, "CPU")


@torch.library.register_fake("cuops::kron_linear_fwd", lib=library)
def _fwd_fake(x, factors, bias):  # type: ignore[no-untyped-def]
    return x.new_empty(out_shape(x, factors))


@torch.library.register_fake("cuops::kron_linear_bwd", lib=library)
def _bwd_fake(dy, x, factors, needs_x, needs_factors, needs_bias):  # type: ignore[no-untyped-def]
    dfactors = [w.new_empty(w.shape if needed else 0) for w, needed in zip(factors, needs_factors, strict=True)]
    return x.new_empty(x.shape if needs_x else 0), dfactors, x.new_empty(dy.shape[-1] if needs_bias else 0)


def _save_for_bwd(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, factors, bias = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, *factors)


def _bwd_of_fwd(ctx, dy):  # type: ignore[no-untyped-def]
    x, *factors = ctx.saved_tensors
    needs_x, needs_factors, needs_bias = ctx.needs_input_grad
    needs_bias = ctx.has_bias and needs_bias
    dx, dfactors, dbias = torch.ops.cuops.kron_linear_bwd(dy, x, factors, needs_x, list(needs_factors), needs_bias)
    dfactors = [d if needed else None for d, needed in zip(dfactors, needs_factors, strict=True)]
    return dx if needs_x else None, dfactors, dbias if needs_bias else None


def _save_for_second(ctx, inputs, output):  # type: ignore[no-untyped-def]
    dy, x, factors, *ctx.needs = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dy, x, *factors)


def _second(ctx, ddx, ddfactors, ddbias):  # type: ignore[no-untyped-def]
    """The gradient of the gradient, and those that follow, through the plain formula."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, so that only the formula lies between them and its results.
        inputs = [(t if t.requires_grad else t.detach().requires_grad_()).view_as(t) for t in ctx.saved_tensors]
        dy, x, *factors = inputs
        dx, dfactors, dbias = _bwd(dy, x, factors, *ctx.needs)
    pairs = [(a, grad) for a, grad in zip((dx, *dfactors, dbias), (ddx, *ddfactors, ddbias), strict=True)]
    pairs = [(a, grad) for a, grad in pairs if grad is not None and a.requires_grad]
    found: Any = [None] * len(inputs)
    if pairs:
        results, grads = zip(*pairs, strict=True)
        found = torch.autograd.grad(results, inputs, grads, allow_unused=True, create_graph=create_graph)
    return found[0], found[1], list(found[2:]), None, None, None


torch.library.register_autograd("cuops::kron_linear_fwd", _bwd_of_fwd, setup_context=_save_for_bwd, lib=library)
torch.library.register_autograd("cuops::kron_linear_bwd", _second, setup_context=_save_for_second, lib=library)


def autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors in the dtype that autocast wants of a matmul, as PyTorch converts the arguments of its own."""
    device = next(t for t in tensors if t is not None).device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors]


_is_compiling = torch.compiler.is_compiling
_is_grad_enabled, _modes = torch.is_grad_enabled, torch._C._len_torch_dispatch_stack


def _is_direct(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> bool:
    """Whether PyTorch's dispatcher may be left out: plain CUDA tensors, no gradient, nothing watches the call."""
    if _is_compiling() or not x.is_cuda or _modes() != 0:
        return False
    tensors = (x, *factors) if bias is None else (x, *factors, bias)
    return all(type(t) in PLAIN for t in tensors) and not (_is_grad_enabled() and any(t.requires_grad for t in tensors))


def forward_torch(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """The operator, and where transforms of torch.func are at work its formula, all of whose parts they know."""
    if is_transformed():
        return reference.kron_linear_torch(x, factors, bias)
    if _is_direct(x, factors, bias):
        return _fwd_cuda(x, factors, bias)
    return torch.ops.cuops.kron_linear_fwd(x, factors, bias)
