"""Transposed copies by the library, between a GEMM and what it wants, or leaves, across."""

from __future__ import annotations

import pytest
import torch
from cuops import _backend
from cuops._kron_linear.copies import swapped
from kron_samples import random
from samples import DTYPES

pytestmark = pytest.mark.gpu

# Parts of a tile, whole ones, several down and across; one matrix, and many.
SHAPES = [(1, 2, 2), (5, 3, 7), (1000, 2, 5), (4099, 16, 3), (7, 64, 64), (3, 65, 63), (2, 128, 300), (2, 300, 128)]
SHAPES += [(3, 129, 131), (2, 1000, 700), (5, 1, 9), (5, 9, 1), (2, 3, 5000), (2, 5000, 3), (70_000, 1, 1)]


def transposed(x):
    """By the library, whatever was there before."""
    y = x.new_full((x.shape[0], x.shape[2], x.shape[1]), float("nan"))
    _backend.library().kron_linear_transpose(y, x)
    return y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_matrix_becomes_its_transpose_wherever_arrays_start(shape, dtype):
    x = random((*shape,), dtype, 1)
    assert torch.equal(transposed(x), x.mT)
    later = torch.empty(x.numel() + 1, device="cuda", dtype=dtype)[1:].view(shape).copy_(x)
    assert torch.equal(transposed(later), x.mT)


def test_nothing_beyond_an_array_is_touched():
    around = torch.full((5 * 33 * 17 + 64,), -1.0, device="cuda")
    y = around[32:-32].view(5, 33, 17)
    _backend.library().kron_linear_transpose(y, torch.ones(5, 17, 33, device="cuda"))
    assert (y == 1).all()
    assert (around[:32] == -1).all()
    assert (around[-32:] == -1).all()


def test_more_than_2_to_the_31_elements():
    x = torch.zeros(2**15 + 1, 255, 257, device="cuda", dtype=torch.float16)
    x[-1] = random((255, 257), torch.float16, 1)
    y = transposed(x)
    assert torch.equal(y[-1], x[-1].mT)
    assert not y[:-1].any()


def test_only_plain_arrays_that_are_not_narrow_go_through_the_library(monkeypatch):
    taken, library = [], _backend.library()

    class Counting:
        def kron_linear_transpose(self, y, x):
            taken.append(tuple(x.shape))
            library.kron_linear_transpose(y, x)

    monkeypatch.setattr(_backend, "library", Counting)
    x = random((4, 40, 50), torch.float32, 1)
    for t in (x[:1], x[:, :8], x[:, :8].contiguous(), x[:, :, ::2], x.clone().requires_grad_(), x.cpu()):
        assert torch.equal(swapped(t), t.mT)
    assert torch.equal(torch.vmap(swapped)(torch.stack((x, x)))[1], x.mT)
    assert taken == []
    assert torch.equal(swapped(x), x.mT)
    assert swapped(x).is_contiguous()
    assert taken == [(4, 40, 50)] * 2


@pytest.mark.parametrize(
    ("y", "x", "error", "match"),
    [
        ((2, 4, 3), (2, 3, 5), ValueError, "y: "),
        ((3, 4), (4, 3), ValueError, "x: "),
        ((2, 4, 3, torch.float64), (2, 3, 4), TypeError, "y: "),
    ],
    ids=["shape", "dimensions", "dtype"],
)
def test_other_arrays_are_refused(y, x, error, match):
    *shape, dtype = y if isinstance(y[-1], torch.dtype) else (*y, torch.float32)
    with pytest.raises(error, match=match):
        _backend.library().kron_linear_transpose(
            torch.empty(shape, device="cuda", dtype=dtype), torch.ones(x, device="cuda")
        )
