"""Gradients of kron_linear where factors make two that fit into tiles of one size, which have kernels of their own."""

from __future__ import annotations

import itertools
import math

import cuops
import pytest
import torch
from cuops._kron_linear import sums as _sums
from cuops._kron_linear.gemm import chain_of_matmuls_backward
from kron_exact import distance, gradients, problem_of
from kron_samples import ODD, assert_repeatable, random
from samples import DTYPES

pytestmark = pytest.mark.gpu
SQUARES = [[(size, size)] * 2 for size in (16, 24, 32, 48, 64, 80, 96, 128)]
OF_ODD_ROWS = [*ODD, [(40, 3), (5, 61)]]
SMALLER = [
    [(112, 112), (128, 128)],
    [(86, 86), (120, 128)],
    [(80, 72), (68, 96)],
    [(67, 73), (72, 80)],
    [(40, 56), (64, 48)],
    [(17, 31), (32, 24)],
    [(7, 16), (16, 8)],
    [(21, 18), (24, 10)],
]


def by_gemms(x, dy, factors):
    dx, dfactors = chain_of_matmuls_backward(dy, x, factors, True, [True] * len(factors))
    return [dx, *dfactors]


def of_sums(depth, dtype):
    """What sums of `depth` products lose: in float64 what as many steps of a random walk do, in 16 bits nothing to speak of."""
    return {torch.float64: depth**0.5 * torch.finfo(torch.float64).eps, torch.float32: 4e-7}.get(dtype, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(rows, sizes) for rows in (1, 5, 300) for sizes in SQUARES + SMALLER + OF_ODD_ROWS]
    + [(2500, [(61, 64), (60, 63)]), (1001, [(100, 120), (113, 121)])]
    + [(2500, [(16, 16)] * 2), (2500, [(13, 9), (10, 16)])]  # several samples a team
    + [(1025, [(8, 8)] * 4), (1100, [(2, 32), (32, 2)] * 2), (257, [(32, 32), (4, 4), (128, 128)])]
    # after a first factor that has none
    + [
        (40, [(8, 8)] * 5),
        (9, [(24, 24)] * 4),
        (3, [(32, 32)] * 4),
        (5, [(20, 24), (32, 24), (17, 31), (24, 32)]),
        (7, [(3, 5), (64, 64), (64, 64)]),
        (9, [(2, 2), (5, 3), (32, 32), (32, 32)]),
    ],
)
def test_gradients_of_squares_are_as_accurate_as_a_chain_of_gemms(rows, sizes, dtype, monkeypatch):
    monkeypatch.setattr(_sums, "_parts", lambda *_: 1)  # by which a sum of GEMMs loses less
    x, dy, factors = problem_of(rows, sizes, dtype)
    if dtype == torch.float32:  # where every row has a scale of its own
        dy = dy * torch.logspace(-3, 3, rows, device="cuda")[:, None]
    wide = by_gemms(x.double(), dy.double(), [w.double() for w in factors])
    # Of a few sums in turn, and of one over all that a factor gives and some more.
    depths = [18**2, *(16 + dy.numel() / len(w) for w in factors)]
    for depth, mine, gemm, want in zip(depths, gradients(x, dy, factors), by_gemms(x, dy, factors), wide, strict=True):
        assert (mine.shape, mine.dtype) == (want.shape, dtype)
        # What is stored last is rounded in both, and both round once or more before.
        assert distance(mine, want) <= 2 * distance(gemm, want) + of_sums(depth, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes", [*SQUARES, *SMALLER, *OF_ODD_ROWS, [(3, 3), (32, 32), (32, 32)], [(17, 24), (24, 16), (16, 24), (24, 8)]]
)
def test_only_some_gradients_of_squares(sizes, dtype):
    x, dy, factors = problem_of(300, sizes, dtype)
    everything = gradients(x, dy, factors)
    depth = 16 + dy.numel() / min(map(len, factors))
    for needs in list(itertools.product((True, False), repeat=1 + len(sizes)))[1:-1]:
        want = [gradient for gradient, needed in zip(everything, needs, strict=True) if needed]
        for got, full in zip(gradients(x, dy, factors, needs), want, strict=True):
            # Sums are added in another order, or found by other kernels.
            assert distance(got, full.double()) <= 2 * len(sizes) * torch.finfo(dtype).eps + of_sums(depth, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SQUARES + SMALLER)
def test_gradients_of_squares_are_the_same_in_every_run(sizes, dtype):
    assert_repeatable(gradients, *problem_of(1000, sizes, dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", SQUARES)
def test_views_have_the_gradients_of_copies(sizes, dtype):
    x, dy, factors = problem_of(40, sizes, dtype)
    wide = random((40, x.shape[1] + 24), dtype)
    wide[:, 5:-19] = x
    got = gradients(wide[:, 5:-19], dy.mT.contiguous().mT, [w.mT.contiguous().mT for w in factors])
    assert all(torch.equal(a, b) for a, b in zip(got, gradients(x, dy, factors), strict=True))


@pytest.mark.parametrize("sizes", SQUARES)
def test_gradients_of_squares_of_any_magnitude(sizes):
    x, dy, factors = problem_of(51, sizes, torch.float32)
    magnitudes = torch.logspace(-15, 15, 51, device="cuda")[:, None]
    x, dy, factors = x * magnitudes, dy / magnitudes, [factors[0] * 1e-8, factors[1] * 1e8]
    wide = by_gemms(x.double(), dy.double(), [w.double() for w in factors])
    for got, want in zip(gradients(x, dy, factors), wide, strict=True):
        rows = got.shape[0]
        off = (got.double() - want).reshape(rows, -1).norm(dim=1) / want.reshape(rows, -1).norm(dim=1)
        assert off.max() < 2e-6


@pytest.mark.parametrize(
    ("of_x", "of_dy", "of_second"),
    [(1e15, 1e15, 1), (1e20, 1e12, 1e-20), (1e18, 1e14, 1e-25), (1e-20, 1e-20, 1e10), (1e-20, 1e-19, 1e20)],
)
@pytest.mark.parametrize("sizes", SQUARES)
def test_sums_of_gradients_of_any_magnitude(sizes, of_x, of_dy, of_second):
    """Sums over samples of which each is larger than the one before, or smaller."""
    x, dy, factors = problem_of(50, sizes, torch.float32)
    for magnitudes in (
        torch.logspace(-6, 0, 50, device="cuda")[:, None],
        torch.logspace(0, -6, 50, device="cuda")[:, None],
    ):
        scaled = x * magnitudes * of_x, dy * of_dy, [factors[0], factors[1] * of_second]
        wide = by_gemms(scaled[0].double(), scaled[1].double(), [w.double() for w in scaled[2]])
        for got, want in zip(gradients(*scaled), wide, strict=True):
            # Blocks have one sample each, whose share is rounded, where float32 hardly has the numbers.
            subnormal = 2.0**-149 * (50 * want.numel()) ** 0.5
            assert (got.double() - want).norm() < 2e-6 * want.norm() + subnormal


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SQUARES)
def test_an_infinity_in_one_row_leaves_the_others_alone(sizes, dtype):
    x, dy, factors = problem_of(64, sizes, dtype)
    want, *_ = gradients(x, dy, factors)
    dy[7, 100] = math.inf
    got, *_ = gradients(x, dy, factors)
    assert not got[7].isfinite().all()
    assert torch.equal(got[:7], want[:7])
    assert torch.equal(got[8:], want[8:])


@pytest.mark.parametrize(("rows", "sizes"), [(1500, [(80, 72), (68, 96)]), (5000, [(20, 20)] * 2)])
def test_small_samples_that_follow_one_another_keep_their_digits(rows, sizes):
    x, dy, factors = problem_of(rows, sizes, torch.float32)
    dy *= 1e-6
    wide = by_gemms(x.double(), dy.double(), [w.double() for w in factors])
    for got, want in zip(gradients(x, dy, factors), wide, strict=True):
        assert distance(got, want) < 1e-6
    dy[3] = torch.inf
    dx = gradients(x, dy, factors)[0]
    assert not dx[3].isfinite().any()
    assert torch.cat([dx[:3], dx[4:]]).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_factor_of_odd_columns_starts_anywhere(dtype):
    x, dy, factors = problem_of(300, [(17, 31), (32, 24)], dtype)
    apart = torch.cat([factors[0].reshape(-1)[:1], factors[0].reshape(-1)])[1:].view(17, 31)
    got = gradients(x, dy, factors)
    leaves = [t.requires_grad_() for t in (x, apart, factors[1])]
    again = torch.autograd.grad(cuops.kron_linear(leaves[0], leaves[1:]), leaves, dy)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
