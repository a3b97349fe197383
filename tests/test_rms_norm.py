"""RMSNorm against its definition in extended precision."""

from __future__ import annotations

import itertools

import cuops
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rms_norm_samples import SHAPES, WIDE, assert_close, definition
from samples import DTYPES, make

gpu = pytest.mark.gpu


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


@gpu
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("n", [65, 136, 328, 520, 896, 8200, 12288, 16392, 24576])
def test_agrees_with_the_definition_on_many_rows(n, dtype):
    rows = max(3001, (1 << 21) // n + 3)
    x, weight = make((rows, n), dtype, "cuda"), make((n,), dtype, "cuda", 1)
    some = torch.tensor([*range(0, rows - 5, rows // 25), *range(rows - 5, rows)])
    assert_close(cuops.rms_norm(x, weight)[some], definition(x[some], weight)[0], n)


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


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16"])
def test_out_dtype_may_be_a_name(name):
    assert cuops.rms_norm(torch.ones(3, 8), out_dtype=name).dtype == getattr(torch, name)


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


@pytest.mark.parametrize("shape", [(0, 2, 3), (4, 0, 3), (2, 0, 5, 3), (0, 0, 0)], ids=str)
def test_empty_input_over_several_dimensions(shape, device):
    x, weight = torch.empty(shape, device=device, requires_grad=True), torch.ones(shape[-2:], device=device)
    for array, parameter in ((x, weight), (x.detach().cpu().numpy(), weight.cpu().numpy())):
        y, h, rstd = cuops.rms_norm(array, parameter, parameter, residual=array, return_rstd=True)
        assert y.shape == h.shape == shape
        assert rstd.shape == shape[:-2]
        assert cuops.rms_norm(array, normalized_shape=shape[-2:]).shape == shape
    out = np.empty(shape, np.float32)
    assert cuops.rms_norm_(out, normalized_shape=shape[-2:]) is out
    assert cuops.rms_norm(out, weight.cpu().numpy(), out=out) is out
    assert cuops.rms_norm_(x.detach(), weight).shape == shape
    cuops.rms_norm(x, weight).sum().backward()
    assert x.grad.shape == shape


@gpu
def test_more_than_two_to_the_31_elements():
    x = torch.empty(2**19 + 3, 4096, device="cuda", dtype=torch.float16)
    for chunk in x.split(2**16):
        chunk.normal_()
    y = cuops.rms_norm(x)
    for rows in (slice(0, 2), slice(2**18 - 1, 2**18 + 2), slice(-3, None)):
        assert_close(y[rows], definition(x[rows])[0], 4096)


@gpu
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(
    ("dtype", "n"),
    [(torch.bfloat16, n) for n in (256, 2048, 4097, 8192, 16384, 24576, 32768, 65536)]
    + [(torch.float16, 16392), (torch.float32, 12284)],
)
def test_more_rows_than_the_cache_holds(dtype, n, with_residual):
    rows = 80_000_000 // n + 3
    x, residual = (torch.randn(rows, n, device="cuda", dtype=dtype) for _ in range(2))
    x[rows // 7] = 0
    x[-2] *= torch.finfo(dtype).max / 1000
    weight = make((n,), dtype, "cuda", 1)
    if with_residual:
        y, h = cuops.rms_norm(x, weight, residual=residual)
        assert torch.equal(h, x + residual)
    else:
        y, h = cuops.rms_norm(x, weight), x
    for part in (slice(0, 4), slice(rows // 7, None, rows // 7), slice(-4, None)):
        assert_close(y[part], definition(h[part], weight)[0], n)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "vectors"),
    [
        *[(2049, 65), (4099, 125), (16387, 49), (90_001, 24), (16, 32768), (17, 18440), (20, 20000)],
        # rows that fill their threads
        *[
            (2048, 2),
            (384, 8),
            (4096, 32),
            (1024, 64),
            (64, 128),
            (16, 256),
            (256, 512),
            (512, 384),
            (2048, 512),
            (700, 1024),
        ],
        # longer ones, in blocks of several sizes and clusters
        *[
            (600, 1100),
            (520, 1280),
            (700, 1344),
            (600, 1700),
            (8, 1300),
            (16, 4096),
            (300, 5000),
            (40, 16384),
            (3000, 3072),
        ],
        *[(20, 1000), (300, 700), (400, 1024)],  # few rows with a residual
        *[(262_144, 2), (40_960, 8), (32_769, 16), (16_384, 32), (8192, 64), (131_072, 32), (2048, 128), (8192, 256)],
    ],
)
@pytest.mark.parametrize("kind", ["weight", "offset", "no weight", "float32 weight", "residual"])
def test_as_many_rows_as_have_a_kernel_of_their_own(kind, rows, vectors, dtype):
    n = vectors * 16 // dtype.itemsize
    x = torch.randn(rows, n, device="cuda", dtype=dtype)
    weight = None if kind == "no weight" else make((n,), torch.float32 if "float32" in kind else dtype, "cuda", 1)
    offset = 1.0 if kind == "offset" else 0.0
    residual = torch.randn_like(x) if kind == "residual" else None
    if offset:  # and rows apart
        x = torch.cat([x, x[:, :64]], -1)[:, :n]
    x[rows // 7] = 0
    x[-2] *= torch.finfo(dtype).max / 1000
    y, *h, rstd = cuops.rms_norm(x, weight, residual=residual, weight_offset=offset, return_rstd=True)
    if residual is not None:
        assert torch.equal(h[0], x + residual)
    h = h[0] if h else x.clone()
    in_place = y if residual is not None else cuops.rms_norm_(x, weight, weight_offset=offset)
    for part in (slice(0, 4), slice(rows // 7, None, rows // 7), slice(-4, None)):
        want = definition(h[part], weight, weight_offset=offset)
        assert_close(y[part], want[0], n)
        assert_close(in_place[part], want[0], n)
        assert_close(rstd[part], want[2], n)


@gpu
@pytest.mark.parametrize(
    ("dtype", "kind"),
    list(itertools.product([torch.float32, torch.float16, torch.bfloat16], ["weight", "no weight", "residual"]))
    + list(itertools.product([torch.float16, torch.bfloat16], ["float32 weight", "float32 residual"])),
    ids=str,
)
@pytest.mark.parametrize("vectors", [9, 24, 33, 40, 48, 49, 65, 80, 96, 98, 129, 160, 161])
def test_many_rows_that_are_longer_than_a_power_of_two(dtype, vectors, kind):
    n = vectors * 16 // dtype.itemsize
    rows = (1 << 21) // n + 1003
    x = torch.randn(rows, n, device="cuda", dtype=dtype)
    x[rows // 7] = 0
    x[-2] *= torch.finfo(dtype).max / 1000
    wide = torch.float32 if "float32" in kind else dtype
    weight = None if kind == "no weight" else make((n,), wide if "weight" in kind else dtype, "cuda", 1)
    residual = torch.randn(rows, n, device="cuda", dtype=wide) if "residual" in kind else None
    y, *h, rstd = cuops.rms_norm(x, weight, residual=residual, return_rstd=True)
    if residual is not None:
        assert torch.equal(h[0], x + residual)
    h = h[0] if h else x
    for part in (slice(0, 4), slice(rows // 7, None, rows // 7), slice(-4, None)):
        want = definition(h[part], weight)
        assert_close(y[part], want[0], n)
        assert_close(rstd[part], want[2], n)


@gpu
def test_a_row_of_more_than_two_to_the_31_elements():
    x = torch.ones(1, 2**31 + 9, device="cuda", dtype=torch.float16)
    x[0, -1] = 3
    y = cuops.rms_norm(x)
    assert y[0, 0] == 1
    assert y[0, 2**31] == 1
    assert y[0, -1] == 3


def test_in_place_of_an_array_takes_the_offset_of_the_weight():
    x, weight = np.random.default_rng(0).standard_normal((3, 4)), np.ones(4)
    y = cuops.rms_norm(x, weight, weight_offset=1.0)
    np.testing.assert_array_equal(cuops.rms_norm_(x.copy(), weight, weight_offset=1.0), y)


def test_in_place_the_bias_alone_gets_a_gradient():
    x, bias = torch.randn(3, 4), torch.zeros(4, requires_grad=True)
    cuops.rms_norm_(x, torch.ones(4), bias).sum().backward()
    assert bias.grad.tolist() == [3.0] * 4


def test_the_sum_alone_passes_gradients_on(device):
    x, residual = (torch.randn(3, 4, device=device, requires_grad=True) for _ in range(2))
    cuops.rms_norm(x, residual=residual)[1].sum().backward()
    assert x.grad.eq(1).all()
    assert residual.grad.eq(1).all()
