"""RMSNorm against its definition in extended precision."""

from __future__ import annotations

import itertools
import threading

import cuops
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
gpu = pytest.mark.gpu


def definition(x, weight=None, bias=None, eps=1e-6, *, residual=None, weight_offset=0.0, dims=1):
    """(y, h, rstd) in the extended precision of NumPy's longdouble."""
    x, weight, bias, residual = (
        None if a is None else a.detach().cpu().double().numpy().astype(np.longdouble)
        for a in (x, weight, bias, residual)
    )
    h = x if residual is None else x + residual
    axes = tuple(range(h.ndim - dims, h.ndim))
    rstd = 1 / np.sqrt(np.square(h).mean(axis=axes, keepdims=True) + np.longdouble(eps))
    y = h * rstd
    if weight is not None:
        y = y * (weight + weight_offset)
    return (y if bias is None else y + bias), h, rstd.reshape(h.shape[: h.ndim - dims])


def assert_close(got: torch.Tensor, want: np.ndarray, n: int, terms: float = 0.0) -> None:
    """One rounding to `got`'s dtype, and of the sums (float32, float64) what a sum of n squares and five operations may lose.

    `terms` is the size of what was added up for an element, where that is more than the element itself.
    """
    result = torch.finfo(got.dtype)
    sums = torch.finfo(torch.float64 if got.dtype == torch.float64 else torch.float32)
    got = got.detach().cpu().double().numpy().astype(np.longdouble)
    assert got.shape == want.shape
    relative = result.eps / 2 + sums.eps * (8 + n / 2048)
    allowed = relative * np.maximum(np.abs(want), terms) + 2 * float(result.smallest_normal) * result.eps
    worst = np.max(np.abs(got - want) / allowed, initial=0)
    assert worst <= 1, f"an error of {worst:.3g} times what rounding explains"


def make(shape, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


SHAPES = [
    (1,), (7,), (3, 1), (5, 8), (4, 33), (2, 3, 64), (9, 100), (3, 127), (17, 128), (2, 2, 2, 256), (6, 1000), (3, 1024), (2, 1025),
    (3, 4096), (2, 4097), (1, 8192), (2, 16384),
]  # fmt: skip
WIDE = [
    (2, 32768),
    (3, 32769),
    (2, 65536),
    (1, 131072),
    (2, 131073),
    (1, 262144),
    (1, 262147),
    (1, 1048576),
    (1, 1048579),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_the_definition(shape, dtype, device):
    x, weight = make(shape, dtype, device), make(shape[-1:], dtype, device, 1)
    assert_close(cuops.rms_norm(x, weight), definition(x, weight)[0], shape[-1])


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", WIDE, ids=str)
def test_agrees_with_the_definition_on_wide_rows(shape, dtype):
    test_agrees_with_the_definition(shape, dtype, torch.device("cuda"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [8, 33, 1000, 4096])
@pytest.mark.parametrize(
    ("with_weight", "with_bias", "with_residual"), list(itertools.product([False, True], repeat=3))
)
def test_every_combination_of_arguments(n, dtype, with_weight, with_bias, with_residual, device):
    x = make((5, n), dtype, device)
    weight = make((n,), dtype, device, 1) if with_weight else None
    bias = make((n,), dtype, device, 2) if with_bias else None
    residual = make((5, n), dtype, device, 3) if with_residual else None
    got = cuops.rms_norm(x, weight, bias, 1e-3, residual=residual, weight_offset=1.0, return_rstd=True)
    # y is of the h that is returned, rounded as it is.
    h = got[1] if with_residual else x
    if with_residual:
        assert torch.equal(h, (x.double() + residual.double()).to(dtype))
    want, _, rstd = definition(h, weight, bias, 1e-3, weight_offset=1.0)
    assert_close(
        got[0],
        want,
        n,
        terms=0 if bias is None else np.abs(definition(h, weight, None, 1e-3, weight_offset=1.0)[0]) + 1,
    )
    assert got[-1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(got[-1], rstd, n)


@pytest.mark.parametrize(("dtype", "weight_dtype"), list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_weights_may_have_another_dtype(dtype, weight_dtype, device):
    x, weight, bias = (
        make((3, 264), dtype, device),
        make((264,), weight_dtype, device, 1),
        make((264,), weight_dtype, device, 2),
    )
    y = cuops.rms_norm(x, weight, bias)
    assert y.dtype == dtype
    # A float64 weight takes part as float32 beside 16 and 32 bits, as the sums do.
    assert_close(y, definition(x, weight, bias)[0], 264, terms=np.abs(definition(x, weight)[0]) + 1)


@pytest.mark.parametrize(("dtype", "out_dtype"), list(itertools.product(DTYPES, DTYPES)), ids=str)
@pytest.mark.parametrize("n", [64, 65])
def test_out_dtype_is_the_dtype_of_y(n, dtype, out_dtype, device):
    x, weight = make((4, n), dtype, device), make((n,), dtype, device, 1)
    y = cuops.rms_norm(x, weight, out_dtype=out_dtype)
    assert y.dtype == out_dtype
    want = definition(x, weight)[0]
    if dtype != torch.float64 and out_dtype == torch.float64:  # the sums are float32
        assert_close(y.float(), want, n)
    else:
        assert_close(y, want, n)


@pytest.mark.parametrize("normalized_shape", [(6,), (5, 6), (4, 5, 6)])
@pytest.mark.parametrize("with_weight", [False, True])
def test_several_trailing_dimensions(normalized_shape, with_weight, device):
    x, weight = (
        make((3, 4, 5, 6), device=device),
        make(normalized_shape, device=device, seed=1) if with_weight else None,
    )
    y, rstd = cuops.rms_norm(x, weight, normalized_shape=normalized_shape, return_rstd=True)
    want, _, want_rstd = definition(x, weight, dims=len(normalized_shape))
    assert_close(y, want, 120)
    assert_close(rstd, want_rstd, 120)


LAYOUTS = {
    "every second row": lambda t: t[::2],
    "a slice of the columns": lambda t: t[:, :40],
    "a slice that starts off a vector": lambda t: t[:, 3:44],
    "a slice at a vector": lambda t: t[:, 8:56],
    "transposed leading dimensions": lambda t: t.view(4, 6, 64).transpose(0, 1),
    "heads of a fused projection": lambda t: t.view(4, 6, 64)[:, :, :48].unflatten(-1, (3, 16)),
    "three strides": lambda t: t.view(2, 2, 6, 64).permute(2, 0, 1, 3)[:, :, :, :48],
    "columns as rows": lambda t: t.t(),
    "expanded": lambda t: t[:1].expand(5, 64),
    "one row": lambda t: t[3],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout, dtype, device):
    x = LAYOUTS[layout](make((24, 64), dtype, device))
    residual = LAYOUTS[layout](make((24, 64), dtype, device, 1))
    weight = make((2 * x.shape[-1],), dtype, device, 2)[::2]
    assert_close(cuops.rms_norm(x, weight), definition(x, weight)[0], x.shape[-1])
    y, h = cuops.rms_norm(x, weight, residual=residual)
    assert torch.equal(h, (x.double() + residual.double()).to(dtype))
    assert_close(y, definition(h, weight)[0], x.shape[-1])


@settings(max_examples=60, deadline=None)
@given(
    leading=st.lists(st.integers(0, 4), min_size=1, max_size=3), n=st.integers(1, 70), start=st.integers(0, 9),
    gap=st.integers(0, 9), order=st.permutations(range(3)),
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_any_shape_and_stride(dtype, device, leading, n, start, gap, order):
    base = make((*leading, start + n + gap), dtype, device)
    x = base[..., start : start + n].permute(*[i for i in order if i < len(leading)], len(leading))
    assert_close(cuops.rms_norm(x), definition(x)[0], n)


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), (0, 0), (2, 0, 5)], ids=str)
def test_empty_input_gives_empty_output(shape, device):
    x = torch.empty(shape, device=device)
    y, rstd = cuops.rms_norm(x, return_rstd=True)
    assert y.shape == x.shape
    assert rstd.shape == x.shape[:-1]
    assert cuops.rms_norm(x.cpu().numpy()).shape == shape


EXTREMES = {
    "squares overflow": (torch.float32, [1e20, -3e20, 2e20]),
    "the largest float32": (torch.float32, [3.4e38, -3.4e38, 1e38]),
    "squares drown": (torch.float32, [1e-25, -2e-25, 3e-25]),
    "subnormal": (torch.float32, [1e-40, -2e-40, 3e-40]),
    "both": (torch.float32, [1e25, -1e-25, 2e25]),
    "float64 squares overflow": (torch.float64, [1e200, -2e200, 3e200]),
    "float64 squares drown": (torch.float64, [1e-200, -2e-200, 3e-200]),
    "the largest bfloat16": (torch.bfloat16, [3.3e38, -3.3e38, 1e38]),
    "the largest float16": (torch.float16, [65504.0, -65504.0, 1.0]),
    "the smallest float16": (torch.float16, [6e-8, -6e-8, 1.2e-7]),
}


@pytest.mark.parametrize("n", [3, 24, 4098, 40000])
@pytest.mark.parametrize("case", EXTREMES)
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_any_finite_row_is_right(case, n, kind, device):
    dtype, values = EXTREMES[case]
    x = torch.tensor(values, dtype=torch.float64).repeat(n // 3 + 1)[:n].to(dtype).expand(3, n).contiguous().to(device)
    want = definition(x, eps=0.0)[0]
    if kind == "torch":
        assert_close(cuops.rms_norm(x, eps=0.0), want, n)
        assert_close(cuops.rms_norm_(x.clone(), eps=0.0), want, n)
    elif dtype != torch.bfloat16:
        assert_close(torch.from_numpy(cuops.rms_norm(x.cpu().numpy(), eps=0.0)), want, n)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [5, 64, 5000])
def test_zeros_give_zeros(n, dtype, device):
    x = torch.zeros(3, n, dtype=dtype, device=device)
    for eps in (0.0, 1e-6):
        assert torch.equal(cuops.rms_norm(x, eps=eps), x)
    if dtype != torch.bfloat16:
        assert not cuops.rms_norm(x.cpu().numpy(), eps=0.0).any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("n", [5, 64, 5000])
def test_nan_and_infinity_propagate_as_in_pytorch(value, n, device):
    x = make((3, n), device=device)
    x[1, 2] = value
    y = cuops.rms_norm(x)
    want = F.rms_norm(x.cpu(), (n,), eps=1e-6)  # on CUDA, PyTorch's answer depends on the size
    torch.testing.assert_close(y.cpu(), want, equal_nan=True)
    torch.testing.assert_close(torch.from_numpy(cuops.rms_norm(x.cpu().numpy())), y.cpu(), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [64, 1000, 8192])
def test_error_is_at_most_that_of_pytorch(n, dtype, device):
    x, weight = make((64, n), dtype, device), make((n,), dtype, device, 1)
    want = definition(x, weight)[0]

    def error(y):
        return float(np.sqrt(np.mean(np.square(y.cpu().double().numpy() - want))))

    assert error(cuops.rms_norm(x, weight)) <= 1.001 * error(F.rms_norm(x, (n,), weight, 1e-6))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("shape", [(4, 64), (3, 5, 33), (1, 100000), (300, 1000)], ids=str)
def test_numpy_arrays(shape, dtype):
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    weight = np.random.default_rng(1).standard_normal(shape[-1]).astype(dtype)
    want = definition(torch.from_numpy(x), torch.from_numpy(weight))[0]
    y, rstd = cuops.rms_norm(x, weight, return_rstd=True)
    assert y.dtype == dtype
    assert_close(torch.from_numpy(y), want, shape[-1])
    assert rstd.shape == shape[:-1]
    strided = np.asfortranarray(x)
    assert_close(torch.from_numpy(cuops.rms_norm(strided, weight)), want, shape[-1])
    for writable in (x.copy(), np.asfortranarray(x)):
        assert cuops.rms_norm_(writable, weight) is writable
        assert_close(torch.from_numpy(np.ascontiguousarray(writable)), want, shape[-1])


OUTPUTS = {
    "contiguous": lambda shape, dtype: np.zeros(shape, dtype),
    "in columns": lambda shape, dtype: np.zeros(shape, dtype, order="F"),
    "every second": lambda shape, dtype: np.zeros((*shape[:-1], 2 * shape[-1]), dtype)[..., ::2],
}


@pytest.mark.parametrize("layout", OUTPUTS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("shape", [(33,), (5, 33), (2, 3, 64), (0, 8)], ids=str)
def test_out_is_written_and_returned(shape, dtype, layout):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    want = cuops.rms_norm(x, out_dtype=dtype)
    out = OUTPUTS[layout](shape, dtype)
    assert cuops.rms_norm(x, out=out, out_dtype=dtype) is out
    assert np.array_equal(out, want)
    got = cuops.rms_norm(x, out=out, out_dtype=dtype, residual=x, normalized_shape=shape, return_rstd=True)
    assert got[0] is out
    assert np.array_equal(out, cuops.rms_norm(2 * x, normalized_shape=shape, out_dtype=dtype))


@pytest.mark.parametrize("overlap", ["x", "a row on", "residual", "weight"])
def test_out_may_overlap_the_inputs(overlap):
    base = np.random.default_rng(0).standard_normal((7, 8)).astype(np.float32)
    x, residual, weight = base[1:5], np.arange(32, dtype=np.float32).reshape(4, 8), np.arange(8, dtype=np.float32)
    whole = np.arange(32, dtype=np.float32).reshape(4, 8)
    weight = whole[2] if overlap == "weight" else weight
    out = {"x": x, "a row on": base[2:6], "residual": residual, "weight": whole}[overlap]
    want = cuops.rms_norm(x, weight), cuops.rms_norm(x, weight, residual=residual)[0]
    if overlap == "residual":
        cuops.rms_norm(x, weight, residual=residual, out=out)
    else:
        cuops.rms_norm(x, weight, out=out)
    assert np.array_equal(out, want[overlap == "residual"])


def test_bad_out_is_refused_by_name(device):
    x, fixed = np.ones((2, 4), np.float32), np.ones((2, 4), np.float32)
    fixed.flags.writeable = False
    assert_refused(
        [
            ("out", TypeError, lambda: cuops.rms_norm(x, out=[[0.0] * 4] * 2)),
            ("out", TypeError, lambda: cuops.rms_norm(x, out=torch.ones(2, 4))),
            ("out", ValueError, lambda: cuops.rms_norm(x, out=np.ones((4, 2), np.float32))),
            ("out", ValueError, lambda: cuops.rms_norm(x, out=np.ones((2, 4)))),
            ("out", ValueError, lambda: cuops.rms_norm(x, out=x, out_dtype=np.float16)),
            ("out", ValueError, lambda: cuops.rms_norm(x, out=fixed)),
        ],
        x,
    )
    tensor = torch.ones(2, 4, device=device)
    assert_refused([("out", TypeError, lambda out=out: cuops.rms_norm(tensor, out=out)) for out in (tensor, x)], tensor)


@gpu
def test_numpy_arrays_on_the_gpu():
    test_numpy_arrays((4096, 2048), np.float32)
    test_numpy_arrays((7, 3, 999), np.float64)
    assert cuops._backend.gpu_for_host_arrays() == 0


def test_in_place_needs_a_writable_matrix(device):
    with pytest.raises(ValueError, match=r"x: expected at least 2 dimensions, got shape \(8,\)"):
        cuops.rms_norm_(np.ones(8))
    with pytest.raises(ValueError, match=r"x: expected at least 2 dimensions"):
        cuops.rms_norm_(torch.ones(8, device=device))
    fixed = np.ones((2, 8))
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="x: expected a writable array"):
        cuops.rms_norm_(fixed)


def test_in_place_writes_into_x(device):
    x, weight = make((6, 4097), device=device), make((4097,), device=device, seed=1)
    want = cuops.rms_norm(x, weight)
    pointer = x.data_ptr()
    y = cuops.rms_norm_(x, weight)
    assert y is x
    assert x.data_ptr() == pointer
    assert torch.equal(x, want)


def bad_calls(x, other):
    """Calls that must be refused, by the argument that the error must name. `other` makes an array of x's kind."""
    weight = other((4,))
    return [
        ("weight", ValueError, lambda: cuops.rms_norm(x, other((3,)))),
        ("weight", ValueError, lambda: cuops.rms_norm(x, other((2, 2, 4)))),
        ("weight", TypeError, lambda: cuops.rms_norm(x, [1.0] * 4)),
        ("bias", ValueError, lambda: cuops.rms_norm(x, weight, other((5,)))),
        ("bias", TypeError, lambda: cuops.rms_norm(x, weight, "bias")),
        ("residual", ValueError, lambda: cuops.rms_norm(x, residual=other((2, 5)))),
        ("residual", TypeError, lambda: cuops.rms_norm(x, residual=1.0)),
        ("eps", ValueError, lambda: cuops.rms_norm(x, weight, eps=-1e-6)),
        ("eps", ValueError, lambda: cuops.rms_norm(x, weight, eps=float("nan"))),
        ("eps", ValueError, lambda: cuops.rms_norm(x, weight, eps=float("inf"))),
        ("eps", TypeError, lambda: cuops.rms_norm(x, weight, eps="1e-6")),
        ("weight_offset", TypeError, lambda: cuops.rms_norm(x, weight, weight_offset=None)),
        ("weight_offset", ValueError, lambda: cuops.rms_norm(x, weight, weight_offset=float("nan"))),
        ("normalized_shape", ValueError, lambda: cuops.rms_norm(x, normalized_shape=(3,))),
        ("normalized_shape", ValueError, lambda: cuops.rms_norm(x, normalized_shape=())),
        ("weight", ValueError, lambda: cuops.rms_norm(x, weight, normalized_shape=(2, 4))),
        ("out_dtype", TypeError, lambda: cuops.rms_norm(x, out_dtype="int8")),
    ]


def assert_refused(calls, x):
    before = x.copy() if isinstance(x, np.ndarray) else x.clone()
    for argument, error, call in calls:
        with pytest.raises(error, match=f"^{argument}: expected "):
            call()
    assert (x == before).all()
    cuops.rms_norm(x)


def test_bad_arguments_are_refused_by_name(device):
    x = make((2, 4), device=device)
    assert_refused(bad_calls(x, lambda shape: torch.ones(shape, device=device)), x)
    assert_refused(
        [
            ("weight", TypeError, lambda: cuops.rms_norm(x, np.ones(4, np.float32))),
            ("weight", ValueError, lambda: cuops.rms_norm(x, torch.ones(4, device="meta"))),
            ("weight", TypeError, lambda: cuops.rms_norm(x, torch.ones(4, device=device, dtype=torch.int32))),
            ("residual", ValueError, lambda: cuops.rms_norm(x, residual=x.double())),
        ],
        x,
    )


def test_bad_arguments_are_refused_by_name_with_numpy():
    x = np.ones((2, 4), np.float32)
    assert_refused(bad_calls(x, lambda shape: np.ones(shape, np.float32)), x)


@pytest.mark.parametrize(
    "x",
    [
        [1.0, 2.0], 3.0, None, np.float32(1), np.ones(3, np.int64), np.ones(3, np.complex64), np.ones(3, bool), np.ones((), np.float32),
        torch.ones(3, dtype=torch.int32), torch.ones(3, dtype=torch.complex64), torch.tensor(1.0), torch.ones(2, 3).to_sparse(),
    ],
    ids=lambda x: f"{type(x).__name__} {getattr(x, 'dtype', '')} {getattr(x, 'ndim', '')}",
)  # fmt: skip
def test_bad_x_is_refused(x, device):
    if isinstance(x, torch.Tensor):
        x = x.to(device)
    with pytest.raises((TypeError, ValueError), match="^x: expected "):
        cuops.rms_norm(x)
    with pytest.raises((TypeError, ValueError), match="^x: expected "):
        cuops.rms_norm_(x)


@gpu
def test_tensors_on_two_devices_are_refused():
    for x, weight in (
        (torch.ones(2, 4, device="cuda"), torch.ones(4)),
        (torch.ones(2, 4), torch.ones(4, device="cuda")),
    ):
        with pytest.raises(ValueError, match="^weight: expected a tensor on x's device"):
            cuops.rms_norm(x, weight)


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


@gpu
def test_more_than_two_to_the_31_elements():
    x = torch.empty(2**19 + 3, 4096, device="cuda", dtype=torch.float16)
    for chunk in x.split(2**16):
        chunk.normal_()
    y = cuops.rms_norm(x)
    for rows in (slice(0, 2), slice(2**18 - 1, 2**18 + 2), slice(-3, None)):
        assert_close(y[rows], definition(x[rows])[0], 4096)


@gpu
def test_a_row_of_more_than_two_to_the_31_elements():
    x = torch.ones(1, 2**31 + 9, device="cuda", dtype=torch.float16)
    x[0, -1] = 3
    y = cuops.rms_norm(x)
    assert y[0, 0] == 1
    assert y[0, 2**31] == 1
    assert y[0, -1] == 3


@gpu
def test_arrays_of_other_libraries_come_back_as_their_own():
    cupy = pytest.importorskip("cupy")
    x = make((5, 100), device="cuda")
    want = cuops.rms_norm(x, x[0])
    theirs = cupy.asarray(x)
    got = cuops.rms_norm(theirs, theirs[0])
    assert isinstance(got, cupy.ndarray)
    assert torch.equal(torch.as_tensor(got, device="cuda"), want)
    h, rstd = cuops.rms_norm(theirs[:, ::2], residual=theirs[:, ::2], return_rstd=True)[1:]
    assert cupy.array_equal(h, 2 * theirs[:, ::2])
    assert rstd.shape == (5,)


@gpu
def test_jax_arrays_come_back_as_jax_arrays():
    jax = pytest.importorskip("jax")
    x = jax.numpy.asarray(make((5, 128)).numpy())
    got = cuops.rms_norm(x.astype("bfloat16"), x[0])
    assert isinstance(got, jax.Array)
    assert got.dtype == "bfloat16"
    want = cuops.rms_norm(make((5, 128)).bfloat16().cuda(), make((5, 128))[0].cuda())
    assert np.array_equal(np.asarray(got, np.float32), want.float().cpu().numpy())


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
