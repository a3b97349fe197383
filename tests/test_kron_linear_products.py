"""kron_linear of few products: a factor in a launch, and its gradient and that of its input in another."""

from __future__ import annotations

import itertools

import cuops
import pytest
import torch
from cuops import _backend
from kron_exact import arguments, check, exact, gradients
from kron_samples import DTYPES, random

pytestmark = pytest.mark.gpu
SIZES = [(16, 16), (64, 64), (128, 128), (7, 3), (1, 5), (6, 1), (33, 100), (86, 130), (257, 40), (2, 500)]
CHAINS = [
    [(24, 24), (24, 24)],
    [(4, 4), (128, 128)],
    [(128, 100), (4, 6)],
    [(2, 2), (100, 100), (3, 3)],
    [(20, 17), (18, 30)],
]
EVERYTHING = [[size] for size in SIZES] + CHAINS


def value_and_gradients(x, dy, factors):
    return [cuops.kron_linear(x, factors), *gradients(x, dy, factors)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 16, 37, 1000])
@pytest.mark.parametrize("sizes", EVERYTHING, ids=str)
def test_values_and_gradients_are_those_of_the_definition(sizes, rows, dtype):
    x, dy, factors = arguments(rows, sizes, dtype)
    check(value_and_gradients(x, dy, factors), x, dy, factors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("rows", "inner"), [(1, 2), (5, 3), (16, 16), (130, 36), (1000, 7), (3, 1001)])
def test_one_factor_with_columns_beyond_it(rows, inner, size, dtype):
    (o, i), (x, _, (w,)) = size, arguments(rows * inner, [size], dtype)
    x, dy = x.reshape(rows, inner, i).mT.contiguous(), random((rows, o, inner), dtype, 5)
    y, dx, dw = torch.full_like(dy, torch.nan), torch.full_like(x, torch.nan), torch.full_like(w, torch.nan)
    _backend.library().kron_linear_fwd(y.reshape(rows, -1), x.reshape(rows, -1), [w], inner, None, False)
    _backend.library().kron_linear_bwd_product(dx, dw, dy, x, w)

    def flat(t):
        return t.mT.reshape(rows * inner, -1)

    check([flat(y), flat(dx), dw], flat(x), flat(dy), [w])
    for k, alone in enumerate((torch.full_like(dx, torch.nan), torch.full_like(dw, torch.nan))):
        _backend.library().kron_linear_bwd_product(*((alone, None) if k == 0 else (None, alone)), dy, x, w)
        # Alone, its sum may have other parts.
        tolerance = (1 if k == 0 else rows * inner) ** 0.5 * torch.finfo(dtype).eps
        torch.testing.assert_close(alone, (dx, dw)[k], rtol=4 * torch.finfo(dtype).eps, atol=16 * tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", EVERYTHING[:8] + CHAINS[:3], ids=str)
def test_views_biases_and_transposed_factors(sizes, dtype):
    x, dy, factors = arguments(37, sizes, dtype)
    wide = random((37, x.shape[1] + 13), dtype)
    wide[:, 3 : 3 + x.shape[1]] = x
    bias = torch.full((dy.shape[1] + 1,), 3.0, dtype=dtype, device="cuda")[1:]
    exactly = exact(x, dy, factors)
    eps = torch.finfo(dtype).eps
    for view in (x, wide[:, 3 : 3 + x.shape[1]]):
        others = [w.mT.contiguous().mT for w in factors]
        got = cuops.kron_linear(view, others, bias).double()
        torch.testing.assert_close(got, exactly[0] + 3, rtol=2 * eps, atol=16 * len(sizes) * eps)
        check(value_and_gradients(view, dy, others), x, dy, factors)


@pytest.mark.parametrize("sizes", EVERYTHING[1:4] + CHAINS, ids=str)
def test_only_some_gradients(sizes):
    x, dy, factors = arguments(100, sizes, torch.float32)
    everything = gradients(x, dy, factors)
    for needs in list(itertools.product((True, False), repeat=1 + len(sizes)))[1:-1]:
        want = [gradient for gradient, needed in zip(everything, needs, strict=True) if needed]
        for got, full in zip(gradients(x, dy, factors, needs), want, strict=True):
            torch.testing.assert_close(got, full, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", EVERYTHING[:3] + CHAINS, ids=str)
def test_twenty_runs_give_the_same_bits(sizes, dtype):
    sample = arguments(300, sizes, dtype)
    want = gradients(*sample)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(gradients(*sample), want, strict=True))


def test_launches_wait_for_what_the_ones_before_them_write():
    x, grad, factors = arguments(300, [(48, 48)], torch.float32)
    wide, wide_grad = x.double(), grad.double()
    for k in range(20):
        factors = [w.roll(k, 0) for w in factors]
        x = cuops.kron_linear(x, factors)
        grad, *_ = gradients(x, grad, factors)
        wide, wide_grad, *_ = exact(wide, wide_grad, factors)
    assert (x - wide).norm() <= 1e-4 * wide.norm()
    assert (grad - wide_grad).norm() <= 1e-4 * wide_grad.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        [(size, size)] * n
        for size, n in ((2, 10), (8, 4), (16, 2), (16, 3), (24, 3), (32, 2), (32, 3), (40, 2), (64, 2), (128, 2))
    ],
    ids=str,
)
def test_fused_launches_wait_for_what_the_ones_before_them_write(sizes, dtype):
    for rows in (16, 400):
        x, _, factors = arguments(rows, sizes, dtype)
        apart = x.clone()
        for k in range(10):
            turned = [w.roll(k, 0) for w in factors]
            x = cuops.kron_linear(x, turned)
        for k in range(10):
            turned = [w.roll(k, 0) for w in factors]
            torch.cuda.synchronize()
            apart = cuops.kron_linear(apart, turned)
            torch.cuda.synchronize()
        assert torch.equal(x, apart)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gradient_whose_elements_are_no_multiple_of_four(dtype):
    x, dy, factors = arguments(300, [(33, 33), (3, 3), (3, 3), (5, 5)], dtype)
    check(value_and_gradients(x, dy, factors), x, dy, factors)


def test_what_goes_together_is_checked():
    x, dy, w = (torch.ones(size, device="cuda") for size in ((4, 6, 1), (4, 5, 1), (5, 6)))
    dx, dw = torch.empty_like(x), torch.empty_like(w)
    bwd = _backend.library().kron_linear_bwd_product
    for wrong, error in [
        ((dx, dw, dy.mT, x, w), ValueError),
        ((dx.double(), dw, dy, x, w), TypeError),
        ((dx, dw.cpu(), dy, x, w), ValueError),
        ((dx, dw, dy[:2], x, w), ValueError),
        ((dx, dw.mT, dy, x, w), ValueError),
        ((dx, dw, dy, x[:, :, 0], w), ValueError),
        ((dx, dw, dy, x, w[0]), ValueError),
        ((dx, dw, dy.cpu(), x.cpu(), w.cpu()), ValueError),
    ]:
        with pytest.raises(error):
            bwd(*wrong)
    bwd(dx, dw, dy, x, w)
    assert torch.equal(dx, torch.full_like(x, 5))
    assert torch.equal(dw, torch.full_like(w, 4))
