"""Samples between bounds, at the edges of what a bound is."""

from __future__ import annotations

import cuops
import numpy as np
import pytest
import torch


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
