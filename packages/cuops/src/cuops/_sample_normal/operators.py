"""Normal samples in PyTorch: the operators cuops::sample_normal_fwd and sample_normal_bwd, and their gradients."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import _arguments, _backend, _higher_derivatives, reference
from .._transforms import is_transformed
from . import checks
from .bounds import rounded_inwards
from .noise import Draw, noise, sizes_of
from .quantile import Once
from .random_state import expect_random_state, random_state

library = torch.library.Library("cuops", "FRAGMENT")
DRAW = (
    "Tensor? state, SymInt seed, int stream, SymInt num_samples, SymInt start, int sample_dim, bool shared_noise, "
    "bool antithetic"
)
library.define(
    f"sample_normal_fwd(Tensor mu, Tensor sigma, Tensor? low, Tensor? high, {DRAW}, ScalarType dtype) -> Tensor"
)
library.define(
    f"sample_normal_bwd(Tensor grad, Tensor mu, Tensor sigma, Tensor? low, Tensor? high, {DRAW}) "
    "-> (Tensor dmu, Tensor dsigma, Tensor dlow, Tensor dhigh)"
)

# The noise of the formula, of one draw or of a batch of states: hundreds of operations, for which compilers take long.
# Some are products of int64 that wrap around, which compilers of C++ take to be impossible.
library.define(f"sample_normal_noise(Tensor columns, {DRAW}, bool precise, bool uniform) -> Tensor")


def draw_of(state: Tensor | None, seed: int, stream: int, *layout: Any) -> Draw:
    """The draw that an operator's arguments name."""
    if state is not None:
        state = state.reshape(-1)
        seed, stream = state[0], state[1] if state.numel() > 1 else 0  # type: ignore[assignment]
    num_samples, start, sample_dim, shared_noise, antithetic = layout
    return Draw(seed, stream, num_samples, start, sample_dim, shared_noise, antithetic)


def noise_of(draw: Draw, columns: slice, device: torch.device, precise: bool, uniform: bool) -> Tensor:
    """`noise.noise` of some columns, by its operator, which transforms and compilers do not look into."""
    seed, stream, *layout = draw
    is_state = isinstance(seed, Tensor)
    numbers = (torch.stack([seed, seed * 0 + stream], -1), 0, 0) if is_state else (None, seed, stream)
    which = torch.arange(columns.start, columns.stop, device=device)
    return torch.ops.cuops.sample_normal_noise(which, *numbers, *layout, precise, uniform)  # type: ignore[no-any-return]


def _fwd_plain(mu, sigma, low, high, *rest):  # type: ignore[no-untyped-def]
    x = reference.sample_normal_torch(mu, sigma, low, high, draw_of(*rest[:-1]), rest[-1])
    return torch.ops.aten._unsafe_view(x, x.shape) if x._is_view() else x  # that autograd lets be written to


def _bwd_plain(grad, mu, sigma, low, high, *rest):  # type: ignore[no-untyped-def]
    found = reference.sample_normal_torch_backward(grad, mu, sigma, low, high, draw_of(*rest))
    return tuple(mu.new_empty(0) if gradient is None else gradient for gradient in found)


def _numbers(state: Tensor | None, seed: int, stream: int) -> tuple[None, int, int]:
    """Seed and stream as numbers, from which NumPy draws many times as fast as PyTorch from a state on the CPU."""
    if state is not None:
        seed, stream = (*state.reshape(-1).tolist(), 0)[:2]
    return None, seed, stream


def _fwd_cpu(mu, sigma, low, high, state, seed, stream, *layout):  # type: ignore[no-untyped-def]
    return _fwd_plain(mu, sigma, low, high, *_numbers(state, seed, stream), *layout)


def _bwd_cpu(grad, mu, sigma, low, high, state, seed, stream, *layout):  # type: ignore[no-untyped-def]
    return _bwd_plain(grad, mu, sigma, low, high, *_numbers(state, seed, stream), *layout)


def _readable(a: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A parameter as the library takes it: contiguous, or one element where all are one; in `dtype`."""
    if a is None:
        return a
    if a.numel() > 1 and not any(stride for size, stride in zip(a.shape, a.stride(), strict=True) if size > 1):
        a = a.as_strided((1,), (1,))
    return a.to(dtype).contiguous().resolve_neg()


def _fwd_cuda(mu, sigma, low, high, state, seed, stream, num, start, sample_dim, shared, antithetic, dtype):  # type: ignore[no-untyped-def]
    x = mu.new_empty(sizes_of(mu.shape, num, sample_dim), dtype=dtype)
    if x.numel() > 0:
        draw_into(x, mu, sigma, low, high, state, 0, seed, stream, start, sample_dim, shared, antithetic)
    return x


def draw_into(x, mu, sigma, low, high, *draw):  # type: ignore[no-untyped-def]
    """Draws into a contiguous x."""
    wide = _arguments.sums_dtype(x.dtype)
    mu, sigma = (_readable(a, x.dtype if a.dtype == x.dtype else wide) for a in (mu, sigma))
    low, high = (_readable(a, x.dtype) for a in (low, high))
    _backend.library().sample_normal_fwd(x, mu, sigma, 0.0, low, high, *draw)


def _bwd_cuda(grad, mu, sigma, low, high, state, seed, stream, num, start, sample_dim, shared, antithetic):  # type: ignore[no-untyped-def]
    lib = _backend.library()
    grad = grad.contiguous()
    layout = start, sample_dim, shared, antithetic
    if low is not None or grad.numel() == 0:
        return _bwd_plain(grad, mu, sigma, low, high, state, seed, stream, num, *layout)
    chunks = lib.sample_normal_bwd_chunks(grad, state, start, sample_dim, antithetic)
    partial = grad.new_empty((chunks, 2, mu.numel()), dtype=_arguments.sums_dtype(grad.dtype))
    dmu, dsigma = (torch.empty_like(a, memory_format=torch.contiguous_format) for a in (mu, sigma))
    lib.sample_normal_bwd(dmu, dsigma, partial, grad, state, seed, stream, *layout)
    return dmu, dsigma, mu.new_empty(0), mu.new_empty(0)


def _noise(xp, columns, state, seed, stream, *rest):  # type: ignore[no-untyped-def]
    *layout, precise, uniform = rest
    if state is None:
        return noise(xp, Draw(seed, stream, *layout), columns, precise, uniform)
    # The columns of all draws side by side, each with its seed.
    batch, count = state.shape[:-1], math.prod(state.shape[:-1])
    each = 1 if layout[3] else columns.shape[0]
    seed, stream = (xp.broadcast_to(state[..., i].reshape(-1, 1), (count, each)).reshape(1, -1) for i in (0, -1))
    draw = Draw(seed, stream if state.shape[-1] > 1 else 0, *layout)
    z = noise(xp, draw, xp.tile(columns, (count,)), precise, uniform)
    return xp.moveaxis(z.reshape(z.shape[0], count, each), 1, 0).reshape(*batch, z.shape[0], each)


def _noise_cpu(columns, state, *rest):  # type: ignore[no-untyped-def]
    # By NumPy, which is several times as fast as PyTorch there.
    return torch.from_numpy(_noise(np, columns.numpy(), None if state is None else state.numpy(), *rest)).contiguous()


def _noise_cuda(*arguments):  # type: ignore[no-untyped-def]
    z = _noise(torch, *arguments)  # a view, which may begin within a group
    return z.clone(memory_format=torch.contiguous_format)


library.impl("sample_normal_fwd", _fwd_cuda, "CUDA")
library.impl("sample_normal_bwd", _bwd_cuda, "CUDA")
library.impl("sample_normal_noise", _noise_cuda, "CUDA")
library.impl("sample_normal_fwd", _fwd_cpu, "CPU")
library.impl("sample_normal_bwd", _bwd_cpu, "CPU")
library.impl("sample_normal_noise", _noise_cpu, "CPU")


@torch.library.register_fake("cuops::sample_normal_fwd", lib=library)
def _fwd_fake(mu, sigma, low, high, state, seed, stream, num_samples, start, sample_dim, shared, antithetic, dtype):  # type: ignore[no-untyped-def]
    return mu.new_empty(sizes_of(mu.shape, num_samples, sample_dim), dtype=dtype)


@torch.library.register_fake("cuops::sample_normal_noise", lib=library)
def _noise_fake(columns, state, seed, stream, num_samples, start, sample_dim, shared, *rest):  # type: ignore[no-untyped-def]
    batch = () if state is None else state.shape[:-1]
    return columns.new_empty((*batch, num_samples, 1 if shared else columns.numel()), dtype=torch.float64)


@torch.library.register_vmap("cuops::sample_normal_noise", lib=library)
def _noise_batched(info, in_dims, columns, state, *rest):  # type: ignore[no-untyped-def]
    return torch.ops.cuops.sample_normal_noise(columns, state.movedim(in_dims[1], 0), *rest), 0


@torch.library.register_fake("cuops::sample_normal_bwd", lib=library)
def _bwd_fake(grad, mu, sigma, low, high, *rest):  # type: ignore[no-untyped-def]
    return tuple(
        mu.new_empty(0) if a is None else torch.empty_like(a, memory_format=torch.contiguous_format)
        for a in (mu, sigma, low, high)
    )


def _save_for_bwd(ctx, inputs, output):  # type: ignore[no-untyped-def]
    mu, sigma, low, high, state, *ctx.constants, _ = inputs
    if low is None:  # of no value, so that both may change before the backward
        mu, sigma = (a.new_empty(()).expand(a.shape) for a in (mu, sigma))
    ctx.save_for_backward(mu, sigma, low, high, state)


def _bwd(ctx, grad):  # type: ignore[no-untyped-def]
    *given, state = ctx.saved_tensors
    backward = torch.ops.cuops.sample_normal_bwd
    if is_transformed():
        backward, given = _bwd_plain, given if given[2] is None else Once.apply(*given)
    found = backward(grad, *given, state, *ctx.constants)
    gradients = [None if a is None else g for a, g in zip(given, found, strict=True)]
    return (*gradients, *[None] * 9)


def _save_for_second(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, ctx.seed, ctx.stream, ctx.num, ctx.start, ctx.dim, ctx.shared, ctx.antithetic = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _second(ctx, *grads):  # type: ignore[no-untyped-def]
    """The gradient of the gradient, and those that follow, through its formula."""
    *given, state = ctx.saved_tensors
    if given[3] is not None:
        raise NotImplementedError("second derivatives of truncated samples are not there")
    constants = ctx.seed, ctx.stream, ctx.num, ctx.start, ctx.dim, ctx.shared, ctx.antithetic
    found = _higher_derivatives.through(lambda *tensors: _bwd_plain(*tensors, state, *constants), given, grads)
    return *found, *[None] * 8


torch.library.register_autograd("cuops::sample_normal_fwd", _bwd, setup_context=_save_for_bwd, lib=library)
torch.library.register_autograd("cuops::sample_normal_bwd", _second, setup_context=_save_for_second, lib=library)


_is_compiling, _is_fake = torch.compiler.is_compiling, torch._subclasses.fake_tensor.is_fake
_mode, _Key = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey
_modes, _tracing_state = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state


def forward_torch(given, shape, sizes, draw, dtype, generator, seed, out, validate):  # type: ignore[no-untyped-def]
    """The operator, and where transforms are at work its formula; what `given` and `draw` have is checked before."""
    mu, sigma, low, high = given.values()
    traced = _is_traced(mu, sigma if isinstance(sigma, Tensor) else mu)
    if not isinstance(sigma, Tensor):
        sigma = _filled(mu, float(sigma), traced)
    truncated = low is not None or high is not None
    if truncated:
        low, high = _inwards(low, dtype, True, mu, traced), _inwards(high, dtype, False, mu, traced)
    if (validate or not mu.is_cuda) and not traced and not is_transformed():
        checks.values(given, sigma, low, high)
    if out is not None:
        _arguments.out(out, sizes, dtype, mu, "mu")
        if not _is_compiling():
            _arguments.apart("out", out)
            _arguments.writable_here("out", out)
        asked = mu, sigma, low, high, out
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in asked):
            raise ValueError("out: expected no argument that requires a gradient")
    if is_empty := _is_empty(sizes, traced):
        expect_random_state(mu.device, generator, seed)
        if out is not None:
            return out
    parameters: Any = [None if a is None else a.expand(shape) for a in (mu, sigma, low, high)]
    layout = draw.num_samples, draw.start, draw.sample_dim, draw.shared_noise, draw.antithetic
    state, seed, stream = (None, 0, 0) if is_empty else random_state(mu.device, generator, seed, traced)
    is_in_place = out is not None and out.is_cuda and out.is_contiguous() and not (_is_watched() or out.is_neg())
    if is_in_place and not is_transformed() and _arguments.are_apart(out, *parameters):
        draw_into(out, *parameters, state, 0, seed, stream, *layout[1:])
        torch.autograd.graph.increment_version(out)
        return out
    if is_transformed():
        whole = draw_of(state, seed, stream, *layout)
        x = reference.sample_normal_formula(*parameters, whole, dtype)  # type: ignore[call-arg]
    else:
        x = torch.ops.cuops.sample_normal_fwd(*parameters, state, seed, stream, *layout, dtype)
    return x if out is None else out.copy_(x)


def _is_empty(sizes: tuple[int, ...], traced: bool) -> bool:
    """Whether a size is 0; in a graph, whose sizes may depend on data, whether one is known to be."""
    if traced:
        from torch.fx.experimental import symbolic_shapes

        if hasattr(symbolic_shapes, "guard_or_false"):  # from PyTorch 2.8 on
            return any(symbolic_shapes.guard_or_false(size == 0) for size in sizes)
    return 0 in sizes


def _is_watched() -> bool:
    """Whether something records what PyTorch's dispatcher sees, from which no call may hide."""
    return _is_compiling() or _modes() > 0 or _tracing_state() is not None


def _is_traced(*tensors: Tensor) -> bool:
    """Whether a graph is made, to which numbers may be inputs, and for which tensors may have no values."""
    if _is_compiling() or any(map(_mode, (_Key.FAKE, _Key.PROXY))):
        return True
    return any(tensor.is_meta or _is_fake(tensor) for tensor in tensors)


def _filled(mu: Tensor, value: float, traced: bool) -> Tensor:
    """One number in float64. In a graph it may be an input, which a fill would make a constant."""
    if traced:
        return mu.new_ones((1,), dtype=torch.float64) * value
    return mu.new_full((1,), value, dtype=torch.float64)


def _inwards(bound: Any, dtype: torch.dtype, up: bool, mu: Tensor, traced: bool) -> Tensor:
    """A bound in the result's dtype, rounded to where it still holds."""
    if not isinstance(bound, Tensor):
        if bound is not None and traced:
            return rounded_inwards(_filled(mu, float(bound), traced), dtype, up)
        missing = -math.inf if up else math.inf
        value = missing if bound is None else _number_inwards(float(bound), dtype, up)
        return mu.new_full((1,), value, dtype=dtype)
    if bound.dtype == dtype:
        return bound
    rounded = rounded_inwards(bound.detach(), dtype, up)
    if not bound.requires_grad and not is_transformed():
        return rounded
    return rounded + torch.where(bound.isfinite(), bound - bound.detach(), 0).to(dtype)


@functools.lru_cache(maxsize=256)
def _number_inwards(bound: float, dtype: torch.dtype, up: bool) -> float:
    return float(rounded_inwards(torch.tensor([bound], dtype=torch.float64, device="cpu"), dtype, up))
