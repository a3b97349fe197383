"""RMSNorm of numbers whose squares leave the range, of zeros, infinities and NaN; its error beside that of PyTorch."""

from __future__ import annotations

import cuops
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rms_norm_samples import assert_close, definition
from samples import DTYPES, make

gpu = pytest.mark.gpu

EXTREMES = {
    "squares overflow": (torch.float32, [1e20, -3e20, 2e20]),
    "the largest float32": (torch.float32, [3.4e38, -3.4e38, 1e38]),
    "squares drown": (torch.float32, [1e-25, -2e-25, 3e-25]),
    "subnormal": (torch.float32, [1e-40, -2e-40, 3e-40]),
    "both": (torch.float32, [1e25, -1e-25, 2e25]),
    "float64 squares overflow": (torch.float64, [1e200, -2e200, 3e200]),
    "float64 squares drown": (torch.float64, [1e-200, -2e-200, 3e-200]),
    "the largest bfloat16": (torch.bfloat16, [3.3e38, -3.3e38, 1e38]),
    "the largest float16": (torch.float16, [65504.0, -65504.0, 1.0]),
    "the smallest float16": (torch.float16, [6e-8, -6e-8, 1.2e-7]),
}


@pytest.mark.parametrize("n", [3, 24, 4098, 40000])
@pytest.mark.parametrize("case", EXTREMES)
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_any_finite_row_is_right(case, n, kind, device):
    dtype, values = EXTREMES[case]
    x = torch.tensor(values, dtype=torch.float64).repeat(n // 3 + 1)[:n].to(dtype).expand(3, n).contiguous().to(device)
    want = definition(x, eps=0.0)[0]
    if kind == "torch":
        assert_close(cuops.rms_norm(x, eps=0.0), want, n)
        assert_close(cuops.rms_norm_(x.clone(), eps=0.0), want, n)
    elif dtype != torch.bfloat16:
        assert_close(torch.from_numpy(cuops.rms_norm(x.cpu().numpy(), eps=0.0)), want, n)


@pytest.mark.parametrize("eps", [1e300, 1e39, 1e-42, 1e-50, 1e-310])
@pytest.mark.parametrize("size", [1e-26, 1.0, 1e20])
@pytest.mark.parametrize("n", [24, 4098, 40000, 300000])
def test_an_eps_that_float32_does_not_have_is_right(n, size, eps, device):
    x = (make((3, n), torch.float64) * size).float().to(device).requires_grad_()
    want, _, want_rstd = definition(x, eps=eps)
    y, rstd = cuops.rms_norm(x, eps=eps, return_rstd=True)
    assert_close(y, want, n)
    assert_close(rstd, np.minimum(want_rstd, np.finfo(np.float32).max), n)
    dy = make((3, n), device=device)
    (dx,) = torch.autograd.grad(y, x, dy)
    wide, g = (t.detach().cpu().double().numpy().astype(np.longdouble) for t in (x, dy))
    normed, rstd = wide * want_rstd[:, None], want_rstd[:, None]
    slope = np.mean(normed * g, -1, keepdims=True)
    assert_close(dx, rstd * (g - normed * slope), n, np.abs(rstd * g) + np.abs(rstd * normed * slope))


def gradient_of_x(x, g):
    h, g = x.detach().double(), g.detach().double()
    rstd = h.square().mean(-1, keepdim=True).rsqrt()
    return rstd * (g - h * rstd * (g * h * rstd).mean(-1, keepdim=True))


def test_numpy_is_silent_where_it_is_told_to_raise(device):
    x, parameter = np.array([[1e-7, 1, 2]], np.float16), np.array([1e-300, 1e300, 2])
    wide = parameter[None]
    with np.errstate(all="raise"):
        assert cuops.rms_norm(x)[0, 0] > 0
        assert cuops.rms_norm(x, parameter, parameter).shape == x.shape
        assert np.isfinite(cuops.rms_norm(wide, out_dtype=np.float16)).all()
        assert np.isfinite(cuops.rms_norm(wide, residual=wide)[0]).all()
        assert cuops.rms_norm_(np.array([[np.nan, np.inf, 2.0]])).shape == (1, 3)


def test_the_largest_numbers_are_right_where_denormals_are_zeros():
    x = torch.tensor([[1.5e308, 1e308]], dtype=torch.float64)
    want = (x / 1e308) / (x / 1e308).square().mean().sqrt()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor keeps denormals")
    try:
        found = [cuops.rms_norm(x), torch.from_numpy(cuops.rms_norm(x.numpy()))]
    finally:
        torch.set_flush_denormal(False)
    for y in found:
        torch.testing.assert_close(y, want, rtol=1e-14, atol=0)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vectors", [700, 1300, 5000, 16384])
@pytest.mark.parametrize("rows", [9, 300])
def test_rows_of_a_sum_that_need_care(rows, vectors, dtype):
    n = vectors * 16 // dtype.itemsize
    x, residual = (make((rows, n), dtype, "cuda", seed) for seed in (0, 1))
    weight = make((n,), dtype, "cuda", 2)
    for t in (x, residual):
        t[::3] *= 1e25
        t[1::3] *= 1e-25
    for _ in range(5):
        y, h, rstd = cuops.rms_norm(x, weight, residual=residual, eps=0.0, return_rstd=True)
        assert torch.equal(h, x + residual)
        for some in (slice(0, 3), slice(-3, None)):
            want = definition(h[some], weight, eps=0.0)
            assert_close(y[some], want[0], n)
            assert_close(rstd[some], want[2], n)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [5, 64, 5000])
def test_zeros_give_zeros(n, dtype, device):
    x = torch.zeros(3, n, dtype=dtype, device=device)
    for eps in (0.0, 1e-6):
        assert torch.equal(cuops.rms_norm(x, eps=eps), x)
    if dtype != torch.bfloat16:
        assert not cuops.rms_norm(x.cpu().numpy(), eps=0.0).any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("n", [5, 64, 5000])
def test_nan_and_infinity_propagate_as_in_pytorch(value, n, device):
    x = make((3, n), device=device)
    x[1, 2] = value
    y = cuops.rms_norm(x)
    want = F.rms_norm(x.cpu(), (n,), eps=1e-6)  # on CUDA, PyTorch's answer depends on the size
    torch.testing.assert_close(y.cpu(), want, equal_nan=True)
    torch.testing.assert_close(torch.from_numpy(cuops.rms_norm(x.cpu().numpy())), y.cpu(), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [64, 1000, 8192])
def test_error_is_at_most_that_of_pytorch(n, dtype, device):
    x, weight = make((64, n), dtype, device), make((n,), dtype, device, 1)
    want = definition(x, weight)[0]

    def error(y):
        return float(np.sqrt(np.mean(np.square(y.cpu().double().numpy() - want))))

    assert error(cuops.rms_norm(x, weight)) <= 1.001 * error(F.rms_norm(x, (n,), weight, 1e-6))


@pytest.mark.parametrize("kind", ["common", "offset"])
def test_sums_over_rows_are_as_exact_beside_a_row_that_needs_care(kind, device):
    """Rows of half that share a warp with it: what is small in them keeps its digits."""
    x = torch.full((8, 64), 0.0107, dtype=torch.float16, device=device)
    x[:, 0] = 60000.0
    x[0] = 0.0
    weight = torch.zeros(64, dtype=torch.float16, device=device, requires_grad=True)
    dy = torch.zeros_like(x)
    dy[1] = 1000.0
    y = cuops.rms_norm(x, weight, eps=0.0, weight_offset=1.0 if kind == "offset" else 0.0)
    (dweight,) = torch.autograd.grad(y, weight, dy)
    want = 1000 * x[1].double() / x[1].double().square().mean().sqrt()
    torch.testing.assert_close(dweight.double(), want, rtol=2e-3, atol=0.0)


@pytest.mark.parametrize(("size", "dy_size"), [(1e18, 1e22), (1e16, 1e24)])
@pytest.mark.parametrize(
    ("rows", "n"), [(4, 64), (300, 64), (300, 4096), (64, 8192), (1, 65536), (4, 70000), (300, 70000), (3, 70001)]
)
@pytest.mark.parametrize("wants_weight", [False, True])
def test_the_gradient_of_large_numbers_is_finite_where_it_is_a_number(wants_weight, rows, n, size, dy_size, device):
    x = torch.full((rows, n), size, device=device, requires_grad=True)
    weight = torch.ones(n, device=device, requires_grad=wants_weight)
    dy = torch.zeros_like(x)
    dy[:, 0] = dy_size
    (dx,) = torch.autograd.grad(cuops.rms_norm(x, weight), x, dy)
    want = torch.full((n,), -dy_size / size / n, dtype=torch.float64, device=device)
    want[0] = dy_size / size * (n - 1) / n
    torch.testing.assert_close(dx.double(), want.expand(rows, n), rtol=1e-4, atol=0.0)


SIZES = [(1e-8, 1e24, 1.0), (1e8, 1e-32, 1e6), (1e8, 1e-28, 1.0), (1e8, 1e31, 1e-4)]  # of x, dy, weight
BEYOND_WITHOUT_WEIGHT = [(1e-8, 1e31, 1e-5), (1e-3, 1e36, 1e-4), (0.1, 1e38, 1e-4)]


@pytest.mark.parametrize(
    ("rows", "n"),
    [(4, 64), (4, 4096)] + [pytest.param(*shape, marks=gpu) for shape in [(300, 64), (1000, 2048), (2000, 4096)]],
)
@pytest.mark.parametrize(
    ("kind", "size", "dy_size", "factor"),
    [(kind, *sizes) for kind in ("trained", "trained, offset") for sizes in SIZES]
    + [
        (kind, *sizes)
        for kind in ("no weight", "frozen", "frozen, offset", "bias")
        for sizes in SIZES + BEYOND_WITHOUT_WEIGHT
    ],
)
def test_the_gradient_of_x_leaves_the_range_only_where_it_is_beyond(kind, rows, n, size, dy_size, factor, device):
    x, dy = (make((rows, n), torch.float64, seed=seed).sign() for seed in (1, 2))
    x, dy = (x * size).float().to(device).requires_grad_(), (dy * dy_size).float().to(device)
    weight, offset = torch.full((n,), factor, device=device), 0.0
    bias = torch.zeros_like(weight).requires_grad_() if kind == "bias" else None
    if "offset" in kind:
        weight, offset = torch.zeros_like(weight), factor
    elif kind == "no weight":
        dy, weight, factor = dy * factor, None, 1.0
    leaves = [x, *([weight.requires_grad_()] if "trained" in kind else []), *([bias] if kind == "bias" else [])]
    y = cuops.rms_norm(x, weight, bias, eps=0.0, weight_offset=offset)
    dx = torch.autograd.grad(y, leaves, dy)[0]
    want = gradient_of_x(x, dy.double() * factor)
    torch.testing.assert_close(dx.double(), want, rtol=0.0, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("dy_size", [1e27, 1e30])
@pytest.mark.parametrize(("rows", "n"), [(4, 64), (4, 4096), (1, 65536), (3, 70001)])
@pytest.mark.parametrize("wants_weight", [False, True])
def test_the_gradient_is_finite_where_the_sum_of_a_row_alone_leaves_the_range(wants_weight, rows, n, dy_size, device):
    x = torch.full((rows, n), 1e8, device=device, requires_grad=True)
    dy = torch.full_like(x, dy_size)
    dy[:, ::2] /= 2  # the sum of x dy is beyond from 4,500 columns on, or from 5
    weight = torch.ones(n, device=device, requires_grad=wants_weight)
    (dx,) = torch.autograd.grad(cuops.rms_norm(x, weight), x, dy)
    dy = dy.double()
    want = (dy - dy.mean(-1, keepdim=True)) / 1e8
    torch.testing.assert_close(dx.double(), want, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize(("rows", "n"), [(4, 64), (1, 65536), (1, 262144), (3, 70001)])
def test_a_few_small_numbers_beside_large_gradients_are_not_made_larger(rows, n, device):
    """Where a part of a row has the whole sum of x dy, which its row's x is large enough for."""
    few = n // 128
    x = torch.ones((rows, n), device=device)
    x[:, :few] = 1e-3
    dy = torch.zeros_like(x)
    dy[:, :few] = 2e36
    (dx,) = torch.autograd.grad(cuops.rms_norm(x.requires_grad_(), torch.ones(n, device=device), eps=0.0), x, dy)
    torch.testing.assert_close(dx.double(), gradient_of_x(x, dy), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["no weight", "frozen", "trained", "bias"])
@pytest.mark.parametrize(("rows", "n"), [(4, 16), (4, 64), (300, 64), (300, 120), (301, 63), (40, 129)])
def test_a_row_keeps_its_gradient_beside_one_that_needs_care(rows, n, kind, dtype, device):
    """Were both scaled, to [1, 2), the second's sum of x dy would leave the range."""
    x = torch.full((rows, n), 0.45, dtype=dtype, device=device)
    dy = torch.full_like(x, 2.5e38 / n)
    dy[:, ::2] *= 3
    x[::2], dy[::2] = 1e20, dy[::2] * 1e-6
    x.requires_grad_()
    weight = None if kind == "no weight" else torch.ones_like(x[0], requires_grad=kind == "trained")
    bias = torch.zeros_like(weight, requires_grad=True) if kind == "bias" else None
    (dx,) = torch.autograd.grad(cuops.rms_norm(x, weight, bias, eps=0.0), x, dy)
    rtol = 1e-4 if dtype == torch.float32 else 2.0**-8
    torch.testing.assert_close(dx.double(), gradient_of_x(x, dy), rtol=rtol, atol=0.0)


@pytest.mark.parametrize(
    ("dtype", "size", "dy_size"),
    [(torch.float32, size, dy_size) for size, dy_size in [(1e-8, 1e-37), (1e-8, 1e-38), (1e-5, 1e-36), (0.01, 1e-37)]]
    + [(torch.float64, 1e-100, 1e-250), (torch.float64, 1e-20, 1e-300), (torch.bfloat16, 1e-8, 1e-37)],
)
@pytest.mark.parametrize("kind", ["no weight", "frozen", "trained", "bias"])
@pytest.mark.parametrize(("rows", "n"), [(1, 64), (4, 64), (300, 64), (4, 4096), (3, 8190), (1, 65536), (3, 70001)])
def test_products_that_drown_count_in_the_gradient(rows, n, kind, dtype, size, dy_size, device):
    x, dy = (make((rows, n), torch.float64, seed=seed).sign() for seed in (1, 2))
    x, dy = (x * size).to(device, dtype).requires_grad_(), (dy * dy_size).to(device, dtype)
    dy[:, : n // 4] = x.detach().sign()[:, : n // 4] * dy_size  # so that their sum is not small
    dy[:, n // 2 :] = 0
    weight = None if kind == "no weight" else torch.ones_like(x[0], requires_grad=kind == "trained")
    bias = torch.zeros_like(weight, requires_grad=True) if kind == "bias" else None
    (dx,) = torch.autograd.grad(cuops.rms_norm(x, weight, bias, eps=0.0), x, dy)
    want = gradient_of_x(
        x.detach().double() * 2.0**60, dy.double() * 2.0**60
    )  # of the same size, within the range of sums
    rtol = 2.0**-8 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(dx.double(), want, rtol=0.0, atol=rtol * float(want.abs().max()))


@pytest.mark.parametrize(("size", "factor"), [(1e18, 1e-24), (1e18, 1e-27), (1e18, 1e-29), (1e-8, 1e31)])
@pytest.mark.parametrize("n", [256, 4096, 40000, 300000])
def test_a_weight_near_either_end_of_the_range(n, size, factor, device):
    x = torch.full((4, n), size, device=device)
    y = cuops.rms_norm(x, torch.full((n,), factor, device=device), eps=0.0)
    torch.testing.assert_close(y, torch.full_like(y, factor), rtol=1e-5, atol=0.0)
