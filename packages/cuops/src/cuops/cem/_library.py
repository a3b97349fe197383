"""Which library an array is of, and how its arrays are written."""

from __future__ import annotations

import contextlib
from typing import Any

from .._arguments import is_tensor
from .._torch import torch


def library_of(array: Any) -> Any:
    """The module torch or numpy, whichever the array is of."""
    if is_tensor(array):
        return torch
    import numpy as np

    return np


def copied(array: Any) -> Any:
    """The same bits in memory of their own."""
    return array.clone() if is_tensor(array) else array.copy()


def mark_written(*arrays: Any) -> None:
    """Tells autograd of tensors that the library, or NumPy, has written, as PyTorch's own operators do."""
    if torch is not None and not torch.compiler.is_compiling():
        for array in arrays:
            if is_tensor(array):
                torch.autograd.graph.increment_version(array)


def exact(array: Any) -> Any:
    """A context in which products of tensors have their dtype, also where the caller uses autocast."""
    if is_tensor(array) and torch.is_autocast_enabled(array.device.type):
        return torch.autocast(array.device.type, enabled=False)
    return contextlib.nullcontext()


def outside_of_graphs(method: Any) -> Any:
    """A method that torch.compile calls and does not follow: graphs have no inference mode, and other NumPy code."""
    if torch is None:
        return method
    try:  # as torch.compiler.disable, without its import of the compiler, and without a wrapper
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(method.__code__, frames._FrameExecStrategy(skip, skip))
    except (AttributeError, TypeError, RuntimeError):  # of a PyTorch that has no such functions, or others
        return torch.compiler.disable(method)
    method._torchdynamo_disable = True
    return method


def writing(array: Any) -> Any:
    """A context for writing: of what is out of range without warnings, of tensors whether made for inference or not."""
    return torch.inference_mode() if is_tensor(array) else library_of(array).errstate(all="ignore")
