"""Which library an array is of."""

from __future__ import annotations

from typing import Any

from .._arguments import is_tensor
from .._torch import torch


def library_of(array: Any) -> Any:
    """The module torch or numpy, whichever the array is of."""
    if is_tensor(array):
        return torch
    import numpy as np

    return np


def writing(array: Any) -> Any:
    """A context for writing: of what is out of range without warnings, of tensors whether made for inference or not."""
    return torch.inference_mode() if is_tensor(array) else library_of(array).errstate(all="ignore")
