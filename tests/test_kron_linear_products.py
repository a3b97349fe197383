"""kron_linear of few products: a factor in a launch, and its gradient and that of its input in another."""

from __future__ import annotations

import itertools

import cuops
import pytest
import torch
from cuops import _backend
from kron_exact import check_results, exact, gradients, problem_of, value_and_gradients
from kron_samples import assert_repeatable, columns_of, random
from samples import DTYPES

pytestmark = pytest.mark.gpu
SIZES = [(16, 16), (64, 64), (128, 128), (7, 3), (1, 5), (6, 1), (33, 100), (86, 130), (256, 40), (2, 200)]
CHAINS = [
    [(24, 24), (24, 24)],
    [(4, 4), (128, 128)],
    [(128, 100), (4, 6)],
    [(2, 2), (100, 100), (3, 3)],
    [(20, 17), (18, 30)],
]
EVERYTHING = [[size] for size in SIZES] + CHAINS


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 16, 37, 1000])
@pytest.mark.parametrize("sizes", EVERYTHING, ids=str)
def test_values_and_gradients_are_those_of_the_definition(sizes, rows, dtype):
    x, dy, factors = problem_of(rows, sizes, dtype)
    check_results(value_and_gradients(x, dy, factors), x, dy, factors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("rows", "inner"), [(1, 2), (5, 3), (16, 16), (130, 36), (1000, 7), (3, 1001)])
def test_one_factor_with_columns_beyond_it(rows, inner, size, dtype):
    (o, i), (x, _, (w,)) = size, problem_of(rows * inner, [size], dtype)
    x, dy = x.reshape(rows, inner, i).mT.contiguous(), random((rows, o, inner), dtype, 5)
    y, dx, dw = torch.full_like(dy, torch.nan), torch.full_like(x, torch.nan), torch.full_like(w, torch.nan)
    _backend.library().kron_linear_fwd(y.reshape(rows, -1), x.reshape(rows, -1), [w], inner, None, False)
    _backend.library().kron_linear_product_bwd(dx, dw, dy, x, w)

    def flat(t):
        return t.mT.reshape(rows * inner, -1)

    check_results([flat(y), flat(dx), dw], flat(x), flat(dy), [w])
    for k, alone in enumerate((torch.full_like(dx, torch.nan), torch.full_like(dw, torch.nan))):
        _backend.library().kron_linear_product_bwd(*((alone, None) if k == 0 else (None, alone)), dy, x, w)
        # Alone, its sum may have other parts.
        tolerance = (1 if k == 0 else rows * inner) ** 0.5 * torch.finfo(dtype).eps
        torch.testing.assert_close(alone, (dx, dw)[k], rtol=4 * torch.finfo(dtype).eps, atol=16 * tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", EVERYTHING[:8] + CHAINS[:3], ids=str)
def test_views_biases_and_transposed_factors(sizes, dtype):
    x, dy, factors = problem_of(37, sizes, dtype)
    n, eps = x.shape[1], torch.finfo(dtype).eps
    bias = random((dy.shape[1] + 1,), dtype, 7)[1:]
    want = exact(x, dy, factors)[0] + bias.double()
    others = [w.mT.contiguous().mT for w in factors]
    for first, beyond in ((0, 0), (3, 10), (16, 48)):  # rows may still be whole vectors
        wide = random((37, first + n + beyond), dtype)
        view = wide[:, first : first + n]
        view.copy_(x)
        got = cuops.kron_linear(view, others, bias).double()
        torch.testing.assert_close(got, want, rtol=2 * eps, atol=16 * len(sizes) * eps)
    check_results(value_and_gradients(x, dy, others), x, dy, factors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(64, 64), (16, 100), (256, 256), (512, 64), (300, 7)], ids=str)
def test_rows_of_two_strides_have_the_values(size, dtype):
    x, dy, factors = problem_of(64, [size], dtype)
    x = x.reshape(16, 4, -1)
    for view in (x.transpose(0, 1), torch.cat([x, x], -1)[:, :, : size[1]], x[:, 1:]):
        rows = view.reshape(-1, size[1])
        dy_of_rows = dy[: len(rows)]
        y, (dx, dw) = cuops.kron_linear(view, factors), gradients(view, dy_of_rows.view(*view.shape[:-1], -1), factors)
        check_results([y.flatten(0, 1), dx.flatten(0, 1), dw], rows, dy_of_rows, factors)


@pytest.mark.parametrize("sizes", EVERYTHING[1:4] + CHAINS, ids=str)
def test_gradients_that_are_not_wanted_change_no_other(sizes):
    x, dy, factors = problem_of(100, sizes, torch.float32)
    everything = gradients(x, dy, factors)
    for needs in list(itertools.product((True, False), repeat=1 + len(sizes)))[1:-1]:
        want = [gradient for gradient, needed in zip(everything, needs, strict=True) if needed]
        for got, full in zip(gradients(x, dy, factors, needs), want, strict=True):
            torch.testing.assert_close(got, full, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", EVERYTHING[:3] + CHAINS, ids=str)
def test_twenty_runs_give_the_same_bits(sizes, dtype):
    assert_repeatable(gradients, *problem_of(300, sizes, dtype))


def in_turn(launch, turned, start):
    """What launch(factors, x) makes of `start` for each of `turned`: in a graph, without a pause, and one by one."""
    apart = start
    for factors in turned:
        apart = launch(factors, apart)
        torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        x = start
        for factors in turned:
            x = launch(factors, x)
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    return x, apart


@pytest.mark.cached
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        [(size, size)] * n
        for size, n in (
            *((16, 1), (48, 1), (128, 1), (2, 4), (2, 10), (3, 4), (8, 4), (16, 2), (16, 3), (24, 3)),
            *((32, 2), (32, 3), (40, 2), (64, 2), (64, 3), (128, 2)),
        )
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [16, 400])
def test_launches_wait_for_what_the_ones_before_them_write(rows, sizes, dtype):
    x, dy, factors = problem_of(min(rows, (1 << 23) // columns_of(sizes)), sizes, dtype)
    factors = [torch.linalg.qr(w.double())[0].to(dtype) for w in factors]  # which keep magnitudes
    turned = [[w.roll(k, 0) for w in factors] for k in range(12)]
    assert torch.equal(*in_turn(lambda factors, state: cuops.kron_linear(state, factors), turned, x))

    def back(factors, grad):
        return torch.ops.cuops.kron_linear_bwd(grad, x, factors, True, [True] * len(factors), False)[0]

    assert torch.equal(*in_turn(back, turned, dy))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gradient_whose_elements_are_no_multiple_of_four(dtype):
    x, dy, factors = problem_of(300, [(33, 33), (3, 3), (3, 3), (5, 5)], dtype)
    check_results(value_and_gradients(x, dy, factors), x, dy, factors)


def test_what_goes_together_is_checked():
    x, dy, w = (torch.ones(size, device="cuda") for size in ((4, 6, 1), (4, 5, 1), (5, 6)))
    dx, dw = torch.empty_like(x), torch.empty_like(w)
    bwd = _backend.library().kron_linear_product_bwd
    for wrong, error, message in [
        ((dx, dw, dy.mT, x, w), ValueError, "dy: expected a contiguous array"),
        ((dx.double(), dw, dy, x, w), TypeError, "dx: expected x's dtype"),
        ((dx, dw.cpu(), dy, x, w), ValueError, "dw: expected an array on cuda"),
        ((dx, dw, dy[:2], x, w), ValueError, "dy: expected a contiguous array"),
        ((dx, dw.mT, dy, x, w), ValueError, "dw: expected a contiguous matrix of 5 x 6"),
        ((dx, dw, dy, x[:, :, 0], w), ValueError, r"x: expected \(rows, in, inner\)"),
        ((dx, dw, dy, x, w[0]), ValueError, "factors: expected matrices"),
        ((dx, dw, dy.cpu(), x.cpu(), w.cpu()), ValueError, "x: expected an array on a CUDA device"),
    ]:
        with pytest.raises(error, match=f"^{message}"):
            bwd(*wrong)
    with pytest.raises(ValueError, match="^rows, inner, out, in: expected at least 1 each"):
        _backend.library().kron_linear_product_bwd_time(1, 4, 0, 5, 6, 0)
    bwd(dx, dw, dy, x, w)
    assert torch.equal(dx, torch.full_like(x, 5))
    assert torch.equal(dw, torch.full_like(w, 4))
