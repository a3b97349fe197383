"""The gradient of a gradient that has a formula in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def through(
    formula: Callable[..., tuple[Tensor, ...]], given: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> list[Any]:
    """Gradients for what the formula is given, from those for the tuple of its results; differentiable with a graph."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, so that only the formula lies between them and its results.
        inputs = [
            None if t is None else (t if t.requires_grad else t.detach().requires_grad_()).view_as(t) for t in given
        ]
        results = formula(*inputs)
    pairs = [(a, grad) for a, grad in zip(results, grads, strict=True) if grad is not None and a.requires_grad]
    if not pairs:
        return [None] * len(inputs)
    tensors = [t for t in inputs if t is not None]
    outputs, of_outputs = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, tensors, of_outputs, allow_unused=True, create_graph=create_graph))
    return [None if t is None else next(found) for t in inputs]
