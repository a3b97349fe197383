"""Gradients of RMSNorm for rows of any width, start and size of numbers, which different kernels compute."""

from __future__ import annotations

from itertools import product

import cuops
import pytest
import torch
from rms_norm_samples import assert_gradients_close
from samples import DTYPES

pytestmark = pytest.mark.gpu


def gradients(x, weight, bias, dy, dh, residual, weight_offset):
    """The gradients by cuops, and those of the formula in float64 at the same h."""
    result = cuops.rms_norm(x, weight, bias, 1e-5, residual=residual, weight_offset=weight_offset)
    outputs, seeds = (result, (dy, dh)) if residual is not None else (result, dy)
    inputs = [t for t in (x, weight, bias) if t is not None]
    got = torch.autograd.grad(outputs, inputs, seeds)

    h = (x if residual is None else result[1]).detach().double().requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (weight, bias) if t is not None]
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)
    y = y if weight is None else y * (wide[0] + weight_offset)
    y = y if bias is None else y + wide[-1]
    dx, *others = torch.autograd.grad(y, [h, *wide], dy.double())
    return got, [dx if residual is None else dx + dh.double(), *others]


KINDS = ["plain", "residual", "bias", "offset", "no weight", "wide weight", "off a vector"]  # and "apart", of some
ALL_AT_ONCE = [
    *[(2, 16384), (9, 4104), (16, 6144), (40, 8192), (65, 16384), (100, 6152), (256, 4096), (300, 2048), (512, 3584)],
    *[(640, 2048), (1024, 1024)],
    *[(33, 16383), (64, 4097), (90, 8190), (130, 7164), (256, 8191)],  # between vectors
]
FEW_SHORT = [(3, 8), (20, 72), (65, 257), (100, 136), (130, 9), (16, 1023), (33, 1024), (200, 66), (1024, 32)]
GROUPS = {  # of shapes that different kernels compute: kinds, (rows, n), dtypes
    "rows of any width": (
        KINDS,
        [(5 if n > 8192 else 700, n) for n in (3, 65, 512, 4097, 8192, 33333, 65536, 131080, 262144, 262147, 600_000)],
        DTYPES,
    ),
    "few long rows": (
        KINDS,
        [(1, 20000), (1, 262143), (1, 1_048_576), (2, 16384), (3, 70001), (16, 65532), (17, 262143)],
        DTYPES,
    ),
    "rows that start between vectors": (
        ["bias", "residual", "offset", "wide weight"],
        [(128, 40004), (129, 40001), (300, 33), (300, 1025), (40, 4102), (5000, 1023), (2200, 4097), (900, 9001)],
        DTYPES[1:],
    ),
    "many rows": (
        ["residual", "offset", "wide weight"],
        [(9000, 40), (4300, 512), (3000, 1024), (2000, 4096), (2200, 4608), (2200, 9216), (1000, 16384), (300, 65536)],
        DTYPES[1:],
    ),
    "more rows than the cache holds": (["plain"], [(40_000_000 // n, n) for n in (1000, 4096, 8192)], DTYPES[1:]),
    "few rows": (["plain"], [*product((1, 2, 16, 40, 256), (7, 65, 256, 1000, 4097, 7168, 8192, 33333))], DTYPES),
    "rows that are read all at once": (["plain", "residual", "apart"], ALL_AT_ONCE, DTYPES[1:]),
    "rows that one block or cluster has": (["plain", "residual", "apart"], FEW_SHORT, DTYPES[1:]),
    "few short rows": (["wide weight", "offset"], [(1, 520), (1, 2600), *FEW_SHORT], DTYPES[1:]),
}


@pytest.mark.parametrize(
    ("kind", "rows", "n", "dtype"),
    [
        pytest.param(kind, rows, n, dtype, id=f"{group}-{kind}-{rows}-{n}-{dtype}")
        for group, (kinds, shapes, dtypes) in GROUPS.items()
        for kind, (rows, n), dtype in product(kinds, shapes, dtypes)
    ],
)
def test_gradients_agree_with_the_formula(kind, rows, n, dtype):
    torch.manual_seed(n)
    base = torch.randn(rows, n + (8 if kind == "apart" else 3), device="cuda").to(dtype)
    x = {"off a vector": base[:, 3:], "apart": base[:, :n]}.get(kind, base[:, :n].contiguous())
    x = x.detach().requires_grad_()
    dy, dh, residual = (torch.randn(rows, n, device="cuda").to(dtype) for _ in range(3))
    weight_dtype = torch.float32 if kind == "wide weight" else dtype
    weight = None if kind == "no weight" else torch.randn(n, device="cuda").to(weight_dtype).requires_grad_()
    bias = torch.randn(n, device="cuda").to(dtype).requires_grad_() if kind == "bias" else None
    offset = 1.0 if kind in ("bias", "offset") else 0.0
    arguments = x, weight, bias, dy, dh, residual if kind in ("residual", "offset") else None, offset
    got, want = gradients(*arguments)
    assert_gradients_close(got, want, n, rows)
    assert all(torch.equal(a, b) for a, b in zip(got, gradients(*arguments)[0], strict=True))


SIZES = {
    "all": [1e-20, 0.0, 1.0, 1e20],
    "one large": [1.0] * 15 + [1e20],
    "one small": [0.0] * 15 + [1e-20],
    "one ordinary": [1e-22] * 15 + [1.0],
    "the largest": [1e15, 1e-30, 1e30],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("eps", [0.0, 1e-5])
@pytest.mark.parametrize(
    ("rows", "n"), [*product([1, 3], [65536, 262143, 1_048_576]), (12, 8192), (48, 8192), (96, 8191)]
)
@pytest.mark.parametrize("sizes", SIZES)
def test_parts_of_a_row_may_differ_in_size(sizes, rows, n, eps, dtype):
    generator = torch.Generator("cuda").manual_seed(n)
    piece = 2048  # of neighbours, less than what a block reads at once
    pick = torch.randint(len(SIZES[sizes]), (rows, n // piece + 1), generator=generator, device="cuda")
    pick[:, 0] = len(SIZES[sizes]) - 1  # no row is zeros alone
    size = torch.tensor(SIZES[sizes], dtype=torch.float64, device="cuda")[pick].repeat_interleave(piece, 1)[:, :n]
    power = 10 if dtype == torch.float64 else 1  # of float64 squares leave the range much later
    x, dy = (torch.randn(rows, n, generator=generator, device="cuda").double() for _ in range(2))
    x, dy = (x * size**power).to(dtype).requires_grad_(), dy.to(dtype)
    weight = torch.randn(n, generator=generator, device="cuda").to(dtype).requires_grad_()

    def run():
        y = cuops.rms_norm(x, weight, None, eps)
        return y.detach(), *torch.autograd.grad(y, (x, weight), dy)

    y, dx, dweight = run()
    assert all(torch.equal(a, b) for a, b in zip((y, dx, dweight), run(), strict=True))
    # The formula, with each row divided by its largest element, or by the root of eps.
    largest = x.detach().double().abs().amax(-1, keepdim=True).clamp(min=eps**0.5)
    h, grad = x.detach().double() / largest, dy.double() * weight.detach().double()
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps / largest / largest)
    xhat = h * rstd
    want = rstd * (grad - xhat * (grad * xhat).mean(-1, keepdim=True)) / largest
    want_weight = (dy.double() * xhat).sum(0)
    tolerance = torch.finfo(dtype).eps / 2 + (1e-13 if dtype == torch.float64 else 2e-5)
    for got, wanted in ((y, xhat * weight.detach().double()), (dx, want), (dweight, want_weight)):
        error = (got.double() - wanted).abs() / (wanted.abs() + wanted.abs().mean(-1, keepdim=True))
        assert error.max() <= tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "n"), [*product([1, 3], [65536, 262143]), (12, 8192), (48, 8191)])
@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_zeros_have_gradients_without_nan(eps, n, rows, dtype):
    x = torch.zeros(rows, n, device="cuda", dtype=dtype)
    x[rows // 2, n // 2] = 1  # all parts of this row are zeros but one
    x.requires_grad_()
    weight = torch.ones(n, device="cuda", dtype=dtype, requires_grad=True)
    y = cuops.rms_norm(x, weight, None, eps)
    assert y.count_nonzero() == 1
    dx, dweight = torch.autograd.grad(y, (x, weight), torch.ones_like(x))
    assert dx.isfinite().all()
    assert dweight.isfinite().all()
    assert dweight.count_nonzero() == 1
    if eps == 0:
        assert not dx[torch.arange(rows, device="cuda") != rows // 2].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "n"), [*product([1, 3], [65536, 262143]), (12, 8192), (48, 8192), (70, 8191)])
def test_nan_and_infinity_stay_in_their_row(rows, n, dtype, value):
    torch.manual_seed(n)
    x, dy = (torch.randn(rows, n, device="cuda").to(dtype) for _ in range(2))
    x[:, n // 2 :] *= 1e37  # other parts have a scale
    weight = torch.randn(n, device="cuda").to(dtype).requires_grad_()

    def run(x):
        y = cuops.rms_norm(x.requires_grad_(), weight, None, 1e-5)
        return y.detach(), *torch.autograd.grad(y, (x, weight), dy)

    wanted = run(x.clone())
    own = rows // 2
    x[own, 7] = value
    y, dx, dweight = run(x)
    for got, want in zip((y, dx), wanted, strict=False):
        assert torch.equal(got[:own], want[:own])
        assert torch.equal(got[own + 1 :], want[own + 1 :])
    assert dx[own].isnan().all()
    assert y[own].isnan().sum() == (n if value != value else 1)
    assert dweight.isnan().sum() == (n if value != value else 1)


@pytest.mark.parametrize("n", [60, 65, 1024, 4097, 33336, 600_000])
@pytest.mark.parametrize("scale", [1e22, 1e-12])
@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=str,
)
def test_are_right_where_squares_leave_the_range(dtype, weight_dtype, scale, n):
    torch.manual_seed(n)
    x = (torch.randn(40, n, device="cuda", dtype=torch.float64) * scale).to(dtype)
    x[::3] /= scale  # ordinary rows among them
    x.requires_grad_()
    weight = torch.randn(n, device="cuda").to(weight_dtype).requires_grad_()
    dy = torch.randn(40, n, device="cuda").to(dtype)
    got, want = gradients(x, weight, None, dy, None, None, 0.0)
    rows = want[0].abs().mean(-1, keepdim=True)
    error = (got[0].double() - want[0]).abs() / (want[0].abs() + rows)
    assert error.max() <= torch.finfo(dtype).eps / 2 + 2e-5
    assert_gradients_close(got[1:], want[1:], n, 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "n", [7, 64, 257, 1000, 1023, 1024, 2049, 4096, 4097, 7168, 8192, 16383, 33333, 65536, 131071, 131072]
)
def test_rows_of_all_sizes_lie_side_by_side(n, dtype):
    torch.manual_seed(n)
    rows = 150 if n > 8192 else 3000  # more than there are blocks
    scale = torch.tensor([1.0, 1e22, 1e-12, 1.0, 1e-25], device="cuda").repeat(rows // 5)
    x = (torch.randn(rows, n, device="cuda") * scale[:, None]).to(dtype).requires_grad_()
    weight = torch.randn(n, device="cuda").to(dtype).requires_grad_()
    dy = torch.randn(rows, n, device="cuda").to(dtype)
    (dx, dweight), (want_dx, want_dweight) = gradients(x, weight, None, dy, None, None, 0.0)
    h = x.detach().double()
    want_y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5) * weight.detach().double()
    for got, want in ((cuops.rms_norm(x, weight, None, 1e-5), want_y), (dx, want_dx), (dweight, want_dweight)):
        error = (got.detach().double() - want).norm(dim=-1) / want.norm(dim=-1)
        assert error.max() <= torch.finfo(dtype).eps * (1 + 16 * (dtype == torch.float32))
