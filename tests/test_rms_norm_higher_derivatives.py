"""RMSNorm's gradients by finite differences, and the derivatives of these gradients."""

from __future__ import annotations

import itertools

import cuops
import pytest
import torch
import torch.nn.functional as F
from samples import make
from torch.fx.experimental.proxy_tensor import make_fx


@pytest.mark.parametrize(
    ("with_weight", "with_bias", "with_residual"), list(itertools.product([False, True], repeat=3))
)
def test_gradients_of_gradients_are_those_of_differences(with_weight, with_bias, with_residual, device):
    x = make((3, 5), torch.float64, device).requires_grad_()
    others = [
        make(shape, torch.float64, device, seed).requires_grad_() if wanted else None
        for seed, (shape, wanted) in enumerate([((5,), with_weight), ((5,), with_bias), ((3, 5), with_residual)], 1)
    ]

    def call(x, weight, bias, residual):
        return cuops.rms_norm(x, weight, bias, 1e-3, residual=residual, weight_offset=0.5, return_rstd=True)

    assert torch.autograd.gradcheck(call, (x, *others))
    assert torch.autograd.gradgradcheck(call, (x, *others))


def normalized_again(x, weight, residual):
    """What `cuops.rms_norm` returns, by PyTorch's own."""
    h = x + residual
    return F.rms_norm(h, weight.shape, weight, 1e-3), h


def test_third_derivatives(device):
    inputs = [make(shape, torch.float64, device, k).requires_grad_() for k, shape in enumerate(((2, 5), (5,), (2, 5)))]

    def third(results):
        value = sum(r.pow(3).sum() for r in results)
        for _ in range(2):
            value = sum(g.pow(2).sum() for g in torch.autograd.grad(value, inputs, create_graph=True))
        return torch.autograd.grad(value, inputs)

    x, weight, residual = inputs
    got = third(cuops.rms_norm(x, weight, eps=1e-3, residual=residual))
    torch.testing.assert_close(got, third(normalized_again(*inputs)), rtol=1e-9, atol=1e-9)


def test_second_derivatives_leave_a_weight_without_gradient_as_it_is(device):
    x, weight = torch.ones(2, 3, device=device, requires_grad=True), torch.ones(3, device=device)
    (grad,) = torch.autograd.grad(cuops.rms_norm(x, weight).pow(2).sum(), x, create_graph=True)
    grad.sum().backward()
    assert not weight.requires_grad


def test_products_with_the_hessian(device):
    x, weight, v = (make(shape, torch.float64, device, k) for k, shape in enumerate(((3, 5), (5,), (3, 5))))

    def loss(x):
        return cuops.rms_norm(x, weight, residual=2 * x)[0].pow(3).sum()

    got, want = (product(loss, x, v)[1] for product in (torch.autograd.functional.hvp, torch.autograd.functional.vhp))
    assert want.abs().min() > 0
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_the_gradient_of_rstd_is_right_where_its_cube_is_no_number(device):
    x = torch.tensor([[1e-120, 0.0], [1e150, 1e150]], dtype=torch.float64, device=device, requires_grad=True)
    (found,) = torch.autograd.grad(cuops.rms_norm(x, eps=0.0, return_rstd=True)[1].sum(), x)
    want = [[-(2**0.5) * 1e240, 0.0], [-5e-301, -5e-301]]  # -rstd^3 x / n
    torch.testing.assert_close(found.cpu(), torch.tensor(want, dtype=torch.float64), rtol=1e-14, atol=0.0)


GRADIENT = torch.func.grad(lambda x: cuops.rms_norm(x).square().mean(-1).sin().sum())


@pytest.mark.parametrize(
    ("transform", "x"),
    [
        (torch.vmap(lambda x: cuops.rms_norm(x, return_rstd=True)), make((64, 64))),
        (GRADIENT, make((64, 4))),
        (torch.vmap(lambda x: cuops.rms_norm(x)), make((2, 64, 32)).transpose(1, 2)),
        (lambda x: torch.func.jvp(cuops.rms_norm, (x,), (x.flip(0),))[1], make((8, 64))),
        (lambda x: torch.func.jvp(GRADIENT, (x,), (x.flip(0),))[1], make((4, 8))),
    ],
    ids=["rstd", "a gradient of short rows", "columns", "forward mode", "forward over reverse"],
)
def test_compiled_transforms_are_those_of_eager_calls(transform, x, device):
    torch.compiler.reset()
    x = x.to(device)
    torch.testing.assert_close(torch.compile(transform)(x), transform(x))


@pytest.mark.parametrize("size", [1e-300, 1e-150, 1.0, 1e150])
def test_forward_mode_is_right_for_rows_of_any_magnitude(size, device):
    x, tangent = (make((3, 5), torch.float64, device, seed) for seed in (1, 2))
    want = torch.func.jvp(lambda x: F.rms_norm(x, (5,), eps=0.0), (x,), (tangent,))[1]
    got = torch.func.jvp(lambda x: cuops.rms_norm(x, eps=0.0), (size * x,), (size * tangent,))[1]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def test_forward_mode_of_no_elements(device):
    jacobian = torch.func.jacfwd(lambda x: cuops.rms_norm(x).sum())(torch.randn(0, device=device))
    assert jacobian.shape == (0,)


def test_a_graph_has_the_gradient_of_a_forward_that_it_has_not_seen(device):
    x = make((3, 8), device=device).requires_grad_()
    y = cuops.rms_norm(x)
    traced = make_fx(lambda dy: torch.autograd.grad(y, x, dy, retain_graph=True)[0])(torch.ones_like(y))
    assert "rms_norm_bwd" in traced.code
    dy = make((3, 8), device=device, seed=1)
    torch.testing.assert_close(traced(dy), torch.autograd.grad(y, x, dy)[0])
