"""Sums over the first dimension by the library: of a batch of products, and of the rows of a bias gradient."""

from __future__ import annotations

import pytest
import torch
import tvm_ffi
from cuops import _backend
from cuops._kron_linear.copies import summed
from kron_samples import assert_repeatable, random
from samples import DTYPES

pytestmark = pytest.mark.gpu

# Fewer columns than a block has, and many; in vectors and not; fewer rows than threads, and many; in one part and several.
SHAPES = [(1, 7), (3, 1), (2, 100_000), (10, 1_000_000), (64, 36), (129, 4489), (1000, 324), (3001, 441), (500, 9_999)]
SHAPES += [(8193, 1), (8192, 25), (8191, 1024), (40_000, 16), (40_000, 300), (1024, 10_000), (100_000, 9), (0, 5)]


def integers(shape, dtype):
    """Numbers of which any order gives the same sum in float32."""
    return torch.randint(-4, 5, shape, device="cuda").to(dtype)


def summed_by_library(x):
    """Whatever was there before."""
    y = x.new_full(x.shape[1:], float("nan"))
    _backend.library().kron_linear_sum(y, x)
    return y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_column_is_added_up_and_rounded_once_wherever_arrays_start(shape, dtype):
    x = integers(shape, dtype)
    want = x.double().sum(0).to(dtype)
    assert torch.equal(summed_by_library(x), want)
    later = torch.empty(x.numel() + 1, device="cuda", dtype=dtype)[1:].view(shape).copy_(x)
    assert torch.equal(summed_by_library(later), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1000, 17, 31), (50_000, 3, 5)], ids=str)
def test_sums_of_matrices_are_of_few_additions_one_after_the_other_and_repeatable(shape, dtype):
    x = random(shape, dtype, 1)
    want, y = x.double().sum(0), summed(x)
    of_result, of_sums = (torch.finfo(t).eps / 2 for t in (dtype, torch.promote_types(dtype, torch.float32)))
    assert ((y.double() - want).abs() <= of_result * want.abs() + 64 * of_sums * x.double().abs().sum(0)).all()
    assert_repeatable(lambda: [summed(x)])


@pytest.mark.parametrize("shape", [(1000, 33), (20_000, 33), (64, 8192 * 9)], ids=str)
def test_nothing_beyond_an_array_is_touched(shape):
    around = torch.full((shape[1] + 64,), -1.0, device="cuda")
    y = around[32:-32]
    _backend.library().kron_linear_sum(y, torch.ones(shape, device="cuda"))
    assert (y == shape[0]).all()
    assert (around[:32] == -1).all()
    assert (around[-32:] == -1).all()


@pytest.mark.parametrize("shape", [(3, 2**30), (2**21 + 1, 1025)], ids=str)
def test_more_than_2_to_the_31_elements(shape):
    x = torch.zeros(shape, device="cuda", dtype=torch.float16)
    x[-1] = integers(shape[1:], torch.float16)
    assert torch.equal(summed_by_library(x), x[-1])


def test_arrays_that_lend_no_memory_are_added_up_in_one_launch():
    x, y = integers((20_000, 33), torch.float32), torch.empty(33, device="cuda")
    _backend.library().kron_linear_sum(*(tvm_ffi.from_dlpack(t) for t in (y, x)))
    torch.cuda.synchronize()
    assert torch.equal(y, x.sum(0))


def test_only_plain_arrays_without_gaps_go_through_the_library(monkeypatch):
    taken, library = [], _backend.library()

    class Counting:
        def kron_linear_sum(self, y, x):
            taken.append(tuple(x.shape))
            library.kron_linear_sum(y, x)

    monkeypatch.setattr(_backend, "library", Counting)
    x = integers((40, 50), torch.float32)
    for t in (x[:, ::2], x.mT, x.clone().requires_grad_(), x.cpu()):
        assert torch.equal(summed(t), t.sum(0))
    assert torch.equal(torch.vmap(summed)(torch.stack((x, x)))[1], x.sum(0))
    assert taken == []
    assert torch.equal(summed(x), x.sum(0))
    assert taken == [(40, 50)]


@pytest.mark.parametrize(
    ("y", "x", "error", "match"),
    [
        (lambda: torch.empty(4, device="cuda"), (2, 5), ValueError, "y: "),
        (lambda: torch.empty(4, 2, device="cuda")[:, 0], (2, 4), ValueError, "y: "),
        (lambda: torch.empty(4, device="cuda", dtype=torch.float64), (2, 4), TypeError, "y: "),
        (lambda: torch.empty((), device="cuda"), (), ValueError, "x: "),
    ],
    ids=["shape", "gaps", "dtype", "dimensions"],
)
def test_other_arrays_are_refused(y, x, error, match):
    with pytest.raises(error, match=match):
        _backend.library().kron_linear_sum(y(), torch.ones(x, device="cuda"))
