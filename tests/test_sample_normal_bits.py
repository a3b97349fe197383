"""Samples have the same bits in every run, on every GPU and by every backend: those that are written here."""

import itertools
import math
import os
import subprocess
import sys

import cuops
import numpy as np
import pytest
import torch
from cuops import _backend, _driver
from cuops._sample_normal.noise import normals

DRAWS = """
import hashlib
import cuops, torch

for bounds in ({}, {"low": -0.5, "high": 2.0}, {"low": 6.0}, {"high": -20.0}, {"low": 1e3}):
    for dtype in ("float64", "float32") if bounds else ("float64", "float32", "float16", "bfloat16"):
        mu = torch.zeros(512, dtype=getattr(torch, dtype), device="cuda")
        x = cuops.sample_normal(mu, 1.0, 4000, seed=7, **bounds)
        print(dtype, bounds, hashlib.sha256(x.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:16])
"""
DIGESTS = """\
float64 {} 23e4edf069121a42
float32 {} 9da315ca59473db5
float16 {} 048dc3b75ca8c14e
bfloat16 {} ca25b84cc9637090
float64 {'low': -0.5, 'high': 2.0} a06fd4c13f645bff
float32 {'low': -0.5, 'high': 2.0} 892954c6cecd9db6
float64 {'low': 6.0} a8c778c93cd96553
float32 {'low': 6.0} df893bf38af6ed04
float64 {'high': -20.0} d7118a7554da0585
float32 {'high': -20.0} fdb07b35fdeb05df
float64 {'low': 1000.0} 9cd0a4783a3a3d92
float32 {'low': 1000.0} 9886f33b92e9e4af
"""


WORDS = (0x00000000, 0x00000000), (0x89ABCDEF, 0x3FFFFFFF), (0xFFFFFFFF, 0x80000001), (0x12345678, 0xC0654321)
MORE_WORDS = (0, 0), (0x76543210, 0xFEDCBA98), (0xFFFFFFFF, 0x3), (0xFFFFFFFF, 0x9ABCDEF0)
# The formula of _sample_normal/noise.py with 60 digits, which pi and what u is cut to change.
NORMALS = [
    (4.782663016029709, -4.7826612248891305),
    (0.7875977354314844, 0.7875974404706523),
    (-0.0002441406743541653, -0.00024414058292178398),
    (1.015177741880847, -2.0631135871390587),
]
NORMALS_OF_FLOAT64 = [
    (6.712269864687835, -6.712269864687835),
    (0.7875975234447342, 0.7875975208228603),
    (-1.0536712127723509e-08, -1.0536712127723509e-08),
    (1.0151778068627573, -2.0631135154887525),
]


@pytest.mark.parametrize("xp", [np, torch], ids=["numpy", "torch"])
@pytest.mark.parametrize(("more", "expected"), [(None, NORMALS), (MORE_WORDS, NORMALS_OF_FLOAT64)], ids=["24", "53"])
def test_normals_of_known_words_are_those_of_the_formula(more, expected, xp):
    for i in (0, 2):
        first, second = (
            tuple(xp.asarray([word]) for pair in words[i : i + 2] for word in pair) if words else None
            for words in (WORDS, more)
        )
        z = normals(xp, first, second)
        np.testing.assert_allclose(np.asarray(z)[0].reshape(2, 2), expected[i : i + 2], rtol=4e-16)


@pytest.mark.gpu
def test_every_backend_draws_the_bits_of_all():
    usable = [backend.name for backend in _backend.installed() if backend.least_driver <= _driver.cuda_version()]
    assert usable
    for name in usable:
        environment = os.environ | {"CUOPS_BACKEND": name}
        run = subprocess.run(
            [sys.executable, "-c", DRAWS], env=environment, capture_output=True, text=True, check=False
        )
        assert run.stdout == DIGESTS, (name, run.stderr)


def drawn(n, d, dtype, seed=5, **options):
    mu = torch.linspace(-1, 1, d, dtype=torch.float64).to(dtype).cuda()
    sigma = torch.linspace(0.5, 2, d, dtype=torch.float64).to(dtype).cuda()
    return cuops.sample_normal(mu, sigma, n, seed=seed, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d", [4096, 4098, 4097, 4100, 110, 30, 7, 1])
def test_every_grid_draws_the_same_numbers(d, dtype):
    """Kernels have 1, 2 or 4 columns a thread, and grids that depend on the size of the draw."""
    n = 45 * (1 << 20) // (dtype.itemsize * d) + 3  # large enough for the grids of large draws
    x = drawn(n, d, dtype)
    for start, count in ((0, 1), (1, 6), (n // 2, 64), (n - 9, 9)):
        assert torch.equal(drawn(count, d, dtype, start=start), x[start : start + count])
    assert torch.equal(drawn(n, d, dtype, sample_dim=-1), x.T)
    assert torch.equal(drawn(n, d, dtype, seed=torch.tensor(5, device="cuda")), x)


@pytest.mark.gpu
def test_float64_is_that_of_the_processor_but_for_the_last_bits():
    """Logarithm, root, sine and cosine are off by up to two units in the last place each, here and there."""
    mu = torch.zeros(1000, dtype=torch.float64)
    expected = cuops.sample_normal(mu, 1.0, 4000, seed=9)
    x = cuops.sample_normal(mu.cuda(), 1.0, 4000, seed=9).cpu()
    assert ((x - expected) / expected).abs().max() < 2**-50


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 62), (5, 7), (2, 3, 12), (300, 2)], ids=str)
def test_batches_draw_the_columns_of_one_row(shape):
    mu = torch.zeros(shape, device="cuda")
    x = cuops.sample_normal(mu, 1.0, 100, seed=5)
    flat = cuops.sample_normal(mu.flatten(), 1.0, 100, seed=5)
    assert torch.equal(x.movedim(-2, 0).flatten(1), flat)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [(1,), (2,), (3,), (10,), (110,), (4096,), (4097,), (40_001,), (3, 62), (2, 7)], ids=str
)
@pytest.mark.parametrize("options", [{}, {"antithetic": True, "start": 3}, {"seed": torch.tensor([5])}], ids=str)
def test_shared_noise_is_that_of_a_draw_of_one_dimension(shape, dtype, options):
    """Kernels for many columns a noise have vectors that lie in one row or in two, and fewer rows than a period at the end."""
    options = {"seed": 5} | {k: v.cuda() if k == "seed" else v for k, v in options.items()}
    mu = torch.linspace(-1, 1, math.prod(shape), dtype=torch.float64).reshape(shape).to(dtype).cuda()
    sigma = mu.abs() + 0.5
    n = (3 << 20) // (dtype.itemsize * mu.numel()) // 8 * 8 + (8 if len(shape) > 1 else 3)
    x = cuops.sample_normal(mu, sigma, n, shared_noise=True, **options)
    for column in {0, shape[-1] // 2, shape[-1] - 1}:
        one = [a.reshape(-1, shape[-1])[-1, column, None] for a in (mu, sigma)]
        assert torch.equal(x.reshape(-1, n, shape[-1])[-1, :, column, None], cuops.sample_normal(*one, n, **options))
    misaligned = mu.new_empty(x.numel() + 1)[1:].view(x.shape)
    assert torch.equal(cuops.sample_normal(mu, sigma, n, shared_noise=True, out=misaligned, **options), x)


@pytest.mark.gpu
@pytest.mark.cached
@pytest.mark.parametrize(
    ("d", "n", "shared"), [*itertools.product([3, 110, 256], [1, 5, 1024, 40_000], [False]), (256, 200_000, True)]
)
def test_replays_count_on_in_any_grid(d, n, shared):
    mu, graph = torch.zeros(d, device="cuda"), torch.cuda.CUDAGraph()
    cuops.sample_normal(mu, 1.0, n, shared_noise=shared)
    torch.manual_seed(11)
    seeds = [torch.empty((), dtype=torch.int64).random_() for _ in range(2)]
    torch.manual_seed(11)
    with torch.cuda.graph(graph):
        drawn = [cuops.sample_normal(mu, 1.0, n, shared_noise=shared) for _ in seeds]
    for replay in range(3):
        graph.replay()
        for seed, x in zip(seeds, drawn, strict=True):
            state = torch.stack([seed, torch.tensor(replay)]).cuda()
            assert torch.equal(x, cuops.sample_normal(mu, 1.0, n, seed=state, shared_noise=shared))


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("strict", [False, True])
def test_sizes_with_a_name_are_not_bounded_in_exported_programs(dimension, strict, device):
    class Draws(torch.nn.Module):
        def forward(self, mu):
            return cuops.sample_normal(mu, 1.0, mu.shape[0], seed=3)

    dynamic = ({dimension: torch.export.Dim("n")},)
    mu, longer = (torch.zeros(size, device=device) for size in ((5, 3), (9, 3) if dimension == 0 else (5, 11)))
    exported = torch.export.export(Draws(), (mu,), dynamic_shapes=dynamic, strict=strict).module()
    assert torch.equal(exported(longer), Draws()(longer))


def test_numbers_of_samples_stay_symbolic_in_exported_programs(device):
    class Draws(torch.nn.Module):
        def forward(self, mu, like):
            return cuops.sample_normal(mu, 1.0, like.shape[0], seed=3, start=like.shape[0] + 1)

    mu, like, longer = (torch.zeros(size, device=device) for size in (5, 6, 9))
    dynamic = None, {0: torch.export.Dim.DYNAMIC}
    for strict in (False, True):
        exported = torch.export.export(Draws(), (mu, like), dynamic_shapes=dynamic, strict=strict).module()
        assert torch.equal(exported(mu, longer), Draws()(mu, longer))


def test_seeds_come_from_the_cpu_whatever_the_default_device():
    def draw():
        return cuops.sample_normal(np.zeros(4), 1.0, 3, generator=torch.Generator().manual_seed(1))

    want = draw()
    with torch.device("meta"):
        assert np.array_equal(draw(), want)


def test_fake_samples_on_cuda_advance_no_generator():
    cuda = torch.cuda.is_available()
    before = torch.cuda.get_rng_state() if cuda else None
    with torch._subclasses.FakeTensorMode():
        assert cuops.sample_normal(torch.zeros(4, device="cuda"), 1.0, 3).shape == (3, 4)
    assert not cuda or torch.equal(torch.cuda.get_rng_state(), before)
