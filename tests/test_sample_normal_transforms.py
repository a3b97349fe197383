"""Derivatives of samples under PyTorch's transforms, of one kind or of several at once, in eager and in compiled code."""

from __future__ import annotations

import cuops
import pytest
import torch
from torch.autograd import forward_ad

BOUNDS = [{}, {"low": -1.0}]
# Its tracer takes the integers of a draw for NumPy's, ends there, and cannot go on within a transform.
NOT_BY_2_7 = pytest.mark.xfail(
    torch.__version__.startswith("2.7."), reason="PyTorch 2.7", raises=RuntimeError, strict=True
)


def samples(mu, bounds):
    return cuops.sample_normal(mu, 1.0, 3, seed=3, **bounds)


@pytest.mark.parametrize("bounds", BOUNDS, ids=["unbounded", "bounded"])
@pytest.mark.parametrize("backend", [pytest.param("eager", marks=NOT_BY_2_7), "inductor"])
def test_compiled_transforms_are_those_of_eager_calls(bounds, backend, device):
    torch.compiler.reset()
    mu = torch.tensor([0.1, -2.0, 3.0], device=device)
    transforms = (
        lambda m: torch.func.jvp(lambda m: samples(m, bounds), (m,), (torch.ones_like(m),))[1],
        lambda m: torch.func.grad(lambda m: samples(m, bounds).square().sum())(m),
        lambda m: torch.vmap(lambda m: samples(m, bounds))(m[None]),
    )
    for transform in transforms:
        want = transform(mu)
        assert want.abs().sum() > 0
        torch.testing.assert_close(torch.compile(transform, backend=backend)(mu), want)


def squares(mu):
    return samples(mu, {"low": -1.0}).square().sum()


def of_a_map(mu):
    y = torch.vmap(lambda m: samples(m, {"low": -1.0}))(mu[None])
    return torch.autograd.grad(y.square().sum(), mu, create_graph=True)[0]


def of_a_gradient(mu):
    return torch.func.grad(squares)(mu)


def of_a_tangent(mu):
    return torch.func.jvp(squares, (mu,), (torch.ones_like(mu),))[1]


def of_a_dual_tensor(mu):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(squares(forward_ad.make_dual(mu, torch.ones_like(mu)))).tangent


@pytest.mark.parametrize("first", [of_a_map, of_a_gradient, of_a_tangent, of_a_dual_tensor])
def test_a_second_derivative_of_truncated_samples_is_refused_however_it_is_asked_for(first, device):
    mu = torch.tensor([0.1, -2.0, 3.0], dtype=torch.float64, device=device, requires_grad=True)
    found, want = first(mu), torch.autograd.grad(squares(mu), mu)[0]
    torch.testing.assert_close(found, want if found.ndim else want.sum())
    with pytest.raises(NotImplementedError, match="second derivatives of truncated samples"):
        torch.autograd.grad(found.sum(), mu)


@pytest.mark.parametrize("transform", [lambda f, *a: f(*a), lambda f, *a: torch.compile(f, backend="aot_eager")(*a)])
def test_a_bound_that_wants_a_gradient_gives_the_same_samples(transform, device):
    torch.compiler.reset()
    for dtype, mu, low, high in (
        (torch.float32, 0.0, [-torch.inf, -1.0], [1.0, torch.inf]),
        (torch.float16, 65000.0, [-65504.0, 0.0], [1e30, 1e30]),
    ):
        bounds = [torch.tensor(bound, dtype=torch.float64, device=device) for bound in (low, high)]
        x, y = (
            transform(
                lambda low, high, mu=mu, dtype=dtype: cuops.sample_normal(
                    torch.full((2,), mu, dtype=dtype, device=device), 30000.0, 6, low=low, high=high, seed=1
                ),
                *(bound.clone().requires_grad_(wants) for bound in bounds),
            )
            for wants in (False, True)
        )
        assert torch.equal(x, y)
        assert x.isfinite().all()
