"""A factor's gradient by GEMMs: products summed over all that it does not touch, tried on the CPU in float64."""

from __future__ import annotations

import pytest
import torch
from cuops import _kron_linear_gemm
from cuops._kron_linear_gemm import sum_of_products
from kron_samples import Largest, close, make
from torch.utils.flop_counter import FlopCounterMode


@pytest.mark.parametrize(
    ("depth", "parts"),
    [((1, 4096), 16), ((8192, 1), 16), ((1, 4095), 1), ((4100, 1), 1), ((1, 4090), 1), ((1, 32768), 1), ((64, 64), 1)],
)
@pytest.mark.parametrize("size", [(65, 80), (64, 80)])
def test_some_sums_are_of_parts(size, depth, parts, monkeypatch):
    (o, i), (rows, inner), taken = size, depth, []
    parted = _kron_linear_gemm._parted
    monkeypatch.setattr(_kron_linear_gemm, "_parted", lambda t, parts: taken.append(parts) or parted(t, parts))
    g, x = make((rows, o, inner), torch.float64, seed=1), make((rows, i, inner), torch.float64, seed=2)
    across = x.mT.contiguous().mT
    wanted = torch.einsum("rok,rik->oi", g, x)
    close(sum_of_products(g, x), wanted)
    close(sum_of_products(g, across), wanted)
    assert taken == ([parts] * 4 if parts > 1 and o > 64 else [])


@pytest.mark.parametrize("size", [8192, 1024])
def test_large_gradients_are_not_added_up_of_parts(size):
    g = torch.empty((4096, size, 1), dtype=torch.float64, device="meta")
    with Largest() as largest:
        assert sum_of_products(g, g).shape == (size, size)
    assert largest.bytes == 8 * max(size**2, 4096 * size)


@pytest.mark.parametrize(("rows", "inner", "are_added"), [(3, 11_279, True), (3, 11_278, False), (4, 11_279, False)])
@pytest.mark.parametrize("size", [(130, 3), (3, 130)])
def test_few_long_sums_are_added_up_row_after_row(size, rows, inner, are_added, monkeypatch):
    (o, i), taken, added = size, [], _kron_linear_gemm._row_after_row
    monkeypatch.setattr(_kron_linear_gemm, "ROWS_ADDED", {8: 3})
    monkeypatch.setattr(_kron_linear_gemm, "_row_after_row", lambda g, x: taken.append(len(g)) or added(g, x))
    g, x = make((rows, o, inner), torch.float64, seed=1), make((rows, i, inner), torch.float64, seed=2)
    close(sum_of_products(g, x), torch.einsum("rok,rik->oi", g, x))
    assert taken == ([rows] if are_added else [])
    several = torch.stack((g, -g))
    close(torch.vmap(lambda g: sum_of_products(g, x))(several), torch.einsum("srok,rik->soi", several, x))


@pytest.mark.parametrize(("rows", "inner"), [(16, 1), (100, 1), (1, 16)])
def test_a_sum_along_one_axis_is_one_product(rows, inner):
    g, x = make((rows, 30, inner), torch.float64, seed=1), make((rows, 40, inner), torch.float64, seed=2)
    with FlopCounterMode(display=False) as counter, Largest() as largest:
        dw = sum_of_products(g, x)
    close(dw, torch.einsum("rok,rik->oi", g, x))
    assert list(counter.get_flop_counts()["Global"]) == [torch.ops.aten.mm]
    assert largest.bytes == 8 * max(30 * 40, 40 * rows * inner)


@pytest.mark.parametrize(
    ("rows", "o", "i", "inner", "across", "is_batch"),
    [
        (100, 64, 64, 64, False, True),
        (100, 64, 64, 64, True, True),
        (200, 96, 64, 20, False, True),
        (200, 96, 64, 20, True, False),  # of one copy rather than two
        (100, 64, 64, 16, False, True),
        (400, 64, 64, 16, False, False),  # of products that would be more than x
        (40, 30, 30, 2500, False, True),
        (2, 30, 30, 2500, False, False),  # of few rows with long sums
    ],
)
def test_a_batch_adds_up_few_products_and_one_gemm_of_copies_many(rows, o, i, inner, across, is_batch):
    g, x = make((rows, o, inner), torch.float64, seed=1), make((rows, i, inner), torch.float64, seed=2)
    if across:
        x = x.mT.contiguous().mT
    with FlopCounterMode(display=False) as counter, Largest() as largest:
        dw = sum_of_products(g, x)
    close(dw, torch.einsum("rok,rik->oi", g, x))
    assert list(counter.get_flop_counts()["Global"]) == [torch.ops.aten.bmm if is_batch else torch.ops.aten.mm]
    assert largest.bytes <= max(g.nbytes, x.nbytes, 8 * _kron_linear_gemm.ROOM)
    several = torch.stack((g, -g))
    close(torch.vmap(lambda g: sum_of_products(g, x))(several), torch.einsum("srok,rik->soi", several, x))
