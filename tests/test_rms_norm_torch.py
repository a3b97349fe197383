"""RMSNorm as an operator of PyTorch: gradients, compiled graphs, CUDA graphs, streams and devices."""

from __future__ import annotations

import itertools

import cuops
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rms_norm_samples import BACKEND, SHAPES, WIDE
from samples import DTYPES, make
from torch._dynamo.testing import CompileCounter

gpu = pytest.mark.gpu

GRADIENT_SHAPES = [(3, 5), (40, 64), (7, 1000), (33, 1024), (5, 4096), (3, 4097), (2, 8192), (700, 96)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_may_be_written_into(dtype, device):
    x = make((3, 8), dtype, device).requires_grad_()
    for result in cuops.rms_norm(x, return_rstd=True):
        result.add_(1)


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

    assert_gradients_close(got, h, weight, dy, dh)
    for _ in range(20):
        y, h = cuops.rms_norm(x, weight, bias if with_bias else None, 1e-4, residual=residual)
        assert all(map(torch.equal, got, torch.autograd.grad((y, h), inputs, (dy, dh))))


def assert_gradients_close(got, h, weight, dy, dh):
    """Gradients for x, residual, weight and bias, or the first of these, with eps = 1e-4."""
    wide_h, wide_weight, wide_dy = (t.detach().double().requires_grad_() for t in (h, weight, dy))
    wide_y = wide_h * torch.rsqrt(wide_h.square().mean(-1, keepdim=True) + 1e-4) * wide_weight
    dx, dweight = torch.autograd.grad(wide_y, [wide_h, wide_weight], wide_dy)
    dx, n, rows = dx + dh.double(), h.shape[-1], h.shape[:-1].numel()
    result, sums = torch.finfo(h.dtype), torch.finfo(torch.float64 if h.dtype == torch.float64 else torch.float32)
    for a, b in zip(got, [dx, dx, dweight, wide_dy.reshape(rows, n).sum(0)], strict=False):
        # One rounding to the result, and what float32 loses in sums over a row or over all rows of terms of size 10.
        allowed = result.eps / 2 * b.abs() + sums.eps * (16 + n**0.5 / 8 + rows**0.5) * 10
        assert ((a.double() - b).abs() <= allowed).all()


@settings(max_examples=40, deadline=None)
@given(
    leading=st.lists(st.integers(1, 4), max_size=3), n=st.integers(16, 80), start=st.integers(0, 9),
    gap=st.integers(0, 9), order=st.permutations(range(3)), with_bias=st.booleans(),
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_any_shape_and_stride(dtype, device, leading, n, start, gap, order, with_bias):
    def slices(seed):
        base = make((*leading, start + n + gap), dtype, device, seed)
        return base[..., start : start + n].permute(*[i for i in order if i < len(leading)], len(leading))

    x, residual, dy, dh = (slices(seed) for seed in range(4))
    inputs = [t.detach().requires_grad_() for t in (x, residual, *(make((n,), dtype, device, s) for s in (4, 5)))]
    y, h = cuops.rms_norm(inputs[0], inputs[2], inputs[3] if with_bias else None, 1e-4, residual=inputs[1])
    got = torch.autograd.grad((y, h), inputs[: 3 + with_bias], (dy, dh))
    assert_gradients_close(got, h, inputs[2], dy, dh)


def transposed(rows, n, dtype, device, seed):
    return make((2, rows, n), dtype, device, seed).transpose(0, 1)


def row_major(rows, n, dtype, device, seed):
    return make((rows, n), dtype, device, seed)


@pytest.mark.parametrize("layout", [row_major, transposed])
@pytest.mark.parametrize("with_residual", [False, True])
def test_the_operator_keeps_what_it_promises_pytorch(with_residual, layout, device):
    for dtype, n in ((torch.float32, 13), (torch.bfloat16, 8)):
        x, dy, dh = (layout(3, n, dtype, device, seed).requires_grad_() for seed in range(3))
        weight, bias = (make((n,), dtype, device, seed).requires_grad_() for seed in (3, 4))
        residual = layout(3, n, dtype, device, 5).requires_grad_() if with_residual else None
        torch.library.opcheck(torch.ops.cuops.rms_norm_fwd.default, (x, residual, weight, bias, None, 1e-6, 0.0))
        for needs_dweight, bias_dtype in ((True, dtype), (False, None)):
            arguments = dy, dh if with_residual else None, x, weight, bias_dtype, needs_dweight, 1e-6, 0.0
            torch.library.opcheck(torch.ops.cuops.rms_norm_bwd.default, arguments)
        wide = [layout(3, n, torch.float32, device, seed).requires_grad_() for seed in (6, 7)]  # dh and h
        torch.library.opcheck(torch.ops.cuops.rms_norm_bwd.default, (dy, *wide, weight, None, True, 1e-6, 0.0))
    dy, x = (make((5,), torch.float64, device, seed) for seed in (0, 1))  # whose bias has the gradient dy itself
    arguments = dy, None, x, None, torch.float64, False, 1e-6, 0.0
    torch.library.opcheck(torch.ops.cuops.rms_norm_bwd.default, arguments)


def test_outputs_have_gradients_of_what_they_depend_on(device):
    x, residual = (make((3, 16), torch.float32, device, seed) for seed in (0, 1))
    weight = make((16,), torch.float32, device, 2).requires_grad_()
    for wants_rstd in (False, True):
        for wants_x in (False, True):
            x.requires_grad_(wants_x)
            y, *others = cuops.rms_norm(x, weight, residual=residual, return_rstd=wants_rstd)
            assert y.requires_grad
            assert [t.requires_grad for t in others] == [wants_x] * (1 + wants_rstd)
            (dweight,) = torch.autograd.grad(y.sum(), [weight])
            torch.testing.assert_close(dweight, (y.detach() / weight.detach()).sum(0))


@pytest.mark.parametrize("layout", [row_major, transposed])
def test_compiled_gradients_are_those_of_eager_calls(layout, device):
    x, residual = (layout(6, 32, torch.float32, device, seed).requires_grad_() for seed in (0, 1))
    weight = make((32,), torch.float32, device, 2).requires_grad_()

    def loss(x, weight, residual):
        y, h = cuops.rms_norm(x, weight, residual=residual)
        return (y.transpose(0, 1).cos() * h.transpose(0, 1)).sum()

    want = torch.autograd.grad(loss(x, weight, residual), (x, weight, residual))
    compiled = torch.compile(loss, fullgraph=True, backend=BACKEND[device.type])
    got = torch.autograd.grad(compiled(x, weight, residual), (x, weight, residual))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_gradients_of_a_wider_y_are_not_rounded_on_their_way(dtype, device):
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    x, weight = make((40, 64), dtype, device).requires_grad_(), make((64,), dtype, device, 1).requires_grad_()
    dy = make((40, 64), wide, device, 2) * 2.0**17  # beyond float16
    dx, dweight = torch.autograd.grad(cuops.rms_norm(x, weight, eps=1e-3, out_dtype=wide), (x, weight), dy)
    inputs = [t.detach().double().requires_grad_() for t in (x, weight)]
    y = inputs[0] * torch.rsqrt(inputs[0].square().mean(-1, keepdim=True) + 1e-3) * inputs[1]
    want = torch.autograd.grad(y, inputs, dy.double())
    eps = torch.finfo(dtype).eps
    for got, exact in zip((dx, dweight), want, strict=True):
        limit = torch.finfo(dtype).max
        assert got.dtype == dtype
        assert (got.isinf() == (exact.abs() > limit)).all()
        close = (got.double() - exact).abs() <= eps / 2 * exact.abs() + 2.0**17 * 1e-5
        assert (close | got.isinf()).all()


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_have_the_dtypes_of_their_inputs(dtype, weight_dtype, device):
    x = make((40, 64), dtype, device).requires_grad_()
    weight, bias = (make((64,), weight_dtype, device, seed).requires_grad_() for seed in (1, 2))
    for inputs in ([x, weight], [x, weight, bias]):
        got = torch.autograd.grad(cuops.rms_norm(*inputs).sum(), inputs)
        want = torch.autograd.grad(cuops.rms_norm(*[t.double() for t in inputs]).sum(), inputs)
        for a, b, tensor in zip(got, want, inputs, strict=True):
            assert a.dtype == tensor.dtype
            torch.testing.assert_close(a, b, rtol=2 * torch.finfo(tensor.dtype).eps, atol=1e-4)


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=4))[1:], ids=str)
def test_only_the_gradients_that_are_wanted_are_computed(wanted, device):
    x, residual = (
        make((5, 64), device=device, seed=seed).requires_grad_(wants) for seed, wants in enumerate(wanted[:2])
    )
    weight, bias = (
        make((64,), device=device, seed=seed).requires_grad_(wants) for seed, wants in enumerate(wanted[2:], 2)
    )
    y, h = cuops.rms_norm(x, weight, bias, residual=residual)
    (y.square().sum() + h.sum()).backward()
    everything = [t.detach().requires_grad_() for t in (x, residual, weight, bias)]
    y, h = cuops.rms_norm(everything[0], *everything[2:], residual=everything[1])
    (y.square().sum() + h.sum()).backward()
    for tensor, wants, other in zip((x, residual, weight, bias), wanted, everything, strict=True):
        assert (tensor.grad is not None) == wants
        if wants:
            torch.testing.assert_close(tensor.grad, other.grad)


@pytest.mark.parametrize("expanded", ["x", "dy", "dh"])
def test_gradients_of_what_is_expanded_over_its_first_dimension(expanded, device):
    tensors = {
        name: make((1 if name == expanded else 3, 5, 64), device=device, seed=seed).requires_grad_().expand(3, 5, 64)
        for seed, name in enumerate(("x", "residual", "dy", "dh"))
    }
    weight = make((64,), device=device, seed=4).requires_grad_()

    def gradients(x, residual, dy, dh):
        outputs = cuops.rms_norm(x, weight), *cuops.rms_norm(x, weight, residual=residual)
        return torch.autograd.grad(outputs, (x, weight), (dy, dy, dh))

    copies = {name: t.contiguous() for name, t in tensors.items()}
    assert all(map(torch.equal, gradients(**tensors), gradients(**copies)))


@pytest.mark.parametrize(("rows", "n"), [(5, 64), (65, 256), (65, 257), (33, 1024), (12, 8192)])
def test_sums_that_nobody_wants_are_not_made(rows, n, device):
    dy, x, weight = (make(shape, device=device, seed=seed) for seed, shape in enumerate(((rows, n), (rows, n), (n,))))
    dx, dweight, dbias = torch.ops.cuops.rms_norm_bwd(dy, None, x, weight, None, False, 1e-6, 0.0)
    assert dweight.numel() == dbias.numel() == 0
    everything = torch.ops.cuops.rms_norm_bwd(dy, None, x, weight, torch.float32, True, 1e-6, 0.0)
    torch.testing.assert_close(dx, everything[0])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_several_gradients_at_once(device):
    x, weight = make((3, 8), device=device).requires_grad_(), make((8,), device=device, seed=1).requires_grad_()
    y = cuops.rms_norm(x, weight)
    dys = make((4, 3, 8), device=device, seed=2)

    def gradients(dy, **options):
        return torch.autograd.grad(y, (x, weight), dy, retain_graph=True, **options)

    want = [torch.stack(parts) for parts in zip(*map(gradients, dys), strict=True)]
    torch.testing.assert_close(list(gradients(dys, is_grads_batched=True)), want)
    torch.testing.assert_close(list(torch.func.vmap(gradients)(dys)), want)
    results = cuops.rms_norm(x, weight, residual=x)

    def through_h(dh):
        return torch.autograd.grad(results, (x, weight), (dys[0], dh), retain_graph=True)

    want = [torch.stack(parts) for parts in zip(*map(through_h, dys), strict=True)]
    torch.testing.assert_close(list(torch.func.vmap(through_h)(dys)), want)


def test_the_gradient_of_rstd_holds_where_its_cube_does_not(device):
    x = torch.full((2, 8), 1e-15, device=device, requires_grad=True)
    cuops.rms_norm(x, eps=0, return_rstd=True)[1].sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, -1 / (8 * 1e-15**2)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_into_one_graph(dynamic, device):
    @torch.compile(fullgraph=True, dynamic=dynamic, backend=BACKEND[device.type])
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


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, *WIDE], ids=str)
def test_every_path_gives_the_same_bits(shape, dtype):
    x, weight = make(shape, dtype, "cuda"), make(shape[-1:], dtype, "cuda", 1)
    want = torch.ops.cuops.rms_norm_fwd(x, None, weight, None, None, 1e-6, 0.0)[0]
    assert torch.equal(cuops.rms_norm(x, weight), want)
    with torch.no_grad():
        assert torch.equal(cuops.rms_norm(x.requires_grad_(), weight), want)
    assert torch.equal(cuops.rms_norm(x, weight), want)
    for _ in range(20):
        assert torch.equal(cuops.rms_norm(x.detach(), weight), want)


@gpu
@pytest.mark.cached
def test_gradients_in_a_cuda_graph_are_those_of_new_data():
    x, dy = (make((64, 4096), torch.bfloat16, "cuda", seed) for seed in (0, 1))
    weight = make((4096,), torch.bfloat16, "cuda", 2).requires_grad_()
    x.requires_grad_()

    def gradients():
        return torch.autograd.grad(cuops.rms_norm(x, weight), (x, weight), dy)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients()
    with torch.no_grad():
        x.copy_(make((64, 4096), torch.bfloat16, "cuda", 3))
    graph.replay()
    assert all(map(torch.equal, captured, gradients()))


def test_exports_the_shape_to_normalise_as_one_of_any_size(device):
    class Module(torch.nn.Module):
        def forward(self, x):
            return cuops.rms_norm(x, normalized_shape=x.shape[1:])

    sizes = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    program = torch.export.export(Module(), (make((8, 4, 16), device=device),), dynamic_shapes=(sizes,))
    x = make((3, 5, 16), device=device)
    torch.testing.assert_close(program.module()(x), Module()(x))
