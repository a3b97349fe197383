"""kron_linear of small factors of any size, and its gradients, which have kernels of their own."""

from __future__ import annotations

import itertools
import math

import cuops
import pytest
import torch
from cuops import _backend
from kron_exact import check_results, exact, gradients, problem_of, value_and_gradients
from kron_samples import assert_repeatable, columns_of, random
from samples import DTYPES

pytestmark = pytest.mark.gpu
SQUARE = [
    [6] * 2,
    [3] * 5,
    [7, 11, 13],
    [12] * 3,
    [5] * 4,
    [14, 10],
    [2, 3, 4, 5],
    [6] * 5,
    [9, 9, 8],
    [15, 2],
    [16, 6, 8],
    [2] * 10,
    [4, 2, 2, 3],
]
SIZES = [[(size, size) for size in sizes] for sizes in SQUARE] + [
    [(3, 5), (7, 2), (4, 6)],
    [(16, 1), (1, 16), (2, 3)],
    [(5, 12), (12, 5)],
    [(2, 16), (16, 2), (3, 3)],
    [(1, 1), (10, 9), (1, 2)],
]
SEVERAL_LAUNCHES = [
    [(3, 3)] * 10,
    [(6, 6)] * 7,
    [(12, 12)] * 4,
    [(5, 4)] * 7,
    [(2, 3), (13, 13), (11, 12), (16, 14), (7, 7)],
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values_and_gradients_are_those_of_the_definition(sizes, rows, dtype):
    x, dy, factors = problem_of(rows, sizes, dtype)
    check_results(value_and_gradients(x, dy, factors), x, dy, factors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SEVERAL_LAUNCHES, ids=str)
def test_samples_that_no_multiprocessor_holds(sizes, dtype):
    x, dy, factors = problem_of(max(2, (1 << 18) // columns_of(sizes)), sizes, dtype)
    check_results(value_and_gradients(x, dy, factors), x, dy, factors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES[:8], ids=str)
def test_a_bias_for_samples_that_start_anywhere(sizes, dtype):
    x, dy, factors = problem_of(37, sizes, dtype)
    wide = random((37, x.shape[1] + 13), dtype)
    wide[:, 3 : 3 + x.shape[1]] = x
    bias = torch.full((dy.shape[1] + 1,), 3.0, dtype=dtype, device="cuda")[1:]
    want = cuops.kron_linear(x, factors).double() + 3
    for view in (x, wide[:, 3 : 3 + x.shape[1]]):
        got = cuops.kron_linear(view, [w.mT.contiguous().mT for w in factors], bias)
        torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [[(6, 6)] * 2, [(7, 7), (11, 11), (13, 13)], [(6, 6)] * 6, [(12, 12)] * 3], ids=str)
def test_rows_of_two_strides_are_read_in_place(sizes, dtype):
    n = columns_of(sizes)
    _, _, factors = problem_of(1, sizes, dtype)
    wide = random((3, 50, n + 7), dtype)
    for x in (
        wide[:, :4, :n],
        wide[:, 1:, 7:],
        wide[:1, :1, :n].expand(3, 2, n),
        wide[:, :2, 1 : n + 1].mT.contiguous().mT,
    ):
        want = cuops.kron_linear(x.clone(), factors)
        scale = want.abs().max().item() * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        # Another kernel may take the copy.
        torch.testing.assert_close(cuops.kron_linear(x, factors), want, rtol=torch.finfo(dtype).eps, atol=16 * scale)


@pytest.mark.parametrize("inner", [2, 3, 4, 8, 12, 30, 37, 256, 1001])
@pytest.mark.parametrize("rows", [1, 50])
@pytest.mark.parametrize("sizes", [[(6, 6)], [(5, 7), (3, 2)], [(12, 12)] * 2, [(3, 3)] * 4], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_columns_beyond_the_factors(sizes, rows, inner, dtype):
    x, dy, factors = problem_of(rows, [*sizes, (inner, inner)], dtype)
    factors = factors[:-1]
    wide = torch.full((rows, dy.shape[1] + 3), math.nan, dtype=dtype, device="cuda")
    y = wide[:, : dy.shape[1]]
    _backend.library().kron_linear_fwd(y, x, factors, inner, None, False)
    assert wide[:, dy.shape[1] :].isnan().all()
    dx, dfactors = torch.full_like(x, math.nan), [torch.full_like(w, math.nan) for w in factors]
    partial = torch.full((1 << 22,), math.nan, dtype=torch.promote_types(dtype, torch.float32), device="cuda")
    _backend.library().kron_linear_fibers_bwd(dfactors, dx, partial, dy, x, factors, inner)
    check_results([y, dx, *dfactors, None], x, dy, [*factors, torch.eye(inner, dtype=dtype, device="cuda")])


def test_a_plan_of_the_largest_samples_asks_for_little_scratch():
    for sizes in ([4, 4, 4, 6, 11, 12, 5, 5, 11, 11], [4] * 6 + [16] * 3, [16] * 7, [2] * 28):
        groups = _backend.library().kron_linear_fibers_bwd_plan(0, 1, [n for size in sizes for n in (size, size)], 1, 0)
        assert sum(count for _, count, *_ in groups) == len(sizes)
        assert all(0 < scratch < 1 << 22 for _, _, scratch, _ in groups)
    assert len(_backend.library().kron_linear_fibers_bwd_plan(0, 1, [16, 16, 17, 16], 1, 0)) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [3, 500])
@pytest.mark.parametrize(
    "sizes",
    [
        [(4, 4), (128, 128)],
        [(128, 128), (4, 4)],
        [(2, 2), (100, 100), (3, 3)],
        [(7, 5), (33, 40)],
        [(64, 64), (64, 64), (3, 3)],
        [(16, 16), (48, 48), (6, 6)],
        [(8, 8)] * 3,
        [(12, 12), (40, 24), (1, 1)],
    ],
    ids=str,
)
def test_small_and_large_factors_in_one_chain(sizes, rows, dtype):
    x, dy, factors = problem_of(rows, sizes, dtype)
    check_results([cuops.kron_linear(x, factors), *gradients(x, dy, factors)], x, dy, factors)


@pytest.mark.parametrize("sizes", [[(6, 6)] * 3, [(3, 5), (7, 2), (4, 6)], [(12, 12)] * 4], ids=str)
def test_gradients_that_are_not_wanted_change_no_other(sizes):
    x, dy, factors = problem_of(40, sizes, torch.float32)
    everything = gradients(x, dy, factors)
    for needs in list(itertools.product((True, False), repeat=1 + len(sizes)))[1:-1]:
        want = [gradient for gradient, needed in zip(everything, needs, strict=True) if needed]
        for got, full in zip(gradients(x, dy, factors, needs), want, strict=True):
            # x's alone is by the kernel of the product, which adds in another order.
            assert torch.equal(got, full) or (needs[0] and not any(needs[1:]))
            torch.testing.assert_close(got, full, rtol=0, atol=1e-6 * full.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [SIZES[0], SIZES[1], SIZES[3], SIZES[11], SEVERAL_LAUNCHES[2]], ids=str)
def test_twenty_runs_give_the_same_bits(sizes, dtype):
    assert_repeatable(value_and_gradients, *problem_of(100, sizes, dtype))


@pytest.mark.parametrize("sizes", SIZES[:8], ids=str)
def test_an_infinity_in_one_sample_leaves_the_others_alone(sizes):
    x, dy, factors = problem_of(64, sizes, torch.float32)
    y, (dx, *_) = cuops.kron_linear(x, factors), gradients(x, dy, factors)
    x[7, 1], dy[9, 2] = math.inf, math.nan
    others = torch.arange(64) != 7
    assert torch.equal(cuops.kron_linear(x, factors)[others], y[others])
    others = torch.arange(64) != 9
    assert torch.equal(gradients(x, dy, factors)[0][others], dx[others])


def test_launches_wait_for_what_the_ones_before_them_write():
    x, grad, factors = problem_of(500, [(6, 6)] * 4, torch.float32)
    wide, wide_grad = x.double(), grad.double()
    for k in range(20):
        factors = [w.roll(k, 0) for w in factors]
        x = cuops.kron_linear(x, factors)
        grad, *_ = gradients(x, grad, factors)
        wide, wide_grad, *_ = exact(wide, wide_grad, factors)
    assert (x - wide).norm() <= 1e-4 * wide.norm()
    assert (grad - wide_grad).norm() <= 1e-4 * wide_grad.norm()
