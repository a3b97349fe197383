"""Gradients of one factor of kron_linear: products summed over all that it does not touch, and dx."""

from __future__ import annotations

import pytest
import torch
from cuops._kron_linear import bwd, factor_bwd, fused
from cuops._kron_linear.factor_bwd import by_kernel, factor_gradient
from cuops._kron_linear.sums import sum_of_products
from kron_samples import assert_repeatable, exact_gradients, random
from samples import DTYPES

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _kernel(monkeypatch):
    """Where there is a kernel, it is taken, faster or not."""
    factor_bwd._partial_rows.cache_clear()
    for faster in ("_is_faster", "_are_both_faster"):
        monkeypatch.setattr(factor_bwd, faster, lambda *_: True)
    yield
    factor_bwd._partial_rows.cache_clear()


# Rows and columns of the factor: parts of a warp's tile, whole ones, parts of several blocks.
SIZES = [(8, 8), (16, 16), (24, 40), (80, 80), (128, 96), (72, 144), (264, 8), (200, 136)]
# Rows, and columns beyond the factor's.
DEPTHS = [(1, 8), (7, 16), (3, 200), (1, 5000), (100, 24), (300, 64)]
# Rows along the depth that are no whole vectors: of several dtypes, and of odd numbers, whose elements lie across words.
ODD_DEPTHS = [(1, 2), (8, 3), (4, 13), (2, 5001), (100, 30), (300, 9), (3000, 22), (40, 1003)]


def operands(rows, inner, size, dtype, layout):
    """g (rows, o, inner) and x (rows, i, inner), each with its rows along the depth or across it."""
    made = []
    for k, (columns, is_across) in enumerate(zip(size, layout, strict=True)):
        t = random((rows, inner, columns) if is_across else (rows, columns, inner), dtype, 3 + k)
        made.append(t.mT if is_across else t)
    return made


def check(got, g, x):
    wanted = torch.einsum("rok,rik->oi", g.double(), x.double())
    terms = torch.einsum("rok,rik->oi", g.double().abs(), x.double().abs())
    # What is left out of a product, what sums lose, and the rounding of the result.
    sums = 1e-15 if g.dtype == torch.float64 else 1e-6
    bound = sums * terms + torch.finfo(g.dtype).eps * wanted.abs()
    assert got.dtype == g.dtype
    assert ((got.double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [(False, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("depth", DEPTHS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_the_sum_of_products(size, depth, layout, dtype):
    g, x = operands(*depth, size, dtype, layout)
    check(factor_gradient(g, x), g, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("depth", ODD_DEPTHS, ids=str)
@pytest.mark.parametrize("size", [*SIZES, (1, 5), (7, 33), (121, 9), (67, 131)], ids=str)
def test_rows_of_any_length_along_the_sum(size, depth, dtype):
    g, x = operands(*depth, size, dtype, (False, False))
    found = by_kernel(g, x, None)
    if found is None:  # where shared memory is smaller than on Hopper
        assert torch.cuda.get_device_properties(0).shared_memory_per_block_optin < 123_000
        return
    dx, dw = found
    assert dx is None
    check(dw, g, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_that_end_in_the_middle_of_a_word_are_left_to_gemms(dtype):
    for size in [(8, 12), (8, 7), (7, 8)]:
        g, x = operands(5, 9, size, dtype, (False, False))
        assert (by_kernel(g, x, None) is None) == (dtype.itemsize == 2 and size != (8, 12))


def check_dx(got, g, w):
    wanted, terms = w.double().mT @ g.double(), w.double().abs().mT @ g.double().abs()
    sums = 1e-15 if g.dtype == torch.float64 else 1e-6
    assert (got.dtype, got.shape) == (g.dtype, wanted.shape)
    assert ((got.double() - wanted).abs() <= sums * terms + torch.finfo(g.dtype).eps * wanted.abs()).all()


WITH_DX = [dtype for dtype in DTYPES if dtype != torch.float32]


@pytest.mark.parametrize("dtype", WITH_DX, ids=str)
@pytest.mark.parametrize("depth", [*DEPTHS, (3000, 16), *ODD_DEPTHS], ids=str)
@pytest.mark.parametrize(
    "size", [(8, 8), (12, 12), (16, 24), (7, 33), (33, 7), (80, 80), (96, 64), (128, 112), (100, 12)], ids=str
)
def test_both_gradients_by_one_kernel(size, depth, dtype):
    (g, x), w = operands(*depth, size, dtype, (False, False)), random(size, dtype, 8)
    found = by_kernel(g, x, w)
    if found is None:  # where shared memory is smaller than on Hopper
        assert torch.cuda.get_device_properties(0).shared_memory_per_block_optin < 213_000
        return
    dx, dw = found
    check(dw, g, x)
    check_dx(dx, g, w)
    assert_repeatable(lambda: by_kernel(g, x, w))


@pytest.mark.parametrize("is_expanded", [False, True])
@pytest.mark.parametrize("dtype", WITH_DX, ids=str)
def test_both_gradients_of_the_first_of_two_factors_in_place(dtype, is_expanded, monkeypatch):
    x, factors = random((600, 33 * 22), dtype, 3), [random((41, 33), dtype, 4), random((13, 22), dtype, 5)]
    dy = random((1, 1) if is_expanded else (600, 41 * 13), dtype, 6).expand(600, 41 * 13)
    found = []
    monkeypatch.setattr(bwd, "in_chain", lambda *of: found.append(by_kernel(*of)) or found[-1])
    dx, dfactors = bwd.by_chain([dy], x, factors, True, [True, True])
    assert found[0][0] is not None
    roundings = 200 if dtype == torch.float64 else 4  # of sums; of a state, of what dx is found of, and of results
    for got, want in zip((dx, *dfactors), exact_gradients(dy, x, factors)[:-1], strict=True):
        assert got.dtype == dtype
        assert (got.cpu().double() - want).norm() <= roundings * torch.finfo(dtype).eps * want.norm()


@pytest.mark.parametrize("dtype", WITH_DX, ids=str)
@pytest.mark.parametrize("inner", [104, 102, 101, 3])
def test_dx_is_written_as_a_whole_and_nothing_beside_it(inner, dtype):
    library = fused.library()
    (g, x), w = operands(8, inner, (40, 72), dtype, (False, False)), random((40, 72), dtype, 8)
    rows = library.kron_linear_factor_bwd_partial_rows(fused.DTYPES[dtype], 8, inner, 40, 72, False, False, True, 0)
    sums = torch.promote_types(dtype, torch.float32)
    dw, partial = torch.empty_like(w), torch.full((rows, 40 * 72), torch.nan, dtype=sums, device="cuda")
    before, dx, behind = torch.full((10, 72, inner), torch.nan, dtype=dtype, device="cuda").split([1, 8, 1])
    library.kron_linear_factor_bwd(dw, dx, partial, g, x, w, False)
    check(dw, g, x)
    check_dx(dx, g, w)
    assert before.isnan().all()
    assert behind.isnan().all()


def test_two_kernels_where_one_cannot_do_it():
    for dtype, size, depth, layout in [
        (torch.float32, (16, 16), (5, 64), (False, False)),
        (torch.float16, (136, 16), (5, 64), (False, False)),
        (torch.float16, (16, 16), (5, 12), (False, True)),
        (torch.float64, (16, 16), (5, 64), (False, True)),
        (torch.float64, (16, 16), (64, 1), (False, False)),
    ]:
        assert by_kernel(*operands(*depth, size, dtype, layout), random(size, dtype, 8)) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 33, 1000, 70001])
def test_rows_without_columns_beyond_have_the_gradient(rows, dtype):
    g, x = operands(rows, 1, (48, 64), dtype, (False, False))
    check(factor_gradient(g, x), g, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [(False, False), (False, True), (True, True)], ids=str)
def test_everything_is_written_and_nothing_beside_it(layout, dtype):
    library, sums = fused.library(), torch.promote_types(dtype, torch.float32)
    g, x = operands(9, 40, (40, 72), dtype, layout)
    rows = library.kron_linear_factor_bwd_partial_rows(fused.DTYPES[dtype], 9, 40, 40, 72, *layout, False, 0)
    dw, beside = torch.full((60, 72), torch.nan, dtype=dtype, device="cuda").split([40, 20])
    partial = torch.full((rows, 40 * 72), torch.nan, dtype=sums, device="cuda")
    library.kron_linear_factor_bwd(dw, None, partial, g, x, None, False)
    check(dw, g, x)
    assert beside.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_runs_give_the_same_bits(dtype):
    g, x = operands(17, 600, (96, 64), dtype, (False, True))
    assert_repeatable(lambda: [factor_gradient(g, x)])


def test_float32_of_very_different_magnitudes():
    g, x = operands(3, 512, (32, 48), torch.float32, (False, True))
    scale = torch.logspace(-30, 30, 32, device="cuda").reshape(1, 32, 1)
    g = g * scale
    check(factor_gradient(g, x) / scale[0], g / scale, x)


def test_tf32_where_it_is_allowed(monkeypatch):
    g, x = operands(3, 4096, (64, 64), torch.float32, (False, True))
    exact = factor_gradient(g, x)
    monkeypatch.setattr(factor_bwd, "tf32_allowed", lambda x: True)
    less = factor_gradient(g, x)
    assert not torch.equal(less, exact)
    assert (less - exact).norm() <= torch.finfo(torch.float16).eps * exact.norm()


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000, -1, 0x7F800000], ids=hex)
def test_what_is_not_finite_stays_so(bits, tf32, monkeypatch):
    monkeypatch.setattr(factor_bwd, "tf32_allowed", lambda x: tf32)
    g, x = operands(3, 64, (32, 48), torch.float32, (False, True))
    g.view(torch.int32)[1, 5, 7] = bits
    finite = factor_gradient(g, x).isfinite()
    assert not finite[5].any()
    assert finite.sum() == 31 * 48


@pytest.mark.parametrize("tf32", [False, True])
def test_the_largest_numbers_do_not_overflow(tf32, monkeypatch):
    monkeypatch.setattr(factor_bwd, "tf32_allowed", lambda x: tf32)
    g, x = operands(3, 64, (32, 48), torch.float32, (False, True))
    g[1, :, 7], x[1, :, 7] = 0, torch.finfo(torch.float32).min
    assert factor_gradient(g, x).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_the_kernel_cannot_read_goes_through_gemms(dtype):
    g, x = operands(5, 3, (7, 9), dtype, (False, True))
    assert torch.equal(factor_gradient(g, x), sum_of_products(g, x))
    storage = random((5 * 16 * 64 + 1,), dtype)
    g, x = storage[1:].view(5, 16, 64), random((5, 16, 64), dtype, 1)
    assert torch.equal(factor_gradient(g, x), sum_of_products(g, x))
    g = random((1, 16, 64), dtype).expand(5, 16, 64)
    assert torch.equal(factor_gradient(g, x), sum_of_products(g, x))


def test_wrong_arguments_are_named():
    library, (g, x) = fused.library(), operands(5, 16, (8, 8), torch.float32, (False, False))
    dw, partial = g.new_zeros(8, 8), g.new_zeros(200, 64)
    with pytest.raises(ValueError, match="g: expected rows along or across"):
        library.kron_linear_factor_bwd(dw, None, partial, g[:, :, ::2], x[:, :, ::2], None, False)
    with pytest.raises(ValueError, match="g: expected"):
        library.kron_linear_factor_bwd(dw, None, partial, g[:4], x, None, False)
    with pytest.raises(ValueError, match="partial: expected"):
        library.kron_linear_factor_bwd(dw, None, partial[:1, :1], g, x, None, False)
    with pytest.raises(TypeError, match="partial: expected the dtype of the sums"):
        library.kron_linear_factor_bwd(dw, None, partial.half(), g, x, None, False)
    with pytest.raises(ValueError, match="x: no kernel"):
        library.kron_linear_factor_bwd(dw, None, partial, g.mT.contiguous().mT, x, None, False)
    with pytest.raises(ValueError, match="w: expected with dx, and only then"):
        library.kron_linear_factor_bwd(dw, torch.empty_like(x), partial, g, x, None, False)
    g, x, dw = g.double(), x.double(), dw.double()
    with pytest.raises(ValueError, match="dx: expected a contiguous array like x"):
        library.kron_linear_factor_bwd(dw, x[:, :4], partial.double(), g, x, dw, False)
