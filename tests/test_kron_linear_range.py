"""The fused kernels of kron_linear on numbers of one sign, of any magnitude, and that are not finite."""

from __future__ import annotations

import math

import cuops
import pytest
import torch
from cuops import _backend
from cuops._kron_linear.gemm import chain_of_matmuls
from kron_samples import FUSED, columns_of, factors_of, random, row_distance, x_of

gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (140, [(32, 32)] * 2),
        (140, [(64, 64)] * 2),
        (2000, [(64, 64)] * 2),
        (140, [(96, 96)] * 2),
        (140, [(128, 128)] * 2),
        *[(rows, [(128, 128)] * 2) for rows in (30, 60)],  # of which blocks share samples
        (140, [(32, 32)] * 3),
        (140, [(64, 64)] * 3),
        (5000, [(16, 16)] * 2),
        (300, [(8, 8)] * 5),
        (300, [(16, 16)] * 4),
    ],
)
def test_sums_that_only_grow_lose_no_more_than_those_of_gemms(rows, sizes):
    x, factors = random((rows, columns_of(sizes))).abs(), [w.abs() for w in factors_of(sizes)]
    wide = x_of(x.double(), [w.double() for w in factors])
    assert row_distance(cuops.kron_linear(x, factors), wide) <= 2 * row_distance(
        chain_of_matmuls(x, factors, None), wide
    )


@gpu
@pytest.mark.parametrize(
    ("sizes", "dtype", "first"),
    [([size] * 2, torch.float32, 1e-8) for size in (32, 64, 96, 128)]
    + [([32] * 3, torch.float32, 1e-8), ([16] * 4, torch.float32, 1e-8)]
    + [([size] * 2, torch.bfloat16, first) for size in (32, 128) for first in (1e-37, 1e-8, 1e35)],
)
def test_rows_and_factors_of_any_magnitude(sizes, dtype, first):
    if first != 1e-8 and sizes == [128] * 2 and _backend.choose().name == "cu118":
        pytest.skip("there GEMMs write what is between the factors in bfloat16, whose range it leaves")
    lowest, highest = (-25, 25) if first == 1e-8 else (-10, 10)  # such that results are normal numbers
    magnitudes = torch.logspace(lowest, highest, 301, dtype=torch.float64, device="cuda")
    x = (random((301, math.prod(sizes)), torch.float64) * magnitudes[:, None]).to(dtype)
    scales = [first, *[1] * (len(sizes) - 2), 1 / first]
    factors = [
        random((size, size), torch.float64, seed).mul(scale).to(dtype)
        for seed, (size, scale) in enumerate(zip(sizes, scales, strict=True))
    ]
    wide = x_of(x.double(), [w.double() for w in factors])
    assert row_distance(cuops.kron_linear(x, factors), wide) < 4 * torch.finfo(dtype).eps


@gpu
@pytest.mark.parametrize(
    ("of_x", "of_first", "dtype", "limit"),
    [
        (1e-10, 1e36, torch.float32, 1e-6),
        (1e-10, 5e37, torch.float32, 1e-6),
        (1e-39, 1e20, torch.float32, 2e-5),  # whose numbers have 19 digits
        (1e20, 1e-39, torch.float32, 2e-5),
        (1e-10, 1e36, torch.bfloat16, 2**-5),
    ],
)
@pytest.mark.parametrize("sizes", [*FUSED, [(33, 40), (8, 8)], [(32, 32)] * 3, [(16, 16)] * 4, [(9, 30), (7, 11)]])
def test_a_factor_near_either_end_of_the_range(sizes, of_x, of_first, dtype, limit):
    x, (first, *others) = random((301, columns_of(sizes))), factors_of(sizes)
    x, factors = (x * of_x).to(dtype), [(first * of_first).to(dtype), *(w.to(dtype) for w in others)]
    wide = x_of(x.double(), [w.double() for w in factors])
    assert row_distance(cuops.kron_linear(x, factors), wide) < limit


@gpu
@pytest.mark.parametrize("rows", [30, 60, 301])
@pytest.mark.parametrize("sizes", [[32] * 2, [64] * 2, [96] * 2, [128] * 2, [32] * 3, [64] * 3, [16] * 4])
@pytest.mark.parametrize("small", [0, 1])
def test_float32_near_the_lower_end_of_its_range(small, sizes, rows):
    scales = [1e-37, *[1e37 ** (1 / len(sizes))] * len(sizes)] if small == 0 else [1e20, 1e-37, *[1] * (len(sizes) - 1)]
    x = random((rows, math.prod(sizes))) * scales[0]
    factors = [random((n, n), seed=k) * scale for k, (n, scale) in enumerate(zip(sizes, scales[1:], strict=True))]
    wide = x_of(x.double(), [w.double() for w in factors])
    assert row_distance(cuops.kron_linear(x, factors), wide) < 1e-6


@gpu
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [([size] * 2, torch.float64) for size in (32, 64)]
    + [([size] * 2, torch.float32) for size in (32, 64, 96, 128)]
    + [([32] * 3, dtype) for dtype in (torch.float64, torch.float32)]
    + [([8] * 5, torch.float32), ([16] * 4, torch.float32)]
    + [([size] * 2, dtype) for size in (32, 64, 96, 128) for dtype in (torch.float16, torch.bfloat16)],
)
def test_a_row_that_is_not_finite_leaves_the_others_alone(sizes, dtype, value):
    x, factors = random((300, math.prod(sizes)), dtype), factors_of([(size, size) for size in sizes], dtype)
    want = cuops.kron_linear(x, factors)
    x[7, 100] = value
    got = cuops.kron_linear(x, factors)
    assert not got[7].isfinite().any()
    assert torch.equal(got[:7], want[:7])
    assert torch.equal(got[8:], want[8:])


@gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [16, 32, 300])
@pytest.mark.parametrize("sizes", [[4] * 6, [8] * 5, [16] * 4, [32] * 2, [32] * 3, [64] * 2, [128] * 2], ids=str)
def test_nan_in_a_factor_leaves_what_is_without_it_alone(sizes, rows, dtype):
    x, factors = random((rows, math.prod(sizes)), dtype), factors_of([(size, size) for size in sizes], dtype)
    want = cuops.kron_linear(x, factors)
    factors[1][1, 2] = math.nan
    got = cuops.kron_linear(x, factors)
    within = got.view(rows, sizes[0], sizes[1], -1)[:, :, 1]
    assert within.isnan().all()
    within.copy_(want.view(rows, sizes[0], sizes[1], -1)[:, :, 1])
    torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=1e-7)


@gpu
@pytest.mark.parametrize(
    "sizes", [[(20, 17), (36, 17)], [(5, 3), (9, 33)], [(24, 24), (20, 20)], [(3, 3), (17, 5), (2, 2)]]
)
@pytest.mark.parametrize("rows", [3, 300])
def test_an_infinity_of_float64_is_no_more_than_that(sizes, rows):
    x, factors = random((rows, columns_of(sizes)), torch.float64), factors_of(sizes, torch.float64)
    x[1, -1] = math.inf
    y = x.new_empty(rows, math.prod(o for o, _ in sizes))
    _backend.library().kron_linear_fwd(y, x, factors, 1, None, False)  # one launch, whatever the plan prefers
    assert y[1].isinf().all()
    assert y[0].isfinite().all()
    assert y[2].isfinite().all()
