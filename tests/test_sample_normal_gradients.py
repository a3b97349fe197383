"""Gradients of normal samples in PyTorch."""

from __future__ import annotations

import itertools
import random

import cuops
import pytest
import torch
from cuops import _backend, reference
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
    # and the noise, which is off by 1e-6 on the whole in float32, by 2e-5 for bfloat16 on a GPU, and by 2e-15 in float64 there.
    sums = torch.finfo(torch.promote_types(grad.dtype, torch.float32)).eps
    noise = {torch.float64: 2e-15, torch.bfloat16: 2e-5}.get(grad.dtype, 1e-6)
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


def chunks_of(grad, start=0, antithetic=False, state=None, sample_dim=0):
    """How many sums of each column one launch leaves for another; 0 where one does it all."""
    return _backend.library().sample_normal_bwd_chunks(grad, state, start, sample_dim, antithetic)


FEW = [
    *[((1024,), n) for n in (1, 2, 3, 4, 5, 8, 9)], *[((columns,), 37) for columns in range(1, 10)],
    *[((columns,), 1024) for columns in (1, 10, 110, 1010, 4910)], ((30,), 300), ((512,), 4096), ((64,), 4096),
    ((1,), 1), ((1,), 4000), ((512, 20), 1), ((512, 33), 3), ((64, 256), 4), ((64, 256), 16), ((64, 32), 8), ((3, 7), 9),
    ((300, 1), 6), ((77, 5), 70), ((40, 130), 31),
]  # fmt: skip


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "n"), FEW, ids=str)
def test_gradients_of_few_samples_take_one_launch(shape, n, dtype):
    mu, sigma = leaves(*parameters(shape, dtype, "cuda"))
    x = cuops.sample_normal(mu, sigma, n, seed=2)
    grad = normal(x.shape, x)
    assert chunks_of(grad) == 0 or (dtype == torch.float64 and (n == 4000 or x.numel() > 3_000_000))
    found = torch.autograd.grad(x, (mu, sigma), grad, retain_graph=True)
    shares = expect_sums(found, grad, mu, sigma, Draw(2, 0, n))
    assert min(shares) > (0.5 if mu.numel() < 20 else 0.9)
    for _ in range(5):
        again = torch.autograd.grad(x, (mu, sigma), grad, retain_graph=True)
        assert all(map(torch.equal, found, again))


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1,), (128, 20), (4096, 512), (65_536, 33), (3, 100_001)], ids=str)
def test_the_gradient_of_one_sample_is_its_noise(shape, dtype):
    mu, sigma = leaves(*parameters(shape, dtype, "cuda"))
    x = cuops.sample_normal(mu, sigma, 1, seed=2)
    grad = normal(x.shape, x)
    assert chunks_of(grad) == 0
    dmu, dsigma = torch.autograd.grad(x, (mu, sigma), grad)
    noise = cuops.sample_normal(torch.zeros_like(mu), 1.0, 1, seed=2)
    assert torch.equal(dmu, grad.reshape(shape))
    assert torch.equal(dsigma, (grad * noise).reshape(shape))


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(24))
def test_gradients_of_few_samples_of_any_kind(seed, dtype):
    """Seeds may be on the GPU, draws begin within a group, and gradients anywhere in memory."""
    draw = random.Random(seed)
    shape = (*([draw.choice([2, 9, 40])] if draw.random() < 0.5 else []), draw.choice([1, 2, 3, 4, 7, 8, 31, 64, 250]))
    n, start, offset = draw.choice([*range(1, 10), 33, 128, 600]), draw.randrange(9), draw.randrange(9)
    shared, antithetic = draw.random() < 0.2, draw.random() < 0.3
    state = torch.tensor([2, 3], device="cuda") if draw.random() < 0.5 else None
    mu, sigma = leaves(*parameters(shape, dtype, "cuda"))
    x = cuops.sample_normal(
        mu, sigma, n, seed=2 if state is None else state, start=start, shared_noise=shared, antithetic=antithetic
    )
    grad = torch.full((x.numel() + 16,), torch.nan, dtype=dtype, device="cuda")[offset:][: x.numel()].view(x.shape)
    grad.copy_(normal(x.shape, x))
    assert chunks_of(grad, start, antithetic, state) == 0
    found = torch.autograd.grad(x, (mu, sigma), grad)
    stream = 0 if state is None else 3
    shares = expect_sums(found, grad, mu, sigma, Draw(2, stream, n, start, 0, shared, antithetic))
    assert min(shares) > (0.5 if mu.numel() < 20 else 0.9)


@gpu
@pytest.mark.parametrize("offset", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_written_where_no_vector_begins(dtype, offset):
    mu, sigma = parameters((1024,), dtype, "cuda")
    grad = normal((64, 1024), mu)
    memory = torch.full((2, 1024 + 8), 7.0, dtype=dtype, device="cuda")
    dmu, dsigma = (row[offset:][:1024] for row in memory)
    partial = torch.empty(chunks_of(grad), 2, 1024, device="cuda")
    assert partial.numel() == 0
    _backend.library().sample_normal_bwd(dmu, dsigma, partial, grad, None, 2, 0, 0, 0, False, False)
    expect_sums((dmu, dsigma), grad, mu, sigma, Draw(2, 0, 64))
    for row in memory:
        assert (row[:offset] == 7).all()
        assert (row[offset + 1024 :] == 7).all()


@gpu
@pytest.mark.parametrize(
    ("n", "columns"), [(65_536, 4096), (65_536, 4097), (2**20, 64), (2**20, 1), (10**7, 1), (4_194_304, 10)]
)
def test_gradients_of_many_samples_take_sums_of_chunks(n, columns):
    assert chunks_of(torch.empty(n, columns, dtype=torch.bfloat16, device="cuda")) > 1


def test_gradients_go_to_what_was_broadcast(device):
    mu, _ = leaves(*parameters((3, 5), torch.float64, device))
    scale = torch.ones(5, dtype=torch.float64, device=device, requires_grad=True)
    x = cuops.sample_normal(mu, scale, 11, seed=1)
    x.sum().backward()
    assert torch.allclose(mu.grad, torch.full_like(mu, 11))
    assert torch.allclose(scale.grad, (x - mu[:, None]).sum((0, 1)))


@gpu
@pytest.mark.cached
@pytest.mark.parametrize(("n", "share"), [(2000, 0.01), (20_000, 0.1)])
def test_no_noise_is_stored_for_the_gradient(n, share):
    """Nothing where one launch does it all, else sums of chunks of the samples."""
    mu, sigma = leaves(*parameters((1000,), device="cuda"))
    before = torch.cuda.memory_allocated()
    x = cuops.sample_normal(mu, sigma, n, seed=1)
    assert torch.cuda.memory_allocated() - before < 1.01 * x.numel() * 4
    grad = torch.ones_like(x)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(x, (mu, sigma), grad)
    assert torch.cuda.max_memory_allocated() - before < share * x.numel() * 4
