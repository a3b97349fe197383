"""A linear layer whose weight is a Kronecker product, as a module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .. import _arguments
from ..kron_linear import kron_linear
from ._nearest_kronecker import nearest_kronecker


class KronLinear(torch.nn.Module):
    """`cuops.kron_linear` as a module, in place of a `torch.nn.Linear` of far more parameters.

        y = x @ kron(factors[0], factors[1], ..., factors[n-1]).T + bias

    Args:
        in_factors: the columns of each factor; their product is the size of x's last dimension.
        out_factors: the rows of each factor, as many; their product is the size of y's last dimension.
        bias: whether there is a bias.
        device: where the parameters are made.
        dtype: of the parameters: float64, float32, float16 or bfloat16.

    ``forward(x)`` takes ``(*, in_features)`` and returns ``(*, out_features)``, in x's dtype, which is the parameters'.
    ``in_features`` and ``out_features`` are the two products, as those of `torch.nn.Linear`; ``in_factors`` and
    ``out_factors`` are tuples.

    The factors are ``factors.0`` to ``factors.n-1`` of the state_dict, each ``(out_factors[k], in_factors[k])``. They
    start uniformly random. On average over draws, entries of their product, and thus y, have the variance of a new
    `torch.nn.Linear`; that of one draw scatters around it, widely where there are many small factors.

    Raises:
        TypeError: sizes are no sequence of integers, or the dtype is none of these; x is no tensor, when called.
        ValueError: there is no size, one is less than 1, their product is 2**63 or more, or in_factors and out_factors
            differ in length.
    """

    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_factors: Sequence[int],
        out_factors: Sequence[int],
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.in_factors, self.out_factors = _sizes("in_factors", in_factors), _sizes("out_factors", out_factors)
        if len(self.in_factors) != len(self.out_factors):
            raise ValueError(
                f"out_factors: expected as many as in_factors, {len(self.in_factors)}, got {len(self.out_factors)}"
            )
        self.in_features, self.out_features = math.prod(self.in_factors), math.prod(self.out_factors)
        for name, features in (("in_factors", self.in_features), ("out_factors", self.out_features)):
            if features >= 1 << 63:
                raise ValueError(
                    f"{name}: expected sizes whose product is less than 2**63, got {_arguments.short(features)}"
                )
        if dtype is not None and dtype not in _arguments.TORCH_DTYPES:
            raise TypeError(f"dtype: expected torch.float64, float32, float16 or bfloat16, got {dtype!r}")
        bias = _arguments.flag("bias", bias)
        made = {"device": device, "dtype": dtype}
        sizes = zip(self.out_factors, self.in_factors, strict=True)
        self.factors = torch.nn.ParameterList([torch.nn.Parameter(torch.empty(size, **made)) for size in sizes])
        self.register_parameter("bias", torch.nn.Parameter(torch.empty(self.out_features, **made)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new parameters; over draws, the product's entries have PyTorch's variance, 1 / (3 in_features)."""
        for w in self.factors:
            variance = 3 ** (-1 / len(self.factors)) / w.shape[1]
            torch.nn.init.uniform_(w, -math.sqrt(3 * variance), math.sqrt(3 * variance))
        if self.bias is not None:
            torch.nn.init.uniform_(self.bias, -1 / math.sqrt(self.in_features), 1 / math.sqrt(self.in_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y, ``(*, out_features)``, of x, ``(*, in_features)``."""
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x: expected a torch.Tensor, got {type(x).__qualname__}")
        y: torch.Tensor = kron_linear(x, [self.factors[k] for k in range(len(self.in_factors))], self.bias)
        return y

    def extra_repr(self) -> str:
        """The sizes of the factors, and whether there is a bias."""
        return f"in_factors={self.in_factors}, out_factors={self.out_factors}, bias={self.bias is not None}"

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, in_factors: Sequence[int], out_factors: Sequence[int]
    ) -> tuple[KronLinear, float]:
        """The layer with the weight nearest to that of `linear`, and their relative distance in the Frobenius norm.

        The product of two factors is the nearest there is; that of more factors is a local optimum. The bias is copied.
        The layer is in training mode if `linear` is, and its parameters want gradients as those of `linear` do. A class
        derived from this one is called with the sizes, whether there is a bias, and the dtype.

        Args:
            linear: the layer, with a weight of ``(out_features, in_features)``.
            in_factors, out_factors: as those of the class; their products are in_features and out_features.

        Returns:
            The new layer, on the device and in the dtype of the weight A, and the float
            ``norm(A - kron(factors)) / norm(A)``.

        Raises:
            TypeError: linear is not a `torch.nn.Linear`, or has a DTensor, or a parameter that is not float64, float32,
                float16 or bfloat16.
            ValueError: the products of the factors are not the sizes of its weight, there are more than 64 factors, the
                weight has no values or one that is not finite, or weight or bias have other shapes than a linear layer.

        Source: Van Loan and Pitsianis, Approximation with Kronecker products,
        https://doi.org/10.1007/978-94-015-8196-7_17.
        """
        if not isinstance(linear, torch.nn.Linear):
            raise TypeError(f"linear: expected a torch.nn.Linear, got {type(linear).__qualname__}")
        weight, bias = linear.weight, linear.bias
        for name, p in (("weight", weight), ("bias", bias)):
            if p is None:
                continue
            if torch.nn.parameter.is_lazy(p):
                raise ValueError(f"linear: expected a {name} with values, got a {type(linear).__qualname__} without")
            if hasattr(p, "full_tensor"):
                raise TypeError(f"linear: expected a plain {name}, got a {type(p).__qualname__}")
            if p.is_meta:
                raise ValueError(f"linear: expected a {name} with values, got one on meta")
            if p.layout is not torch.strided:
                raise ValueError(f"linear: expected a dense {name}, got one of {p.layout}")
            if p.dtype not in _arguments.TORCH_DTYPES:
                raise TypeError(f"linear: expected a {name} of float64, float32, float16 or bfloat16, got {p.dtype}")
        if weight.ndim != 2:
            raise ValueError(f"linear: expected a weight that is a matrix, got one of shape {tuple(weight.shape)}")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"linear: expected a bias of shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
        sizes = _sizes("in_factors", in_factors), _sizes("out_factors", out_factors)
        for name, given, wanted in zip(("in_factors", "out_factors"), sizes, reversed(weight.shape), strict=True):
            if len(given) > 64:  # dimensions of a tensor
                raise ValueError(f"{name}: expected at most 64 sizes, got {len(given)}")
            if math.prod(given) != wanted:
                got = _arguments.short(math.prod(given))
                raise ValueError(f"{name}: expected sizes whose product is {wanted}, as linear has it, got {got}")
        if not weight.detach().isfinite().all():
            raise ValueError("linear: expected a finite weight, got one with infinities or NaN")
        made = *sizes, bias is not None
        if cls is KronLinear:  # which so draws nothing
            layer = torch.nn.utils.skip_init(cls, *made, device=weight.device, dtype=weight.dtype)
        else:
            with torch.device(weight.device):
                layer = cls(*made, dtype=weight.dtype)
        nearest, error = nearest_kronecker(weight.detach(), layer.out_factors, layer.in_factors)
        with torch.no_grad():
            for w, found in zip(layer.factors, nearest, strict=True):
                w.copy_(found).requires_grad_(_is_trained(linear, "weight"))
            if layer.bias is not None:
                layer.bias.copy_(bias).requires_grad_(_is_trained(linear, "bias"))
        return layer.train(linear.training), error


def _is_trained(linear: torch.nn.Linear, name: str) -> bool:
    """Whether a parameter wants a gradient, or, parametrized or pruned, one of those that it is made of does."""
    if name not in linear._parameters:
        prefixes = f"parametrizations.{name}.", f"{name}_"
        made_of = [p for of, p in linear.named_parameters() if of.startswith(prefixes)]
        if made_of:
            return any(p.requires_grad for p in made_of)
    return bool(getattr(linear, name).requires_grad)


def _sizes(name: str, sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes as a tuple. Raises where they are not positive integers, or there are none."""
    given = tuple(sizes) if _arguments.is_ordered(sizes) else None
    if given is None or not _arguments.are_integers(given):
        raise TypeError(f"{name}: expected a sequence of integers, got {sizes!r}")
    if not given or min(given) < 1:
        raise ValueError(f"{name}: expected at least one size, each of at least 1, got {given}")
    return tuple(int(size) for size in given)
