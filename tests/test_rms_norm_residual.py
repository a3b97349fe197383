"""RMSNorm of a sum of two dtypes: a float32 residual stream beside branches of 16 bits, say."""

from __future__ import annotations

import itertools

import cuops
import numpy as np
import pytest
import torch
from rms_norm_samples import BACKEND, assert_close, definition
from samples import DTYPES, make

gpu = pytest.mark.gpu
PAIRS = [pair for pair in itertools.product(DTYPES, DTYPES) if pair[0] != pair[1]]
STREAM = torch.bfloat16, torch.float32


def inputs(shape, dtypes, device):
    """x, residual and weight, all of which want gradients."""
    weight = make(shape[-1:], dtypes[0], device, 2)
    return *(
        make(shape, dtype, device, seed).requires_grad_() for seed, dtype in enumerate(dtypes)
    ), weight.requires_grad_()


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(3, 1), (5, 33), (7, 64), (300, 57), (65, 1000), (50, 1001), (5, 4096), (2, 8192)]
    + [pytest.param(shape, marks=gpu) for shape in [(1100, 2003), (40, 33333), (3, 90000)]],
    ids=str,
)
def test_the_sum_has_the_dtype_that_pytorch_gives_it(shape, dtypes, device):
    x, residual, weight = (t.detach() for t in inputs(shape, dtypes, device))
    y, h, rstd = cuops.rms_norm(x, weight, weight, residual=residual, return_rstd=True)
    want, _, want_rstd = definition(h, weight, weight)
    assert torch.equal(h, x + residual)
    assert h.dtype == torch.promote_types(*dtypes)
    assert y.dtype == x.dtype
    assert_close(y, want, shape[-1], terms=np.abs(want) + 1)
    assert rstd.dtype == (torch.float64 if torch.float64 in dtypes else torch.float32)
    assert_close(rstd, want_rstd, shape[-1])


@pytest.mark.parametrize("dtypes", [STREAM, STREAM[::-1]], ids=str)
@pytest.mark.parametrize("scale", [1e20, 1e-20])
@pytest.mark.parametrize("n", [264, 2001])
def test_squares_beyond_the_range_of_the_sums(n, scale, dtypes, device):
    x, residual = make((4, n), dtypes[0], device) * scale, make((4, n), dtypes[1], device, 1) * scale
    y, h = cuops.rms_norm(x, residual=residual, eps=0.0)
    assert_close(y, definition(h, eps=0.0)[0], n)


@pytest.mark.parametrize("dtypes", [STREAM, STREAM[::-1]], ids=str)
def test_rows_that_lie_anywhere(dtypes, device):
    whole = [make((6, 4, 72), dtype, device, seed) for seed, dtype in enumerate(dtypes)]
    for part in (np.s_[::2, :, 3:44], np.s_[:, 1, 8:56], np.s_[1:, ::3, :40], np.s_[:, :, ::2]):
        x, residual = (t[part] for t in whole)
        y, h = cuops.rms_norm(x, residual=residual)
        assert torch.equal(h, x + residual)
        assert_close(y, definition(h)[0], x.shape[-1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["weight", "float32 weight", "no weight"])
@pytest.mark.parametrize(
    "shape",
    [(5, 8), (3, 72)]
    + [
        pytest.param(shape, marks=gpu)
        for shape in [
            *[
                (64, 1024),
                (40_000, 72),
                (20_000, 264),
                (8200, 520),
                (8192, 600),
                (4100, 768),
                (2100, 1032),
                (3000, 2048),
            ],
            *[(4, 4096), (300, 5120), (12, 8192), (400, 8192), (300, 9216), (20, 32768), (2, 65536), (700, 1001)],
        ]
    ],
    ids=str,
)
def test_a_stream_in_float32_of_any_length(shape, kind, dtype, device):
    x, residual = make(shape, dtype, device), make(shape, torch.float32, device, 1)
    weight = None if kind == "no weight" else make(shape[-1:], torch.float32 if "float32" in kind else dtype, device, 2)
    residual[1] *= 1e25
    y, h, rstd = cuops.rms_norm(x, weight, residual=residual, eps=0.0, weight_offset=0.5, return_rstd=True)
    assert torch.equal(h, x + residual)
    some = [0, 1, len(x) // 2, -1]
    want = definition(h[some], weight, eps=0.0, weight_offset=0.5)
    assert y.dtype == dtype
    assert_close(y[some], want[0], shape[-1])
    assert_close(rstd[some], want[2], shape[-1])


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(5, 33), (33, 1024)]
    + [pytest.param(shape, marks=gpu) for shape in [(9, 40000), (700, 8), (2000, 520), (300, 4096), (3, 65540)]],
    ids=str,
)
def test_gradients_are_those_of_the_sum_in_the_dtypes_of_its_terms(shape, dtypes, device):
    x, residual, weight = inputs(shape, dtypes, device)
    y, h = cuops.rms_norm(x, weight, residual=residual)
    dy, dh = make(shape, y.dtype, device, 4), make(shape, h.dtype, device, 5)
    got = torch.autograd.grad((y, h), (x, residual, weight), (dy, dh))

    alone = h.detach().requires_grad_()
    want, dweight = torch.autograd.grad(cuops.rms_norm(alone, weight, out_dtype=y.dtype), (alone, weight), dy)
    want = want.double() + dh.double()
    for gradient, dtype in zip(got, dtypes, strict=False):
        assert gradient.dtype == dtype
        sums = 4 * torch.finfo(h.dtype).eps * (want.abs() + dh.abs()).double()
        result = torch.finfo(dtype)
        assert ((gradient.double() - want).abs() <= result.eps * (want.abs() + result.smallest_normal) + sums).all()
    assert torch.equal(got[2], dweight)


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float16, 1.0), *((torch.bfloat16, scale) for scale in (1.0, 1e-21, 1e19))],
    ids=str,
)
@pytest.mark.parametrize("kind", ["float32 weight", "frozen", "no weight", "offset and bias", "of y alone"])
@pytest.mark.parametrize(
    "shape",
    [(7, 64), (5, 33)]
    + [
        pytest.param(shape, marks=gpu)
        for shape in [
            *[(1100, 2048), (2100, 264), (64, 1024), (600, 4096), (300, 16384), (40, 65536), (20, 72), (33, 512)],
            *[(2000, 33), (3000, 1023), (600, 1001), (500, 4098), (300, 9001), (40, 65535)],
        ]
    ],
    ids=str,
)
def test_gradients_of_a_stream_in_float32_are_those_of_the_formula(shape, kind, dtype, scale, device):
    n, dtypes = shape[-1], (dtype, torch.float32)
    x, residual = ((make(shape, d, device, s) * scale).requires_grad_() for s, d in enumerate(dtypes))
    weight = make((n,), torch.float32 if kind == "float32 weight" else dtype, device, 2)
    weight = None if kind == "no weight" else weight.requires_grad_(kind != "frozen")
    bias = make((n,), dtype, device, 3).requires_grad_() if kind == "offset and bias" else None
    dy, dh = make(shape, dtype, device, 4), make(shape, torch.float32, device, 5) / scale
    offset = 0.0 if bias is None else 1.0
    y, h = cuops.rms_norm(x, weight, bias, 0.0, residual=residual, weight_offset=offset)
    leaves = [t for t in (x, residual, weight, bias) if t is not None and t.requires_grad]
    both = (y, h)[: 1 if kind == "of y alone" else 2]
    got = torch.autograd.grad(both, leaves, (dy, dh)[: len(both)])

    wide = h.detach().double().requires_grad_()
    parameters = [None if t is None else t.detach().double().requires_grad_() for t in (weight, bias)]
    y = cuops.reference.rms_norm_torch(wide, None, *parameters, 0.0, offset, None)[0]
    wanted = [t for t in parameters if t is not None]
    of_h, *sums = torch.autograd.grad(y, [wide, *wanted], dy.double())
    total = of_h if kind == "of y alone" else of_h + dh.double()
    terms = total.abs().amax() + of_h.abs().amax()
    for gradient, its in zip(got[:2], dtypes, strict=True):
        assert gradient.dtype == its
        limits = torch.finfo(its)
        allowed = limits.eps * total.abs() + limits.smallest_normal + 1e-5 * terms
        assert ((gradient.double() - total).abs() <= allowed).all()
    for gradient, want in zip(got[2:], sums, strict=False):
        torch.testing.assert_close(gradient.double(), want, rtol=torch.finfo(gradient.dtype).eps, atol=2e-5 * shape[0])


def test_only_a_gradient_that_is_wanted_is_made(device):
    x, residual, weight = inputs((5, 64), STREAM, device)
    for wanted in (x, residual):
        for t in (x, residual, weight):
            t.requires_grad_(t is wanted).grad = None
        y, h = cuops.rms_norm(x, weight, residual=residual)
        (y.float().square().sum() + h.sum()).backward()
        assert [t.grad is not None for t in (x, residual)] == [t is wanted for t in (x, residual)]
        assert wanted.grad.dtype == wanted.dtype
        for t in (x, residual):
            t.requires_grad_()
        (gradient,) = torch.autograd.grad(cuops.rms_norm(x, weight, residual=residual)[1].sum(), wanted)
        assert gradient.eq(1).all()
        assert gradient.dtype == wanted.dtype


@pytest.mark.parametrize("dtypes", [STREAM, (torch.float16, torch.bfloat16)], ids=str)
def test_the_operator_keeps_what_it_promises_pytorch(dtypes, device):
    x, residual, weight = inputs((3, 13), dtypes, device)
    torch.library.opcheck(torch.ops.cuops.rms_norm_fwd.default, (x, residual, weight, None, None, 1e-6, 0.0))


def test_compiles_and_differentiates_as_it_runs(device):
    def loss(x, residual, weight):
        y, h = cuops.rms_norm(x, weight, residual=residual)
        return (y.float().cos() * h).sum()

    tensors = inputs((6, 32), STREAM, device)
    want = torch.autograd.grad(loss(*tensors), tensors)
    compiled = torch.compile(loss, fullgraph=True, backend=BACKEND[device.type])
    torch.testing.assert_close(torch.autograd.grad(compiled(*tensors), tensors), want)
    torch.testing.assert_close(torch.func.grad(loss, (0, 1, 2))(*tensors), want)
    each = torch.func.vmap(loss, (0, 0, None))(*tensors)
    torch.testing.assert_close(each.sum(), loss(*tensors))


def test_a_stream_in_float32_under_autocast(device):
    linear = torch.nn.Linear(32, 32, device=device)
    norm = cuops.nn.RMSNorm(32, eps=1e-6, device=device)
    stream = make((4, 32), device=device)
    with torch.autocast(device.type, torch.bfloat16):
        branch = linear(stream)
        y, h = norm(branch, stream)
    assert branch.dtype == torch.bfloat16
    assert torch.equal(h, branch + stream)
    assert_close(y, definition(h, norm.weight)[0], 32)


@pytest.mark.parametrize("dtypes", list(itertools.permutations(["float64", "float32", "float16"], 2)), ids=str)
def test_numpy_arrays_agree_with_the_definition(dtypes):
    x, residual = (np.random.default_rng(seed).standard_normal((5, 33)).astype(d) for seed, d in enumerate(dtypes))
    y, h, rstd = cuops.rms_norm(x, residual=residual, return_rstd=True)
    assert (h == x + residual).all()
    assert (y.dtype, h.dtype) == (x.dtype, np.promote_types(*dtypes))
    assert rstd.dtype == ("float64" if "float64" in dtypes else "float32")
    assert_close(torch.from_numpy(y), definition(torch.from_numpy(h))[0], 33)


@gpu
@pytest.mark.parametrize("name", ["cupy", "jax.numpy"])
def test_arrays_of_other_libraries(name):
    library = pytest.importorskip(name)
    dtypes = ["float16", "float32"] + (["bfloat16"] if name == "jax.numpy" else [])
    for dtype, other in itertools.permutations(dtypes, 2):
        x, residual = (
            library.asarray(np.random.default_rng(s).standard_normal((5, 64))).astype(d)
            for s, d in enumerate((dtype, other))
        )
        y, h = cuops.rms_norm(x, residual=residual)
        assert type(h) is type(x)
        assert bool((h == x + residual).all())
        assert (str(y.dtype), str(h.dtype)) == (dtype, "float32")
        want = definition(torch.from_dlpack(h))[0]
        assert_close(torch.from_dlpack(y), want, 64)
