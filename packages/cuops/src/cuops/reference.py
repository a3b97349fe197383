"""What every operator computes, in plain NumPy and plain PyTorch: what the CPU runs, and tests compare kernels with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch


def rms_norm_numpy(
    x: np.ndarray,
    residual: np.ndarray | None,
    weight: np.ndarray | None,
    bias: np.ndarray | None,
    eps: float,
    weight_offset: float,
    out_dtype: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(y, h, rstd) of RMSNorm over the last dimension; h is x where there is no residual."""
    import numpy as np

    wide = x.astype(np.float64)
    h = x if residual is None else (wide + residual).astype(x.dtype)
    wide = h.astype(np.float64)
    largest = np.max(np.abs(wide), axis=-1, keepdims=True, initial=np.sqrt(eps))
    # A power of two keeps the squares of float64 in range, exactly.
    exponent = np.maximum(np.frexp(np.where(np.isfinite(largest), largest, 1))[1], -1000)
    scale = np.exp2(-exponent.astype(np.float64))
    scaled = wide * scale
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        rms = np.sqrt(np.square(scaled).sum(-1, keepdims=True) / max(x.shape[-1], 1) + eps * scale * scale)
        y = np.where(rms == 0, 0.0, scaled / rms)
        rstd = np.where(rms == 0, 0.0, scale / rms)
        if weight is not None:
            y = y * (weight.astype(np.float64) + weight_offset)
        if bias is not None:
            y = y + bias.astype(np.float64)
        rstd = rstd[..., 0].astype(np.float64 if x.dtype == np.float64 else np.float32)
        return y.astype(out_dtype or x.dtype), h, rstd


def _rstd(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """1 / sqrt(mean(x^2) + eps) as factors (rstd, scale): a power of two keeps float64's squares in range."""
    import torch

    with torch.no_grad():
        largest = torch.cat([x.abs(), x.new_full((*x.shape[:-1], 1), eps**0.5)], -1).amax(-1, keepdim=True)
        exponent = torch.frexp(torch.where(largest.isfinite(), largest, 1.0)).exponent.clamp(min=-1000)
        scale = torch.exp2(-exponent.double())
    mean = (x * scale).square().sum(-1, keepdim=True) / max(x.shape[-1], 1) + eps * scale * scale
    zero = mean == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, mean).rsqrt()), scale


def rms_norm_torch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, h, rstd) of RMSNorm over the last dimension; h is x where there is no residual. Differentiable."""
    import torch

    h = x if residual is None else (x.double() + residual.double()).to(x.dtype)
    rstd, scale = _rstd(h.double(), eps)
    y = h.double() * scale * rstd
    if weight is not None:
        y = y * (weight.double() + weight_offset)
    if bias is not None:
        y = y + bias.double()
    return (
        y.to(out_dtype or x.dtype),
        h,
        (rstd * scale)[..., 0].to(torch.float64 if x.dtype == torch.float64 else torch.float32),
    )


def rms_norm_torch_backward(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Gradients for (h and so x and residual, weight, bias), from those for (y, h). Differentiable."""
    rstd, scale = _rstd(h.double(), eps)
    y = h.double() * scale * rstd  # without weight and bias
    grad, leading = dy.double(), tuple(range(h.ndim - 1))
    through = grad if weight is None else grad * (weight.double() + weight_offset)
    dx = (through - y * (through * y).sum(-1, keepdim=True) / max(h.shape[-1], 1)) * rstd * scale
    if dh is not None:
        dx = dx + dh
    dweight = None if weight is None else (grad * y).sum(leading).to(weight.dtype)
    return dx.to(h.dtype), dweight, grad.sum(leading)


def kron_linear_numpy(x: np.ndarray, factors: Sequence[np.ndarray], bias: np.ndarray | None) -> np.ndarray:
    """x @ kron(factors).T + bias: each product takes the first dimension that is left, and puts its own last."""
    import numpy as np

    state = x.astype(np.float64).reshape(math.prod(x.shape[:-1]), *(w.shape[1] for w in factors))
    for w in factors:
        state = np.tensordot(state, w.astype(np.float64), axes=(1, 1))
    y = state.reshape(*x.shape[:-1], math.prod(w.shape[0] for w in factors))
    if bias is not None:
        y = y + bias.astype(np.float64)
    with np.errstate(over="ignore"):
        return y.astype(x.dtype)


def _product(x: torch.Tensor, factors: Sequence[torch.Tensor], left_out: int | None = None) -> torch.Tensor:
    """(rows, o1, ..., on) from (..., i1 * ... * in) in float64; the size of the factor that is left out stays."""
    import torch

    state = x.double().reshape(math.prod(x.shape[:-1]), *(w.shape[1] for w in factors))
    for k, w in enumerate(factors):
        state = state.movedim(1, -1) if k == left_out else torch.tensordot(state, w.double(), dims=([1], [1]))
    return state


def kron_linear_torch(x: torch.Tensor, factors: Sequence[torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
    """x @ kron(factors).T + bias. Differentiable."""
    y = _product(x, factors).reshape(*x.shape[:-1], math.prod(w.shape[0] for w in factors))
    return (y if bias is None else y + bias.double()).to(x.dtype)


def kron_linear_torch_backward(
    dy: torch.Tensor, x: torch.Tensor, factors: Sequence[torch.Tensor], needs_x: bool, needs_factors: Sequence[bool]
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """Gradients for x and the factors, None where not needed. Differentiable."""
    import torch

    grad = dy.double().reshape(math.prod(dy.shape[:-1]), *(w.shape[0] for w in factors))
    dfactors: list[torch.Tensor | None] = []
    for k, (w, needed) in enumerate(zip(factors, needs_factors, strict=True)):
        others = [dim for dim in range(grad.ndim) if dim != k + 1]
        dw = torch.tensordot(grad, _product(x, factors, k), dims=(others, others)) if needed else None
        dfactors.append(None if dw is None else dw.to(w.dtype))
    dx = _product(dy, [w.mT for w in factors]).reshape(x.shape).to(x.dtype) if needs_x else None
    return dx, dfactors
