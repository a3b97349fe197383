"""Normal samples of PyTorch tensors straight by the library, around PyTorch's dispatcher."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _backend
from .._transforms import PLAIN
from .noise import sizes_of
from .random_state import advancing, host_seed, is_capturing, is_for

_is_compiling, _peek = torch.compiler.is_compiling, torch._C._functorch.peek_interpreter_stack
_is_grad_enabled, _modes = torch.is_grad_enabled, torch._C._len_torch_dispatch_stack
_tracing_state = torch._C._get_tracing_state


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


# Written out, without loops or helpers: each call runs this, which for small arrays is a good part of it.
def direct(mu, sigma, num_samples, sample_dim, shared, antithetic, generator, seed, start):  # type: ignore[no-untyped-def]
    """The samples by the shortest way, without PyTorch's dispatcher, or None where a call needs more than that."""
    if (
        type(mu) not in PLAIN
        or _is_compiling()
        or not mu.is_cuda
        or mu.is_neg()
        or type(shared) is not bool
        or type(antithetic) is not bool
        or type(num_samples) is not int
        or num_samples <= 0
        or type(start) is not int
        or not 0 <= start < 1 << 43
        or _modes()
        or _tracing_state() is not None
        or _peek() is not None
        or forward_ad._current_level >= 0
    ):
        return None
    shape, value = mu.shape, 0.0
    if type(sigma) in PLAIN:
        if sigma.shape != shape or sigma.is_neg() or (_is_grad_enabled() and (mu.requires_grad or sigma.requires_grad)):
            return None
    elif type(sigma) is float and 0 <= sigma < math.inf and not (_is_grad_enabled() and mu.requires_grad):
        sigma, value = None, sigma
    else:
        return None
    if not shape or 0 in shape:
        return None
    state = None
    if type(seed) is Tensor and generator is None:
        if not seed.is_contiguous():
            return None
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
            draw = replays, host_seed(), 0, start, sample_dim, shared, antithetic
            _library_fwd()(x, mu, sigma, value, None, None, None, *draw)
            return x
        taken.set_offset(offset + 4)  # before others go on: the first call may take long
    if seed >> 63:
        seed -= 1 << 64
    try:
        draw = 0, seed, offset >> 2, start, sample_dim, shared, antithetic
        _library_fwd()(x, mu, sigma, value, None, None, None, *draw)
    except BaseException:
        _take_back(taken, offset)
        raise
    return x


def _take_back(generator: torch.Generator, offset: int) -> None:
    """Leaves a generator as it was before a call that failed, unless others have drawn since."""
    with advancing:
        if generator.get_offset() == offset + 4:
            generator.set_offset(offset)


@functools.cache
def _default_generators() -> Any:
    torch.cuda.init()
    return torch.cuda.default_generators
