"""RMSNorm with a weight of another dtype or none, an offset, a bias, y of another dtype, rows of two strides, on a GPU."""

from __future__ import annotations

import cuops
import numpy as np
import pytest
import torch
from rms_norm_samples import assert_close, definition
from samples import DTYPES, make

pytestmark = pytest.mark.gpu

# Rows of parts of warps, of blocks and of clusters, of vectors and off them, few and many.
SHAPES = [
    (5, 8), (7, 264), (3, 2048), (4200, 1032), (3, 12288), (130, 12296), (40, 16384), (9, 262144), (3, 300000),
    (5, 9), (300, 57), (50, 1001), (2200, 2001), (40, 33333), (5, 130001),
]  # fmt: skip
KINDS = [
    "no weight",
    "float32 weight",
    "float16 weight",
    "offset",
    "bias",
    "float32 bias",
    "float32 y",
    "bfloat16 y",
    "two strides",
]


def options(kind, n, dtype):
    """A weight, a bias, and the arguments by name."""
    weight, bias = (make((n,), dtype, "cuda", seed) for seed in (1, 2))
    if kind.endswith(" weight"):
        return None if kind == "no weight" else weight.to(getattr(torch, kind.split()[0])), None, {}
    if kind.endswith("bias"):
        return weight, bias.float() if kind == "float32 bias" else bias, {"weight_offset": 0.5}
    if kind.endswith(" y"):
        return weight, None, {"out_dtype": getattr(torch, kind.split()[0])}
    return weight, None, {"weight_offset": 1.0} if kind == "offset" else {}


def rows_to_check(rows):
    return [*range(0, rows, max(rows // 6, 1)), rows - 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agree_with_the_definition(shape, dtype, kind):
    rows, n = shape
    weight, bias, others = options(kind, n, dtype)
    x, residual = (make((rows, 2, n + n % 2), dtype, "cuda", seed)[:, :, :n] for seed in (0, 3))
    if kind != "two strides":
        x, residual = (t[:, 0].contiguous() for t in (x, residual))
    some = rows_to_check(rows)
    for scale in (1, 2.0**70, 2.0**-70) if dtype != torch.float16 else (1, 2.0**-12):
        scaled = x * scale
        y, rstd = cuops.rms_norm(scaled, weight, bias, 0.0, return_rstd=True, **others)
        h = scaled[some]
        assert_normalised(y[some], rstd[some], h, weight, bias, others)
    y, h, rstd = cuops.rms_norm(x, weight, bias, 0.0, residual=residual, return_rstd=True, **others)
    assert torch.equal(h, x + residual)
    assert_normalised(y[some], rstd[some], h[some], weight, bias, others)


def assert_normalised(y, rstd, h, weight, bias, others):
    offset = others.get("weight_offset", 0.0)
    want, _, want_rstd = definition(h, weight, bias, 0.0, weight_offset=offset)
    terms = 0.0 if bias is None else np.abs(definition(h, weight, None, 0.0, weight_offset=offset)[0]) + 1
    assert y.dtype == others.get("out_dtype", h.dtype)
    assert_close(y, want, h.shape[-1], terms=terms)
    assert_close(rstd, want_rstd, h.shape[-1])


@pytest.mark.parametrize("kind", ["frozen", "no weight", "float32 weight", "offset"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (60_000, 72), (20_000, 264), (8_200, 520), (7_000, 640)], ids=str)
def test_the_gradient_of_x_alone_agrees_with_the_definition(shape, dtype, kind):
    rows, n = shape
    weight, _, others = options(kind, n, dtype)
    offset, some = others.get("weight_offset", 0.0), rows_to_check(rows)
    dy, dh, residual = (make(shape, dtype, "cuda", seed) for seed in (4, 5, 6))
    for scale in (1, 2.0**40, 2.0**-40) if dtype != torch.float16 else (1,):
        x = (make(shape, dtype, "cuda") * scale).requires_grad_()
        (dx,) = torch.autograd.grad(cuops.rms_norm(x, weight, eps=0.0, **others), x, dy)
        assert_gradient_close(dx[some], x[some], dy[some], None, weight, offset, scale)
    y, h = cuops.rms_norm(x, weight, eps=0.0, residual=residual * scale, **others)
    (dx,) = torch.autograd.grad((y, h), x, (dy, dh))
    assert_gradient_close(dx[some], h[some], dy[some], dh[some], weight, offset, scale)


def assert_gradient_close(dx, h, dy, dh, weight, offset, scale):
    h = (h.detach().double() / scale).requires_grad_()
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True)) * (1 if weight is None else weight.double() + offset)
    (want,) = torch.autograd.grad(y, h, dy.double())
    want = want / scale + (0 if dh is None else dh.double())
    # One rounding to the result, and what float32 loses in sums over a row of terms of size 10.
    result, sums = torch.finfo(dx.dtype), torch.finfo(torch.float64 if dx.dtype == torch.float64 else torch.float32)
    largest = (dy.double().abs().amax() / scale + (0 if dh is None else 1)) * 10
    allowed = (
        result.eps / 2 * want.abs()
        + sums.eps * (16 + h.shape[-1] ** 0.5 / 8) * largest
        + result.smallest_normal * result.eps
    )
    assert ((dx.double() - want).abs() <= allowed).all()
