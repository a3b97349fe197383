"""Tensors that PyTorch negates when they are read, as the imaginary part of a conjugate is, are what they stand for."""

from __future__ import annotations

import cuops
import pytest
import torch

LAYERS = {
    "rms_norm": (lambda x, weight, bias: cuops.rms_norm(x, weight, bias), [(6, 64), (64,), (64,)]),
    "rms_norm with a residual": (
        lambda x, residual, weight: cuops.rms_norm(x, weight, residual=residual),
        [(6, 64), (6, 64), (64,)],
    ),
    "kron_linear": (lambda x, a, b, bias: cuops.kron_linear(x, [a, b], bias), [(6, 64), (4, 8), (8, 8), (32,)]),
    "sample_normal": (lambda mu, sigma: cuops.sample_normal(mu, sigma, 8, seed=3), [(6, 64), (6, 64)]),
    "sample_normal within bounds": (
        lambda mu, low: cuops.sample_normal(mu, 2.0, 8, low=low, high=9.0, seed=3),
        [(6, 64), (6, 64)],
    ),
}


def operands(sizes, device):
    """Positive numbers, which sigma has to be."""
    torch.manual_seed(0)
    return [torch.rand(size).add(0.5).to(device) for size in sizes]


def negated_on_reading(t):
    """t, as a tensor whose memory holds -t."""
    return torch._neg_view(-t)


def first(results):
    return results[0] if isinstance(results, tuple) else results


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
def test_each_operand(layer, with_gradients, device):
    call, sizes = LAYERS[layer]
    given = operands(sizes, device)
    want = first(call(*given))
    for k in range(len(given)):
        others = [t.clone().requires_grad_() if with_gradients else t for t in given]
        others[k] = negated_on_reading(given[k])
        assert others[k].is_neg()
        assert torch.equal(first(call(*others)), want), k


@pytest.mark.parametrize("layer", ["rms_norm", "rms_norm with a residual", "kron_linear", "sample_normal"])
def test_the_gradient_of_the_result(layer, device):
    call, sizes = LAYERS[layer]
    given = [t.requires_grad_() for t in operands(sizes, device)]
    results = call(*given)
    results = results if isinstance(results, tuple) else (results,)
    grads = operands([y.shape for y in results], device)
    want = torch.autograd.grad(results, given, grads, retain_graph=True)
    for k in range(len(grads)):
        others = [negated_on_reading(g) if k == i else g for i, g in enumerate(grads)]
        for got, expected in zip(torch.autograd.grad(results, given, others, retain_graph=True), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


def test_rms_norm_in_place(device):
    x, weight = operands([(6, 64), (64,)], device)
    want = cuops.rms_norm(x, weight)
    given = negated_on_reading(x)
    assert cuops.rms_norm_(given, weight) is given
    torch.testing.assert_close(given.resolve_neg(), want, rtol=0, atol=0)
