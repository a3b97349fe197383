"""RMSNorm as an operator of PyTorch: gradients, compiled graphs, CUDA graphs, streams and devices."""

from __future__ import annotations

import itertools
import threading

import cuops
import pytest
import torch
from rms_norm_samples import DTYPES, SHAPES, WIDE, assert_close, definition, make
from torch._dynamo.testing import CompileCounter

gpu = pytest.mark.gpu


GRADIENT_SHAPES = [(3, 5), (40, 64), (7, 1000), (33, 1024), (5, 4096), (3, 4097), (2, 8192), (700, 96)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [*GRADIENT_SHAPES, pytest.param((9, 40000), marks=gpu), pytest.param((3, 131072), marks=gpu)], ids=str
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_gradients_agree_with_the_definition(shape, with_bias, dtype, device):
    n = shape[-1]
    x, residual = (make(shape, dtype, device, seed).requires_grad_() for seed in (0, 1))
    weight, bias = (make((n,), dtype, device, seed).requires_grad_() for seed in (2, 3))
    dy, dh = (make(shape, dtype, device, seed) for seed in (4, 5))
    y, h = cuops.rms_norm(x, weight, bias if with_bias else None, 1e-4, residual=residual)
    inputs = [x, residual, weight] + ([bias] if with_bias else [])
    got = torch.autograd.grad((y, h), inputs, (dy, dh))

    wide_h, wide_weight, wide_dy = (t.detach().double().requires_grad_() for t in (h, weight, dy))
    wide_y = wide_h * torch.rsqrt(wide_h.square().mean(-1, keepdim=True) + 1e-4) * wide_weight
    dx, dweight = torch.autograd.grad(wide_y, [wide_h, wide_weight], wide_dy)
    dx = dx + dh.double()
    result, sums = torch.finfo(dtype), torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    for a, b in zip(got, [dx, dx, dweight, wide_dy.sum(0)], strict=False):
        # One rounding to the result, and what float32 loses in sums over a row or over all rows of terms of size 10.
        allowed = result.eps / 2 * b.abs() + sums.eps * (16 + n**0.5 / 8 + shape[0] ** 0.5) * 10
        assert ((a.double() - b).abs() <= allowed).all()
    again = torch.autograd.grad(
        cuops.rms_norm(x, weight, bias if with_bias else None, 1e-4, residual=residual), inputs, (dy, dh)
    )
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.parametrize("with_residual", [False, True])
def test_opcheck(with_residual, device):
    for dtype, n in itertools.product((torch.float32, torch.bfloat16), (8, 13)):
        x, weight, bias = (make(shape, dtype, device).requires_grad_() for shape in ((3, n), (n,), (n,)))
        residual = make((3, n), dtype, device).requires_grad_() if with_residual else None
        torch.library.opcheck(torch.ops.cuops.rms_norm_fwd.default, (x, residual, weight, bias, 1e-6, 0.0, None))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_into_one_graph(dynamic, device):
    @torch.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager" if device.type == "cpu" else "inductor")
    def layer(x, weight, residual):
        y, h = cuops.rms_norm(x, weight, residual=residual)
        return cuops.rms_norm(y * 2, weight) + h

    for rows in (3, 5):
        x, weight, residual = (
            make((rows, 64), device=device),
            make((64,), device=device),
            make((rows, 64), device=device),
        )
        y, h = cuops.rms_norm(x, weight, residual=residual)
        torch.testing.assert_close(layer(x, weight, residual), cuops.rms_norm(y * 2, weight) + h)


def test_compiled_code_takes_sizes_that_it_does_not_know(device):
    counter = CompileCounter()

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def normalized(x):
        return cuops.rms_norm(x, normalized_shape=x.shape[1:])

    for n in range(4, 8):
        x = make((2, n, 3), torch.float32, device, n)
        torch.testing.assert_close(normalized(x), cuops.rms_norm(x, normalized_shape=(n, 3)))
    assert counter.frame_count == 1


def test_compiled_graphs_call_the_operator(device):
    found = []

    def backend(module, _):
        found.extend(str(node.target) for node in module.graph.nodes)
        return module

    torch.compile(cuops.rms_norm, fullgraph=True, backend=backend)(make((3, 64), device=device))
    assert "cuops.rms_norm_fwd" in found


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, *WIDE], ids=str)
def test_every_path_gives_the_same_bits(shape, dtype):
    x, weight = make(shape, dtype, "cuda"), make(shape[-1:], dtype, "cuda", 1)
    want = torch.ops.cuops.rms_norm_fwd(x, None, weight, None, 1e-6, 0.0, None)[0]
    assert torch.equal(cuops.rms_norm(x, weight), want)
    with torch.no_grad():
        assert torch.equal(cuops.rms_norm(x.requires_grad_(), weight), want)
    assert torch.equal(cuops.rms_norm(x, weight), want)
    for _ in range(20):
        assert torch.equal(cuops.rms_norm(x.detach(), weight), want)


@gpu
@pytest.mark.captures
def test_cuda_graph_replays_on_new_data():
    x, weight = make((64, 4096), torch.bfloat16, "cuda"), make((4096,), torch.bfloat16, "cuda", 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = cuops.rms_norm(x, weight)
    x.copy_(make((64, 4096), torch.bfloat16, "cuda", 2))
    graph.replay()
    assert torch.equal(y, cuops.rms_norm(x, weight))


@gpu
def test_works_on_the_current_stream():
    x = torch.zeros(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x.fill_(2.0)
        y = cuops.rms_norm(x)
    stream.synchronize()
    torch.testing.assert_close(y, torch.ones_like(y))


@gpu
def test_threads_and_streams_do_not_disturb_each_other():
    results = {}

    def work(index):
        with torch.cuda.stream(torch.cuda.Stream()):
            x = make((257, 1000 + 8 * index), device="cuda", seed=index)
            results[index] = [cuops.rms_norm(x) for _ in range(50)], cuops.rms_norm(x.cpu().numpy())
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(4):
        x = make((257, 1000 + 8 * index), device="cuda", seed=index)
        on_gpu, on_host = results[index]
        assert all(torch.equal(y, cuops.rms_norm(x)) for y in on_gpu)
        assert torch.equal(torch.from_numpy(on_host), cuops.rms_norm(x).cpu())


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_gpu_that_is_not_current():
    assert torch.cuda.current_device() == 0
    on_first, on_second = make((100, 3000), device="cuda:0"), make((100, 3000), device="cuda:1")
    results = [(cuops.rms_norm(on_first), cuops.rms_norm(on_second)) for _ in range(20)]
    assert torch.cuda.current_device() == 0
    for first, second in results:
        assert second.device == on_second.device
        assert torch.equal(first.cpu(), second.cpu())
    assert_close(results[0][1], definition(on_second)[0], 3000)


@pytest.mark.parametrize(
    ("with_weight", "with_bias", "with_residual"), list(itertools.product([False, True], repeat=3))
)
def test_gradients(with_weight, with_bias, with_residual, device):
    x = make((3, 5), torch.float64, device).requires_grad_()
    others = [
        make(shape, torch.float64, device, seed).requires_grad_() if wanted else None
        for seed, (shape, wanted) in enumerate([((5,), with_weight), ((5,), with_bias), ((3, 5), with_residual)], 1)
    ]

    def call(x, weight, bias, residual):
        return cuops.rms_norm(x, weight, bias, 1e-3, residual=residual, weight_offset=0.5, return_rstd=True)

    assert torch.autograd.gradcheck(call, (x, *others))
    assert torch.autograd.gradgradcheck(call, (x, *others))
