"""A factor's gradient by GEMMs: products summed over all that it does not touch, tried on the CPU in float64."""

from __future__ import annotations

import math

import pytest
import torch
from cuops._kron_linear import sums as _sums
from cuops._kron_linear.gemm import chain_of_matmuls_backward
from cuops._kron_linear.sums import sum_of_products
from kron_samples import Largest, close
from samples import make
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode


@pytest.mark.parametrize(("dtype", "is_wide"), [(torch.float16, False), (torch.bfloat16, True)], ids=str)
@pytest.mark.parametrize("depth", [(1, 4096), (6, 1), (1, 6), (3, 6)])
def test_wide_sums_are_not_asked_for_of_float16_where_the_vendors_may_be_of_it(depth, dtype, is_wide, monkeypatch):
    rows, inner = depth
    g, x = make((rows, 5, inner), dtype, seed=1), make((rows, 4, inner), dtype, seed=2)
    monkeypatch.setattr(_sums, "_sums_in_float16", lambda: True)
    monkeypatch.setattr(_sums, "HAS_WIDE_PRODUCTS", True)
    for name in ("mm", "bmm"):  # which CPUs have none of
        product = getattr(torch, name)
        wide = lambda a, b, out_dtype=None, product=product: product(a, b).to(out_dtype or a.dtype)  # noqa: E731
        monkeypatch.setattr(torch, name, wide)
    assert sum_of_products(g, x, torch.float32).dtype == (torch.float32 if is_wide else dtype)
    monkeypatch.setattr(_sums, "HAS_WIDE_PRODUCTS", False)  # in PyTorch before 2.8
    assert sum_of_products(g, x, torch.float32).dtype == dtype


@pytest.fixture
def taken(monkeypatch):
    """The numbers of parts that operands are divided into."""
    numbers, parted = [], _sums._parted
    monkeypatch.setattr(_sums, "_parted", lambda t, parts: numbers.append(parts) or parted(t, parts))
    return numbers


@pytest.mark.parametrize(
    ("depth", "size", "parts"),
    [
        ((1, 4096), (65, 80), 16),  # of nine tiles
        ((8192, 1), (65, 80), 32),
        ((8192, 1), (64, 9), 64),
        ((512, 1), (64, 9), 16),
        ((32768, 1), (3, 9), 256),
        ((1, 4095), (65, 80), 21),  # the nearest number that divides it
        ((1, 4093), (65, 80), 1),  # a prime
        ((100, 1), (65, 80), 1),
        ((256, 1), (64, 9), 1),
        ((8192, 1), (170, 170), 1),
        ((2048, 1), (79, 80), 16),
        ((2048, 1), (80, 80), 1),  # a large one, whose sums are short
        ((2500, 1), (80, 80), 20),
        ((64, 64), (65, 80), 1),  # a batch of rows
    ],
)
def test_some_sums_are_of_parts(depth, size, parts, taken):
    (o, i), (rows, inner) = size, depth
    g, x = make((rows, o, inner), torch.float64, seed=1), make((rows, i, inner), torch.float64, seed=2)
    across = x.mT.contiguous().mT
    wanted = torch.einsum("rok,rik->oi", g, x)
    close(sum_of_products(g, x), wanted)
    close(sum_of_products(g, across), wanted)
    assert taken == ([parts] * 4 if parts > 1 else [])


@pytest.mark.parametrize(("terms", "size", "parts"), [(67**2, 150, 67), (67**2, 160, 1), (2**14, 160, 64)])
def test_the_products_of_parts_have_no_more_room_than_an_operand_or_a_few_megabytes(terms, size, parts):
    assert _sums._parts(terms, size, size, 4) == parts
    assert parts * size**2 <= max(_sums.ROOM, terms * size)
    assert max(_sums.ROOM, 67**2 * 160) < 67 * 160**2


@pytest.mark.parametrize(("size", "are_parted"), [((64, 80), False), ((63, 80), True), ((64, 81), True)])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_short_sums_of_16_bits_are_left_whole_where_the_gradient_is_whole_vectors(size, are_parted, layout, taken):
    depth = (1024, 1) if layout == "rows" else (1, 1024)
    g, x = (torch.ones((depth[0], n, depth[1]), dtype=torch.bfloat16) for n in size)
    assert (sum_of_products(g, x) == 1024).all()
    assert bool(taken) == are_parted


@pytest.mark.parametrize(("terms", "size", "parts"), [(100_000, 80, 100), (131_072, 80, 1), (131_072, 64, 256)])
def test_very_long_float64_sums_are_left_whole_where_one_product_has_all_multiprocessors(terms, size, parts):
    assert _sums._parts(terms, size, size, 8) == parts


@pytest.mark.parametrize("size", [8192, 1024])
def test_large_gradients_are_not_added_up_of_parts(size):
    g = torch.empty((4096, size, 1), dtype=torch.float64, device="meta")
    with Largest() as largest:
        assert sum_of_products(g, g).shape == (size, size)
    assert largest.bytes == 8 * max(size**2, 4096 * size)


@pytest.mark.parametrize(("rows", "inner", "are_added"), [(3, 11_279, True), (3, 11_278, False), (4, 11_279, False)])
@pytest.mark.parametrize("size", [(130, 3), (3, 130)])
def test_few_long_sums_are_added_up_row_after_row(size, rows, inner, are_added, monkeypatch):
    (o, i), taken, added = size, [], _sums._row_after_row
    monkeypatch.setattr(_sums, "ROWS_ADDED", {8: 3})
    monkeypatch.setattr(_sums, "_row_after_row", lambda g, x: taken.append(len(g)) or added(g, x))
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
        (200, 96, 64, 12, True, False),  # of one copy rather than two
        (100, 64, 64, 16, False, True),
        (400, 64, 64, 16, False, False),  # of products that would be more than x
        (40, 30, 30, 2500, False, True),
        (2, 30, 30, 25000, False, False),  # of few rows with long sums
    ],
)
def test_a_batch_adds_up_few_products_and_one_gemm_of_copies_many(rows, o, i, inner, across, is_batch, monkeypatch):
    monkeypatch.setattr(_sums, "_parts", lambda *_: 1)
    g, x = make((rows, o, inner), torch.float64, seed=1), make((rows, i, inner), torch.float64, seed=2)
    if across:
        x = x.mT.contiguous().mT
    with FlopCounterMode(display=False) as counter, Largest() as largest:
        dw = sum_of_products(g, x)
    close(dw, torch.einsum("rok,rik->oi", g, x))
    assert list(counter.get_flop_counts()["Global"]) == [torch.ops.aten.bmm if is_batch else torch.ops.aten.mm]
    assert largest.bytes <= max(g.nbytes, x.nbytes, 8 * _sums.ROOM)
    several = torch.stack((g, -g))
    close(torch.vmap(lambda g: sum_of_products(g, x))(several), torch.einsum("srok,rik->soi", several, x))


@pytest.mark.parametrize(("rows", "sizes"), [(1, [(7, 5), (1, 1)]), (6, [(7, 5)]), (6, [(7, 5), (3, 4)])])
def test_graphs_may_leave_all_sizes_open(rows, sizes):
    factors = [make(size, torch.float64, seed=k) for k, size in enumerate(sizes)]
    x, dy = (make((rows, math.prod(s[d] for s in sizes)), torch.float64) for d in (1, 0))

    def gradients(dy, x, *factors):
        dx, dfactors = chain_of_matmuls_backward(dy, x, factors, True, [True] * len(factors))
        return [dx, *dfactors]

    traced = make_fx(gradients, tracing_mode="symbolic")(dy, x, *factors)
    for got, want in zip(traced(dy, x, *factors), gradients(dy, x, *factors), strict=True):
        close(got, want)
