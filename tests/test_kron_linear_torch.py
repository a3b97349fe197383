"""kron_linear inside PyTorch: compile, opcheck, autocast, transforms, graphs, streams, threads, devices."""

from __future__ import annotations

import itertools
import math

import cuops
import pytest
import torch
import torch.nn.functional as F
from cuops import reference
from cuops._kron_linear import bwd, eager, operators
from kron_samples import LARGE, SAMPLES, arguments, check, definition, exact_gradients, x_of
from samples import DTYPES, make

gpu = pytest.mark.gpu


def test_a_list_of_parameters_compiles(device):
    factors = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(size, device=device)) for size in ((2, 3), (4, 2))])
    compiled = torch.compile(lambda x: cuops.kron_linear(x, factors), fullgraph=True, backend="eager")
    assert compiled(torch.ones(5, 6, device=device)).shape == (5, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("sample", "with_bias"), [("a vector", True), ("empty batch", False), ("both", True)])
def test_the_operator_keeps_what_it_promises_pytorch(sample, with_bias, dtype, device):
    x, factors, bias = arguments(SAMPLES[sample], dtype, device)
    bias = bias.requires_grad_() if with_bias else None
    factors = [w.requires_grad_() for w in factors]
    torch.library.opcheck(torch.ops.cuops.kron_linear_fwd.default, (x.requires_grad_(), factors, bias))
    dy = make((*x.shape[:-1], definition(x, factors).shape[-1]), dtype, device, 9).requires_grad_()
    needs = (True, [True] * len(factors), with_bias) if with_bias else (False, [True, False], True)
    torch.library.opcheck(torch.ops.cuops.kron_linear_bwd.default, (dy, x, factors, *needs))


def test_gradients_of_transposed_factors_are_as_the_operator_says(device):
    x, factors, _ = arguments(SAMPLES["both"], torch.float32, device)
    transposed = [w.mT.contiguous().mT.requires_grad_() for w in factors]
    dy = make((*x.shape[:-1], definition(x, factors).shape[-1]), device=device, seed=9)
    needs = True, [True] * len(factors), False
    torch.library.opcheck(torch.ops.cuops.kron_linear_bwd.default, (dy, x, transposed, *needs))
    _, dfactors, _ = torch.ops.cuops.kron_linear_bwd(dy, x, transposed, *needs)
    assert all(d.is_contiguous() for d in dfactors)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_into_one_graph(dynamic, device):
    @torch.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager" if device.type == "cpu" else "inductor")
    def layer(x, factors, bias):
        return cuops.kron_linear(cuops.kron_linear(x * 2, factors, bias), [w.mT for w in factors]) + 1

    for rows, (a, b) in itertools.product((3, 5), ((4, 6), (7, 2))):
        x, factors = make((rows, a * b), device=device), [make((5, a), device=device), make((3, b), device=device)]
        bias = make((15,), device=device, seed=2).requires_grad_()
        want = x_of(x_of(x * 2, factors) + bias, [w.mT for w in factors]) + 1
        got = layer(x, factors, bias)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        (dbias,) = torch.autograd.grad(got.sum(), bias)
        torch.testing.assert_close(dbias, torch.autograd.grad(want.sum(), bias)[0], rtol=1e-4, atol=1e-3)


def kept_sizes(call):
    """What `call` returns, and the sizes of what autograd keeps for it."""
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(tuple(t.shape)) or t, lambda t: t):
        return call(), sizes


def check_frozen(layer):
    x, factors, bias = arguments(SAMPLES["primes"], torch.float64)
    y, sizes = kept_sizes(lambda: layer(x.requires_grad_(), factors, bias.requires_grad_()))
    assert tuple(x.shape) not in sizes
    dy = make(y.shape, torch.float64, seed=9).requires_grad_()
    want, *_, dbias = exact_gradients(dy, x, factors)
    for got, wanted in zip(torch.autograd.grad(y, (x, bias), dy), (want, dbias), strict=True):
        torch.testing.assert_close(got, wanted)


def test_x_is_not_kept_where_no_factor_has_a_gradient():
    check_frozen(torch.compile(cuops.kron_linear, fullgraph=True, backend="aot_eager"))


def test_eager_calls_do_not_keep_x_where_no_factor_has_a_gradient(monkeypatch):
    nothing = bwd.NOTHING
    monkeypatch.setattr(eager, "forward_and_states", lambda *a: (reference.kron_linear_torch(*a[:3]), nothing))
    monkeypatch.setattr(eager, "bwd_cuda", lambda *a: operators.bwd_plain(*a[:-1]))
    check_frozen(lambda x, factors, bias: eager._Direct.apply(x, bias, *factors))


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_frozen_factors_have_the_gradients_of_linear(dtype):
    x, factors, bias = arguments(SAMPLES["64 x 80"], dtype, torch.device("cuda"))
    y, sizes = kept_sizes(lambda: cuops.kron_linear(x.requires_grad_(), factors, bias.requires_grad_()))
    assert sizes == [tuple(w.shape) for w in factors]
    dy = torch.randn_like(y).requires_grad_()
    dx, dbias = torch.autograd.grad(y, (x, bias), dy, create_graph=True)
    check(dx, dy, [w.mT for w in factors])
    torch.testing.assert_close(dbias, dy.sum(0))
    (again,) = torch.autograd.grad(dx, dy, v := torch.randn_like(x))
    check(again, v, factors)


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # as torch.compile does it
def test_compiles_in_a_backward_and_with_factors_that_are_made_on_the_way(device):
    class Rotation(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *factors):
            ctx.save_for_backward(*factors)
            return cuops.kron_linear(x, map(torch.neg, factors))

        @staticmethod
        def backward(ctx, dy):
            return cuops.rms_norm(cuops.kron_linear(dy, [w.mT for w in ctx.saved_tensors])), None, None

    x, factors, _ = arguments(SAMPLES["both"], device=device)
    y = torch.compile(Rotation.apply, fullgraph=True, backend="aot_eager")(x.requires_grad_(), *factors)
    want = Rotation.apply(x, *factors)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(want.sum(), x))


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast_does_what_it_does_to_linear(dtype, low, device):
    x, (w, v), bias = arguments(SAMPLES["both"], dtype, device)
    weight = torch.kron(w, v).requires_grad_()
    w.requires_grad_()
    with torch.autocast(device.type, dtype=low):
        y = cuops.kron_linear(x, [w, v], bias)
        assert y.dtype == F.linear(x, weight, bias).dtype
    y.sum().backward()
    assert w.grad.dtype == dtype
    converted = [a.detach().to(y.dtype) for a in (x, w, v, bias)]
    check(y, converted[0], converted[1:3], converted[3])


def test_autocast_compiles_into_the_graph(device):
    x, factors, bias = arguments(SAMPLES["both"], torch.float32, device)
    compiled = torch.compile(cuops.kron_linear, fullgraph=True, backend="aot_eager")
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert torch.equal(compiled(x, factors, bias), cuops.kron_linear(x, factors, bias))


def test_autocast_mixes_dtypes(device):
    x, factors, bias = arguments(SAMPLES["primes"], torch.float32, device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = cuops.kron_linear(x.bfloat16(), factors, bias.half())
    assert y.dtype == torch.bfloat16


def test_what_has_no_values_is_named_under_autocast_too(device):
    x, (w, v), _ = arguments(SAMPLES["both"], torch.float32, device)
    none = torch.nn.parameter.UninitializedParameter(device=device)
    for enabled in (False, True):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled):
            with pytest.raises(ValueError, match=r"^factors\[1\]: expected a tensor with values"):
                cuops.kron_linear(x, [w, none])
            with pytest.raises(ValueError, match="^x: expected a tensor with values"):
                cuops.kron_linear(none, [w, v])


def test_a_dtype_that_autocast_made_is_said_to_be(device):
    x, (w, v), _ = arguments(SAMPLES["both"], torch.float32, device)
    message = r"^factors\[1\]: expected x's dtype torch.bfloat16, got torch.float64, under autocast$"
    with torch.autocast(device.type, dtype=torch.bfloat16), pytest.raises(TypeError, match=message):
        cuops.kron_linear(x, [w, v.double()])
    message = r"^factors\[0\]: expected x's dtype torch.float64, got torch.bfloat16, under autocast$"
    with torch.autocast(device.type, dtype=torch.bfloat16), pytest.raises(TypeError, match=message):
        cuops.kron_linear(x.double(), [w, v])
    with pytest.raises(TypeError, match=r"^factors\[1\]: expected x's dtype torch.float32, got torch.float64$"):
        cuops.kron_linear(x, [w, v.double()])


def test_transforms_of_torch_func(device):
    x, (w, v), bias = arguments(SAMPLES["both"], torch.float64, device)

    def loss(of):
        return lambda x, w, v, bias: of(x, [w, v], bias).sin().sum()

    def formula(x, factors, bias=None):
        y = x_of(x, factors)
        return y if bias is None else y + bias

    for transform in (
        lambda of: torch.func.grad(loss(of), argnums=(0, 1, 2, 3))(x, w, v, bias)[1],
        lambda of: torch.vmap(lambda row: of(row, [w, v], bias))(x),
        lambda of: torch.vmap(lambda b: of(x, [w, v], b))(torch.stack([bias, -bias])),
        lambda of: torch.vmap(lambda factor: of(x, [factor, v]))(torch.stack([w, -w])),
        lambda of: torch.vmap(torch.func.grad(loss(of), argnums=1), (0, None, None, None))(x, w, v, bias),
        lambda of: torch.func.jvp(lambda x, w: of(x, [w, v]), (x, w), (x + 1, w + 1))[1],
        lambda of: torch.func.jacrev(lambda v: of(x[0], [w[:3], v]))(v),
    ):
        torch.testing.assert_close(transform(cuops.kron_linear), transform(formula), rtol=1e-10, atol=1e-8)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "transform",
    [
        lambda of, x, w, v, bias: torch.vmap(lambda row: of(row, [w, v], bias))(x),
        lambda of, x, w, v, bias: torch.func.grad(lambda w: of(x, [w, v], bias).sin().sum())(w),
        lambda of, x, w, v, bias: torch.func.jvp(lambda x, v: of(x, [w, v], bias), (x, v), (x + 1, v + 1))[1],
    ],
    ids=["vmap", "grad", "jvp"],
)
def test_transforms_compile_into_one_graph(transform, dynamic, device):
    x, (w, v), bias = arguments(SAMPLES["both"], torch.float64, device)
    compiled = torch.compile(transform, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    want = transform(lambda x, factors, bias: x_of(x, factors) + bias, x, w, v, bias)
    got = compiled(cuops.kron_linear, x, w, v, bias)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-8)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("sample", ["a vector", "empty batch", "no columns", "primes", "64 x 80"])
def test_several_gradients_at_once(sample, create_graph, device):
    x, factors, bias = arguments(SAMPLES[sample], torch.float64, device)
    inputs = [a.requires_grad_() for a in (x, *factors, bias)]
    y = cuops.kron_linear(x, factors, bias)
    dys = make((4, *y.shape), torch.float64, device, 9)
    got = torch.autograd.grad(y, inputs, dys, is_grads_batched=True, create_graph=create_graph)
    one_by_one = zip(*(exact_gradients(dy, x, factors) for dy in dys), strict=True)
    for found, want in zip(got, map(torch.stack, one_by_one), strict=True):
        torch.testing.assert_close(found.cpu(), want, rtol=1e-10, atol=1e-8)


def test_vectorized_derivatives_of_functions(device):
    x, (w, v), bias = arguments(SAMPLES["a vector"], torch.float64, device)

    def derivative(of, kernel):
        return of(lambda x, w, v, bias: kernel(x, [w, v], bias), (x, w, v, bias))

    def jacobian(function, inputs):
        return torch.autograd.functional.jacobian(function, inputs, vectorize=True)

    def hessian(function, inputs):
        return torch.autograd.functional.hessian(lambda *a: function(*a).sin().sum(), inputs, vectorize=True)

    for of in (jacobian, hessian):
        want = derivative(of, lambda x, factors, bias: x_of(x, factors) + bias)
        torch.testing.assert_close(derivative(of, cuops.kron_linear), want, rtol=1e-10, atol=1e-10)


def test_a_compiled_backward_is_one_graph():
    x, factors, bias = arguments(SAMPLES["both"], torch.float64)
    x.requires_grad_()
    y = cuops.kron_linear(x, factors, bias)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        y.sum().backward()
    want, *_ = exact_gradients(torch.ones_like(y), x, factors)
    torch.testing.assert_close(x.grad, want, rtol=1e-10, atol=1e-10)


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sample", SAMPLES)
def test_every_path_gives_the_same_bits(sample, dtype):
    x, factors, bias = arguments(SAMPLES[sample], dtype, "cuda")
    want = torch.ops.cuops.kron_linear_fwd(x, factors, bias)
    assert torch.equal(cuops.kron_linear(x, factors, bias), want)
    assert torch.equal(cuops.kron_linear(x.clone().requires_grad_(), factors, bias), want)
    with torch.no_grad():
        assert torch.equal(cuops.kron_linear(x.clone().requires_grad_(), factors, bias), want)


@pytest.mark.parametrize(
    "sizes", [[(5, 3)], [(16, 16)] * 2, [(80, 80)] * 3, [(2, 2), (100, 100)], [(300, 200)]], ids=str
)
def test_results_may_be_changed_in_place(sizes, device):
    x = make((4, math.prod(i for _, i in sizes)), torch.float64, device)
    factors = [make(size, torch.float64, device, k).requires_grad_() for k, size in enumerate(sizes)]
    want = cuops.kron_linear(x, factors).relu()
    got = cuops.kron_linear(x, factors).relu_()
    assert torch.equal(got, want)
    for a, b in zip(*(torch.autograd.grad(y.sum(), factors) for y in (got, want)), strict=True):
        assert torch.equal(a, b)


@gpu
@pytest.mark.cached
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_graph_replays_on_new_data(dtype):
    x, factors, bias = arguments(LARGE["four of 16"], dtype, "cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        leaf = x.clone().requires_grad_()

        def run():
            y = cuops.kron_linear(leaf, factors, bias)
            return y, *torch.autograd.grad(y, leaf, x)

        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results = run()
        with torch.no_grad():
            leaf.copy_(make(x.shape, dtype, "cuda", 30))
        graph.replay()
        for a, b in zip(results, run(), strict=True):
            assert torch.equal(a, b)


@gpu
@pytest.mark.parametrize("sizes", [[(64, 64), (64, 64)], [(16, 16)] * 3, [(2, 2)] * 12], ids=str)
def test_more_than_two_to_the_31_elements(sizes):
    factors = [make(size, torch.float16, "cuda", seed) / size[1] ** 0.5 for seed, size in enumerate(sizes)]
    x = torch.empty(2**19 + 3, 4096, device="cuda", dtype=torch.float16)
    for chunk in x.split(2**16):
        chunk.normal_()
    y = cuops.kron_linear(x, factors)
    for rows in (slice(0, 2), slice(2**18 - 1, 2**18 + 2), slice(-3, None)):
        check(y[rows], x[rows], factors)


@gpu
def test_rows_of_more_than_two_to_the_31_elements():
    x = torch.ones(1, 2**31 + 2**16, device="cuda", dtype=torch.float16)
    x[0, -1] = 3
    factors = [torch.eye(n, device="cuda", dtype=torch.float16) for n in (2**15 + 1, 2**16)]
    assert torch.equal(cuops.kron_linear(x, factors), x)


@gpu
def test_float32_is_as_exact_as_cublas_and_takes_tf32_where_allowed():
    x, factors, _ = arguments(LARGE["128 x 128"], torch.float32, "cuda")
    want = definition(x, factors)

    def error(y):
        return ((y.cpu().double() - want).square().mean() / want.square().mean()).sqrt().item()

    exact = error(cuops.kron_linear(x, factors))
    assert exact <= 2 * error(x_of(x, factors))
    torch.set_float32_matmul_precision("high")
    try:
        assert error(cuops.kron_linear(x, factors)) <= 2 * error(x_of(x, factors))
    finally:
        torch.set_float32_matmul_precision("highest")
