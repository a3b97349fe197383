"""kron_linear of few small samples, which is one short launch, and its gradients, which are another."""

from __future__ import annotations

import itertools
import math

import cuops
import pytest
import torch
from cuops import _backend
from cuops._kron_linear.bwd import fused_backward
from cuops._kron_linear.gemm import chain_of_matmuls
from kron_exact import check_results, distance, exact, gradients, problem_of
from kron_samples import columns_of, factors_of, random
from samples import DTYPES

pytestmark = pytest.mark.gpu
SIZES = [
    [(3, 3)] * 2,
    [(8, 8)] * 2,
    [(16, 16)] * 2,
    [(5, 7), (3, 2)],
    [(1, 5), (6, 1)],
    [(17, 31), (23, 16)],
    [(128, 128), (4, 4)],
    [(2, 2), (24, 24)],
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
    return chain_of_matmuls(x.double(), [w.double() for w in factors], bias.double())


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


def gradients_in_one_launch(x, dy, factors, needs=None):
    """dx and each dW by the kernel for all of them; None where not needed."""
    needs = needs or [True] * (1 + len(factors))
    dx, *dfactors = (
        torch.full_like(t, math.nan, memory_format=torch.contiguous_format) if n else None
        for t, n in zip((x, *factors), needs, strict=True)
    )
    _backend.library().kron_linear_slices_bwd(dfactors, dx, dy, x, factors)
    return [dx, *dfactors]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "sizes"), [*FEW, *((100, sizes) for sizes in SIZES[:6]), (2, [(2, 2)] * 12)])
def test_gradients_in_one_launch_are_those_of_the_definition(rows, sizes, dtype):
    x, dy, factors = problem_of(rows, sizes, dtype)
    views = [torch.cat([w.mT, w.mT])[: w.shape[1]].mT for w in factors]
    for given in (factors, views):
        got = gradients_in_one_launch(x, dy, given)
        check_results([exact(x, dy, factors)[0].to(dtype), *got], x, dy, factors)
    assert all(torch.equal(a, b) for a, b in zip(gradients_in_one_launch(x, dy, views), got, strict=True))


@pytest.mark.parametrize("sizes", [[(200, 3), (2, 2)], [(2, 2), (48, 48)], [(3, 3)] * 2], ids=str)
def test_gradients_of_factors_whose_rows_are_far_apart(sizes):
    x, dy, factors = problem_of(4, sizes, torch.float32)
    far = [torch.cat([w, w.new_zeros(len(w), 100_000)], 1)[:, : w.shape[1]] for w in factors]
    check_results([cuops.kron_linear(x, far), *gradients(x, dy, far)], x, dy, factors)


@pytest.mark.parametrize("rows", [1, 9, 30])
@pytest.mark.parametrize("sizes", [SIZES[3], SIZES[6], SIZES[10]], ids=str)
def test_only_some_gradients_in_one_launch(sizes, rows):
    sample = problem_of(rows, sizes, torch.float32)
    everything = gradients_in_one_launch(*sample)
    for needs in itertools.product((True, False), repeat=1 + len(sizes)):
        got = gradients_in_one_launch(*sample, needs)
        for one, needed, full in zip(got, needs, everything, strict=True):
            assert one is None if not needed else torch.equal(one, full)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [[(4, 4)] * 2, [(6, 6)] * 3, [(3, 3)] * 5, [(7, 7), (11, 11), (13, 13)]], ids=str)
def test_gradients_of_a_few_small_samples_are_one_launch(sizes, dtype):
    x, dy, factors = problem_of(3, sizes, dtype)
    dx, dfactors = fused_backward(dy, x, factors, True, [True] * len(sizes))
    for one, full in zip((dx, *dfactors), gradients_in_one_launch(x, dy, factors), strict=True):
        assert torch.equal(one, full)


def test_arguments_of_gradients_in_one_launch_are_checked():
    x, dy, w, v = (torch.ones(size, device="cuda") for size in ((4, 6), (4, 5), (5, 3), (1, 2)))
    dx, dw, dv = (torch.zeros_like(t) for t in (x, w, v))
    bwd = _backend.library().kron_linear_slices_bwd
    for wrong, error, message in [
        (([dw], dx, dy, x, [w, v]), ValueError, "dfactors: expected one a factor"),
        (([dw, dv], dx.double(), dy, x, [w, v]), TypeError, "dx: expected f32"),
        (([dw.mT, dv], dx, dy, x, [w, v]), ValueError, "dfactors: expected a contiguous matrix of 5 x 3"),
        (([dw, dv.cpu()], dx, dy, x, [w, v]), ValueError, "dfactors: expected an array on cuda"),
        (([dw, dv], dx, dy[:2], x, [w, v]), ValueError, "dy: expected a contiguous matrix of 4 x 5"),
        (([dw, dv], dx, dy, x, [w, v[0]]), ValueError, "factors: expected matrices"),
        (([dw, dv], dx, dy.cpu(), x.cpu(), [w.cpu(), v.cpu()]), ValueError, "x: expected an array on a CUDA device"),
        (([dw], dx[:, :3], dy, x[:, :3].contiguous(), [w]), ValueError, "factors: no kernel"),
    ]:
        with pytest.raises(error, match=f"^{message}"):
            bwd(*wrong)
    growing = [1, 128, 1, 128, 1, 1, 2, 1, 128, 1, 128, 1]  # from a few elements to 2^29 and back
    for rows, sizes in ((4, [5, 3]), (4000, [200, 3, 2, 2]), (1, growing), (4, growing)):
        assert _backend.library().kron_linear_slices_bwd_time(1, rows, sizes, 0) == 0
    bwd([dw, dv], dx, dy, x, [w, v])
    assert torch.equal(dx, torch.full_like(x, 5))
    assert torch.equal(dw, torch.full_like(w, 8))
    assert torch.equal(dv, torch.full_like(v, 60))
