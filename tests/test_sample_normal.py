"""Normal samples: which numbers a call draws, in which layout, from which random state."""

from __future__ import annotations

import functools
import itertools
import math

import cuops
import numpy as np
import pytest
import torch
from cuops import _backend
from sample_normal_samples import parameters
from samples import DTYPES
from torch._dynamo.testing import CompileCounterWithBackend

# Philox-4x32-10 at 0, and at digits of pi: the known answers of its authors' library, Random123.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter, key, answer):
    from cuops._sample_normal.noise import philox

    words = [np.array([word]) for word in counter]
    assert tuple(int(word[0]) for word in philox(words, key)) == answer
    words = [torch.tensor([word]) for word in counter]
    assert tuple(int(word) for word in philox(words, key)) == answer


@pytest.mark.parametrize("part", [0, 1])
def test_a_counter_has_in_its_top_word_what_is_beyond_32_bits(part):
    from cuops._sample_normal.noise import philox, words

    group, column, stream = (np.array([(high << 32) + low]) for high, low in ((5, 3), (9, 2), (7, 4)))
    counter = [np.array([word]) for word in (3, 2, 4, 1 << 31 | part << 30 | 7 << 18 | 9 << 10 | 5)]
    assert words(0x0123456789ABCDEF, stream, group, column, part) == philox(counter, (0x89ABCDEF, 0x01234567))


def test_a_number_as_sigma_is_not_rounded_to_the_dtype_of_mu(device):
    mu = torch.zeros(5, device=device, dtype=torch.float16)
    noise = cuops.sample_normal(mu, 1.0, 4, seed=1, dtype=torch.float32)
    for sigma in (1e5, 1e-8, 0.7):
        x = cuops.sample_normal(mu, sigma, 4, seed=1, dtype=torch.float32)
        torch.testing.assert_close(x, noise * sigma, rtol=1e-6, atol=0)
        assert torch.equal(x, cuops.sample_normal(mu.float(), sigma, 4, seed=1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("sample_dim", "shared", "antithetic", "bounded"), list(itertools.product([0, -1], *[[False, True]] * 3))
)
@pytest.mark.parametrize("shape", [(10,), (33,), (2, 3, 8)], ids=str)
def test_parts_of_a_draw_are_bitwise_those_of_the_whole(shape, sample_dim, shared, antithetic, bounded, dtype, device):
    mu, sigma = parameters(shape, dtype, device)
    options = {"sample_dim": sample_dim, "shared_noise": shared, "antithetic": antithetic, "seed": 7}
    if bounded:
        options |= {"low": -0.5, "high": 1.25}
    axis = len(shape) - 1 if sample_dim == 0 else -1
    whole = cuops.sample_normal(mu, sigma, 41, **options)
    parts = [cuops.sample_normal(mu, sigma, n, start=k, **options) for k, n in ((0, 3), (3, 1), (4, 18), (22, 19))]
    assert torch.equal(torch.cat(parts, axis), whole)


def test_dtype_has_any_spelling(device):
    mu = torch.zeros(3, device=device)
    draws = [cuops.sample_normal(mu, 1.0, 4, dtype=dtype, seed=1) for dtype in (torch.float64, np.float64, "float64")]
    assert all(x.dtype == torch.float64 and torch.equal(x, draws[0]) for x in draws)
    mu, dtypes = mu.cpu().numpy(), (torch.float64, np.float64, np.dtype("float64"), "float64")
    draws = [cuops.sample_normal(mu, 1.0, 4, dtype=dtype, seed=1) for dtype in dtypes]
    assert all(x.dtype == np.float64 and np.array_equal(x, draws[0]) for x in draws)
    pytest.importorskip("ml_dtypes")
    x = cuops.sample_normal(mu, 1.0, 4, dtype=torch.bfloat16, seed=1)
    assert x.dtype == "bfloat16"
    assert np.allclose(x.astype(np.float64), draws[0], rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bounded", [False, True])
def test_both_layouts_hold_the_same_numbers(bounded, dtype, device):
    mu, sigma = parameters((3, 13), dtype, device)
    options = {"seed": 1, "low": 0.0} if bounded else {"seed": 1}
    rows = cuops.sample_normal(mu, sigma, 37, **options)
    columns = cuops.sample_normal(mu, sigma, 37, sample_dim=-1, **options)
    assert rows.shape == (3, 37, 13)
    assert columns.shape == (3, 13, 37)
    assert columns.is_contiguous()
    assert torch.equal(rows.mT, columns)


def test_shared_noise_is_that_of_dimension_zero(device):
    mu, sigma = parameters((2, 9), torch.float64, device)
    plain = cuops.sample_normal(torch.zeros_like(mu), 1.0, 21, seed=5)
    shared = cuops.sample_normal(mu, sigma, 21, seed=5, shared_noise=True)
    assert torch.allclose(shared, mu[:, None] + sigma[:, None] * plain[0, :, :1], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_antithetic_samples_mirror_the_plain_ones(dtype, device):
    zeros = torch.zeros(7, dtype=dtype, device=device)
    plain = cuops.sample_normal(zeros, 1.0, 25, seed=5)
    pairs = cuops.sample_normal(zeros, 1.0, 49, seed=5, antithetic=True)
    assert torch.equal(pairs[0::2], plain)
    assert torch.equal(pairs[1::2], -plain[:24])


@pytest.mark.parametrize("sigma", [0.0, 2.5])
def test_sigma_may_be_a_number(sigma, device):
    mu, _ = parameters(device=device)
    expected = cuops.sample_normal(mu, torch.full_like(mu, sigma), 6, seed=2)
    assert torch.equal(cuops.sample_normal(mu, sigma, 6, seed=2), expected)
    if sigma == 0:
        assert torch.equal(expected, mu.expand(6, -1))


def test_mu_and_sigma_broadcast(device):
    mu, sigma = parameters((4, 5), device=device)
    wide = cuops.sample_normal(mu[:, :1].expand(4, 5), sigma[0].expand(4, 5), 6, seed=2)
    assert torch.equal(cuops.sample_normal(mu[:, :1], sigma[0], 6, seed=2), wide)


def test_float64_continues_the_digits_of_float32(device):
    zeros = torch.zeros(100, dtype=torch.float64, device=device)
    precise = cuops.sample_normal(zeros, 1.0, 2000, seed=4)
    rough = cuops.sample_normal(zeros, 1.0, 2000, seed=4, dtype=torch.float32)
    # The angle is off by at most pi / 4 / 2^22, u by 2^-24, and by more where the radius is small.
    assert (precise - rough).abs().amax() < 1e-4
    assert (precise - rough).abs().median() < 1e-7
    assert not torch.equal(precise, rough.double())


def test_numpy_arrays_give_the_numbers_of_tensors():
    mu, sigma = parameters((3, 17), torch.float64)
    for options in ({}, {"low": -1.0, "high": 0.0}, {"antithetic": True}, {"sample_dim": -1}, {"shared_noise": True}):
        expected = cuops.sample_normal(mu, sigma, 11, seed=3, **options).numpy()
        got = cuops.sample_normal(mu.numpy(), sigma.numpy(), 11, seed=3, **options)
        assert isinstance(got, np.ndarray)
        np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-14)


def test_a_generator_gives_arrays_the_samples_of_tensors():
    mu = torch.zeros(3, dtype=torch.float64)
    x, y = (cuops.sample_normal(m, 1.0, 5, generator=torch.Generator().manual_seed(8)) for m in (mu, mu.numpy()))
    np.testing.assert_allclose(y, x.numpy(), rtol=1e-13, atol=1e-14)


def test_a_generator_reproduces_and_moves_on(device):
    mu, sigma = parameters(device=device)
    generator = torch.Generator(device).manual_seed(11)
    first, second = (cuops.sample_normal(mu, sigma, 9, generator=generator) for _ in range(2))
    assert not torch.equal(first, second)
    generator.manual_seed(11)
    assert torch.equal(cuops.sample_normal(mu, sigma, 9, generator=generator), first)
    torch.manual_seed(11)
    assert torch.equal(cuops.sample_normal(mu, sigma, 9), first)
    assert torch.equal(cuops.sample_normal(mu, sigma, 9), second)


def test_numpy_random_state_reproduces():
    mu, sigma = (a.numpy() for a in parameters())
    np.random.seed(1)
    first, second = cuops.sample_normal(mu, sigma, 5), cuops.sample_normal(mu, sigma, 5)
    assert not np.array_equal(first, second)
    np.random.seed(1)
    np.testing.assert_array_equal(cuops.sample_normal(mu, sigma, 5), first)
    drawn = [cuops.sample_normal(mu, sigma, 5, generator=np.random.default_rng(3)) for _ in range(2)]
    np.testing.assert_array_equal(*drawn)


def test_a_seed_leaves_the_generator_alone(device):
    mu, sigma = parameters(device=device)
    torch.manual_seed(3)
    expected = torch.randn(5, device=device)
    torch.manual_seed(3)
    assert torch.equal(cuops.sample_normal(mu, sigma, 9, seed=1), cuops.sample_normal(mu, sigma, 9, seed=1))
    cuops.sample_normal(mu, sigma, 0)
    assert torch.equal(torch.randn(5, device=device), expected)


def test_a_seed_may_be_a_tensor_with_a_stream(device):
    mu, sigma = parameters(device=device)
    expected = cuops.sample_normal(mu, sigma, 9, seed=-5)
    assert torch.equal(cuops.sample_normal(mu, sigma, 9, seed=2**64 - 5), expected)
    assert torch.equal(cuops.sample_normal(mu, sigma, 9, seed=torch.tensor(-5, device=device)), expected)
    assert torch.equal(cuops.sample_normal(mu, sigma, 9, seed=torch.tensor([-5, 0], device=device)), expected)
    columns = torch.tensor([[-5, 7], [0, 7]], device=device)
    assert torch.equal(cuops.sample_normal(mu, sigma, 9, seed=columns[:, 0]), expected)
    assert torch.equal(cuops.sample_normal(mu, 1.0, 9, seed=columns[:, 0]), cuops.sample_normal(mu, 1.0, 9, seed=-5))
    other = cuops.sample_normal(mu, sigma, 9, seed=torch.tensor([-5, 1], device=device))
    assert not (other == expected).any()


def test_out_may_be_memory_of_the_parameters(array):
    out = array(np.ones((40, 8192)).tolist())  # over all multiprocessors, or several chunks
    out[0], out[25] = 5, 2
    want = cuops.sample_normal(out[0] + 0, out[25] + 0, 40, seed=1)
    assert cuops.sample_normal(out[0], out[25], 40, seed=1, out=out) is out
    assert (out == want).all()


@pytest.mark.parametrize("sample_dim", [0, -1])
def test_out_is_written_and_returned(sample_dim, device):
    mu, sigma = parameters((2, 12), device=device)
    expected = cuops.sample_normal(mu, sigma, 8, seed=1, sample_dim=sample_dim)
    for out in (torch.empty_like(expected), torch.empty_like(expected.mT).mT, torch.empty_like(expected)[..., ::1]):
        assert cuops.sample_normal(mu, sigma, 8, seed=1, sample_dim=sample_dim, out=out) is out
        assert torch.equal(out, expected)
    array = np.empty(expected.shape, np.float32)
    arguments = mu.cpu().numpy(), sigma.cpu().numpy(), 8
    assert cuops.sample_normal(*arguments, seed=1, sample_dim=sample_dim, out=array) is array
    np.testing.assert_allclose(array, expected.cpu().numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("shape", "num_samples"), [((0,), 5), ((3, 0), 5), ((0, 3), 5), ((4,), 0), ((2, 4), 0)])
def test_empty_draws(shape, num_samples, device):
    mu, sigma = parameters(shape, device=device)
    assert cuops.sample_normal(mu, sigma, num_samples).shape == (*shape[:-1], num_samples, shape[-1])
    assert cuops.sample_normal(mu, sigma, num_samples, sample_dim=-1).shape == (*shape, num_samples)
    assert cuops.sample_normal(mu.cpu().numpy(), sigma.cpu().numpy(), num_samples).shape[-2] == num_samples


def test_numpy_is_silent_where_it_is_told_to_raise(device):
    tiny, large = np.array([1e-7, 1e4], np.float16), np.array([1e-300, 1e300])
    with np.errstate(all="raise"):
        assert np.isfinite(cuops.sample_normal(tiny, 1.0, 9, seed=1, low=-1e300, high=1e-9)).all()
        assert cuops.sample_normal(large, large, 9, seed=1, low=-1e-300, dtype=np.float32).shape == (9, 2)
        signaling = np.full(2, 0x7FA00000, np.uint32).view(np.float32)
        assert np.isnan(cuops.sample_normal(signaling, np.ones(2, np.float32), 9)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_is_that_of_the_result(dtype, device):
    mu, sigma = parameters(dtype=torch.float32, device=device)
    x = cuops.sample_normal(mu, sigma, 9, seed=1, dtype=dtype)
    assert x.dtype == dtype
    single = cuops.sample_normal(mu, sigma, 9, seed=1)
    # bfloat16 is of a shorter transform on the GPU, so that a few are rounded another way.
    assert torch.allclose(x.double(), single.double(), rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("bounded", [False, True])
def test_float16_is_rounded_from_the_numbers_of_float32_by_numpy_and_by_pytorch(bounded, monkeypatch):
    monkeypatch.setattr(_backend, "gpu_for_host_arrays", lambda: None)
    mu, sigma = parameters((200,), torch.float16)
    options = {"seed": 3, "low": -0.5} if bounded else {"seed": 3}
    single = cuops.sample_normal(mu, sigma, 1000, dtype=torch.float32, **options)
    assert torch.equal(cuops.sample_normal(mu, sigma, 1000, **options), single.half())
    array = cuops.sample_normal(mu.numpy(), sigma.numpy(), 1000, **options)
    np.testing.assert_array_equal(array, single.half().numpy())


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("bounds", [{"low": -1.0, "high": 1.0}, {"low": -1.0}, {"high": 1.0}], ids=str)
def test_a_mean_that_is_nan_gives_nan_between_bounds(device, kind, bounds):
    mu = torch.tensor([math.nan, 0.0], device=device)
    x = cuops.sample_normal(mu if kind == "torch" else mu.cpu().numpy(), 1.0, 64, seed=1, **bounds)
    x = torch.as_tensor(x)
    assert x[:, 0].isnan().all()
    assert x[:, 1].isfinite().all()


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize(
    ("sigma", "low", "high"),
    [(1e17, 1.0, 2.0), (1e13, -1.0, 1.0), (math.inf, 0.0, 1.0), (1.0, 1e-12, 2e-12), (1e8, 0.0, 1.0)],
)
def test_between_bounds_that_are_near_for_sigma_samples_are_uniform(device, kind, sigma, low, high):
    n = 100_000
    mu, sigma = (
        torch.zeros(1, dtype=torch.float64, device=device),
        torch.full((1,), sigma, dtype=torch.float64, device=device),
    )
    given = (mu, sigma) if kind == "torch" else (mu.cpu().numpy(), sigma.cpu().numpy())
    x = torch.as_tensor(cuops.sample_normal(*given, n, seed=1, low=low, high=high)).flatten().sort().values
    want = (torch.arange(n, dtype=torch.float64, device=x.device) + 0.5) / n
    # The largest distance of n ordered uniform numbers from their places is 2 / sqrt(n) once in 1500 times.
    assert ((x - low) / (high - low) - want).abs().max() < 2 / n**0.5


def test_a_narrow_interval_in_a_tail_has_an_exponential_density(device):
    low, width, n = 1e6, 3e-6, 100_000
    mu = torch.zeros(1, dtype=torch.float64, device=device)
    x = (cuops.sample_normal(mu, 1.0, n, seed=1, low=low, high=low + width) - low).flatten().sort().values.cpu() / width
    want = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    # Between 1e6 and its neighbours there are 1e-10: of the width, 4e-5.
    assert (torch.expm1(-low * width * x) / math.expm1(-low * width) - want).abs().max() < 2 / n**0.5 + 1e-3


def test_bounds_may_have_more_dimensions_than_mu(device):
    mu, sigma = parameters((4,), torch.float64, device)
    low = torch.tensor([[-1.0], [0.0], [0.5]], dtype=torch.float64, device=device)
    expected = cuops.sample_normal(mu.expand(3, 4), sigma, 6, low=low.expand(3, 4), seed=1)
    assert expected.shape == (3, 6, 4)
    assert torch.equal(cuops.sample_normal(mu, sigma, 6, low=low, seed=1), expected)
    array = cuops.sample_normal(mu.cpu().numpy(), sigma.cpu().numpy(), 6, low=low.cpu().numpy(), seed=1)
    np.testing.assert_allclose(array, expected.cpu().numpy(), rtol=1e-12)


@pytest.mark.parametrize("dynamic", [None, True])
def test_seeds_that_change_stay_in_two_graphs(dynamic, device):
    def draw(mu, seed):
        return cuops.sample_normal(mu, 1.0, 9, seed=seed)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(draw, fullgraph=True, dynamic=dynamic, backend=counter)
    mu, _ = parameters(device=device)
    for seed in (0, 3, 4, -5, 2**62, -(2**63), 2**63 - 1):
        assert torch.equal(compiled(mu, seed), draw(mu, seed)), seed
    assert counter.frame_count <= 2


@pytest.mark.parametrize("compiled", [False, True])
def test_parameters_may_change_before_the_backward(compiled, device):
    draw = functools.partial(cuops.sample_normal, num_samples=5, seed=1)
    run = torch.compile(draw, backend="aot_eager") if compiled else draw
    mu, sigma = parameters((4,), device=device)
    want = torch.autograd.grad(draw(mu.requires_grad_(), sigma.requires_grad_()).sum(), (mu, sigma))
    x = run(mu, sigma)
    with torch.no_grad():
        mu += 1
        sigma *= 0.5
    for got, expected in zip(torch.autograd.grad(x.sum(), (mu, sigma)), want, strict=True):
        assert torch.equal(got, expected)
    with torch.inference_mode():
        other = torch.zeros(4, device=device)
    run(other, sigma).sum().backward()
    assert torch.equal(sigma.grad, want[1])


def test_what_is_written_into_is_known_to_autograd(device):
    out = torch.zeros(4, 3, device=device)
    weight = torch.ones(4, 3, device=device, requires_grad=True)
    loss = (weight * out).sum()
    cuops.sample_normal(torch.zeros(3, device=device), 1.0, 4, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
