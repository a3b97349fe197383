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


@pytest.mark.parametrize(
    ("rows", "inner", "are_added"), [(2, 5000, True), (4, 10_000, True), (4, 9999, False), (5, 12_500, False)]
)
@pytest.mark.parametrize("size", [(130, 3), (3, 130), (128, 3)])
def test_few_long_sums_of_large_factors_are_added_up_row_after_row(size, rows, inner, are_added, monkeypatch):
    (o, i), taken, added = size, [], _kron_linear_gemm._row_after_row
    monkeypatch.setattr(_kron_linear_gemm, "_row_after_row", lambda g, x: taken.append(len(g)) or added(g, x))
    g, x = make((rows, o, inner), torch.float64, seed=1), make((rows, i, inner), torch.float64, seed=2)
    close(sum_of_products(g, x), torch.einsum("rok,rik->oi", g, x))
    assert taken == ([rows] if are_added and max(size) > 128 else [])
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
    ("rows", "size", "inner", "is_one"),
    [(8, 5, 2500, True), (8, 64, 2500, True), (8, 5, 2499, False), (401, 5, 2500, False), (8, 65, 2500, False)],
)
def test_a_batch_does_not_add_up_long_sums_of_small_gradients(rows, size, inner, is_one):
    g, x = make((rows, size, inner), torch.float64, seed=1), make((rows, 5, inner), torch.float64, seed=2)
    with FlopCounterMode(display=False) as counter:
        dw = sum_of_products(g, x)
    close(dw, torch.einsum("rok,rik->oi", g, x))
    assert list(counter.get_flop_counts()["Global"]) == [torch.ops.aten.mm if is_one else torch.ops.aten.bmm]


@pytest.mark.parametrize(
    ("rows", "inner", "in_turns"), [(34, 120, True), (34, 119, False), (24, 120, False), (34, 180, False)]
)
def test_batches_of_large_gradients_take_turns_in_no_more_memory_than_x(rows, inner, in_turns, monkeypatch):
    taken, turned = [], _kron_linear_gemm._in_turns
    monkeypatch.setattr(_kron_linear_gemm, "_in_turns", lambda g, x, n: taken.append(n) or turned(g, x, n))
    g, x = make((rows, 180, inner), torch.float64, seed=1), make((rows, 200, inner), torch.float64, seed=2)
    with Largest() as largest:
        dw = sum_of_products(g, x)
    close(dw, torch.einsum("rok,rik->oi", g, x))
    assert taken == ([2] if in_turns else [])
    assert largest.bytes <= x.nbytes
    several = torch.stack((g, -g))
    close(torch.vmap(lambda g: sum_of_products(g, x))(several), torch.einsum("srok,rik->soi", several, x))


@pytest.mark.parametrize(("rows", "o", "inner", "turns"), [(6, 1000, 500, 2), (3, 1200, 600, 0), (2, 1800, 800, 0)])
def test_turns_of_few_rows_take_no_more_memory_than_x(rows, o, inner, turns, monkeypatch):
    taken, turned = [], _kron_linear_gemm._in_turns
    monkeypatch.setattr(_kron_linear_gemm, "_in_turns", lambda g, x, n: taken.append(n) or turned(g, x, n))
    g = make((rows, o, inner), torch.float32, seed=1)
    with Largest() as largest:
        dw = sum_of_products(g, g)
    torch.testing.assert_close(dw, torch.einsum("rok,rik->oi", g, g), rtol=1e-4, atol=1e-2)
    assert taken == ([turns] if turns else [])
    assert largest.bytes <= max(g.nbytes, dw.nbytes)
