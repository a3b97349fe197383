"""kron_linear of factors whose rows are no whole vectors, in float32 and 16 bits, and its gradients."""

from __future__ import annotations

import functools
import math

import cuops
import pytest
import torch
from cuops import _backend
from cuops._kron_linear import bwd, squares_bwd
from kron_exact import check_results, gradients, problem_of
from kron_samples import ODD, assert_repeatable, columns_of, factors_of, random, row_distance

gpu = pytest.mark.gpu
OF_16_BITS = [torch.float16, torch.bfloat16]
OF_FLOAT32 = [*ODD[:1], *ODD[2:], [(40, 50), (9, 61)], [(128, 90), (100, 101)], [(71, 90), (52, 67)]]
SIZES = [(sizes, dtype) for dtype in OF_16_BITS for sizes in [*ODD, *OF_FLOAT32[-3:-1]]]
SIZES += [(sizes, torch.float32) for sizes in OF_FLOAT32]
LOST = {torch.float32: 1e-6} | {dtype: torch.finfo(dtype).eps / 3**0.5 for dtype in OF_16_BITS}
has_wgmma = functools.cache(
    lambda: torch.cuda.get_device_capability() == (9, 0) and float(_backend.choose().cuda) >= 12
)


def planned(rows, sizes, dtype):
    return [group.kernel for group in cuops.kron_plan(rows, sizes, dtype).groups]


@gpu
@pytest.mark.parametrize(("sizes", "dtype"), SIZES, ids=str)
def test_one_kernel_has_both_factors_where_there_is_wgmma(sizes, dtype):
    tile = next(size for size in (64, 96, 128) if size >= max(map(max, sizes)) and (size, dtype.itemsize) != (96, 2))
    letters = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
    assert (planned(3000, sizes, dtype) == [f"kron_wide_{tile}_{letters[dtype]}_odd"]) == has_wgmma()


@gpu
@pytest.mark.parametrize(("rows", "kernel"), [(20, "kron_wide_quarters_f32_odd"), (60, "kron_wide_halves_f32_odd")])
def test_few_samples_are_shared_by_blocks(rows, kernel):
    assert (planned(rows, [(71, 71), (119, 119)], torch.float32) == [kernel]) == has_wgmma()


@gpu
@pytest.mark.parametrize("first", [0, 3, 8])
@pytest.mark.parametrize("rows", [1, 20, 60, 133, 1500])
@pytest.mark.parametrize(("sizes", "dtype"), SIZES, ids=str)
def test_rows_may_start_and_end_anywhere(sizes, dtype, rows, first):
    columns, outputs = columns_of(sizes), math.prod(o for o, _ in sizes)
    factors, bias = factors_of(sizes, dtype), random((outputs,), dtype, seed=8)
    wide = cuops.kron_linear(random((rows, columns), dtype).double(), [w.double() for w in factors])
    for gap in (0, 5):
        given = torch.full((first + rows * (columns + gap) + 8,), math.nan, dtype=dtype, device="cuda")
        x = given[first:-8].view(rows, columns + gap)[:, :columns]
        x.copy_(random((rows, columns), dtype))
        for added in (None, bias, torch.cat([bias[:1], bias])[1:]):
            y = torch.full((rows * outputs + 8,), math.nan, dtype=dtype, device="cuda")
            _backend.library().kron_linear_fwd(y[:-8].view(rows, outputs), x, factors, 1, added, False)
            want = wide if added is None else wide + added
            assert row_distance(y[:-8].view(rows, outputs), want) < LOST[dtype]
            assert y[-8:].isnan().all()


@gpu
@pytest.mark.parametrize("rows", [1, 67, 700])
@pytest.mark.parametrize(("sizes", "dtype"), SIZES, ids=str)
def test_gradients_may_be_of_arrays_that_start_anywhere(sizes, dtype, rows):
    x, dy, factors = problem_of(rows, sizes, dtype)
    moved = []
    for t, first in ((x, 3), (dy, 5)):
        given = torch.full((first + t.numel() + 8,), math.nan, dtype=dtype, device="cuda")
        moved.append(given[first:-8].view(t.shape).copy_(t))
    dx, dfactors = bwd.fused_backward(*moved[::-1], factors, True, [True, True])
    check_results([cuops.kron_linear(x, factors), dx, *dfactors], x, dy, factors)


@gpu
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    SIZES + [(sizes, dtype) for dtype in LOST for sizes in ([(64, 1), (64, 1)], [(1, 3), (40, 2)])],
    ids=str,
)
def test_views_of_two_strides_and_tiny_samples_give_what_copies_give(sizes, dtype):
    base = random((50, 83, columns_of(sizes) + 1), dtype)
    factors, bias = factors_of(sizes, dtype), random((math.prod(o for o, _ in sizes),), dtype, seed=8)
    for x in (base.transpose(0, 1), base[..., 1:].transpose(0, 1), base[:, :1].expand(-1, 83, -1)):
        x = x[..., : columns_of(sizes)]
        got, want = (cuops.kron_linear(t, factors, bias) for t in (x, x.contiguous()))
        assert row_distance(got, want.double()) < 2 * LOST[dtype]  # where other kernels may take a view
        wide = cuops.kron_linear(x.double(), [w.double() for w in factors], bias.double())
        assert row_distance(got, wide) < 2 * LOST[dtype]


@gpu
@pytest.mark.parametrize(("sizes", "dtype"), SIZES, ids=str)
def test_every_run_gives_the_same_bits(sizes, dtype):
    x, dy, factors = problem_of(1000, sizes, dtype)
    assert_repeatable(lambda *a: [cuops.kron_linear(a[0], a[2]), *gradients(*a)], x, dy, factors)


@pytest.mark.parametrize(
    ("rows", "sizes", "dtype", "size"),
    [
        (8192, [(36, 36), (44, 44)], torch.bfloat16, 64),
        (8192, [(9, 9), (44, 44)], torch.bfloat16, None),  # of which zeros would be most of the work
        (1000, [(9, 9), (44, 44)], torch.float16, 64),
        (8192, [(128, 128), (60, 60)], torch.float16, 128),
        (8192, [(128, 128), (28, 28)], torch.float16, None),
        (1000, [(128, 128), (28, 28)], torch.float16, 128),
        (1000, [(128, 128), (20, 20)], torch.float16, None),
        (200, [(128, 128), (2, 2)], torch.float16, 128),
        (200, [(129, 128), (60, 60)], torch.float16, None),
        (200, [(20, 20), (31, 30)], torch.float16, None),
        (8192, [(36, 36), (45, 45)], torch.float32, 64),
        (8192, [(40, 40), (10, 10)], torch.float32, None),
        (1000, [(52, 52), (67, 67)], torch.float32, 96),
        (8192, [(128, 128), (45, 45)], torch.float32, None),
        (1000, [(86, 86), (119, 119)], torch.float32, 128),
        (200, [(9, 9), (70, 70)], torch.float32, None),
        (200, [(9, 9), (45, 45)], torch.float32, 64),
        (200, [(36, 36), (45, 45)], torch.float64, None),
    ],
)
def test_gradients_have_the_kernel_where_it_is_filled_or_samples_are_few(rows, sizes, dtype, size, monkeypatch):
    monkeypatch.setattr(squares_bwd, "_square_blocks", lambda *_: 1)
    two = squares_bwd._odd_two(dtype, rows, tuple(sizes), 0)
    assert (two and two.size) == size
