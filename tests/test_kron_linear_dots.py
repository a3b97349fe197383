"""kron_linear of so few and short sums that each result is found by itself, and its gradients of one factor."""

from __future__ import annotations

import math

import cuops
import pytest
import torch
from cuops import _backend
from kron_exact import check_results, exact, problem_of, value_and_gradients
from kron_samples import assert_repeatable, random
from samples import DTYPES

pytestmark = pytest.mark.gpu
ONE = [[size] for size in [(1, 1), (2, 2), (7, 3), (1, 5), (6, 1), (16, 16), (24, 24), (33, 100), (128, 96), (250, 9)]]
SEVERAL = [
    [(2, 2)] * 2,
    [(8, 8)] * 2,
    [(16, 16)] * 2,
    [(5, 7), (3, 2)],
    [(1, 5), (6, 1)],
    [(3, 3)] * 3,
    [(7, 1), (1, 9), (4, 5)],
    [(3, 3)] * 4,
    [(4, 4)] * 4,
    [(2, 3), (3, 2), (2, 1), (1, 4)],
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 16, 128, 1024])
@pytest.mark.parametrize("sizes", ONE + SEVERAL, ids=str)
def test_values_and_gradients_are_those_of_the_definition(sizes, rows, dtype):
    x, dy, factors = problem_of(rows, sizes, dtype)
    check_results(value_and_gradients(x, dy, factors), x, dy, factors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", ONE + SEVERAL, ids=str)
@pytest.mark.parametrize("leads", [1, 3])
def test_biases_and_rows_apart_and_factors_of_any_strides(leads, sizes, dtype):
    rows = 6
    x, dy, factors = problem_of(rows, sizes, dtype)
    n, out, eps = x.shape[1], dy.shape[1], torch.finfo(dtype).eps
    bias = random((leads, out), dtype, 7)
    want = exact(x, dy, factors)[0] + bias.double().repeat(rows // leads, 1)
    far = 70_001  # elements, more than kernels of small problems count in 32 bits
    layouts = [
        lambda w: w,
        lambda w: w.mT.contiguous().mT,
        lambda w: torch.stack([w, w], -1)[..., 0],
        lambda w: torch.empty(far * len(w), dtype=dtype, device="cuda").as_strided(w.shape, (far, 1)).copy_(w),
    ]
    for first, layout in zip((0, 1, 8, 0), layouts, strict=True):
        wide = torch.full((rows, first + n + 8), math.nan, dtype=dtype, device="cuda")
        view = wide[:, first : first + n]
        view.copy_(x)
        base = torch.full((rows, out + 8), math.nan, dtype=dtype, device="cuda")
        others = [layout(w) for w in factors]
        _backend.library().kron_linear_fwd(base[:, :out], view, others, 1, bias.reshape(-1), False)
        assert base[:, out:].isnan().all()
        torch.testing.assert_close(base[:, :out].double(), want, rtol=2 * eps, atol=16 * len(sizes) * eps)
        if len(sizes) == 1:
            dx, dw = torch.full_like(x, math.nan), torch.full_like(factors[0], math.nan)
            arrays = (t.unsqueeze(-1) for t in (dy, x))
            _backend.library().kron_linear_product_bwd(dx.unsqueeze(-1), dw, *arrays, others[0])
            check_results([cuops.kron_linear(x, others), dx, dw], x, dy, factors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [[(16, 16)], [(3, 3)] * 3], ids=str)
def test_a_row_that_is_not_finite_keeps_to_itself(sizes, dtype):
    x, _, factors = problem_of(16, sizes, dtype)
    want = cuops.kron_linear(x, factors)
    x[3, 2] = math.nan
    got = cuops.kron_linear(x, factors)
    assert got[3].isnan().all()
    assert torch.equal(got[:3], want[:3])
    assert torch.equal(got[4:], want[4:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [[(12, 12)], [(4, 4)] * 2, [(3, 3)] * 4], ids=str)
def test_twenty_runs_give_the_same_bits(sizes, dtype):
    assert_repeatable(value_and_gradients, *problem_of(100, sizes, dtype))
