"""kron_linear of few small samples, which is one short launch."""

from __future__ import annotations

import math

import cuops
import pytest
import torch
from cuops import _backend
from kron_samples import DTYPES, columns_of, factors_of, random

pytestmark = pytest.mark.gpu
SIZES = [
    [(3, 3)] * 2,
    [(8, 8)] * 2,
    [(16, 16)] * 2,
    [(5, 7), (3, 2)],
    [(1, 5), (6, 1)],
    [(17, 31), (23, 16)],
    [(128, 128), (4, 4)],
    [(3, 3)] * 3,
    [(2, 2), (100, 100), (3, 3)],
    [(12, 9), (7, 16), (5, 4)],
    [(16, 16)] * 3,
    [(6, 6)] * 4,
    [(3, 3)] * 7,
]
FEW = [(rows, sizes) for rows in (1, 3, 16) for sizes in SIZES] + [(rows, [(4, 4)] * 6) for rows in (1, 3)]


def one_launch(x, factors, bias=None):
    """By the kernel that the plan has for all factors at once; what surrounds the result must stay."""
    rows, out = len(x), math.prod(len(w) for w in factors)
    base = torch.full((rows, out + 8), math.nan, dtype=x.dtype, device="cuda")
    _backend.library().kron_linear_fwd(base[:, :out], x, factors, 1, bias, False)
    assert base[:, out:].isnan().all()
    return base[:, :out]


def in_float64(x, factors, bias):
    from cuops._kron_linear_gemm import chain_of_matmuls

    return chain_of_matmuls(x.double(), [w.double() for w in factors], bias.double())


def distance(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "sizes"), FEW)
def test_small_samples_lose_little_more_than_a_rounding(rows, sizes, dtype):
    factors, columns = factors_of(sizes, dtype), columns_of(sizes)
    bias = random((math.prod(o for o, _ in sizes),), dtype, seed=8)
    apart = random((rows, columns + 3), dtype)[:, 1:-2]
    views = [torch.cat([w.mT, w.mT])[: w.shape[1]].mT for w in factors]
    want = in_float64(apart.contiguous(), factors, bias)
    # Of 16 bits, half a unit in the last place of each result, or what a few roundings come to in all of them.
    allowed = {torch.float64: 2e-15, torch.float32: 1e-6}.get(dtype, 0.51 * torch.finfo(dtype).eps)
    for x, given in ((apart, factors), (apart.contiguous(), factors), (apart, views)):
        assert distance(one_launch(x, given, bias), want) <= allowed
        assert distance(cuops.kron_linear(x, given, bias), want) <= 2 * allowed  # some plans round between two launches


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [[(8, 8)] * 2, [(3, 3)] * 3, [(7, 7), (11, 11), (13, 13)]])
def test_a_few_small_samples_are_one_launch(sizes, dtype):
    for rows in (1, 16):
        plan = cuops.kron_plan(rows, sizes, dtype)
        assert [(group.first, group.count, group.fused) for group in plan.groups] == [(0, len(sizes), True)]


@pytest.mark.parametrize("sizes", SIZES)
def test_an_infinity_stays_in_its_sample(sizes):
    x, factors = random((5, columns_of(sizes)), torch.float32), factors_of(sizes, torch.float32)
    want = one_launch(x, factors)
    x[2, -1] = math.inf
    got = one_launch(x, factors)
    assert not got[2].isfinite().any()
    others = [0, 1, 3, 4]
    assert torch.equal(got[others], want[others])


@pytest.mark.parametrize("sizes", SIZES)
def test_rows_of_a_bias_take_turns(sizes):
    x, factors = random((6, columns_of(sizes)), torch.float32), factors_of(sizes, torch.float32)
    bias = random((3, math.prod(o for o, _ in sizes)), torch.float32, seed=8)
    want = in_float64(x, factors, torch.zeros(bias.shape[1], device="cuda")) + bias.repeat(2, 1)
    assert distance(one_launch(x, factors, bias), want) <= 1e-6
