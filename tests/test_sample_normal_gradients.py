"""Gradients of normal samples in PyTorch."""

from __future__ import annotations

import itertools
import random

import cuops
import pytest
import torch
from cuops import reference
from cuops._sample_normal.noise import Draw
from sample_normal_samples import leaves, parameters
from samples import DTYPES

gpu = pytest.mark.gpu


@pytest.mark.parametrize(
    ("sample_dim", "shared", "antithetic", "bounded"), list(itertools.product([0, -1], *[[False, True]] * 3))
)
def test_gradients_agree_with_finite_differences(sample_dim, shared, antithetic, bounded, device):
    mu, sigma = leaves(*parameters((2, 5), torch.float64, device))
    bounds = leaves(mu - 0.7, mu + 1.1) if bounded else []

    def draw(mu, sigma, low=None, high=None):
        options = {"sample_dim": sample_dim, "shared_noise": shared, "antithetic": antithetic, "start": 3}
        return cuops.sample_normal(mu, sigma, 7, low=low, high=high, seed=1, **options)

    assert torch.autograd.gradcheck(draw, (mu, sigma, *bounds), fast_mode=True)
    if not bounded:
        assert torch.autograd.gradgradcheck(lambda *a: draw(*a).square(), (mu, sigma), fast_mode=True)


def test_products_with_the_hessian(device):
    mu, sigma = parameters((2, 5), torch.float64, device)
    v = mu.cos(), sigma.sin()

    def loss(mu, sigma):
        return cuops.sample_normal(mu, sigma, 7, seed=1).pow(3).sum()

    for product in (torch.autograd.functional.hvp, torch.autograd.functional.vhp):
        got = product(loss, (mu, sigma), v)[1]
        noise = cuops.sample_normal(torch.zeros_like(mu), 1.0, 7, seed=1)
        x, through = mu[:, None] + sigma[:, None] * noise, v[0][:, None] + v[1][:, None] * noise
        want = (6 * x * through).sum(1), (6 * x * through * noise).sum(1)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def expect_sums(found, grad, mu, sigma, draw):
    """Gradients for mu and sigma are sums of grad, and of its products with the noise."""
    wide = [a.cpu().double() for a in (grad, mu, sigma)]
    exact = reference.sample_normal_torch_backward(*wide, None, None, draw)
    # One rounding to the dtype; n in the sums' own, of up to sqrt(n) and by eps / 2 to either side, which is n eps / 2;
    # and the noise, which is off by 1e-6 on the whole in float32, and by 2e-5 for bfloat16 on a GPU.
    sums = torch.finfo(torch.promote_types(grad.dtype, torch.float32)).eps
    noise = {torch.float64: 0.0, torch.bfloat16: 2e-5}.get(grad.dtype, 1e-6)
    shares = []
    for gradient, want in zip(found, exact, strict=False):
        allowed = torch.finfo(gradient.dtype).eps / 2 * want.abs() + 4 * draw.num_samples * (sums + noise)
        assert ((gradient.cpu() - want).abs() <= allowed).all()
        shares.append((want.abs() / 2 > allowed).double().mean())
    return shares


def normal(shape, like):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(like)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sample_dim", [0, -1])
@pytest.mark.parametrize(("shape", "n"), [((5,), 1000), ((3, 33), 70), ((2048,), 4097), ((1,), 5)])
def test_gradients_are_sums_over_the_samples(shape, n, sample_dim, dtype, device):
    mu, sigma = leaves(*parameters(shape, dtype, device))
    x = cuops.sample_normal(mu, sigma, n, seed=2, sample_dim=sample_dim, start=5)
    grad = normal(x.shape, x)
    dmu, dsigma = torch.autograd.grad(x, (mu, sigma), grad)
    shares = expect_sums((dmu, dsigma), grad, mu, sigma, Draw(2, 0, n, 5, sample_dim))
    assert min(shares) > 0.9  # half of it would not do
    assert torch.equal(
        dmu, torch.autograd.grad(cuops.sample_normal(mu, sigma, n, seed=2, sample_dim=sample_dim, start=5), mu, grad)[0]
    )


@pytest.mark.parametrize("kinds", [(torch.float32, torch.float64), (torch.float64, torch.bfloat16)], ids=str)
def test_each_gradient_has_the_dtype_of_its_parameter(kinds, device):
    mu, sigma = leaves(*(a.to(kind) for a, kind in zip(parameters((33,), device=device), kinds, strict=True)))
    x = cuops.sample_normal(mu, sigma, 70, seed=2, dtype=torch.bfloat16)
    grad = normal(x.shape, x)
    found = torch.autograd.grad(x, (mu, sigma), grad)
    assert tuple(gradient.dtype for gradient in found) == kinds
    assert min(expect_sums(found, grad, mu, sigma, Draw(2, 0, 70))) > 0.9


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(24))
def test_gradients_of_rows_of_any_length_that_begin_anywhere(seed, dtype):
    """Threads have four columns, or what a row has left of them, and groups of four samples, or what a draw has of them."""
    draw = random.Random(seed)
    shape = (*([3] if draw.random() < 0.4 else []), draw.choice([*range(3, 20), 33, 130, 512, 4910]))
    n, start, offset = draw.choice([1, 3, 4, 6, 9, 64, 500]), draw.randrange(6), draw.randrange(4)
    options = {"start": start, "shared_noise": draw.random() < 0.2, "antithetic": draw.random() < 0.2}
    mu, sigma = leaves(*parameters(shape, dtype, "cuda"))
    x = cuops.sample_normal(mu, sigma, n, seed=2, **options)
    grad = torch.full((x.numel() + 8,), torch.nan, dtype=dtype, device="cuda")[offset:][: x.numel()].view(x.shape)
    grad.copy_(normal(x.shape, x))
    found = torch.autograd.grad(x, (mu, sigma), grad)
    shares = expect_sums(
        found, grad, mu, sigma, Draw(2, 0, n, start, 0, options["shared_noise"], options["antithetic"])
    )
    assert min(shares) > 0.5


def test_gradients_go_to_what_was_broadcast(device):
    mu, _ = leaves(*parameters((3, 5), torch.float64, device))
    scale = torch.ones(5, dtype=torch.float64, device=device, requires_grad=True)
    x = cuops.sample_normal(mu, scale, 11, seed=1)
    x.sum().backward()
    assert torch.allclose(mu.grad, torch.full_like(mu, 11))
    assert torch.allclose(scale.grad, (x - mu[:, None]).sum((0, 1)))


@gpu
@pytest.mark.parametrize(("n", "share"), [(2000, 0.3), (20_000, 0.1)])
def test_no_noise_is_stored_for_the_gradient(n, share):
    """Only sums of chunks of the samples, which are more where it takes more chunks to fill the GPU."""
    mu, sigma = leaves(*parameters((1000,), device="cuda"))
    before = torch.cuda.memory_allocated()
    x = cuops.sample_normal(mu, sigma, n, seed=1)
    assert torch.cuda.memory_allocated() - before < 1.01 * x.numel() * 4
    grad = torch.ones_like(x)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(x, (mu, sigma), grad)
    assert torch.cuda.max_memory_allocated() - before < share * x.numel() * 4
