"""The fused kernels of kron_linear."""

from __future__ import annotations

import math

import cuops
import pytest
import torch
from cuops import _backend
from cuops._kron_linear.gemm import chain_of_matmuls
from kron_samples import FUSED, assert_repeatable, columns_of, factors_of, random, row_distance, x_of

gpu = pytest.mark.gpu
THREE = [[(32, 32)] * 3, [(12, 24), (28, 24), (20, 16)], [(31, 5), (17, 29), (32, 28)], [(3, 32), (32, 3), (4, 32)]]
OF_FLOAT32 = [
    *THREE,
    [(32, 32)] * 2,
    [(40, 24), (20, 48)],
    [(96, 96), (100, 56)],
    [(86, 86), (128, 128)],
    [(100, 70), (40, 128)],
    [(21, 34), (36, 16)],
    [(64, 64)] * 3,
    [(33, 57), (40, 64), (64, 48)],
]
TWO_OF_64 = [[(64, 64)] * 2, [(35, 40), (56, 48)], [(8, 64), (64, 8)]]
OF_16_BITS = [[(32, 32)] * 2, *TWO_OF_64, [(31, 20), (16, 24)], [(32, 32)] * 3, [(28, 12), (25, 24), (24, 16)]]
TWO_OF_128 = [[(128, 128)] * 2, [(101, 86), (66, 128)], [(96, 96), (100, 56)], [(3, 128), (128, 8)]]
TWO = [*TWO_OF_64, *TWO_OF_128, [(35, 40), (50, 48)], [(5, 64), (64, 8)]]
TWO_OF_FLOAT64 = [[(size, size)] * 2 for size in (16, 24, 32, 48, 64)] + [
    [(13, 9), (10, 16)],
    [(21, 18), (24, 10)],
    [(31, 17), (26, 32)],
    [(35, 40), (48, 34)],
    [(5, 64), (64, 8)],
    [(64, 64), (80, 80)],
    [(53, 64), (66, 80)],
    [(64, 7), (74, 12)],
]


@gpu
@pytest.mark.parametrize("sizes", FUSED + OF_FLOAT32)
def test_float32_is_as_accurate_as_a_chain_of_gemms(sizes):
    x, factors = random((300, columns_of(sizes))), factors_of(sizes)
    wide = x_of(x.double(), [w.double() for w in factors])
    assert (
        row_distance(cuops.kron_linear(x, factors), wide)
        <= 2 * row_distance(chain_of_matmuls(x, factors, None), wide) + 1e-7
    )


@gpu
@pytest.mark.parametrize("allow_tf32", [False, True])
@pytest.mark.parametrize("ins", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("outs", [(4, 6), (32, 2), (3, 32)], ids=str)
def test_many_samples_of_few_slabs(outs, ins, allow_tf32):
    """A warp that makes slabs has none in some samples, and others are samples ahead of it."""
    sizes = [(outs[0], ins), (outs[1], 32), (32, 32)]
    x, factors = random((8192, columns_of(sizes))), factors_of(sizes)
    want = x_of(x.double(), [w.double() for w in factors])
    torch.backends.cuda.matmul.allow_tf32, before = allow_tf32, torch.backends.cuda.matmul.allow_tf32
    try:
        y = cuops.kron_linear(x, factors)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    # TF32 rounds numbers, and what is between the factors, to 10 bits.
    assert row_distance(y, want) < (2e-3 if allow_tf32 else 1e-6)


@gpu
@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize(
    "sizes",
    [
        [8],
        [16],
        [8] * 2,
        [16] * 2,
        [8] * 3,
        [16, 8, 8],
        [8, 16, 8],
        [8] * 4,
        [4, 2, 16, 2, 2],
        [8] * 5,
        [16] * 3,
        [2, 8, 4, 4],
        [4] * 6,
        [2] * 12,
        [16] * 4,
    ],
)
def test_small_factors_with_a_bias(rows, sizes):
    shapes = [(size, size) for size in sizes]
    rows = min(rows, (1 << 24) // columns_of(shapes))
    x, factors, bias = random((rows, columns_of(shapes))), factors_of(shapes), random((columns_of(shapes),), seed=8)
    wide = x_of(x.double(), [w.double() for w in factors])
    assert row_distance(cuops.kron_linear(x, factors), wide) < 1e-6
    assert row_distance(cuops.kron_linear(x, factors, bias), wide + bias) < 1e-6


@gpu
@pytest.mark.parametrize("inner", [32, 96, 256])
@pytest.mark.parametrize("rows", [1, 50, 700])
@pytest.mark.parametrize("sizes", [[16], [16] * 2, [4] * 4, [2, 8, 8, 2], [8] * 3])
def test_small_factors_with_columns_beyond_them(sizes, rows, inner):
    shapes = [(size, size) for size in sizes]
    columns = columns_of(shapes) * inner
    x, factors = random((rows, columns + 8))[:, 4:-4], [w.mT for w in factors_of(shapes)]
    want = x_of(x.double(), [w.double() for w in (*factors, torch.eye(inner, device="cuda"))])
    y = torch.full((rows, columns + 4), math.nan, device="cuda")
    _backend.library().kron_linear_fwd(y[:, :columns], x, factors, inner, None, False)
    assert row_distance(y[:, :columns], want) < 1e-6
    assert y[:, columns:].isnan().all()


@gpu
@pytest.mark.parametrize("rows", [133, 300])
@pytest.mark.parametrize(
    "sizes", [[8] * 5, [2, 4, 8, 8, 4, 2, 8], [2] * 15, [16] * 4, [4] * 8, [2, 8, 16, 4, 4, 16], [2] * 16]
)
def test_large_samples_of_small_factors_in_one_launch(sizes, rows):
    columns, gap = math.prod(sizes), 8
    # The code of CUDA 11 has no clusters, which samples of 2^16 elements need.
    one_launch = columns < 1 << 16 or _backend.choose().name != "cu118"
    factors = [w.mT for w in factors_of([(n, n) for n in sizes])]
    bias = random((columns + 1,), seed=8)[1:]
    views = random((rows, columns + 16))
    for x, given in ((views[:, :columns].contiguous(), None), (views[:, 4 : 4 + columns], bias)):
        want = chain_of_matmuls(x.double(), [w.double() for w in factors], None if given is None else given.double())
        assert row_distance(cuops.kron_linear(x, factors, given), want) < 1e-6
        if one_launch:
            y = torch.full((rows, columns + gap), math.nan, device="cuda")
            _backend.library().kron_linear_fwd(y[:, :-gap], x, factors, 1, given, False)
            assert row_distance(y[:, :-gap], want) < 1e-6
            assert y[:, -gap:].isnan().all()


@gpu
@pytest.mark.parametrize("inner", [36, 64, 1000])
@pytest.mark.parametrize("rows", [1, 40, 700])
@pytest.mark.parametrize("size", [(64, 64), (36, 60), (64, 33), (7, 40)])
def test_one_factor_with_columns_beyond_it(rows, size, inner):
    (outs, ins), gap = size, 8
    x, factor = random((rows, ins * inner + gap))[:, 4:-4], random(size[::-1]).mT
    want = (factor.double() @ x.double().reshape(rows, ins, inner)).reshape(rows, -1)
    y = torch.full((rows, outs * inner + gap), math.nan, device="cuda")
    _backend.library().kron_linear_fwd(y[:, :-gap], x, [factor], inner, None, False)
    assert row_distance(y[:, :-gap], want) < 1e-6
    assert y[:, -gap:].isnan().all()


@gpu
@pytest.mark.parametrize("rows", [1, 3, 700])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes",
    [[2] * n for n in range(2, 11)]
    + [
        [4],
        [8],
        [16],
        [4] * 2,
        [4] * 5,
        [8] * 2,
        [8] * 3,
        [16] * 2,
        [16, 16, 4],
        [2, 8, 8, 4],
        [4, 2, 16, 2],
        [8, 4, 2],
    ],
)
def test_powers_of_two_with_up_to_1024_elements_a_sample(sizes, dtype, rows):
    columns = math.prod(sizes)
    x, factors = (
        random((rows, 2 * columns), dtype)[:, :columns],
        [w.mT for w in factors_of([(n, n) for n in sizes], dtype)],
    )
    bias = random((columns + 1,), dtype, seed=8)[1:]
    for given in (None, bias):
        wide = chain_of_matmuls(x.double(), [w.double() for w in factors], None if given is None else given.double())
        # Roundings of products and sums, in the dtype of the sums, and one at the end.
        sums = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        assert row_distance(cuops.kron_linear(x, factors, given), wide) < 2 * sum(sizes) * sums + torch.finfo(dtype).eps


@gpu
@pytest.mark.parametrize(
    ("rows", "sizes"), [(20_005, [16] * 2), (3001, [16] * 3), (3001, [4] * 6), (40_003, [2, 8, 4, 4])]
)
def test_tiles_that_follow_one_another(rows, sizes):
    shapes = [(size, size) for size in sizes]
    x, factors = random((rows, columns_of(shapes))), factors_of(shapes)
    bias = random((columns_of(shapes),), seed=8)
    wide = x_of(x.double(), [w.double() for w in factors])
    assert row_distance(cuops.kron_linear(x, factors, bias), wide + bias) < 1e-6


@gpu
@pytest.mark.parametrize("rows", [1, 9, 700])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes", [[(12, 12)] * 3, [(6, 6)] * 4, [(28, 20), (12, 36)], [(36, 36)] * 2, [(7, 5), (4, 12)], [(5, 7), (6, 10)]]
)
def test_one_kernel_takes_rows_that_are_no_multiple_of_8(sizes, dtype, rows):
    columns, outputs = columns_of(sizes), math.prod(o for o, _ in sizes)
    x, factors = random((rows, columns + 16), dtype), factors_of(sizes, dtype)
    bias = random((outputs,), dtype, seed=8)
    allowed = {torch.float64: 1e-14, torch.float32: 1e-6}.get(dtype, torch.finfo(dtype).eps / 3**0.5)
    for view in (x[:, :columns].contiguous(), x[:, 8 : 8 + columns], x[:, 5 : 5 + columns]):
        want = chain_of_matmuls(view.double(), [w.double() for w in factors], None)
        for given in (None, bias):
            base = torch.full((rows, outputs + 16), math.nan, dtype=dtype, device="cuda")
            _backend.library().kron_linear_fwd(base[:, :outputs], view, factors, 1, given, False)
            assert row_distance(base[:, :outputs], want if given is None else want + given) < allowed
            assert base[:, outputs:].isnan().all()


@gpu
@pytest.mark.parametrize("rows", [1, 3, 33, 66, 150, 700])
@pytest.mark.parametrize("sizes", FUSED + OF_FLOAT32)
def test_any_batch_with_a_bias(rows, sizes):
    rows = min(rows, max(3, (1 << 24) // columns_of(sizes)))
    x, factors = random((rows, columns_of(sizes))), factors_of(sizes)
    bias = random((math.prod(o for o, _ in sizes),), seed=8)
    wide = x_of(x.double(), [w.double() for w in factors])
    assert row_distance(cuops.kron_linear(x, factors), wide) < 1e-6
    assert row_distance(cuops.kron_linear(x, factors, bias), wide + bias) < 1e-6


@gpu
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (rows, sizes)
        for rows in (1, 30, 67, 150, 1100)
        for sizes in [
            *TWO_OF_FLOAT64,
            *THREE,
            [(30, 31), (29, 32), (32, 28)],
            [(16, 32), (32, 32), (18, 32)],
            [(17, 9), (5, 30), (26, 24)],
        ]
    ]
    + [(7000, [(16, 16)] * 2), (7000, [(13, 9), (10, 16)])],  # several samples a warp
)
def test_float64_is_as_accurate_as_a_chain_of_gemms(rows, sizes):
    x, factors = random((rows, columns_of(sizes)), torch.float64), factors_of(sizes, torch.float64)
    bias = random((math.prod(o for o, _ in sizes),), torch.float64, seed=8)
    assert row_distance(cuops.kron_linear(x, factors, bias), chain_of_matmuls(x, factors, bias)) < 1e-15
    assert row_distance(cuops.kron_linear(x, factors), chain_of_matmuls(x, factors, None)) < 1e-15


@gpu
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [(sizes, dtype) for sizes in FUSED for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    + [(sizes, torch.float32) for sizes in OF_FLOAT32]
    + [(sizes, dtype) for sizes in OF_16_BITS for dtype in (torch.float16, torch.bfloat16)]
    + [([(32, 32)] * 3, torch.float64)],
)
def test_views_give_what_copies_give(sizes, dtype):
    base = random((40, columns_of(sizes) + 24), dtype)
    transposed = [w.mT for w in factors_of([size[::-1] for size in sizes], dtype)]
    for x in (base[:, 8:-16], base[3::2, 5 : 5 + columns_of(sizes)]):
        want = cuops.kron_linear(x.contiguous(), [w.contiguous() for w in transposed])
        # Other kernels may take a view: what these round and lose differs.
        lost = torch.finfo(torch.promote_types(dtype, torch.float32)).eps * want.abs().max().item()
        got = cuops.kron_linear(x, transposed)
        torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=16 * lost)


@gpu
@pytest.mark.parametrize("sizes", FUSED)
def test_gradients_of_factors_are_the_same_in_every_run(sizes):
    x, factors = random((1000, columns_of(sizes))), [w.requires_grad_() for w in factors_of(sizes)]
    dy = random((1000, math.prod(o for o, _ in sizes)), seed=9)
    assert_repeatable(lambda: torch.autograd.grad(cuops.kron_linear(x, factors), factors, dy))


@gpu
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [(sizes, dtype) for sizes in ([32] * 2, [64] * 2, [32] * 3, [16] * 3) for dtype in (torch.float16, torch.bfloat16)]
    + [(sizes, torch.bfloat16) for sizes in ([8] * 4, [2] * 10)],  # products of float16 factors are rounded too
)
def test_16_bits_lose_little_more_than_a_rounding_of_the_result(sizes, dtype):
    shapes = [(size, size) for size in sizes]
    x, factors = random((500, columns_of(shapes)), dtype), factors_of(shapes, dtype)
    wide = x_of(x.double(), [w.double() for w in factors])
    # Half a unit in the last place is eps / 2 at most, and eps / 2 / sqrt(3) on average at the least favourable magnitude.
    assert row_distance(cuops.kron_linear(x, factors), wide) < 1.5 * torch.finfo(dtype).eps / 2 / 3**0.5


@gpu
@pytest.mark.parametrize("rows", [1, 140, 3000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", OF_16_BITS + TWO[len(TWO_OF_64) :])
def test_16_bits_of_any_batch_with_a_bias(rows, sizes, dtype):
    x, factors = random((rows, columns_of(sizes)), dtype), factors_of(sizes, dtype)
    bias = random((math.prod(o for o, _ in sizes),), dtype, seed=8)
    wide = x_of(x.double(), [w.double() for w in factors])
    allowed = torch.finfo(dtype).eps / 3**0.5  # a few rows may be for GEMMs, which round between the factors
    assert row_distance(cuops.kron_linear(x, factors), wide) < allowed
    for given in (bias, torch.cat([bias[:1], bias])[1:]):  # the other one does not start where a vector may
        assert row_distance(cuops.kron_linear(x, factors, given), wide + bias) < allowed


@pytest.fixture
def tf32():
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


def lost_by_tf32(sizes):
    """What roundings to 11 bits of x, the factors and what lies between lose.

    Each is of half a unit in the last place at most, 2**-11. They are independent of one another. A row may lose half more.
    """
    return (2 * len(sizes) / 3) ** 0.5 * 2**-11 * 1.5


@gpu
@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("rows", [1, 150, 700])
@pytest.mark.parametrize("sizes", [sizes for sizes in TWO + THREE if math.prod(o for o, _ in sizes) > 100])
def test_tf32_rounds_x_factors_and_what_lies_between(sizes, rows):
    x, factors = random((rows, columns_of(sizes))), factors_of(sizes)
    bias = random((math.prod(o for o, _ in sizes),), seed=8)
    wide = x_of(x.double(), [w.double() for w in factors])
    assert row_distance(cuops.kron_linear(x, factors), wide) < lost_by_tf32(sizes)
    assert row_distance(cuops.kron_linear(x, factors, bias), wide + bias) < lost_by_tf32(sizes)


@gpu
@pytest.mark.parametrize("rows", [1, 40, 133, 600])
@pytest.mark.parametrize(
    ("dtype", "allow_tf32", "sizes"),
    [
        (dtype, allow_tf32, sizes)
        for dtype, allow_tf32, more in [
            (torch.float64, False, TWO_OF_FLOAT64 + THREE),
            (torch.float32, False, TWO + THREE),
            (torch.float32, True, TWO + THREE),
            (torch.float16, False, TWO),
            (torch.bfloat16, False, TWO),
        ]
        for sizes in more
    ],
)
def test_one_kernel_reads_views_of_factors_and_of_rows(sizes, dtype, allow_tf32, rows):
    columns, outputs = columns_of(sizes), math.prod(o for o, _ in sizes)
    x = random((rows, columns + 24), dtype)[:, 8:-16]
    factors = factors_of(sizes, dtype)
    want = chain_of_matmuls(x.double(), [w.double() for w in factors], None)
    if allow_tf32:  # a few results may all happen to be small
        allowed = lost_by_tf32(sizes) * (1 if outputs > 100 else 2)
    else:
        allowed = {torch.float32: 1e-6, torch.float64: 1e-15}.get(dtype, torch.finfo(dtype).eps / 3**0.5)
    transposed = [w.mT.contiguous().mT for w in factors]
    parts = [torch.cat([w, w], 1)[:, : w.shape[1]] for w in factors]
    for given in (factors, transposed, parts):
        base = torch.full((rows, outputs + 8), math.nan, dtype=dtype, device="cuda")
        _backend.library().kron_linear_fwd(base[:, :outputs], x, given, 1, None, allow_tf32)
        assert row_distance(base[:, :outputs], want) < allowed
        assert base[:, outputs:].isnan().all()
