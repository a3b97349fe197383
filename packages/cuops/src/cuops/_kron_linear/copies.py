"""Copies of transposes before and between the vendor's GEMMs, and sums of what they leave."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _backend
from .._transforms import PLAIN, takes_formula

# The least rows and columns of matrices that the library transposes faster than PyTorch, by an element's bytes.
LEAST_SWAPPED = {2: 24, 4: 16, 8: 12}


def is_plain(t: Tensor) -> bool:
    """Whether the library's own kernels may read t, of which nothing but its elements then matters."""
    is_on_gpu = type(t) in PLAIN and t.is_cuda and not torch.compiler.is_compiling() and not takes_formula(t)
    return is_on_gpu and not (t.requires_grad and torch.is_grad_enabled())


def _is_swapped(t: Tensor) -> bool:
    """Whether the library copies the transposes of t, (n, a, b): faster than PyTorch, which does the narrow ones."""
    if not is_plain(t) or not t.is_contiguous() or t.mT.is_contiguous():
        return False
    return t.shape[0] > 1 and min(t.shape[1:]) >= LEAST_SWAPPED[t.element_size()]


def swapped(t: Tensor) -> Tensor:
    """t.mT, of (n, a, b), to be reshaped to one matrix: without gaps where `_is_swapped`."""
    if not _is_swapped(t):
        return t.mT
    y = t.new_empty(t.shape[0], t.shape[2], t.shape[1])
    _backend.library().kron_linear_transpose(y, t)
    return y


def summed(t: Tensor) -> Tensor:
    """The sum of t over its first dimension."""
    if not is_plain(t) or not t.is_contiguous():
        return t.sum(0)
    y = t.new_empty(t.shape[1:])
    _backend.library().kron_linear_sum(y, t)
    return y
