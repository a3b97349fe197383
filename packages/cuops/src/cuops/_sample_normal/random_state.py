"""PyTorch's random state as samples take it: a seed and the number of a stream, or a tensor that holds them."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from . import checks


def host_seed() -> int:
    """A seed from PyTorch's generator of the CPU, for the replays of a graph."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def fresh_seed(generator: torch.Generator | None, device: torch.device | str) -> Tensor:
    """A seed that a generator draws."""
    return torch.randint(-(1 << 63), (1 << 63) - 1, (1,), generator=generator, device=device)


is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)  # a build for the CPU has none
advancing = threading.Lock()  # a generator's offset is read and written in two steps


def is_for(generator: torch.Generator, device: torch.device) -> bool:
    """Whether a generator is of a device; one of "cuda" is of the current GPU."""
    at = generator.device
    return at == device or (at.type == device.type == "cuda" and at.index is None)


def _cuda_generator(generator: Any, device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index] if generator is None else generator


def expect_random_state(device: torch.device, generator: Any, seed: Any) -> None:
    """The seed or the generator may serve draws on the device."""
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64:
            raise TypeError(f"seed: expected an int64 tensor, got {seed.dtype}")
        if seed.numel() not in (1, 2):
            raise ValueError(f"seed: expected one or two elements, got {seed.numel()}")
        if seed.device != device:
            raise ValueError(f"seed: expected a tensor on mu's device, {device}, got one on {seed.device}")
    elif seed is not None:
        checks.seed(seed)
    elif generator is not None:
        if not isinstance(generator, torch.Generator):
            got = f"{type(generator).__module__}.{type(generator).__qualname__}"
            raise TypeError(f"generator: expected a torch.Generator, got {got}")
        if not is_for(generator, device):
            raise ValueError(f"generator: expected one of mu's device, {device}, got one of {generator.device}")


def random_state(device: torch.device, generator: Any, seed: Any, traced: bool) -> tuple[Tensor | None, int, int]:
    """(state, seed, stream) as operators take them; a generator is advanced, unless the call is `traced`."""
    expect_random_state(device, generator, seed)
    if isinstance(seed, Tensor):
        return seed.contiguous(), 0, 0
    if seed is not None:
        return None, checks.seed(seed), 0
    recorded = traced or torch._C._get_tracing_state() is not None
    if device.type == "cuda" and not recorded and not is_capturing():
        with advancing:
            taken = _cuda_generator(generator, device)
            offset = taken.get_offset()
            taken.set_offset(offset + 4)
        return None, _signed(taken.initial_seed()), offset // 4
    # The graph draws a seed on the device, each time that it runs.
    return fresh_seed(generator, device), 0, 0


def _signed(seed: int) -> int:
    return seed - (1 << 64) if seed >> 63 else seed
