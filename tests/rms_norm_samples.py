"""Inputs of RMSNorm, its definition in extended precision, and how far a result may be from it."""

from __future__ import annotations

import numpy as np
import torch

BACKEND = {"cpu": "aot_eager", "cuda": "inductor"}  # of torch.compile: inductor needs a compiler of the machine's


def definition(x, weight=None, bias=None, eps=1e-6, *, residual=None, weight_offset=0.0, dims=1):
    """(y, h, rstd) in the extended precision of NumPy's longdouble."""
    x, weight, bias, residual = (
        None if a is None else a.detach().cpu().double().numpy().astype(np.longdouble)
        for a in (x, weight, bias, residual)
    )
    h = x if residual is None else x + residual
    axes = tuple(range(h.ndim - dims, h.ndim))
    rstd = 1 / np.sqrt(np.square(h).mean(axis=axes, keepdims=True) + np.longdouble(eps))
    y = h * rstd
    if weight is not None:
        y = y * (weight + weight_offset)
    return (y if bias is None else y + bias), h, rstd.reshape(h.shape[: h.ndim - dims])


def assert_close(got: torch.Tensor, want: np.ndarray, n: int, terms: float = 0.0) -> None:
    """One rounding to `got`'s dtype, and of the sums (float32, float64) what a sum of n squares and five operations may lose.

    `terms` is the size of what was added up for an element, where that is more than the element itself.
    """
    result = torch.finfo(got.dtype)
    sums = torch.finfo(torch.float64 if got.dtype == torch.float64 else torch.float32)
    got = got.detach().cpu().double().numpy().astype(np.longdouble)
    assert got.shape == want.shape
    relative = result.eps / 2 + sums.eps * (8 + n / 2048)
    allowed = relative * np.maximum(np.abs(want), terms) + 2 * float(result.smallest_normal) * result.eps
    worst = np.max(np.abs(got - want) / allowed, initial=0)
    assert worst <= 1, f"an error of {worst:.3g} times what rounding explains"


def assert_gradients_close(got, want, n, rows):
    """One rounding to the result's dtype, and what sums over a row or over all rows lose, for numbers of size 1."""
    for a, b in zip(got, want, strict=True):
        sums = torch.finfo(torch.float64 if got[0].dtype == torch.float64 else torch.float32)
        allowed = (
            torch.finfo(a.dtype).eps / 2 * b.abs() + sums.eps * (16 + n**0.5 / 8 + rows**0.5) * 10 * b.abs().mean()
        )
        assert ((a.double() - b).abs() <= allowed).all()


SHAPES = [
    (1,), (7,), (3, 1), (5, 8), (4, 33), (2, 3, 64), (9, 100), (3, 127), (17, 128), (2, 2, 2, 256), (6, 1000), (3, 1024), (2, 1025),
    (3, 4096), (2, 4097), (1, 8192), (2, 16384),
]  # fmt: skip


WIDE = [
    (2, 32768),
    (3, 32769),
    (16, 33333),
    (40, 33333),
    (2, 65536),
    (1, 131072),
    (2, 131073),
    (1, 262144),
    (1, 262147),
    (1, 1048576),
    (1, 1048579),
    (2, 1048576),
    (3, 600001),
    (4, 524296),
]
