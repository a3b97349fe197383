"""The quantile of a truncated normal distribution with its derivative, under any of PyTorch's transforms."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from . import truncation


class Quantile(torch.autograd.Function):
    """Of noise, mu, sigma, low and high, all float64 and of one shape."""

    generate_vmap_rule = True

    @staticmethod
    def forward(noise: Tensor, *parameters: Tensor) -> Tensor:
        """The quantile."""
        return truncation.truncated(torch, parameters, noise)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keeps all."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for the parameters."""
        return None, *(grad * slope for slope in _Slopes.apply(*ctx.saved_tensors))

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> Tensor:
        """The tangent of the quantile."""
        found = [s * t for s, t in zip(_Slopes.apply(*ctx.saved_tensors), tangents, strict=True) if t is not None]
        return sum(found[1:], found[0])


class Once(torch.autograd.Function):
    """Tensors as they are, of which a further derivative is refused."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*given: Tensor) -> tuple[Tensor, ...]:
        """Views."""
        return tuple(a.view_as(a) for a in given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        """Keeps nothing."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        """Refuses."""
        raise NotImplementedError("second derivatives of truncated samples are not there")

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        """Refuses."""
        raise NotImplementedError("second derivatives of truncated samples are not there")


class _Slopes(Once):
    """The quantile's derivatives by the parameters."""

    @staticmethod
    def forward(noise: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        return truncation.slopes(torch, parameters, noise)
