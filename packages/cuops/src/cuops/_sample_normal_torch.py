"""Normal samples in PyTorch: the operators cuops::sample_normal_fwd and sample_normal_bwd, and random state."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import reference
from ._noise import Draw

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


def host_seed(generator: torch.Generator | None) -> int:
    """A seed from a generator of the CPU."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def _random_state(device: torch.device, generator: Any, seed: Any) -> tuple[Tensor | None, int, int]:
    """(state, seed, stream) as operators take them; a generator is advanced."""
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() not in (1, 2):
            raise ValueError(f"seed: expected one or two int64, got {seed.numel()} of {seed.dtype}")
        if seed.device != device:
            raise ValueError(f"seed: expected a tensor on mu's device, {device}, got one on {seed.device}")
        return seed, 0, 0
    if seed is not None:
        from .sample_normal import check_seed

        return None, check_seed(seed), 0
    if generator is not None:
        if not isinstance(generator, torch.Generator):
            raise TypeError(f"generator: expected a torch.Generator, got {type(generator).__qualname__}")
        if generator.device.type != device.type:
            raise ValueError(f"generator: expected one of mu's device, {device}, got one of {generator.device}")
    return torch.randint(-(1 << 63), (1 << 63) - 1, (1,), generator=generator, device=device), 0, 0


def _inwards(bound: Any, dtype: torch.dtype, up: bool, mu: Tensor) -> Tensor:
    """A bound in the result's dtype, rounded to where it still holds."""
    if bound is None:
        bound = -math.inf if up else math.inf
    exact = bound if isinstance(bound, Tensor) else torch.full((1,), bound, dtype=torch.float64, device=mu.device)
    rounded = exact.detach().to(dtype)
    wrong = rounded.double() < exact.double() if up else rounded.double() > exact.double()
    inside = torch.nextafter(rounded, torch.full_like(rounded, math.inf if up else -math.inf))
    rounded = torch.where(wrong, inside, rounded)
    return exact + (rounded - exact).detach() if exact.requires_grad else rounded


def sample(given, shape, sizes, draw, dtype, generator, seed, out, validate):  # type: ignore[no-untyped-def]
    """`sample_normal` of tensors, its other arguments being checked."""
    mu, sigma, low, high = given.values()
    if not isinstance(sigma, Tensor):
        sigma = torch.full((1,), float(sigma), dtype=mu.dtype, device=mu.device)
    truncated = low is not None or high is not None
    if truncated:
        low, high = _inwards(low, dtype, True, mu), _inwards(high, dtype, False, mu)
    if (validate or not mu.is_cuda) and not torch.compiler.is_compiling():
        _check_values(sigma, low, high)
    if out is not None:
        from .sample_normal import check_out

        check_out(out, sizes, dtype, mu)
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in (mu, sigma, low, high)):
            raise ValueError("out: expected no argument that requires a gradient")
    parameters = [None if a is None else a.expand(shape) for a in (mu, sigma, low, high)]
    if 0 in sizes:
        return mu.new_empty(sizes, dtype=dtype) if out is None else out
    state, seed, stream = _random_state(mu.device, generator, seed)
    layout = draw.num_samples, draw.start, draw.sample_dim, draw.shared_noise, draw.antithetic
    x = torch.ops.cuops.sample_normal_fwd(*parameters, state, seed, stream, *layout, dtype)
    return x if out is None else out.copy_(x)


def _check_values(sigma: Tensor, low: Tensor | None, high: Tensor | None) -> None:
    if not bool((sigma >= 0).all()):
        raise ValueError("sigma: expected numbers of at least 0, got a negative one or NaN")
    if low is not None and high is not None and not bool((low < high).all()):
        raise ValueError("low: expected less than high everywhere")
