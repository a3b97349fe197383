"""RMSNorm as a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import _arguments
from ..rms_norm import rms_norm

EPS_OF_FLOAT32, EPS_OF_FLOAT64 = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps
# Since then, CUDA's autocast runs torch.nn.functional.rms_norm in float32.
AUTOCAST_TO_FLOAT32 = torch.__version__ >= (2, 12)


class RMSNorm(torch.nn.RMSNorm):
    """`cuops.rms_norm` as a module, in place of `torch.nn.RMSNorm`: the state_dict and the results are the same.

        y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset) + bias

    Args:
        normalized_shape: an int or the sizes of the last dimensions, which are normalised together.
        eps: added to the mean of squares; None is ``torch.finfo(torch.float64).eps`` for float64 and
            ``torch.finfo(torch.float32).eps`` for every other dtype, as in PyTorch.
        elementwise_affine: whether there is a weight.
        bias: whether there is a bias too, of zeros at first.
        weight_offset: added to the weight, which starts as 1 - weight_offset: 1 for models, like Gemma, that store
            weight - 1.
        device: where the parameters are made.
        dtype: of the parameters.

    ``forward(x)`` returns y; ``forward(x, residual)`` returns (y, h) with h = x + residual, both from one kernel. y has
    x's dtype, whatever the weight's; under CUDA's autocast it is float32 from PyTorch 2.12 on, as PyTorch's is. All
    are ``(*, *normalized_shape)``.

    Raises:
        TypeError: an argument is of another kind or dtype, such as a device in the place of bias; or x is, when called.
        ValueError: arguments are not as described, some of them only when called; the message names them.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, https://arxiv.org/abs/1910.07467.
    """

    bias: torch.nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        bias: bool = False,
        weight_offset: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        if not isinstance(bias, bool):  # PyTorch's module has no such argument, and device in its place
            raise TypeError(f"bias: expected True or False, got {bias}; pass device and dtype by name")
        sizes = _arguments.sizes("normalized_shape", normalized_shape)
        if not sizes or min(sizes) < 0:
            raise ValueError(f"normalized_shape: expected at least one size, none below 0, got {sizes}")
        if eps is not None:
            _arguments.number("eps", eps, least=0)
            eps = float(eps)  # torch.compile sees NumPy's numbers as arrays
        _arguments.number("weight_offset", weight_offset)
        if dtype is not None and dtype not in _arguments.TORCH_DTYPES:
            raise TypeError(f"dtype: expected torch.float64, float32, float16 or bfloat16, got {dtype!r}")
        # reset_parameters reads these.
        self.__dict__.update(weight_offset=float(weight_offset), _y_dtype=None, bias=None)
        super().__init__(sizes, eps, elementwise_affine, device=device, dtype=dtype)
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(self.normalized_shape, device=device, dtype=dtype))

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """As every module has it; a bias takes the place of none."""
        if name == "bias" and self.__dict__.get(name, self) is None:
            del self.__dict__[name]
        super().register_parameter(name, param)

    def reset_parameters(self) -> None:
        """Makes the weight 1 - weight_offset, the bias 0."""
        if self.weight is not None:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """y, or (y, h) with a residual."""
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x: expected a torch.Tensor, got {type(x).__qualname__}")
        weight, eps = self.weight, self.eps
        if eps is None:
            eps = EPS_OF_FLOAT64 if x.dtype == torch.float64 else EPS_OF_FLOAT32
        alone = len(self.normalized_shape) == 1 and (weight is not None or x.shape[-1:] == self.normalized_shape)
        return rms_norm(
            x, weight, self.bias, eps, residual=residual, weight_offset=self.weight_offset,
            normalized_shape=None if alone else self.normalized_shape, out_dtype=self._out_dtype(x),
        )  # fmt: skip

    def _out_dtype(self, x: torch.Tensor) -> torch.dtype | None:
        """y's dtype, None being x's."""
        if self._y_dtype is None:
            autocast = x.is_cuda and AUTOCAST_TO_FLOAT32 and torch.is_autocast_enabled("cuda")
            dtype = torch.float32 if autocast and x.dtype != torch.float64 else x.dtype
        elif self._y_dtype == "x" or self.weight is None:
            return None
        elif self._y_dtype == "t5" and self.weight.dtype in (torch.float16, torch.bfloat16):
            dtype = self.weight.dtype
        else:
            dtype = torch.promote_types(x.dtype, self.weight.dtype)
            dtype = torch.promote_types(dtype, torch.float32) if self._y_dtype == "t5" else dtype
        return None if dtype == x.dtype else dtype

    def extra_repr(self) -> str:
        """What `torch.nn.RMSNorm` shows, and bias and weight_offset where there are any."""
        bias = "" if self.bias is None else ", bias=True"
        return super().extra_repr() + bias + (f", weight_offset={self.weight_offset}" if self.weight_offset else "")
