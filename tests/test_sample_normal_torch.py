"""Normal samples in PyTorch: gradients, compilation, CUDA graphs, streams, and what is refused."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import cuops
import numpy as np
import pytest
import torch
from cuops import errors
from cuops._sample_normal import eager
from sample_normal_samples import leaves, parameters
from samples import DTYPES
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

gpu = pytest.mark.gpu


@pytest.mark.parametrize("bounded", [False, True])
def test_the_operator_keeps_what_it_promises_pytorch(bounded, device):
    mu, sigma = leaves(*parameters((2, 6), torch.float32, device))
    low, high = (mu.detach() - 1, mu.detach() + 1) if bounded else (None, None)
    state = torch.tensor([4], device=device)
    for state_or_none, sample_dim in ((None, 0), (state, -1)):
        arguments = mu, sigma, low, high, state_or_none, 1, 0, 9, 2, sample_dim, False, False
        torch.library.opcheck(torch.ops.cuops.sample_normal_fwd, (*arguments, torch.float32))
        grad = torch.randn((2, 9, 6) if sample_dim == 0 else (2, 6, 9), device=device, requires_grad=True)
        if bounded:  # its derivative ends here
            arguments = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments]
            grad.requires_grad_(False)
        torch.library.opcheck(torch.ops.cuops.sample_normal_bwd, (grad, *arguments))
        for columns, shared, antithetic in ((6, False, False), (6, True, False), (6, False, True), (0, True, True)):
            draw = torch.arange(columns, device=device), *arguments[4:-2], shared, antithetic
            torch.library.opcheck(torch.ops.cuops.sample_normal_noise, (*draw, not bounded, bounded))


@pytest.mark.parametrize("seed", [None, 3])
def test_compiles_into_one_graph(seed, device):
    backend = "inductor" if device.type == "cuda" else "aot_eager"

    @torch.compile(fullgraph=True, backend=backend)
    def step(mu, sigma):
        x = cuops.sample_normal(mu, sigma, 9, seed=seed)
        return (x.square().mean(0) * 2).sum(), x

    mu, sigma = leaves(*parameters(device=device))
    torch.manual_seed(1)
    loss, first = step(mu, sigma)
    loss.backward()
    assert torch.allclose(mu.grad, 4 * first.mean(0), rtol=1e-4, atol=1e-5)
    second = step(mu, sigma)[1]
    torch.manual_seed(1)
    assert torch.equal(step(mu, sigma)[1], first)
    assert torch.equal(first, second) == (seed is not None)
    if seed is not None:
        assert torch.equal(first, cuops.sample_normal(mu, sigma, 9, seed=seed))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traced_graphs_draw_anew_each_time(device):
    mu = torch.zeros(5, device=device)
    traced = torch.jit.trace(lambda mu: cuops.sample_normal(mu, 1.0, 4), mu, check_trace=False)
    first, second = traced(mu), traced(mu)
    assert first.shape == (4, 5)
    assert not torch.equal(first, second)


def test_bounds_compile_into_the_graph(device):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def draw(mu, sigma):
        return cuops.sample_normal(mu, sigma, 9, low=-0.1, high=1.0, seed=3)

    mu, sigma = parameters(device=device)
    assert torch.equal(draw(mu, sigma), cuops.sample_normal(mu, sigma, 9, low=-0.1, high=1.0, seed=3))


@pytest.mark.parametrize("dynamic", [None, True])
def test_numbers_that_change_stay_in_two_graphs(dynamic, device):
    def draw(mu, sigma, bound):
        return cuops.sample_normal(mu, sigma, 9, low=-bound, high=bound, seed=3)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(draw, fullgraph=True, dynamic=dynamic, backend=counter)
    mu, _ = parameters(device=device)
    for sigma, bound in ((0.5, 4.0), (0.6, 5.0), (0.7, 6.1), (0.8, 7.5)):
        assert torch.equal(compiled(mu, sigma, bound), draw(mu, sigma, bound))
    assert counter.frame_count <= 2


def test_exports_for_a_number_of_distributions_that_depends_on_data(device):
    class Draw(torch.nn.Module):
        def forward(self, x):
            return cuops.sample_normal(x[x[:, 0] > 0], 1.0, 4, seed=3)

    x = torch.tensor([[1.0, 2.0], [-1.0, 3.0], [4.0, 5.0]], device=device)
    program = torch.export.export(Draw(), (x,))
    for given in (x, -x, x.abs()):
        assert torch.equal(program.module()(given), Draw()(given))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_traces_as_an_operator(mode, device):
    def draw(mu):
        return cuops.sample_normal(mu, 0.7, 9, low=-0.3, seed=3)

    mu, _ = parameters(device=device)
    assert torch.equal(make_fx(draw, tracing_mode=mode)(mu)(mu), draw(mu))


def test_fake_tensors_have_fake_samples(device):
    with FakeTensorMode() as mode:
        fake = torch.zeros(3, 5, device=device)
        assert cuops.sample_normal(fake, 1.0, 4, low=-1.0).shape == (3, 4, 5)
    x = cuops.sample_normal(mode.from_tensor(torch.zeros(5, device=device)), 1.0, 4, high=1.0, seed=2)
    assert (x.shape, x.device) == ((4, 5), fake.device)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("sample_dim", [0, -1])
@pytest.mark.parametrize(("n", "shape"), [(0, (3,)), (2, (0,)), (0, (2, 3))], ids=str)
def test_no_samples_have_gradients_of_zero(n, shape, sample_dim, bounded, device):
    given = leaves(*(torch.full(shape, value, device=device) for value in (0.0, 1.0, -1.0, 2.0)[: 2 + 2 * bounded]))
    mu, sigma, low, high = (*given, None, None)[:4]
    x = cuops.sample_normal(mu, sigma, n, low=low, high=high, sample_dim=sample_dim)
    assert x.numel() == 0
    for gradient, a in zip(torch.autograd.grad(x.sum(), given), given, strict=True):
        assert torch.equal(gradient, torch.zeros_like(a))


def test_transforms_go_through_the_formula(device):
    mu, sigma = parameters((4, 5), torch.float64, device)
    plain = cuops.sample_normal(mu[2], sigma[2], 7, seed=1)
    mapped = torch.func.vmap(lambda m, s: cuops.sample_normal(m, s, 7, seed=1))(mu, sigma)
    assert torch.allclose(mapped[2], plain)
    derivative = torch.func.jacrev(lambda s: cuops.sample_normal(mu[2], s, 7, seed=1).sum(0))(sigma[2])
    assert torch.allclose(derivative.diagonal(), ((plain - mu[2]) / sigma[2]).sum(0))


def test_out_of_any_size_is_written_when_compiled():
    draw = torch.compile(
        lambda mu, out: cuops.sample_normal(mu, 1.0, 5, seed=1, out=out),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for d in (8, 9):
        out = torch.empty(d, 5).T
        assert torch.equal(draw(torch.ones(d), out), cuops.sample_normal(torch.ones(d), 1.0, 5, seed=1))


@gpu
@pytest.mark.cached
@pytest.mark.parametrize("with_generator", [False, True])
def test_every_replay_of_a_graph_draws_fresh_numbers(with_generator):
    mu, sigma = parameters((300,), device="cuda")
    options = {"generator": torch.cuda.default_generators[0]} if with_generator else {}
    graph = torch.cuda.CUDAGraph()
    torch.manual_seed(5)
    with torch.cuda.graph(graph):
        first, second = (cuops.sample_normal(mu, sigma, 1000, **options) for _ in range(2))
    drawn = []
    for _ in range(4):
        graph.replay()
        drawn += [first.clone(), second.clone()]
    for a, b in itertools.combinations(drawn, 2):
        assert not (a == b).any()
    z = torch.stack(drawn).sub(mu).div(sigma)
    assert abs(z.mean()) < 6 / z.numel() ** 0.5
    assert abs(z.square().mean() - 1) < 6 * (2 / z.numel()) ** 0.5
    if with_generator:
        torch.manual_seed(5)
        graph.replay()
        assert torch.equal(first, drawn[0])


@gpu
@pytest.mark.cached
def test_the_seed_before_a_capture_reproduces_its_replays():
    mu, sigma = parameters((64,), device="cuda")

    def replays():
        graph = torch.cuda.CUDAGraph()
        torch.manual_seed(8)
        with torch.cuda.graph(graph):
            x = cuops.sample_normal(mu, sigma, 100)
        drawn = []
        for _ in range(3):
            graph.replay()
            drawn.append(x.clone())
        return torch.stack(drawn)

    assert torch.equal(replays(), replays())


@gpu
@pytest.mark.cached
def test_a_graph_of_forward_and_backward_uses_one_noise():
    mu, sigma = leaves(*parameters((40,), device="cuda"))

    def step():
        x = cuops.sample_normal(mu, sigma, 50)
        return x, torch.autograd.grad(x.sum(), sigma)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        x, dsigma = step()
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        expected = ((x - mu) / sigma).sum(0)
        assert torch.allclose(dsigma, expected, rtol=1e-3, atol=1e-3)


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bounds", [{}, {"low": -0.5, "high": 2.0}, {"low": 6.0}, {"high": -20.0}], ids=str)
@pytest.mark.parametrize("sample_dim", [0, -1])
def test_the_cpu_reproduces_the_gpu(sample_dim, bounds, dtype):
    mu, sigma = torch.zeros(501, dtype=dtype), torch.ones(501, dtype=dtype)
    on_cpu, on_gpu = (
        cuops.sample_normal(a, b, 200, seed=6, sample_dim=sample_dim, **bounds).cpu().double()
        for a, b in ((mu, sigma), (mu.cuda(), sigma.cuda()))
    )
    eps = torch.finfo(dtype).eps
    # Units in the last place: three of the transform, and where the result is rounded another way, one more.
    # The quantiles of truncated float64 add up a few dozen operations.
    least = 64 * eps if bounds and dtype == torch.float64 else 1e-300
    assert ((on_cpu - on_gpu).abs() <= 4 * eps * on_cpu.abs() + least).all()


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [1, 2, 3, 4, 6, 7, 8, 64, 130])
def test_every_kernel_gives_the_same_bits(d, dtype):
    wide = parameters((136,), dtype, "cuda")
    whole = cuops.sample_normal(*wide, 1003, seed=9)
    mu, sigma = (a[:d] for a in wide)
    for start, n in ((0, 1003), (4, 16), (5, 33), (8, 512)):
        for sample_dim in (0, -1):
            x = cuops.sample_normal(mu, sigma, n, seed=9, start=start, sample_dim=sample_dim)
            assert torch.equal(x if sample_dim == 0 else x.T, whole[start : start + n, :d])
    for x in (
        torch.ops.cuops.sample_normal_fwd(mu, sigma, None, None, None, 9, 0, 1003, 0, 0, False, False, dtype),
        cuops.sample_normal(mu, sigma, 1003, seed=torch.tensor([9], device="cuda")),
        cuops.sample_normal(
            mu, sigma, 1003, seed=9, out=torch.empty(1003 * d + 1, dtype=dtype, device="cuda")[1:].view(1003, d)
        ),
    ):
        assert torch.equal(x, whole[:, :d])


@gpu
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize(
    ("shape", "n"), [((7,), 100), ((3, 1000), 2000), ((5,), 3_000_000), ((70_000,), 60), ((300, 70), 51)], ids=str
)
def test_numpy_arrays_on_the_gpu_are_bitwise_its_tensors(shape, n, dtype):
    mu, sigma = parameters(shape, getattr(torch, np.dtype(dtype).name))
    for options in ({}, {"sample_dim": -1, "start": 3}, {"antithetic": True}, {"low": -0.5} if n < 1000 else {}):
        got = cuops.sample_normal(mu.numpy(), sigma.numpy(), n, seed=3, **options)
        expected = cuops.sample_normal(mu.cuda(), sigma.cuda(), n, seed=3, **options)
        np.testing.assert_array_equal(got, expected.cpu().numpy())


@gpu
@pytest.mark.parametrize("library", ["cupy", "jax"])
def test_arrays_of_other_libraries_come_back_as_their_own(library):
    xp = pytest.importorskip("cupy") if library == "cupy" else pytest.importorskip("jax.numpy")
    mu, sigma = (a.numpy() for a in parameters((3, 8)))
    for options in ({}, {"low": -1.0, "high": 1.5}, {"low": 0.1, "high": 0.3, "dtype": torch.float16}):
        x = cuops.sample_normal(xp.asarray(mu), xp.asarray(sigma), 11, seed=3, **options)
        assert isinstance(x, type(xp.asarray(mu)))
        expected = cuops.sample_normal(torch.tensor(mu).cuda(), torch.tensor(sigma).cuda(), 11, seed=3, **options)
        assert np.array_equal(np.asarray(x.get() if library == "cupy" else x), expected.cpu().numpy())
    wide = {"low": np.full((3, 8), 0.1), "high": np.full((3, 8), 0.3)}  # float64, which float32 is rounded from
    x = cuops.sample_normal(xp.asarray(mu), 1.0, 11, seed=3, **{k: xp.asarray(v) for k, v in wide.items()})
    wide = {k: torch.tensor(np.asarray(v, str(xp.asarray(v).dtype))).cuda() for k, v in wide.items()}  # JAX has float32
    expected = cuops.sample_normal(torch.tensor(mu).cuda(), 1.0, 11, seed=3, **wide)
    assert np.array_equal(np.asarray(x.get() if library == "cupy" else x), expected.cpu().numpy())
    with pytest.raises(ValueError, match="^low: expected less than high everywhere in the samples' dtype, float16"):
        cuops.sample_normal(xp.asarray(mu), 1.0, 11, low=1.0, high=1.0001, dtype="float16")


@gpu
def test_threads_draw_different_numbers():
    mu, sigma = parameters((100,), device="cuda")
    drawn = []

    def work(_):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                drawn.append(cuops.sample_normal(mu, sigma, 10).cpu())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len({x.numpy().tobytes() for x in drawn}) == 80


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_samples_on_a_gpu_that_is_not_current():
    torch.cuda.manual_seed_all(5)
    first, second = (torch.zeros(1000, device=f"cuda:{index}") for index in range(2))
    draws = [(cuops.sample_normal(first, 1.0, 100), cuops.sample_normal(second, 1.0, 100)) for _ in range(20)]
    assert torch.cuda.current_device() == 0
    for a, b in draws:
        assert b.device == second.device
        assert torch.equal(a.cpu(), b.cpu())


@gpu
@pytest.mark.parametrize("sample_dim", [0, -1])
def test_samples_lie_where_pytorch_would_have_them(sample_dim, monkeypatch):
    mu = torch.zeros(33, device="cuda", dtype=torch.bfloat16)
    x = cuops.sample_normal(mu, 1.0, 70, sample_dim=sample_dim, seed=1)
    monkeypatch.setattr("cuops._sample_normal.eager._empty_on_current", None)
    y = cuops.sample_normal(mu, 1.0, 70, sample_dim=sample_dim, seed=1)
    assert (x.dtype, x.device, x.shape, x.stride()) == (y.dtype, y.device, y.shape, y.stride())
    assert torch.equal(x, y)


def test_a_graph_has_samples_that_are_written_into_an_array(device):
    mu, out = torch.zeros(3, device=device), torch.empty(4, 3, device=device)

    def draw(mu, out):
        return cuops.sample_normal(mu, 1.0, 4, seed=3, out=out)

    traced = make_fx(draw)(mu, out)
    assert torch.equal(traced(mu + 5, torch.empty_like(out)), cuops.sample_normal(mu + 5, 1.0, 4, seed=3))


@gpu
@pytest.mark.parametrize("others_draw", [False, True])
def test_a_call_that_fails_takes_back_its_numbers_unless_others_have_drawn_since(others_draw, monkeypatch):
    generator, mu = torch.Generator("cuda").manual_seed(1), torch.zeros(3, device="cuda")

    def fails(*_):
        if others_draw:
            torch.rand(4, device="cuda", generator=generator)
        raise errors.CuopsError("no kernel")

    monkeypatch.setattr(eager, "_library_fwd", lambda: fails)
    with pytest.raises(errors.CuopsError, match="no kernel"):
        cuops.sample_normal(mu, 1.0, 5, generator=generator)
    assert (generator.get_offset() > 4) == others_draw
    assert others_draw or generator.get_offset() == 0
