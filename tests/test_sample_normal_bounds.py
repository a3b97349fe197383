"""Samples between bounds, at the edges of what a bound is."""

from __future__ import annotations

import cuops
import numpy as np
import pytest
import torch
from cuops._sample_normal.truncation import truncated


def test_a_bound_of_another_dtype_gets_its_gradient(device):
    low = torch.full((3,), -0.1, dtype=torch.float64, device=device, requires_grad=True)
    cuops.sample_normal(torch.zeros(3, device=device), 1.0, 20, low=low, seed=1).sum().backward()
    assert (low.grad > 0).all()


def test_without_a_sigma_the_gradient_on_a_bound_is_the_bounds(device):
    mu, low = (torch.zeros(1, device=device, requires_grad=True) for _ in range(2))
    cuops.sample_normal(mu, 0.0, 1, low=low, seed=1).sum().backward()
    assert (mu.grad.item(), low.grad.item()) == (0.0, 1.0)


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor], ids=["numpy", "torch"])
@pytest.mark.parametrize(("mu", "expected"), [(0.0, 1.0), (1.0, 1.0), (1.5, 1.5), (3.0, 2.0)])
def test_without_a_sigma_samples_are_mu_or_the_bound_that_it_is_beyond(kind, mu, expected):
    x = cuops.sample_normal(kind([mu]), 0.0, 2, low=1.0, high=2.0, seed=1)
    assert (x == expected).all()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_bound_however_far_out_is_what_samples_come_close_to(dtype, device):
    far = 10.0 ** np.linspace(2, 308 if dtype == "float64" else 38, 3000)
    mu, low = torch.zeros(3000, dtype=getattr(torch, dtype), device=device), torch.tensor(far, device=device)
    for sigma in (1.0, 1e-30, 5e-324):
        for bounds, sign in (({"low": low}, 1), ({"high": -low}, -1), ({"low": low, "high": 1.01 * low}, 1)):
            x = sign * cuops.sample_normal(mu, sigma, 4, seed=1, **bounds).double()
            assert (x >= low).all()
            # Beyond a bound a, samples are about sigma^2 / a away from it, and ten times that now and then.
            assert (x - low <= 30 * sigma**2 / low + low * torch.finfo(mu.dtype).eps).all()


@pytest.mark.parametrize(("shape", "n"), [((4,), 3), ((1,), 3), ((2, 3), 1), ((2, 3), 5)], ids=str)
@pytest.mark.parametrize("sample_dim", [0, -1])
def test_samples_may_be_changed_in_place(shape, n, sample_dim, device):
    mu = torch.zeros(shape, device=device, requires_grad=True)
    x = cuops.sample_normal(mu, 1.0, n, sample_dim=sample_dim, seed=1, low=-2.0)
    want = torch.autograd.grad(x.clamp(-0.5, 0.5).sum(), mu)[0]
    x = cuops.sample_normal(mu, 1.0, n, sample_dim=sample_dim, seed=1, low=-2.0).clamp_(-0.5, 0.5)
    assert torch.equal(torch.autograd.grad(x.sum(), mu)[0], want)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("far", "width"), [(50.0, None), (1e4, None), (1e8, None), (1e12, None), (1e3, 1e-7), (1e6, 1e-10), (1e7, 1e-3)]
)
def test_gradients_on_a_bound_however_far_out_are_those_of_an_exponential_distribution(far, width, dtype, sign, device):
    """Beyond a bound a, which is in standard deviations, samples are t / a away from it, with t of mean 1."""
    count = 40_000
    mu, sigma = (torch.full((1,), value, dtype=dtype, device=device, requires_grad=True) for value in (0.0, 1.0))
    near, beyond = (
        torch.full((1,), sign * value, dtype=torch.float64, device=device, requires_grad=True)
        for value in (far, far + (width or 0.0))
    )
    bounds = {"low" if sign > 0 else "high": near} | ({"high" if sign > 0 else "low": beyond} if width else {})
    x = cuops.sample_normal(mu, sigma, count, seed=1, dtype=torch.float64, **bounds)
    found = torch.autograd.grad(x.sum() / count, (mu, sigma, near, *([beyond] if width else [])))
    by_mu, by_sigma, *by_bounds = (gradient.item() for gradient in found)
    # So by sigma it is 2 t / a, and by mu t / a^2; between bounds that a t of 1 does not tell apart, w^2 / 12 and a w^2 / 6.
    near_each_other = width is not None and far * width < 1e-3
    want = (width**2 / 12, far * width**2 / 6) if near_each_other else (1 / far**2, 2 / far)
    noise = 6 / count**0.5 + 4 / far**2
    assert by_mu == pytest.approx(want[0], rel=noise, abs=1e-16)
    assert sign * by_sigma == pytest.approx(want[1], rel=noise, abs=1e-15)
    assert sum(by_bounds) == pytest.approx(1 - by_mu, abs=1e-7 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("width", [None, 1.0])
@pytest.mark.parametrize("sigma", [1e-149, 1e-152, 1e-160, 5e-324])
def test_where_samples_are_the_bound_the_gradient_is_the_bounds(sigma, width, sign, device):
    mu, sigma, near, beyond = (
        torch.full((2,), value, dtype=torch.float64, device=device, requires_grad=True)
        for value in (0.0, sigma, sign * 1.0, sign * (1.0 + (width or 0.0)))
    )
    bounds = {"low" if sign > 0 else "high": near} | ({"high" if sign > 0 else "low": beyond} if width else {})
    x = cuops.sample_normal(mu, sigma, 50, seed=1, **bounds)
    assert (x == sign).all()
    given = (near, mu, sigma, *([beyond] if width else []))
    by_near, *others = torch.autograd.grad(x.sum() / 50, given)
    torch.testing.assert_close(by_near, torch.ones_like(near))
    assert all((gradient.abs() < 1e-100).all() for gradient in others)


def test_a_sigma_without_end_is_a_number_between_bounds_and_refused_beside_one(array):
    mu, sigma = array([0.0, 1.0, 2.0]), array([1.0, np.inf, 1.0])
    for one_bound in (
        {"low": -1.0},
        {"high": array([3.0])},
        {"low": array([-1.0, -np.inf, -1.0]), "high": 3.0},
        {"low": -np.inf},
    ):
        with pytest.raises(ValueError, match="^sigma: expected finite numbers"):
            cuops.sample_normal(mu, sigma, 4, seed=1, validate=True, **one_bound)
    elsewhere = {"low": array([-np.inf, -1.0, -1.0]), "high": array([3.0, 3.0, np.inf])}
    for bounds in ({"low": -1.0, "high": 3.0}, elsewhere):
        x = cuops.sample_normal(mu, sigma, 4000, seed=1, validate=True, **bounds)[:, 1]
        assert ((x > -1) & (x < 3)).all()
        assert abs(float(x.mean()) - 1) < 5 * (4 / 12**0.5) / 4000**0.5  # of a uniform distribution
    assert (abs(cuops.sample_normal(mu, sigma, 4, seed=1, validate=True)[:, 1]) == np.inf).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "bounds", [{"low": -1.0}, {"low": 0.5}, {"low": 2.5}, {"high": 3.0}, {"high": -1.0}, {"low": -np.inf}], ids=str
)
def test_on_a_gpu_a_sigma_without_end_beside_one_bound_gives_nan(bounds, dtype):
    mu = torch.tensor([0.0, 1.0, 2.0], dtype=dtype, device="cuda")
    sigma = torch.tensor([1.0, np.inf, 1.0], dtype=dtype, device="cuda")
    x = cuops.sample_normal(mu, sigma, 40, seed=1, **bounds)
    assert x[:, 1].isnan().all()
    assert x[:, [0, 2]].isfinite().all()


@pytest.mark.parametrize("low", [-1.0, 0.5, 2.5, -np.inf])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_formula_of_a_sigma_without_end_beside_one_bound_gives_nan(low, sign):
    given = torch.tensor([1.0, np.inf, *((low, np.inf) if sign > 0 else (-np.inf, -low))], dtype=torch.float64)
    assert truncated(torch, list(given), torch.linspace(0.01, 0.99, 9, dtype=torch.float64)).isnan().all()


def test_gradients_beyond_a_bound_that_is_far_out(device):
    def draw(mu):
        return cuops.sample_normal(mu, 1.0, 50, low=0.0, seed=3)  # of which all digits are there, as it is near 0

    mu = torch.tensor([-200.0, -120.0], dtype=torch.float64, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(draw(mu).sum(), mu)
    with torch.no_grad():
        torch.testing.assert_close(grad, (draw(mu + 0.01) - draw(mu - 0.01)).sum(0) / 0.02, rtol=1e-6, atol=0)
