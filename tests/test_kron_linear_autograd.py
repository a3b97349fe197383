"""What autograd keeps of kron_linear, gives back, and differentiates forwards."""

from __future__ import annotations

import cuops
import torch
from cuops import reference
from kron_samples import SAMPLES, Largest, arguments, definition, exact_gradients
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx


def test_forward_mode_differentiation_of_a_gradient_whose_graph_is_there(device):
    x, factors, _ = arguments(SAMPLES["both"], torch.float64, device)
    x.requires_grad_()
    y = cuops.kron_linear(x, factors)
    v, t = torch.randn_like(y), torch.randn_like(y)
    with torch.autograd.forward_ad.dual_level():
        (dx,) = torch.autograd.grad(y, x, torch.autograd.forward_ad.make_dual(v, t))
        tangent = torch.autograd.forward_ad.unpack_dual(dx).tangent
    want, *_ = exact_gradients(t, x, factors)
    torch.testing.assert_close(tangent.cpu(), want, rtol=1e-10, atol=1e-10)


def test_forward_mode_differentiation(device):
    x, factors, _ = arguments(SAMPLES["both"], torch.float64, device)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, 2 * x)
        tangent = torch.autograd.forward_ad.unpack_dual(cuops.kron_linear(dual, factors)).tangent
    torch.testing.assert_close(tangent.cpu(), 2 * definition(x, factors))


def test_x_is_not_kept_for_frozen_factors(device):
    x, factors, bias = arguments(SAMPLES["both"], torch.float64, device)
    want, *_ = exact_gradients(torch.ones(*x.shape[:-1], 66), x, factors)
    x.requires_grad_()
    between = x * 1
    y = cuops.kron_linear(between, factors)
    between.add_(1)
    y.sum().backward()
    torch.testing.assert_close(x.grad.cpu(), want, rtol=1e-10, atol=1e-10)
    with torch.inference_mode():
        fixed = x.detach() * 1
    cuops.kron_linear(fixed, factors, bias.requires_grad_()).sum().backward()
    assert torch.equal(bias.grad.cpu(), torch.full((66,), 6.0, dtype=torch.float64))


def test_factors_are_not_kept_for_a_bias_alone(device):
    x, factors, bias = arguments(SAMPLES["both"], torch.float64, device)
    with torch.inference_mode():
        fixed = [w * 1 for w in factors]
    for given in (factors, fixed):
        y = cuops.kron_linear(x, given, bias.requires_grad_())
        factors[0].zero_()
        dy = torch.randn_like(y)
        (dbias,) = torch.autograd.grad(y, bias, dy)
        torch.testing.assert_close(dbias, dy.sum(tuple(range(y.ndim - 1))), rtol=1e-12, atol=1e-12)


def test_transforms_leave_no_more_between_factors_than_calls(device):
    """In either order of the sizes; what all differentiation in forward mode and of higher order is made of."""
    rows, grows = 5, [torch.randn(40, 1, device=device), torch.randn(1, 40, device=device)]
    for factors, needs in ((grows, [True, True]), (grows[::-1], [True, True])):
        x, dy = (torch.randn(rows, 40, device=device) for _ in range(2))
        with Largest() as largest:
            reference.kron_linear_torch(x, factors, None)
            reference.kron_linear_torch_backward(dy, x, factors, True, needs)
        assert largest.bytes == rows * 40 * 8


def test_transforms_are_traced_for_any_number_of_rows(device):
    def all_of(x, dy, *factors):
        dx, dfactors = reference.kron_linear_torch_backward(dy, x, factors, True, [True, True])
        return reference.kron_linear_torch(x, factors, None), dx, *dfactors

    def arguments_of(rows):
        sizes = (rows, 15), (rows, 8), (2, 3), (4, 5)
        return [torch.randn(size, dtype=torch.float64, device=device) for size in sizes]

    traced, given = make_fx(all_of, tracing_mode="symbolic")(*arguments_of(6)), arguments_of(9)
    for got, want in zip(traced(*given), all_of(*given), strict=True):
        torch.testing.assert_close(got, want)


def test_sizes_of_factors_that_are_left_open_have_one_graph(device):
    counter = CompileCounter()

    @torch.compile(backend=counter, dynamic=True, fullgraph=True)
    def gradients(x, w, v):
        return torch.func.grad(lambda w: cuops.kron_linear(x, [w, v]).square().sum())(w)

    for o, p in ((2, 4), (7, 2), (3, 11), (11, 3)):
        w, v = torch.randn(o, 5, device=device), torch.randn(p, 3, device=device)
        x = torch.randn(6, 15, device=device)
        want = torch.func.grad(lambda w, v=v, x=x: (x @ torch.kron(w, v).T).square().sum())(w)
        torch.testing.assert_close(gradients(x, w, v), want, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


def test_results_may_be_written_into(device):
    w = torch.ones(4, 4, dtype=torch.float64, device=device)
    for shape, factors in (((0, 4), [w]), ((2, 0), [w[:, :0]])):
        x = torch.ones(shape, dtype=torch.float64, device=device, requires_grad=True)
        cuops.kron_linear(x, factors).add_(1).sum().backward()


def test_a_graph_has_the_gradients_of_a_forward_that_it_has_not_seen(device):
    x, factors, _ = arguments(SAMPLES["both"], torch.float64, device)
    inputs = [x.requires_grad_(), *(w.requires_grad_() for w in factors)]
    y = cuops.kron_linear(x, factors)
    traced = make_fx(lambda dy: torch.autograd.grad(y, inputs, dy, retain_graph=True))(torch.ones_like(y))
    assert "kron_linear_bwd" in traced.code
    dy = torch.randn_like(y)
    torch.testing.assert_close(traced(dy), torch.autograd.grad(y, inputs, dy))
