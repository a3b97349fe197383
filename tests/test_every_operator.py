"""What docs/index.md says of all operators in PyTorch (graphs, gradients, transforms, streams), and where each one is."""

from __future__ import annotations

import io
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cuops
import numpy as np
import pytest
import torch
from cuops import _bench, cem
from cuops.cli import run, selftest
from samples import OPERATORS
from torch._dynamo.testing import CompileCounter

ROOT = Path(__file__).parent.parent
gpu = pytest.mark.gpu

# Calls, and the sizes of what they take: 6 is the number of rows, which may be another one.
CALLS = {
    "rms_norm": (lambda x, weight, bias: cuops.rms_norm(x, weight, bias), [(6, 64), (64,), (64,)]),
    "rms_norm with a residual": (
        lambda x, residual, weight: cuops.rms_norm(x, weight, residual=residual),
        [(6, 64), (6, 64), (64,)],
    ),
    "rms_norm of long rows": (lambda x, weight: cuops.rms_norm(x, weight), [(6, 4096), (4096,)]),
    "kron_linear": (lambda x, a, b, bias: cuops.kron_linear(x, [a, b], bias), [(6, 64), (4, 8), (8, 8), (32,)]),
    "kron_linear by tensor cores": (lambda x, a, b: cuops.kron_linear(x, [a, b]), [(6, 4096), (64, 64), (64, 64)]),
    "kron_linear by GEMMs": (lambda x, a, b: cuops.kron_linear(x, [a, b]), [(6, 600), (200, 300), (5, 2)]),
    "sample_normal": (lambda mu, sigma: cuops.sample_normal(mu, sigma, 8, seed=3), [(6, 64), (6, 64)]),
    "sample_normal within bounds": (
        lambda mu, low: cuops.sample_normal(mu, 2.0, 8, low=low, high=9.0, seed=3),
        [(6, 64), (6, 64)],
    ),
}
ONCE = {"sample_normal within bounds"}  # which have no second derivatives

every_call = pytest.mark.parametrize(("call", "sizes"), CALLS.values(), ids=CALLS)
differentiable_twice = pytest.mark.parametrize(
    ("call", "sizes"), [of for name, of in CALLS.items() if name not in ONCE], ids=[n for n in CALLS if n not in ONCE]
)


def operands(sizes, device="cuda", seed=0, rows=6, dtype=torch.float32):
    """Positive numbers, which sigma has to be."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [tuple(rows if size == 6 else size for size in shape) for shape in sizes]
    return [torch.rand(shape, generator=generator, dtype=dtype).add(0.5).to(device) for shape in shapes]


def tuple_of(results):
    return results if isinstance(results, tuple) else (results,)


def are_equal(results, others):
    return all(map(torch.equal, tuple_of(results), tuple_of(others)))


def with_gradients(call, given, grads):
    """The results, and the gradients of all that is given."""
    results = tuple_of(call(*given))
    return *results, *torch.autograd.grad(results, given, grads[: len(results)])


def negated_on_reading(t):
    """t, as a tensor whose memory holds -t: what the imaginary part of a conjugate is."""
    return torch._neg_view(-t)


def test_every_operator_has_a_call_here():
    assert sorted({name.partition(" ")[0] for name in CALLS}) == OPERATORS


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_is_run_tested_measured_and_documented(operator):
    tables = {
        "cli/run.py": run.OPERATORS,
        "cli/selftest.py": selftest.SELF_TESTS,
        "_bench/__init__.py": _bench.OPERATORS,
    }
    files = [f"benchmarks/{operator}.py", f"docs/ops/{operator}.md", f"tests/test_{operator}.py"]
    pages = ["README.md", "packages/cuops/README.md", "docs/index.md"]
    missing = [f"packages/cuops/src/cuops/{table}" for table, operators in tables.items() if operator not in operators]
    missing += [file for file in files if not (ROOT / file).exists()]
    missing += [page for page in pages if not re.search(rf"\b{operator}\b", (ROOT / page).read_text())]
    assert not missing, "see docs/adding-an-op.md"


@every_call
def test_results_are_contiguous_memory_of_their_own(call, sizes, device):
    given = [t.requires_grad_() for t in operands(sizes, device)]
    before = [t.detach().clone() for t in given]
    for result in tuple_of(call(*given)):
        assert result.is_contiguous()
        result.add_(1)
    assert are_equal(tuple(given), tuple(before))


@pytest.mark.parametrize("differentiated", [False, True])
@every_call
def test_operands_that_are_negated_when_they_are_read(call, sizes, differentiated, device):
    given = operands(sizes, device)
    want = call(*given)
    for k in range(len(given)):
        others = [t.clone().requires_grad_() if differentiated else t for t in given]
        others[k] = negated_on_reading(given[k])
        assert others[k].is_neg()
        assert are_equal(call(*others), want), k


@differentiable_twice
def test_gradients_of_results_that_are_negated_when_they_are_read(call, sizes, device):
    given = [t.requires_grad_() for t in operands(sizes, device)]
    results = tuple_of(call(*given))
    grads = operands([y.shape for y in results], device)
    want = torch.autograd.grad(results, given, grads, retain_graph=True)
    for k in range(len(grads)):
        others = [negated_on_reading(g) if k == i else g for i, g in enumerate(grads)]
        for got, expected in zip(torch.autograd.grad(results, given, others, retain_graph=True), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


def test_rms_norm_in_place_of_what_is_negated_when_it_is_read(device):
    x, weight = operands([(6, 64), (64,)], device)
    want = cuops.rms_norm(x, weight)
    given = negated_on_reading(x)
    assert cuops.rms_norm_(given, weight) is given
    torch.testing.assert_close(given.resolve_neg(), want, rtol=0, atol=0)


@every_call
def test_compiles_into_one_node(call, sizes, device):
    found = []

    def backend(module, _):
        found.extend(node for node in module.graph.nodes if str(node.target).startswith("cuops."))
        return module

    given = operands(sizes, device)
    assert are_equal(torch.compile(call, fullgraph=True, backend=backend)(*given), call(*given))
    assert len(found) == 1


@every_call
def test_compiles_once_for_all_numbers_of_rows(call, sizes, device):
    counter = CompileCounter()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for rows in range(3, 7):
        given = operands(sizes, device, rows=rows)
        assert are_equal(compiled(*given), call(*given))
    assert counter.frame_count == 1


@every_call
def test_exports_and_is_loaded(call, sizes, device):
    class Layer(torch.nn.Module):
        def forward(self, *given):
            return call(*given)

    file = io.BytesIO()
    torch.export.save(torch.export.export(Layer(), tuple(operands(sizes, device))), file)
    file.seek(0)
    new = operands(sizes, device, seed=1)
    assert are_equal(torch.export.load(file).module()(*new), call(*new))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@every_call
def test_a_traced_graph_computes_with_new_numbers(call, sizes, device):
    traced = torch.jit.trace(call, tuple(operands(sizes, device)))
    new = operands(sizes, device, seed=1)
    assert are_equal(traced(*new), call(*new))


@every_call
def test_maps_over_each_operand(call, sizes, device):
    given = operands(sizes, device)
    for k in range(len(given)):
        several = [operands(sizes, device, seed)[k] for seed in range(1, 4)]
        mapped = torch.func.vmap(lambda a, k=k: call(*given[:k], a, *given[k + 1 :]))(torch.stack(several))
        one_by_one = [tuple_of(call(*given[:k], a, *given[k + 1 :])) for a in several]
        for got, want in zip(tuple_of(mapped), zip(*one_by_one, strict=True), strict=True):
            torch.testing.assert_close(got, torch.stack(want), rtol=1e-5, atol=1e-6)


@every_call
def test_derivatives_are_those_of_differences_and_the_same_each_time(call, sizes, device):
    given = [t.requires_grad_() for t in operands(sizes, device, dtype=torch.float64)]
    assert torch.autograd.gradcheck(call, given, fast_mode=True, check_forward_ad=True)


@differentiable_twice
def test_second_derivatives_are_those_of_differences(call, sizes, device):
    given = [t.requires_grad_() for t in operands(sizes, device, dtype=torch.float64)]
    assert torch.autograd.gradgradcheck(call, given, fast_mode=True)


@every_call
def test_twenty_runs_give_the_same_bits(call, sizes, device):
    given = [t.requires_grad_() for t in operands(sizes, device)]
    grads = operands([y.shape for y in tuple_of(call(*given))], device, seed=1)
    want = with_gradients(call, given, grads)
    for _ in range(20):
        assert are_equal(with_gradients(call, given, grads), want)


@every_call
def test_runs_where_only_deterministic_algorithms_may(call, sizes, device, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without which PyTorch has no deterministic GEMM
    given = [t.requires_grad_() for t in operands(sizes, device)]
    grads = operands([y.shape for y in tuple_of(call(*given))], device, seed=1)
    want = with_gradients(call, given, grads)
    torch.use_deterministic_algorithms(True)
    try:
        assert are_equal(with_gradients(call, given, grads), want)
    finally:
        torch.use_deterministic_algorithms(False)


@gpu
@pytest.mark.cached
@every_call
def test_a_cuda_graph_replays_on_new_numbers(call, sizes):
    given = [t.requires_grad_() for t in operands(sizes)]
    grads = operands([y.shape for y in tuple_of(call(*given))], seed=1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        with_gradients(call, given, grads)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = with_gradients(call, given, grads)
            with torch.no_grad():
                alone = tuple_of(call(*given))
        with torch.no_grad():
            for t, new in zip(given, operands(sizes, seed=2), strict=True):
                t.copy_(new)
        graph.replay()
        want = with_gradients(call, given, grads)
        assert are_equal(captured, want)
        assert are_equal(alone, want[: len(alone)])


@gpu
@every_call
def test_works_on_the_current_stream(call, sizes):
    late = operands(sizes)
    want, given = call(*late), [torch.ones_like(t) for t in late]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for t, new in zip(given, late, strict=True):
            t.copy_(new)
        got = call(*given)
    stream.synchronize()
    assert are_equal(got, want)


@gpu
@every_call
def test_threads_and_streams_do_not_disturb_each_other(call, sizes):
    def work(seed):
        given = operands(sizes, seed=seed, rows=100 + seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            on_gpu = [tuple_of(call(*given)) for _ in range(50)]
            torch.cuda.current_stream().synchronize()
        return on_gpu, tuple_of(call(*(t.cpu().numpy() for t in given)))

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(4)))
    for seed, (on_gpu, from_host) in enumerate(found):
        want = tuple_of(call(*operands(sizes, seed=seed, rows=100 + seed)))
        assert all(are_equal(got, want) for got in on_gpu)
        for got, wanted in zip(from_host, want, strict=True):
            torch.testing.assert_close(torch.from_numpy(got), wanted.cpu(), rtol=1e-6, atol=1e-6)


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@every_call
def test_tensors_on_a_gpu_that_is_not_current(call, sizes):
    results = [[tuple_of(call(*operands(sizes, f"cuda:{index}"))) for index in range(2)] for _ in range(20)]
    assert torch.cuda.current_device() == 0
    for first, second in results:
        assert all(y.device == torch.device("cuda:1") for y in second)
        assert are_equal(tuple(y.cpu() for y in second), tuple(y.cpu() for y in first))


def flat(x):
    return x.sum(-1)


FLAGS = {
    "rms_norm return_rstd": lambda x, **flag: cuops.rms_norm(x, **flag),
    "sample_normal shared_noise": lambda x, **flag: cuops.sample_normal(x, 1.0, 3, **flag),
    "sample_normal antithetic": lambda x, **flag: cuops.sample_normal(x, 1.0, 3, **flag),
    "sample_normal validate": lambda x, **flag: cuops.sample_normal(x, 1.0, 3, **flag),
    "KronLinear bias": lambda x, **flag: cuops.nn.KronLinear([2], [2], **flag),
    "CrossEntropyMethod maximize": lambda x, **flag: cem.CrossEntropyMethod(x, 1.0, 10, **flag),
    "CrossEntropyMethod antithetic": lambda x, **flag: cem.CrossEntropyMethod(x, 1.0, 10, **flag),
    "reset keep_best": lambda x, **flag: cem.CrossEntropyMethod(x, 1.0, 10).reset(x, 1.0, **flag),
    "minimize progress": lambda x, **flag: cem.minimize(flat, x, 1.0, 10, steps=1, **flag),
    "minimize vectorized": lambda x, **flag: cem.minimize(flat, x, 1.0, 10, steps=1, **flag),
    "minimize cuda_graph": lambda x, **flag: cem.minimize(flat, x, 1.0, 10, steps=1, **flag),
}


@pytest.mark.parametrize("wrong", ["no", 1, 0, None, [], 10**5000], ids=["str", "1", "0", "None", "list", "huge"])
@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_is_true_or_false(flag, wrong, array):
    _, name = flag.split()
    with pytest.raises(TypeError, match=f"^{name}: expected True or False, got {type(wrong).__name__}$"):
        FLAGS[flag](array([[1.0, 2.0]]), **{name: wrong})


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_may_be_numpys(flag, array):
    FLAGS[flag](array([[1.0, 2.0]]), **{flag.split()[1]: np.bool_(flag.endswith("vectorized"))})
