"""Normal samples of PyTorch tensors: by the operators, or straight by the library."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _arguments, _backend, reference
from .._transforms import PLAIN, derivatives, is_transformed
from . import checks as _checks
from .operators import draw_into, draw_of, sizes_of
from .random_state import advancing, host_seed, is_capturing, is_for, random_state


def sample(given, shape, sizes, draw, dtype, generator, seed, out, validate):  # type: ignore[no-untyped-def]
    """`sample_normal` of tensors, its other arguments being checked."""
    mu, sigma, low, high = given.values()
    if not isinstance(sigma, Tensor):
        sigma = mu.new_full((1,), float(sigma), dtype=torch.float64)
    truncated = low is not None or high is not None
    if truncated:
        low, high = _inwards(low, dtype, True, mu), _inwards(high, dtype, False, mu)
    traced = _is_traced(mu, sigma)
    if (validate or not mu.is_cuda) and not traced and not is_transformed():
        _check_values(sigma, low, high)
    if out is not None:
        _arguments.out(out, sizes, dtype, mu, "mu")
        if not torch.compiler.is_compiling():
            _arguments.apart("out", out)
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in (mu, sigma, low, high)):
            raise ValueError("out: expected no argument that requires a gradient")
    if 0 in sizes and out is not None:
        return out
    parameters: Any = [None if a is None else a.expand(shape) for a in (mu, sigma, low, high)]
    layout = draw.num_samples, draw.start, draw.sample_dim, draw.shared_noise, draw.antithetic
    state, seed, stream = (None, 0, 0) if 0 in sizes else random_state(mu.device, generator, seed, traced)
    is_in_place = out is not None and out.is_cuda and out.is_contiguous() and not _is_compiling()
    if is_in_place and _arguments.are_apart(out, *parameters):
        draw_into(out, *parameters, state, 0, seed, stream, *layout[1:])
        torch.autograd.graph.increment_version(out)
        return out
    if not _is_compiling() and is_transformed():
        if truncated and any(derivatives(a) > 1 for a in parameters):
            raise NotImplementedError("second derivatives of truncated samples are not there")
        whole = draw_of(state, seed, stream, *layout)
        x = reference.sample_normal_formula(*parameters, whole, dtype)  # type: ignore[call-arg]
    else:
        x = torch.ops.cuops.sample_normal_fwd(*parameters, state, seed, stream, *layout, dtype)
    return x if out is None else out.copy_(x)


def _is_traced(*tensors: Tensor) -> bool:
    """Whether a graph is made, to which numbers may be inputs, and for which tensors may have no values."""
    if _is_compiling() or any(map(_mode, (_Key.FAKE, _Key.PROXY))):
        return True
    return any(tensor.is_meta or _is_fake(tensor) for tensor in tensors)


def _check_values(sigma: Tensor, low: Tensor | None, high: Tensor | None) -> None:
    if not bool((sigma >= 0).all()):
        raise ValueError("sigma: expected numbers of at least 0, got a negative one or NaN")
    if low is not None and high is not None:
        _checks.bounds(bool((low < high).all()), low.dtype)


def _inwards(bound: Any, dtype: torch.dtype, up: bool, mu: Tensor) -> Tensor:
    """A bound in the result's dtype, rounded to where it still holds."""
    if not isinstance(bound, Tensor):
        if bound is not None and _is_traced(mu):
            return rounded_inwards(mu.new_full((1,), float(bound), dtype=torch.float64), dtype, up)
        missing = -math.inf if up else math.inf
        value = missing if bound is None else _number_inwards(float(bound), dtype, up)
        return mu.new_full((1,), value, dtype=dtype)
    if bound.dtype == dtype:
        return bound
    rounded = rounded_inwards(bound.detach(), dtype, up)
    return bound + (rounded - bound).detach() if bound.requires_grad else rounded


def rounded_inwards(exact: Tensor, dtype: torch.dtype, up: bool) -> Tensor:
    """Tensors of bounds in a dtype, rounded to where they still hold."""
    rounded = exact.to(dtype)
    wrong = rounded.double() < exact.double() if up else rounded.double() > exact.double()
    return torch.where(
        wrong, torch.nextafter(rounded, torch.full_like(rounded, math.inf if up else -math.inf)), rounded
    )


@functools.lru_cache(maxsize=256)
def _number_inwards(bound: float, dtype: torch.dtype, up: bool) -> float:
    return float(rounded_inwards(torch.tensor([bound], dtype=torch.float64, device="cpu"), dtype, up))


_is_compiling, _peek = torch.compiler.is_compiling, torch._C._functorch.peek_interpreter_stack
_is_grad_enabled, _modes = torch.is_grad_enabled, torch._C._len_torch_dispatch_stack
_tracing_state = torch._C._get_tracing_state
_mode, _Key = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey
_is_fake = torch._subclasses.fake_tensor.is_fake


@functools.cache
def _library_fwd() -> Any:
    return _backend.library().sample_normal_fwd


# What torch.compile's code allocates with on the current GPU, in half the time of new_empty.
_empty_on_current = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)


def _matrix(mu: Tensor, rows: int, columns: int) -> Tensor:
    """Memory like mu's for the samples of one distribution."""
    if _empty_on_current is not None:
        x = _empty_on_current((rows, columns), (columns, 1), mu.dtype)
        if x.get_device() == mu.get_device():
            return x
    return mu.new_empty(rows, columns)


# Written for speed: this much of a call is cuops' own.
def direct(mu, sigma, num_samples, sample_dim, shared, antithetic, generator, seed, start):  # type: ignore[no-untyped-def]
    """The samples by the shortest way, without PyTorch's dispatcher, or None where a call needs more than that."""
    if (
        type(mu) not in PLAIN
        or not mu.is_cuda
        or type(num_samples) is not int
        or num_samples <= 0
        or type(start) is not int
        or not 0 <= start < 1 << 43
        or _is_compiling()
        or _modes()
        or _tracing_state() is not None
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
    state = None
    if type(seed) is Tensor and generator is None:
        state, seed = seed, 0
    elif seed is not None:
        if generator is not None or type(seed) is not int or not -(1 << 63) <= seed < 1 << 63:
            return None
    elif generator is not None and (type(generator) is not torch.Generator or not is_for(generator, mu.device)):
        return None
    if sample_dim == 0:
        x = _matrix(mu, num_samples, shape[0]) if len(shape) == 1 else mu.new_empty(sizes_of(shape, num_samples, 0))
    elif sample_dim == -1:
        x = _matrix(mu, shape[0], num_samples) if len(shape) == 1 else mu.new_empty((*shape, num_samples))
    else:
        return None
    if seed is not None:
        _library_fwd()(x, mu, sigma, value, None, None, state, 0, seed, 0, start, sample_dim, shared, antithetic)
        return x
    taken = _default_generators()[mu.get_device()] if generator is None else generator
    with advancing:
        try:
            offset, seed = taken.get_offset(), taken.initial_seed()
        except RuntimeError:  # as it is while a CUDA graph is captured, whose replays count themselves
            if generator is not None or not is_capturing():
                return None
            replays = _backend.library().sample_normal_replays(mu.get_device())
            draw = replays, host_seed(None), 0, start, sample_dim, shared, antithetic
            _library_fwd()(x, mu, sigma, value, None, None, None, *draw)
            return x
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
