"""kron_linear and its gradients beside float64, on random arguments of any sizes."""

from __future__ import annotations

import math

import cuops
import torch
from kron_samples import columns_of, factors_of, random, x_of


def problem_of(rows, sizes, dtype):
    """x, dy and factors whose products keep the magnitude of what they are applied to."""
    factors = [(w / w.shape[1] ** 0.5).to(dtype) for w in factors_of(sizes, torch.float64)]
    out = math.prod(o for o, _ in sizes)
    return random((rows, columns_of(sizes)), dtype), random((rows, out), dtype, 9), factors


def gradients(x, dy, factors, needs=None):
    needs = needs or [True] * (1 + len(factors))
    leaves = [t.clone().requires_grad_(n) for t, n in zip((x, *factors), needs, strict=True)]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return torch.autograd.grad(cuops.kron_linear(leaves[0], leaves[1:]), wanted, dy)


def value_and_gradients(x, dy, factors):
    return [cuops.kron_linear(x, factors), *gradients(x, dy, factors)]


def exact(x, dy, factors):
    """y and all gradients in float64, by PyTorch's autograd of the definition."""
    leaves = [t.double().requires_grad_() for t in (x, *factors)]
    y = x_of(leaves[0], leaves[1:])
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.double())]


def check_results(got, x, dy, factors):
    """y and all gradients are right but for rounding.

    Sums are float32 (float64 of float64), one term after the other, and of those of many rows. What launches leave for
    others is rounded, at most once for each factor on the way forward and back.
    """
    magnitudes = exact(x.abs(), dy.abs(), [w.abs() for w in factors])
    sums = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    result = torch.finfo(x.dtype)
    terms = sum(o + i + 2 for o, i in (w.shape for w in factors)) + dy.numel() ** 0.5
    for mine, want, magnitude in zip(got, exact(x, dy, factors), magnitudes, strict=True):
        if mine is None:
            continue
        assert (mine.shape, mine.dtype) == (want.shape, x.dtype)
        lost = sums * terms + result.eps * 2 * len(factors)
        allowed = result.eps / 2 * want.abs() + lost * magnitude + result.smallest_normal
        assert ((mine.double() - want).abs() <= allowed).all()


def distance(got, want):
    """Of all elements, relative to the length of `want`."""
    return ((got.double() - want).norm() / want.norm()).item()
