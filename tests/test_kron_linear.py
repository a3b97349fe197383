"""kron_linear against the whole matrix, on torch tensors and NumPy arrays."""

from __future__ import annotations

import functools
import math

import cuops
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cuops import reference
from cuops._kron_linear.fused import in_place
from hypothesis import given, settings
from hypothesis import strategies as st
from kron_samples import EMPTY, LARGE, SAMPLES, arguments, check, definition, exact_gradients
from samples import DTYPES, make

gpu = pytest.mark.gpu


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sample", SAMPLES)
def test_agrees_with_the_definition(sample, dtype, with_bias, device):
    x, factors, bias = arguments(SAMPLES[sample], dtype, device)
    bias = bias if with_bias else None
    y = cuops.kron_linear(x, factors, bias)
    assert (y.dtype, y.device.type, y.is_contiguous()) == (dtype, device.type, True)
    check(y, x, factors, bias)


@pytest.mark.parametrize("chunk", [1, 100, 300, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sample", ["one factor", "primes", "growing", "both", "ten of 2"])
def test_the_cpu_works_on_some_rows_at_a_time(sample, dtype, chunk, monkeypatch):
    x, factors, bias = arguments(SAMPLES[sample], dtype, "cpu")
    leaves = [t.requires_grad_() for t in (x, *factors, bias)]
    y = cuops.kron_linear(x, factors, bias)
    dy = make(y.shape, dtype, "cpu", seed=9)
    want = y, *torch.autograd.grad(y, leaves, dy)
    monkeypatch.setattr(reference, "KRON_CHUNK", chunk)
    y = cuops.kron_linear(x, factors, bias)
    for got, whole in zip((y, *torch.autograd.grad(y, leaves, dy)), want, strict=True):
        # The same sums in float64, of which each order rounds to the same or to the next number.
        torch.testing.assert_close(got, whole, rtol=2 * torch.finfo(dtype).eps, atol=1e-12 * len(x))
    if dtype != torch.bfloat16:
        arrays = [t.detach().numpy() for t in (x, *factors, bias)]
        check(torch.from_numpy(reference.kron_linear_numpy(arrays[0], arrays[1:-1], arrays[-1])), x, factors, bias)


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sample", LARGE)
def test_agrees_with_the_definition_on_large_arrays(sample, dtype):
    x, factors, bias = arguments(LARGE[sample], dtype, "cuda")
    check(cuops.kron_linear(x, factors, bias), x, factors, bias)


@pytest.mark.parametrize(
    "sample", [name for name, (_, s) in SAMPLES.items() if math.prod(o * i for o, i in s) < 1 << 22]
)
def test_is_the_linear_layer_of_the_product(sample, device):
    x, factors, bias = arguments(SAMPLES[sample], torch.float64, device)
    want = F.linear(x, functools.reduce(torch.kron, factors), bias)
    torch.testing.assert_close(cuops.kron_linear(x, factors, bias), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sample", ["one factor", "primes", "growing", "both", "ten of 2"])
def test_the_order_of_the_original_layer_maps_to_this_one(sample, device):
    """Reshape to the reversed sizes, then multiply by each w in turn: the transposed factors, reversed."""
    x, factors, _ = arguments(SAMPLES[sample], torch.float64, device)
    ws = [w.mT for w in reversed(factors)]
    state = x.reshape(-1, *(w.shape[0] for w in reversed(ws)))
    for w in ws:
        state = (state @ w).movedim(-1, 1)
    want = state.reshape(*x.shape[:-1], -1)
    torch.testing.assert_close(cuops.kron_linear(x, [w.mT for w in reversed(ws)]), want, rtol=1e-10, atol=1e-10)


LAYOUTS = {
    "every second row": lambda t: t[::2, :48],
    "a slice of the columns": lambda t: t[:, :48],
    "a slice that starts off a vector": lambda t: t[:, 3:51],
    "transposed leading dimensions": lambda t: t.view(4, 6, 64).transpose(0, 1)[..., :48],
    "heads of a fused projection": lambda t: t.view(4, 6, 64)[:, :, :96].unflatten(-1, (4, 16))[..., :12].flatten(-2),
    "columns as rows": lambda t: t.t().contiguous()[:48].t(),
    "every second column": lambda t: t.repeat(1, 2)[:, :96:2],
    "expanded": lambda t: t[:1, :48].expand(5, 48),
    "one row": lambda t: t[3, :48],
}
FACTORS = {
    "contiguous": lambda w: w,
    "transposed": lambda w: w.mT.contiguous().mT,
    "every second column": lambda w: w.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda w: w[:1].expand(w.shape),
    "negated on reading": lambda w: torch._neg_view(w),  # as the imaginary part of a conjugate is
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of_factors", FACTORS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout, of_factors, dtype, device):
    x = LAYOUTS[layout](make((24, 64), dtype, device))
    factors = [FACTORS[of_factors](make(size, dtype, device, 1)) for size in ((5, 8), (4, 6))]
    bias = make((40,), dtype, device, 2)[::2]
    before = x.clone()
    check(cuops.kron_linear(x, factors, bias), x, factors, bias)
    assert torch.equal(x, before)


def test_more_rows_of_two_strides_than_the_library_counts_are_copied():
    many = torch.empty(2, 2**31 + 2, 8, dtype=torch.float16, device="meta")
    few, apart = many[:, :1000], many[:, : 2**31 + 1]
    assert in_place(few) is few
    assert in_place(apart) is not apart
    assert in_place(apart).is_contiguous()


@settings(max_examples=60, deadline=None)
@given(
    leading=st.lists(st.integers(0, 3), max_size=3),
    sizes=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=4),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_any_shape_agrees_with_the_definition(dtype, device, leading, sizes):
    x, factors, bias = arguments((leading, sizes), dtype, device)
    check(cuops.kron_linear(x, iter(factors), bias), x, factors, bias)


@pytest.mark.parametrize("sample", ["ten of 2", "squares of 16", "86 x 128"])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_error_is_at_most_that_of_pytorch(sample, dtype, device):
    x, factors, bias = arguments(SAMPLES[sample], dtype, device)
    want = definition(x, factors, bias)

    def error(y):
        return (y.cpu().double() - want).square().mean().sqrt().item()

    state = x.reshape(-1, *(w.shape[1] for w in factors))
    for w in reversed(factors):
        state = (state @ w.mT).movedim(-1, 1)
    assert error(cuops.kron_linear(x, factors, bias)) <= (2 if dtype == torch.float32 else 1.2) * error(
        state.reshape(x.shape) + bias
    )


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("sample", SAMPLES)
def test_numpy_arrays_agree_with_the_definition(sample, dtype):
    tensors = arguments(SAMPLES[sample], getattr(torch, np.dtype(dtype).name))
    x, factors, bias = tensors[0].numpy(), [w.numpy() for w in tensors[1]], tensors[2].numpy()
    y = cuops.kron_linear(x, factors, bias)
    assert isinstance(y, np.ndarray)
    check(torch.from_numpy(y), *tensors)
    check(
        torch.from_numpy(cuops.kron_linear(np.asfortranarray(x), [np.asfortranarray(w) for w in factors])), *tensors[:2]
    )


def test_read_only_arrays(device):
    tensors = arguments(SAMPLES["both"], torch.float32)
    x, factors, bias = tensors[0].numpy(), [w.numpy() for w in tensors[1]], tensors[2].numpy()
    want = cuops.kron_linear(x, factors, bias)
    for a in (x, *factors, bias):
        a.flags.writeable = False
    assert np.array_equal(cuops.kron_linear(x, factors, bias), want)


def test_numpy_arrays_of_bfloat16(device):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    tensors = arguments(SAMPLES["both"], torch.bfloat16)
    x, *factors, bias = (t.float().numpy().astype(bfloat16) for t in (tensors[0], *tensors[1], tensors[2]))
    y = cuops.kron_linear(x, factors, bias)
    assert y.dtype == bfloat16
    check(torch.from_numpy(y.astype(np.float32)).bfloat16(), *tensors)


def test_more_factors_than_an_array_has_dimensions():
    x, (w, v), bias = arguments(SAMPLES["both"], torch.float64)
    scales = torch.tensor([2.0, 0.5], dtype=torch.float64).repeat(40).reshape(-1, 1, 1)  # whose product is 1
    given = [a.requires_grad_() for a in (x, w, v, scales)]
    y = cuops.kron_linear(x, [w, *scales, v], bias)
    check(y, x, [w, v], bias)
    dy = make(y.shape, torch.float64, seed=9)
    *found, dscales = torch.autograd.grad(y, given, dy)
    for got, want in zip(found, exact_gradients(dy, x, [w, v]), strict=False):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(dscales * scales, (dy * (y - bias)).sum().expand_as(scales), rtol=1e-10, atol=1e-10)
    arrays = [a.detach().numpy() for a in (x, w, *scales, v, bias)]
    check(torch.from_numpy(reference.kron_linear_numpy(arrays[0], arrays[1:-1], arrays[-1])), x, [w, v], bias)


@pytest.mark.filterwarnings("error")
def test_numpy_does_not_warn_of_infinities_and_overflow():
    eye, ones = np.eye(2), np.ones((1, 2))
    x = np.array([[np.inf, 1.0, -np.inf, 1.0], [1e300, 1e300, 1e300, 1e300]])
    y = reference.kron_linear_numpy(x, [ones, 1e10 * eye], np.array([0.0, -np.inf]))
    np.testing.assert_array_equal(y, [[np.nan, np.nan], [np.inf, np.nan]])
    assert np.isinf(reference.kron_linear_numpy(np.full((1, 4), 6e4, np.float16), [ones.astype(np.float16)] * 2, None))
    with np.errstate(all="raise"):
        tiny = np.full((1, 2), 1e-4, np.float16)
        assert reference.kron_linear_numpy(tiny, [tiny], None) == 0
        signaling = np.full(2, 0x7FA00000, np.uint32).view(np.float32)
        assert np.isnan(
            cuops.kron_linear(np.ones((1, 2), np.float32), [signaling.reshape(2, 1), signaling[None]], signaling)
        ).all()


@gpu
def test_arrays_of_other_libraries_come_back_as_their_own():
    cupy = pytest.importorskip("cupy")
    x, factors, bias = arguments(SAMPLES["both"], torch.float32, "cuda")
    got = cuops.kron_linear(cupy.asarray(x), [cupy.asarray(w) for w in factors], cupy.asarray(bias))
    assert isinstance(got, cupy.ndarray)
    backwards = [cupy.asarray(w)[::-1, ::-1] for w in factors]  # strides that PyTorch does not have
    flipped = cuops.kron_linear(cupy.asarray(x), backwards)
    check(torch.as_tensor(flipped, device="cuda"), x, [w.flip(0, 1) for w in factors])
    check(torch.as_tensor(got, device="cuda"), x, factors, bias)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_jax_arrays_come_back_as_jax_arrays(dtype):
    jax = pytest.importorskip("jax")
    x, factors, _ = arguments(SAMPLES["both"], dtype, "cuda")
    got = cuops.kron_linear(*(jax.tree.map(jax.numpy.from_dlpack, a) for a in (x, factors)))
    assert isinstance(got, jax.Array)
    assert got.dtype == str(dtype).removeprefix("torch.")
    check(torch.from_dlpack(got), x, factors)


def refused(x, other):
    """Calls that must be refused, by what the error must name. `other` makes an array of x's kind; x is (2, 12)."""
    w, v = other((5, 3)), other((2, 4))
    return [
        ("factors", ValueError, lambda: cuops.kron_linear(x, [])),
        ("factors", TypeError, lambda: cuops.kron_linear(x, other((2, 3, 4)))),
        ("factors", TypeError, lambda: cuops.kron_linear(x, None)),
        ("factors", TypeError, lambda: cuops.kron_linear(x, {1, 2})),
        ("factors", ValueError, lambda: cuops.kron_linear(x, [w])),
        ("factors", ValueError, lambda: cuops.kron_linear(x, [v, v])),
        (r"factors\[1\]", ValueError, lambda: cuops.kron_linear(x, [w, other((4,))])),
        (r"factors\[0\]", ValueError, lambda: cuops.kron_linear(x, [other((1, 5, 3)), v])),
        (r"factors\[1\]", TypeError, lambda: cuops.kron_linear(x, [w, [[1.0] * 4]])),
        (r"factors\[0\]", TypeError, lambda: cuops.kron_linear(x, [None, v])),
        ("bias", ValueError, lambda: cuops.kron_linear(x, [w, v], other((9,)))),
        ("bias", ValueError, lambda: cuops.kron_linear(x, [w, v], other((1, 10)))),
        ("bias", TypeError, lambda: cuops.kron_linear(x, [w, v], 0.0)),
    ]


def assert_refused(calls):
    for argument, error, call in calls:
        with pytest.raises(error, match=f"^{argument}: expected "):
            call()


def test_bad_arguments_are_refused_by_name(device):
    x, w, v = (make(shape, device=device) for shape in ((2, 12), (5, 3), (2, 4)))
    assert_refused(refused(x, lambda shape: torch.ones(shape, device=device)))
    other_device = torch.ones(2, 4, device="meta")
    assert_refused(
        [
            ("x", TypeError, lambda: cuops.kron_linear(x.int(), [w, v])),
            ("x", ValueError, lambda: cuops.kron_linear(x[0, 0], [w, v])),
            ("x", TypeError, lambda: cuops.kron_linear([1.0] * 12, [w, v])),
            ("x", TypeError, lambda: cuops.kron_linear(x.to_sparse(), [w, v])),
            (r"factors\[0\]", TypeError, lambda: cuops.kron_linear(x, [w.int(), v])),
            (r"factors\[1\]", TypeError, lambda: cuops.kron_linear(x, [w, v.double()])),
            (r"factors\[1\]", TypeError, lambda: cuops.kron_linear(x, [w, np.ones((2, 4), np.float32)])),
            (r"factors\[1\]", ValueError, lambda: cuops.kron_linear(x, [w, other_device])),
            ("bias", TypeError, lambda: cuops.kron_linear(x, [w, v], torch.ones(10, device=device).half())),
            ("bias", ValueError, lambda: cuops.kron_linear(x, [w, v], torch.ones(10, device="meta"))),
        ]
    )


def test_bad_arguments_are_refused_by_name_with_numpy():
    x, w, v = (np.ones(shape, np.float32) for shape in ((2, 12), (5, 3), (2, 4)))
    assert_refused(refused(x, lambda shape: np.ones(shape, np.float32)))
    assert_refused(
        [
            ("x", TypeError, lambda: cuops.kron_linear(x.astype(np.int64), [w, v])),
            (r"factors\[1\]", TypeError, lambda: cuops.kron_linear(x, [w, v.astype(np.float64)])),
            (r"factors\[0\]", TypeError, lambda: cuops.kron_linear(x, [torch.ones(5, 3), v])),
        ]
    )


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("kind", ["torch", "numpy", "meta"])
def test_a_result_that_no_array_holds_is_refused(kind, rows, device):
    if kind == "numpy":
        x, w = np.ones((rows, 1)), np.broadcast_to(np.ones((1, 1)), (1 << 32, 1))
    else:
        x = torch.ones(rows, 1, device=kind if kind == "meta" else device)
        w = x.new_ones(1, 1).expand(1 << 32, 1)
    with pytest.raises(ValueError, match=f"^factors: expected a result of less than 2.63 elements, got {1 << 64}$"):
        cuops.kron_linear(x, [w, w])


@pytest.mark.parametrize(("rows", "sizes"), [(2, [(1, 1), (2, 2)]), (1, [(2, 1)]), (1, [(1, 3), (3, 1)])], ids=str)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_numpy_takes_nan_and_infinity_along_zeros(rows, sizes, dtype):
    """NumPy's dot does not where one operand is a single number."""
    zeros = [np.zeros((rows, math.prod(i for _, i in sizes))), *map(np.zeros, sizes)]
    for number in (np.nan, np.inf):
        for of in range(len(zeros)):
            x, *factors = (np.full_like(a, number) if k == of else a for k, a in enumerate(zeros))
            with np.errstate(invalid="ignore"):
                want = x @ functools.reduce(np.kron, factors).T
            got = cuops.kron_linear(x.astype(dtype), [w.astype(dtype) for w in factors])
            assert np.isnan(got[np.isnan(want)]).all()
            assert np.isnan(want).any()


def test_an_empty_result_takes_no_memory_in_between(device):
    """Which would be 320 GB."""
    x, tall, none = (
        torch.ones(size, device=device, requires_grad=True) for size in ((200_000, 1), (200_000, 1), (0, 1))
    )
    y = cuops.kron_linear(x, [tall, none])
    assert y.shape == (200_000, 0)
    y.sum().backward()
    assert all(t.grad.shape == t.shape and not t.grad.any() for t in (x, tall, none))


@pytest.mark.parametrize("of", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_sums_of_nothing_are_zero_whatever_other_factors_have(of):
    """And take no memory in between, of which this would be a terabyte."""
    bias = np.arange(4.0)
    for sizes in ([(2, 2), (2, 0)], [(2, 0), (2, 2)]):
        y = cuops.kron_linear(of(np.ones((3, 0))), [of(np.full(size, np.nan)) for size in sizes], of(bias))
        np.testing.assert_array_equal(np.asarray(y), np.stack([bias] * 3))
    tall = of(np.ones((400_000, 1)))
    assert cuops.kron_linear(of(np.ones((1, 1))), [tall, tall, of(np.ones((0, 1))), tall]).shape == (1, 0)


@pytest.mark.parametrize("sample", EMPTY)
def test_nothing_gives_the_bias(sample, device):
    x, factors, bias = arguments(SAMPLES[sample], device=device)
    want = bias.expand(*x.shape[:-1], -1) if x.shape[-1] == 0 else torch.empty(*x.shape[:-1], len(bias))
    assert torch.equal(cuops.kron_linear(x, factors, bias), want.to(x))


def test_tensors_without_values_give_the_shape_of_y():
    x, first, second = (torch.empty(*shape, device="meta") for shape in ((2, 6), (4, 2), (5, 3)))
    assert cuops.kron_linear(x, [first, second]).shape == (2, 20)
