"""Derivatives of samples under PyTorch's transforms, of one kind or of several at once, in eager and in compiled code."""

from __future__ import annotations

import cuops
import pytest
import torch
from torch.autograd import forward_ad

BOUNDS = [{}, {"low": -1.0}]


def samples(mu, bounds):
    return cuops.sample_normal(mu, 1.0, 3, seed=3, **bounds)


@pytest.mark.parametrize("bounds", BOUNDS, ids=["unbounded", "bounded"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
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


@pytest.mark.parametrize("options", [*BOUNDS, {"shared_noise": True}, {"antithetic": True}], ids=str)
def test_transforms_leave_the_noise_of_any_number_of_seeds_to_one_operator(options, device):
    torch.compiler.reset()
    found = []

    def backend(module, _):
        found.append([str(node.target) for node in module.graph.nodes])
        return module

    @torch.func.grad
    def slopes(sigma, seed):
        x = cuops.sample_normal(torch.arange(3.0, device=device), sigma, 4, seed=seed, **options)
        return (x * torch.arange(4.0, device=device)[:, None]).sum()

    sigma = torch.tensor([0.1, 2.0, 3.0], device=device)
    over_seeds = torch.vmap(slopes, (None, 0))
    compiled = torch.compile(over_seeds, fullgraph=True, backend=backend)
    for seeds in ([5, 6], [-7, 1 << 40, 5], [1, 2, 3, 4]):
        want = torch.stack([slopes(sigma, seed) for seed in seeds])
        for function in (compiled, over_seeds):
            torch.testing.assert_close(function(sigma, torch.tensor(seeds, device=device)[:, None]), want)
    assert [graph.count("cuops.sample_normal_noise") for graph in found] == [1, 1]  # the second one takes any number


@pytest.mark.parametrize("options", [{}, {"low": -1.0}, {"shared_noise": True}, {"antithetic": True}], ids=str)
def test_compiled_transforms_of_no_distributions_give_no_samples(options, device):
    draw = torch.vmap(lambda mu: cuops.sample_normal(mu, 1.0, 4, seed=0, **options))
    assert torch.compile(draw, backend="aot_eager")(torch.zeros(3, 0, device=device)).shape == (3, 4, 0)


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


def along_a_gradient(f, low, t):
    return (torch.func.grad(f)(low) * t).sum()


def along_a_jacobian(f, low, t):
    return (torch.func.jacrev(f)(low) * t).sum()


def along_a_forward_jacobian(f, low, t):
    return (torch.func.jacfwd(f)(low) * t).sum()


def along_what_autograd_finds(f, low, t):
    low = low.clone().requires_grad_()
    return (torch.autograd.grad(f(low), low)[0] * t).sum()


def along_a_tangent(f, low, t):
    return torch.func.jvp(f, (low,), (t,))[1]


def along_a_compiled_tangent(f, low, t):
    torch.compiler.reset()
    return torch.compile(lambda low, t: along_a_tangent(f, low, t), fullgraph=True, backend="aot_eager")(low, t)


def along_a_dual_tensor(f, low, t):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(low, t))).tangent


@pytest.mark.parametrize("is_mapped", [True, False], ids=["mapped", "whole"])
@pytest.mark.parametrize(
    "along",
    [
        along_a_gradient,
        along_a_jacobian,
        along_a_forward_jacobian,
        along_what_autograd_finds,
        along_a_tangent,
        along_a_compiled_tangent,
        along_a_dual_tensor,
    ],
)
def test_a_bound_of_another_dtype_has_its_derivative_however_it_is_asked_for(along, is_mapped, device):
    def draws(low):
        return cuops.sample_normal(torch.zeros(3, device=device), 1.0, 4, low=low, seed=1)

    def rows(low):
        return torch.stack([draws(row) for row in low])

    low = torch.tensor([[-0.5, 0.1, -torch.inf], [0.3, -1.0, 2.0]], dtype=torch.float64, device=device)
    t = torch.arange(1.0, 7.0, dtype=torch.float64, device=device).reshape(2, 3)
    leaf = low.clone().requires_grad_()
    want = (torch.autograd.grad(rows(leaf).sum(), leaf)[0] * t).sum()
    assert want > 0
    found = along(lambda low: (torch.vmap(draws) if is_mapped else rows)(low).sum(), low, t)
    # All terms are positive: 4 of each of the 6 bounds are rounded to float32, as their sums are.
    torch.testing.assert_close(found.double(), want, rtol=2 * 24 * 2.0**-24, atol=0)


@pytest.mark.parametrize("bounds", BOUNDS, ids=["unbounded", "bounded"])
def test_out_has_the_tangent_of_the_samples(bounds, device):
    mu, out = torch.zeros(3, device=device), torch.empty(3, 3, device=device)
    tangents = []
    for given in (None, out):
        with forward_ad.dual_level():
            x = samples(forward_ad.make_dual(mu, torch.ones_like(mu)), {**bounds, "out": given})
            tangents.append(forward_ad.unpack_dual(x).tangent)
    assert x is out
    torch.testing.assert_close(*tangents)


@pytest.mark.parametrize("bounds", BOUNDS, ids=["unbounded", "bounded"])
def test_a_backward_maps_and_has_the_tangent_of_its_gradient(bounds, device):
    mu = torch.tensor([0.1, -2.0, 3.0], dtype=torch.float64, device=device, requires_grad=True)
    sigma = torch.ones_like(mu, requires_grad=True)
    x = cuops.sample_normal(mu, sigma, 3, seed=3, **bounds)
    grad, tangent = torch.randn((2, *x.shape), dtype=x.dtype, device=device)

    def backward(grad):
        return torch.autograd.grad(x, (mu, sigma), grad, retain_graph=True)

    with forward_ad.dual_level():
        dual = [forward_ad.unpack_dual(g) for g in backward(forward_ad.make_dual(grad, tangent))]
    torch.testing.assert_close([g.primal for g in dual], [*backward(grad)])
    torch.testing.assert_close([g.tangent for g in dual], [*backward(tangent)])
    torch.testing.assert_close(torch.func.jvp(backward, (grad,), (tangent,)), (backward(grad), backward(tangent)))
    both = torch.stack([grad, tangent])
    want = [torch.stack(pair) for pair in zip(backward(grad), backward(tangent), strict=True)]
    torch.testing.assert_close([*torch.vmap(backward)(both)], want)
    torch.testing.assert_close([*torch.autograd.grad(x, (mu, sigma), both, is_grads_batched=True)], want)


def of_a_dual_gradient(x, mu, grad):
    with forward_ad.dual_level():
        found = torch.autograd.grad(x, mu, forward_ad.make_dual(grad, grad), create_graph=True)[0]
        return forward_ad.unpack_dual(found)


def of_mapped_gradients(x, mu, grad):
    return torch.autograd.grad(x, mu, grad[None], is_grads_batched=True, create_graph=True)


def of_a_gradients_map(x, mu, grad):
    return torch.vmap(lambda g: torch.autograd.grad(x, mu, g, create_graph=True))(grad[None])


def a_draw_and_a_gradient(device):
    mu, low = (
        torch.tensor(a, dtype=torch.float64, device=device, requires_grad=True) for a in ([0.1, -2.0], [-1.0, 0.5])
    )
    x = cuops.sample_normal(mu, 1.0, 3, low=low, seed=3)
    return mu, low, x, torch.ones_like(x, requires_grad=True)


@pytest.mark.parametrize("first", [of_a_dual_gradient, of_mapped_gradients, of_a_gradients_map])
def test_a_transformed_backward_of_truncated_samples_refuses_a_second_derivative(first, device):
    mu, low, x, grad = a_draw_and_a_gradient(device)
    for found in first(x, mu, grad):
        for a in (mu, low):
            with pytest.raises(NotImplementedError, match="second derivatives of truncated samples"):
                torch.autograd.grad(found.sum(), a, retain_graph=True)


@pytest.mark.parametrize("first", [of_a_dual_gradient, of_a_gradients_map])
def test_a_transformed_backward_of_truncated_samples_has_a_derivative_by_its_gradient(first, device):
    mu, _, x, grad = a_draw_and_a_gradient(device)
    want = torch.autograd.grad(x.sum(), mu, retain_graph=True)[0]
    for found in first(x, mu, grad):
        by_grad = torch.autograd.grad(found.sum(), grad, retain_graph=True)[0]
        torch.testing.assert_close(by_grad.sum(0), want)


def test_transforms_of_truncated_samples_do_what_eager_calls_do():
    mu, sigma = torch.zeros(2), torch.tensor([0.0, 1.0])

    def draw(mu, sigma):
        return cuops.sample_normal(mu, sigma, 3, seed=1, low=-1.0, high=1.0)

    assert torch.equal(torch.func.vmap(draw, (0, None))(mu[None], sigma)[0], draw(mu, sigma))
    assert torch.func.vmap(draw, (None, 0))(mu, -torch.ones(1, 2)).isnan().all()
    wanted = torch.autograd.functional.jacobian(draw, (mu, sigma))
    for got, want in zip(torch.func.jacrev(draw, (0, 1))(mu, sigma), wanted, strict=True):
        torch.testing.assert_close(got, want)
        assert want.isfinite().all()
    for twice in (torch.func.hessian, lambda f: torch.func.jacrev(torch.func.grad(f))):
        with pytest.raises(NotImplementedError, match="second derivatives of truncated samples"):
            twice(lambda mu: draw(mu, sigma).square().sum())(mu)


def test_samples_under_vmap_are_those_of_the_seed(device):
    mu, seed = torch.zeros(5, dtype=torch.float64, device=device), torch.tensor([5], device=device)
    x = torch.vmap(lambda m: cuops.sample_normal(m, 1.0, 4, seed=seed))(mu[None])[0]
    torch.testing.assert_close(x, cuops.sample_normal(mu, 1.0, 4, seed=5), rtol=1e-12, atol=0)


@pytest.mark.parametrize("options", [{}, {"low": -1.0}, {"shared_noise": True}, {"antithetic": True}], ids=str)
@pytest.mark.parametrize("num_samples", [0, 3])
def test_transforms_of_no_distributions_give_no_samples(options, num_samples, device):
    def draw(mu):
        return cuops.sample_normal(mu, 1.0, num_samples, seed=0, **options)

    none, all_empty = torch.zeros(3, 0, device=device), torch.zeros(0, 3, device=device)
    assert torch.func.vmap(draw)(none).shape == (3, num_samples, 0)
    assert torch.func.grad(lambda mu: draw(mu).sum())(all_empty).shape == (0, 3)
    assert torch.func.jvp(draw, (none,), (none,))[1].shape == (3, num_samples, 0)
