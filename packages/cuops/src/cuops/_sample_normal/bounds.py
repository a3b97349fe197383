"""Bounds in the dtype of samples, rounded to where they still hold."""

from __future__ import annotations

import math
from typing import Any

from .._arguments import is_tensor
from .._torch import torch


def rounded_inwards(exact: Any, dtype: Any, up: bool) -> Any:
    """Tensors or NumPy arrays of bounds in a dtype, none of which lets more through than the exact one."""
    return (_tensors if is_tensor(exact) else _arrays)(exact, dtype, up)


def _tensors(exact: Any, dtype: Any, up: bool) -> Any:
    rounded = exact.to(dtype)
    wrong = rounded.double() < exact.double() if up else rounded.double() > exact.double()
    next_one = torch.nextafter(rounded, torch.full_like(rounded, math.inf if up else -math.inf))
    return torch.where(wrong, next_one, rounded)


def _arrays(exact: Any, dtype: Any, up: bool) -> Any:
    import numpy as np

    with np.errstate(all="ignore"):
        rounded = exact.astype(dtype)
        wrong = rounded < exact if up else rounded > exact
        return np.where(wrong, np.nextafter(rounded, np.asarray(np.inf if up else -np.inf, dtype)), rounded)
