"""Normal samples where counters, and what a launch has, end: beyond 2^31 samples, columns and groups."""

from __future__ import annotations

import math

import cuops
import pytest
import torch
from cuops import _backend

pytestmark = pytest.mark.gpu


def test_more_than_two_to_the_32_samples():
    mu = torch.zeros(3, dtype=torch.bfloat16, device="cuda")
    x = cuops.sample_normal(mu, 1.0, 2**31 + 5, seed=1)
    assert torch.equal(x[-100:], cuops.sample_normal(mu, 1.0, 100, seed=1, start=2**31 - 95))
    far = cuops.sample_normal(mu, 1.0, 64, seed=1, start=2**34 - 32)
    assert torch.equal(far[32:], cuops.sample_normal(mu, 1.0, 32, seed=1, start=2**34))
    assert not torch.equal(far[32:], x[:32])
    assert torch.allclose(far.cpu(), cuops.sample_normal(mu.cpu(), 1.0, 64, seed=1, start=2**34 - 32), rtol=2e-2)
    del x
    wide = torch.zeros(2**32 + 8, dtype=torch.bfloat16, device="cuda")
    far = cuops.sample_normal(wide, 1.0, 1, seed=1)
    assert not torch.equal(far[:, 2**32 :], far[:, :8])
    assert torch.equal(far[:, :8], cuops.sample_normal(wide[:8], 1.0, 1, seed=1))


@pytest.mark.parametrize(("before", "num_samples"), [(8192, 8188), (16000, 12000)])
def test_antithetic_samples_before_a_counter_wraps(before, num_samples):
    """Groups of eight are counted in 32 bits; a draw may be longer than what is left of these."""
    mu, start = torch.zeros(8, device="cuda"), 2**35 - before
    x = cuops.sample_normal(mu, 1.0, num_samples, seed=1, start=start, antithetic=True)
    for first in range(0, num_samples, 64):
        part = x[first : first + 64]
        assert torch.equal(part, cuops.sample_normal(mu, 1.0, len(part), seed=1, start=start + first, antithetic=True))


def test_the_gradient_of_more_columns_than_a_launch_has_blocks():
    grad = torch.ones(2**31 + 8, 1, dtype=torch.bfloat16, device="cuda")
    grad[-1] = 2
    dmu, dsigma = (torch.full((len(grad),), math.nan, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    partial = torch.empty(1, 2, len(grad), device="cuda")
    _backend.library().sample_normal_bwd(dmu, dsigma, partial, grad, None, 1, 0, 0, -1, False, False)
    assert dmu[:3].tolist() == [1.0] * 3
    assert dmu[-9:].tolist() == [1.0] * 8 + [2.0]
    assert dsigma[-9:].isfinite().all()


@pytest.mark.parametrize("chunks", [0, 1])
def test_the_gradient_of_columns_beyond_those_that_32_bits_number(chunks):
    """Four columns of a thread may be of both sides, as rows of ten are no whole fours."""
    mu = torch.zeros(1, dtype=torch.bfloat16, device="cuda").expand(429_496_730, 10)
    x = cuops.sample_normal(mu, 1.0, 1, seed=1)
    noise, grad = x[-8:, 0].clone(), x.fill_(1)
    dmu, dsigma = (torch.empty(mu.shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    partial = torch.empty(chunks, 2, mu.numel(), device="cuda")
    _backend.library().sample_normal_bwd(dmu, dsigma, partial, grad, None, 1, 0, 0, 0, False, False)
    assert torch.equal(dsigma[-8:], noise)
