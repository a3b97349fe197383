"""Normal samples in PyTorch: the operators cuops::sample_normal_fwd and sample_normal_bwd, and random state."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _backend, reference
from ._noise import Draw
from ._random_state import advancing, host_seed, is_capturing, is_for, random_state

PLAIN = (Tensor, torch.nn.Parameter)

library = torch.library.Library("cuops", "FRAGMENT")
DRAW = (
    "Tensor? state, int seed, int stream, SymInt num_samples, SymInt start, int sample_dim, bool shared_noise, "
    "bool antithetic"
)
library.define(
    f"sample_normal_fwd(Tensor mu, Tensor sigma, Tensor? low, Tensor? high, {DRAW}, ScalarType dtype) -> Tensor"
)
library.define(
    f"sample_normal_bwd(Tensor grad, Tensor mu, Tensor sigma, Tensor? low, Tensor? high, {DRAW}) "
    "-> (Tensor dmu, Tensor dsigma, Tensor dlow, Tensor dhigh)"
)


def sizes_of(shape: Any, num_samples: Any, sample_dim: int) -> list[Any]:
    """The sizes of the samples of distributions of a shape."""
    return [*shape[:-1], num_samples, shape[-1]] if sample_dim == 0 else [*shape, num_samples]


def draw_of(state: Tensor | None, seed: int, stream: int, *layout: Any) -> Draw:
    """The draw that an operator's arguments name."""
    if state is not None:
        state = state.reshape(-1)
        seed, stream = state[0], state[1] if state.numel() > 1 else 0  # type: ignore[assignment]
    num_samples, start, sample_dim, shared_noise, antithetic = layout
    return Draw(seed, stream, num_samples, start, sample_dim, shared_noise, antithetic)


def _fwd_plain(mu, sigma, low, high, *rest):  # type: ignore[no-untyped-def]
    return reference.sample_normal_torch(mu, sigma, low, high, draw_of(*rest[:-1]), rest[-1])


def _bwd_plain(grad, mu, sigma, low, high, *rest):  # type: ignore[no-untyped-def]
    found = reference.sample_normal_torch_backward(grad, mu, sigma, low, high, draw_of(*rest))
    return tuple(mu.new_empty(0) if gradient is None else gradient for gradient in found)


def _readable(a: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A parameter as the library takes it: contiguous, or one element where all are one; in `dtype`."""
    if a is None:
        return a
    if a.numel() > 1 and not any(stride for size, stride in zip(a.shape, a.stride(), strict=True) if size > 1):
        a = a.as_strided((1,), (1,))
    return a.to(dtype).contiguous()


def _fwd_cuda(mu, sigma, low, high, state, seed, stream, num, start, sample_dim, shared, antithetic, dtype):  # type: ignore[no-untyped-def]
    x = mu.new_empty(sizes_of(mu.shape, num, sample_dim), dtype=dtype)
    _draw_into(x, mu, sigma, low, high, state, 0, seed, stream, start, sample_dim, shared, antithetic)
    return x


def _draw_into(x, mu, sigma, low, high, *draw):  # type: ignore[no-untyped-def]
    """Draws into a contiguous x."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    mu, sigma = (_readable(a, x.dtype if a.dtype == x.dtype else wide) for a in (mu, sigma))
    low, high = (_readable(a, x.dtype) for a in (low, high))
    _backend.library().sample_normal_fwd(x, mu, sigma, 0.0, low, high, *draw)


def _bwd_cuda(grad, mu, sigma, low, high, state, seed, stream, num, start, sample_dim, shared, antithetic):  # type: ignore[no-untyped-def]
    lib = _backend.library()
    grad = grad.contiguous()
    chunks = lib.sample_normal_bwd_chunks(grad, start, sample_dim, antithetic) if low is None and grad.numel() else 0
    if chunks == 0:
        return _bwd_plain(
            grad, mu, sigma, low, high, state, seed, stream, num, start, sample_dim, shared, antithetic
        )  # fmt: skip
    sums = torch.float64 if grad.dtype == torch.float64 else torch.float32
    partial = grad.new_empty((chunks, 2, mu.numel()), dtype=sums)
    lib.sample_normal_bwd(partial, grad, state, seed, stream, start, sample_dim, shared, antithetic)
    dmu, dsigma = partial.sum(0).reshape(2, *mu.shape)
    return dmu.to(mu.dtype, copy=True), dsigma.to(sigma.dtype, copy=True), mu.new_empty(0), mu.new_empty(0)


library.impl("sample_normal_fwd", _fwd_cuda, "CUDA")
library.impl("sample_normal_bwd", _bwd_cuda, "CUDA")
library.impl("sample_normal_fwd", _fwd_plain, "CPU")
library.impl("sample_normal_bwd", _bwd_plain, "CPU")


@torch.library.register_fake("cuops::sample_normal_fwd", lib=library)
def _fwd_fake(mu, sigma, low, high, state, seed, stream, num_samples, start, sample_dim, shared, antithetic, dtype):  # type: ignore[no-untyped-def]
    return mu.new_empty(sizes_of(mu.shape, num_samples, sample_dim), dtype=dtype)


@torch.library.register_fake("cuops::sample_normal_bwd", lib=library)
def _bwd_fake(grad, mu, sigma, low, high, *rest):  # type: ignore[no-untyped-def]
    return tuple(
        mu.new_empty(0) if a is None else torch.empty_like(a, memory_format=torch.contiguous_format)
        for a in (mu, sigma, low, high)
    )


def _save_for_bwd(ctx, inputs, output):  # type: ignore[no-untyped-def]
    mu, sigma, low, high, state, *ctx.constants, _ = inputs
    ctx.save_for_backward(mu, sigma, low, high, state)


def _bwd(ctx, grad):  # type: ignore[no-untyped-def]
    mu, sigma, low, high, state = ctx.saved_tensors
    found = torch.ops.cuops.sample_normal_bwd(grad, mu, sigma, low, high, state, *ctx.constants)
    gradients = [None if a is None else g for a, g in zip((mu, sigma, low, high), found, strict=True)]
    return (*gradients, *[None] * 9)


def _save_for_second(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, ctx.seed, ctx.stream, ctx.num, ctx.start, ctx.dim, ctx.shared, ctx.antithetic = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _second(ctx, *grads):  # type: ignore[no-untyped-def]
    """The gradient of the gradient, through its formula."""
    *given, state = ctx.saved_tensors
    if given[3] is not None:
        raise NotImplementedError("second derivatives of truncated samples are not there")
    tensors = [None if t is None else t.detach().requires_grad_() for t in given]
    constants = ctx.seed, ctx.stream, ctx.num, ctx.start, ctx.dim, ctx.shared, ctx.antithetic
    with torch.enable_grad():
        outputs = _bwd_plain(*tensors, state, *constants)
    inputs = [t for t in tensors if t is not None]
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
    found: Any = iter([None] * len(inputs))
    if pairs:
        found = iter(torch.autograd.grad([o for o, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True))
    return *[None if t is None else next(found) for t in tensors], *[None] * 8


torch.library.register_autograd("cuops::sample_normal_fwd", _bwd, setup_context=_save_for_bwd, lib=library)
torch.library.register_autograd("cuops::sample_normal_bwd", _second, setup_context=_save_for_second, lib=library)


def _inwards(bound: Any, dtype: torch.dtype, up: bool, mu: Tensor) -> Tensor:
    """A bound in the result's dtype, rounded to where it still holds."""
    if not isinstance(bound, Tensor):
        missing = -math.inf if up else math.inf
        value = missing if bound is None else _number_inwards(float(bound), dtype, up)
        return torch.full((1,), value, dtype=dtype, device=mu.device)
    if bound.dtype == dtype:
        return bound
    rounded = _rounded_inwards(bound.detach(), dtype, up)
    return bound + (rounded - bound).detach() if bound.requires_grad else rounded


def _rounded_inwards(exact: Tensor, dtype: torch.dtype, up: bool) -> Tensor:
    rounded = exact.to(dtype)
    wrong = rounded.double() < exact.double() if up else rounded.double() > exact.double()
    return torch.where(
        wrong, torch.nextafter(rounded, torch.full_like(rounded, math.inf if up else -math.inf)), rounded
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _number_inwards(bound: float, dtype: torch.dtype, up: bool) -> float:
    return _number_inwards_once(bound, dtype, up)


@functools.lru_cache(maxsize=256)
def _number_inwards_once(bound: float, dtype: torch.dtype, up: bool) -> float:
    return float(_rounded_inwards(torch.tensor([bound], dtype=torch.float64), dtype, up))


def sample(given, shape, sizes, draw, dtype, generator, seed, out, validate):  # type: ignore[no-untyped-def]
    """`sample_normal` of tensors, its other arguments being checked."""
    mu, sigma, low, high = given.values()
    if not isinstance(sigma, Tensor):
        sigma = torch.full((1,), float(sigma), dtype=mu.dtype, device=mu.device)
    truncated = low is not None or high is not None
    if truncated:
        low, high = _inwards(low, dtype, True, mu), _inwards(high, dtype, False, mu)
    if (validate or not mu.is_cuda) and not torch.compiler.is_compiling() and not _is_transformed():
        _check_values(sigma, low, high)
    if out is not None:
        from .sample_normal import check_out

        check_out(out, sizes, dtype, mu)
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in (mu, sigma, low, high)):
            raise ValueError("out: expected no argument that requires a gradient")
    if 0 in sizes:
        return mu.new_empty(sizes, dtype=dtype) if out is None else out
    parameters: Any = [None if a is None else a.expand(shape) for a in (mu, sigma, low, high)]
    layout = draw.num_samples, draw.start, draw.sample_dim, draw.shared_noise, draw.antithetic
    state, seed, stream = random_state(mu.device, generator, seed)
    if out is not None and out.is_cuda and out.is_contiguous():
        _draw_into(out, *parameters, state, 0, seed, stream, *layout[1:])
        return out
    if _is_transformed():
        whole = draw_of(state, seed, stream, *layout)
        x = reference.sample_normal_formula(*parameters, whole, dtype)  # type: ignore[call-arg]
    else:
        x = torch.ops.cuops.sample_normal_fwd(*parameters, state, seed, stream, *layout, dtype)
    return x if out is None else out.copy_(x)


def _check_values(sigma: Tensor, low: Tensor | None, high: Tensor | None) -> None:
    if not bool((sigma >= 0).all()):
        raise ValueError("sigma: expected numbers of at least 0, got a negative one or NaN")
    if low is not None and high is not None and not bool((low < high).all()):
        raise ValueError("low: expected less than high everywhere")


_is_compiling, _peek = torch.compiler.is_compiling, torch._C._functorch.peek_interpreter_stack
_is_grad_enabled, _modes = torch.is_grad_enabled, torch._C._len_torch_dispatch_stack


def _is_transformed() -> bool:
    """Whether a transform of torch.func, or forward-mode differentiation, is at work."""
    return not _is_compiling() and (_peek() is not None or forward_ad._current_level >= 0)


@functools.cache
def _library_fwd() -> Any:
    return _backend.library().sample_normal_fwd


# Written for speed: this much of a call is cuops' own.
def direct(mu, sigma, num_samples, sample_dim, shared, antithetic, generator, seed, start):  # type: ignore[no-untyped-def]
    """The samples by the shortest way, without PyTorch's dispatcher, or None where a call needs more than that."""
    if (
        type(mu) not in PLAIN
        or _is_compiling()
        or not mu.is_cuda
        or type(num_samples) is not int
        or num_samples <= 0
        or type(start) is not int
        or not 0 <= start < 1 << 43
        or (sample_dim != 0 and sample_dim != -1)
        or _modes()
        or _peek() is not None
        or forward_ad._current_level >= 0
    ):
        return None
    shape, value = mu.shape, 0.0
    if type(sigma) in PLAIN:
        if sigma.shape != shape or (_is_grad_enabled() and (mu.requires_grad or sigma.requires_grad)):
            return None
    elif type(sigma) is float and 0 <= sigma < math.inf and not (_is_grad_enabled() and mu.requires_grad):
        sigma, value = None, sigma
    else:
        return None
    if not shape or 0 in shape:
        return None
    replays, state = 0, None
    if type(seed) is Tensor and generator is None:
        state, seed = seed, 0
    elif seed is not None:
        if generator is not None or type(seed) is not int or not -(1 << 63) <= seed < 1 << 63:
            return None
    elif is_capturing():
        if generator is not None:
            return None
        device = mu.device.index
        seed, replays = host_seed(None), _backend.library().sample_normal_replays(device)
    elif generator is not None and (type(generator) is not torch.Generator or not is_for(generator, mu.device)):
        return None
    if sample_dim == 0:
        x = mu.new_empty((num_samples, *shape) if len(shape) == 1 else (*shape[:-1], num_samples, shape[-1]))
    else:
        x = mu.new_empty((*shape, num_samples))
    if seed is not None:
        _library_fwd()(x, mu, sigma, value, None, None, state, replays, seed, 0, start, sample_dim, shared, antithetic)
        return x
    taken = _default_generators()[mu.get_device()] if generator is None else generator
    with advancing:
        offset, seed = taken.get_offset(), taken.initial_seed()
        if seed >> 63:
            seed -= 1 << 64
        _library_fwd()(
            x, mu, sigma, value, None, None, None, 0, seed, offset >> 2, start, sample_dim, shared, antithetic
        )  # fmt: skip
        taken.set_offset(offset + 4)
    return x


@functools.cache
def _default_generators() -> Any:
    torch.cuda.init()
    return torch.cuda.default_generators
