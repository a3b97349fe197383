"""States that forwards keep for gradients, merged neighbours, and where chains are cut, tried on the CPU in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from cuops import reference
from cuops._kron_linear import bwd, cuts, fused, gemm, sums
from cuops._kron_linear import kept as keeping
from cuops._kron_linear.merge import Merged, merged, product_of
from cuops._kron_linear.squares_bwd import Two
from cuops._kron_linear.sums import sum_of_products
from kron_samples import OneLaunch, check, close, exact_gradients
from samples import make


def product(x, factors, inner, bias=None):
    """What `apply` computes: the factors on the last dimension, whose elements are `inner` neighbours each."""
    w = product_of(factors)
    y = (w @ x.reshape(-1, w.shape[1], inner)).reshape(*x.shape[:-1], len(w) * inner)
    return y if bias is None else y + bias


def product_of_rows(x, factors, inner):
    assert x.shape[-1] == 1 or x.stride(-1) == 1  # as the library wants it
    return product(x, factors, inner)


def backward_of_product(held, x, factors, groups, inner, needs_x, needs_factors):
    leaves = [t.detach().requires_grad_() for t in (x, *factors)]
    found = torch.autograd.grad(product(leaves[0], leaves[1:], inner), leaves, held.pop().reshape(x.shape[0], -1))
    dx, *dfactors = (g if needed else None for g, needed in zip(found, (needs_x, *needs_factors), strict=True))
    return dx, dfactors


def both_of_a_factor(g, x, w):
    if w is None:
        return None
    assert x.is_contiguous()
    return w.mT @ g, sum_of_products(g, x)


def merged_with_powers(parts, is_merged):
    """A factor or product of each part multiplied by a power of two; these undo one another."""
    powers = 4.0 ** (torch.arange(len(parts), dtype=torch.float64) - (len(parts) - 1) / 2)
    firsts, others = zip(*((part.factors[0], part.factors[1:]) for part in merged(parts, is_merged)), strict=True)
    return [Merged([w * s, *more], s.view(1), 0) for w, more, s in zip(firsts, others, powers, strict=True)]


@pytest.fixture
def _no_kernels(monkeypatch):
    """PyTorch's operators in place of the library, and none of its kernels for several gradients."""
    monkeypatch.setattr(keeping, "_known", {})
    monkeypatch.setattr(bwd, "factor_gradient", sum_of_products)
    for kernel in ("by_kernel", "in_chain"):
        monkeypatch.setattr(bwd, kernel, lambda *_: None)
    monkeypatch.setattr(bwd, "takes_both_of_first", lambda *_: False)
    for time in ("time_of_products", "time_of_slices"):
        monkeypatch.setattr(bwd, time, lambda *_: math.inf)
    for module in (bwd, cuts):
        monkeypatch.setattr(module, "plan_of_fibers", lambda *_: None)
    monkeypatch.setattr(bwd, "groups_of_fibers", lambda *_: None)
    monkeypatch.setattr(bwd, "plan_of", lambda x, factors, _: [(0, len(factors), True)])
    for module in (bwd, keeping):
        monkeypatch.setattr(module, "apply", product_of_rows)
        monkeypatch.setattr(module, "fused_chain", lambda x, factors, bias: product(x, factors, 1, bias))
    for module in (bwd, cuts, keeping):
        monkeypatch.setattr(module, "two_of_a_size", lambda *_: None)


def check_kept(x, dy, factors, kept=bwd.NOTHING):
    """Those of any of the arguments, and no others."""
    wanted = exact_gradients(dy, x, factors)[:-1]
    for needs in itertools.product((True, False), repeat=1 + len(factors)):
        dx, dfactors = bwd.fused_backward(dy, x, factors, needs[0], needs[1:], kept)
        for got, want, needed in zip((dx, *dfactors), wanted, needs, strict=True):
            assert (got is not None) == needed
            if needed:
                close(got, want)


def strided_arguments(sizes, rows=3):
    """x and dy, of twice so many rows, which do not lie one after the other, and factors."""
    x = make((rows, 2, math.prod(i for _, i in sizes)), torch.float64, seed=1)
    dy = make((math.prod(o for o, _ in sizes), rows, 2), torch.float64, seed=2).movedim(0, -1)
    return x, dy, [make(size, torch.float64, seed=3 + k) for k, size in enumerate(sizes)]


def test_no_state_is_kept_that_is_much_larger_than_another_order_leaves():
    grows = [make((256, 32), torch.float64), make((32, 256), torch.float64)]
    shrinks = [make((32, 64), torch.float64), make((64, 32), torch.float64)]
    assert keeping._count_of_first(make((7, 32 * 256), torch.float64), grows) == 0
    assert keeping._count_of_first(make((7, 64 * 32), torch.float64), shrinks) == 1


@pytest.mark.parametrize(
    ("rows", "sizes", "dtype", "limit", "states"),
    [
        (17, [(16, 16)] * 3, torch.float64, 17 * 16**3 * 8, 1),
        (17, [(16, 16)] * 3, torch.float64, 17 * 16**3 * 8 - 1, 0),
        (17, [(15, 16), (16, 16), (16, 16)], torch.float64, 1 << 28, 0),
        (17, [(16, 16)] * 3, torch.float32, 1 << 28, 0),
        (17, [(24, 24)] * 4, torch.float64, 1 << 28, 0),
        (16, [(24, 24)] * 4, torch.float64, 0, 2),
    ],
)
def test_of_many_rows_one_state_of_three_float64_factors_is_kept(rows, sizes, dtype, limit, states, monkeypatch):
    monkeypatch.setattr(keeping, "two_of_a_size", lambda *_: Two(1, 32))
    monkeypatch.setattr(keeping, "tf32_allowed", lambda _: False)
    monkeypatch.setattr(keeping, "BYTES", limit)
    x = torch.empty((rows, math.prod(i for _, i in sizes)), dtype=dtype)
    assert keeping._count_of_first(x, [torch.empty(size, dtype=dtype) for size in sizes]) == states


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("kept", [1, 2, 3])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.usefixtures("_no_kernels")
def test_states_are_kept_where_that_is_worth_it(with_bias, kept, together, monkeypatch):
    monkeypatch.setattr(keeping, "_count_of_first", lambda *_: kept)
    if together:
        monkeypatch.setattr(bwd, "by_kernel", both_of_a_factor)
    x, dy, factors = strided_arguments([(8, 4), (9, 12), (2, 6), (8, 3)])
    x, bias = x.mT.contiguous().mT, make((8 * 9 * 2 * 8,), torch.float64, seed=9) if with_bias else None
    y, found = keeping.forward_and_states(x, factors, bias, [True] * len(factors))
    check(y, x, factors, bias)
    assert [s.numel() for s in found.states] == [6 * n for n in (8 * 12 * 6 * 3, 8 * 9 * 6 * 3, 8 * 9 * 2 * 3)][:kept]
    check_kept(x, dy, factors, found)


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([(20, 14), (13, 30)], [(1, True), (1, False)]),
        ([(20, 14), (3, 5), (17, 6)], [(1, False), (1, True), (1, True)]),
        ([(14, 20), (8, 6), (5, 9)], [(2, False), (1, True)]),  # a GEMM of the product of two
        ([(14, 20), (8, 6), (5, 9)], [(1, True), (2, False)]),
        ([(14, 20), (8, 6), (5, 9)], [(1, True), (2, True)]),
        ([(3, 4), (5, 2), (30, 20)], [(2, True), (1, True)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("merges", [merged, merged_with_powers], ids=["as they are", "with powers"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.usefixtures("_no_kernels")
def test_states_between_launches_are_kept(with_bias, merges, sizes, groups, monkeypatch):
    for module in (fused, bwd):
        monkeypatch.setattr(module, "merged", merges)
    counts = [count for count, _ in groups]
    starts = list(itertools.accumulate(counts, initial=0))
    chain = [(first, *group) for first, group in zip(starts, groups, strict=False)]
    monkeypatch.setattr(keeping, "plan_of", lambda *_: chain)
    monkeypatch.setattr(fused, "plan_of", lambda *_: chain)
    monkeypatch.setattr(fused, "library", OneLaunch)
    monkeypatch.setattr(keeping, "fused_chain", fused.fused_chain)
    x, dy, factors = strided_arguments(sizes)
    bias = make((dy.shape[-1],), torch.float64, seed=9) if with_bias else None
    y, kept = keeping.forward_and_states(x, factors, bias, [True] * len(factors))
    check(y, x, factors, bias)
    assert kept.parts == [(count, count > 1 and not is_fused) for count, is_fused in groups]
    between = reference.elements_between(sizes)
    assert [s.numel() for s in kept.states] == [6 * between[start] for start in starts[1:-1]]
    check_kept(x, dy, factors, kept)
    needs = [k < counts[0] for k in range(len(factors))]  # whose gradients are of x itself
    assert keeping.forward_and_states(x, factors, bias, needs)[1] == bwd.NOTHING
    monkeypatch.setattr(keeping, "BYTES", 0)
    monkeypatch.setattr(keeping, "_known", {})
    choice = keeping._of_groups(x, factors)
    assert choice is None if len(groups) > 2 else choice.parts == kept.parts


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.usefixtures("_no_kernels")
def test_two_large_float64_factors_have_a_state_each_where_there_is_room(with_bias, monkeypatch):
    sizes = [(3, 4), (40, 33), (20, 50)]
    monkeypatch.setattr(keeping, "plan_of", lambda *_: [(0, 1, True), (1, 2, True)])
    x, dy, factors = strided_arguments(sizes)
    bias = make((dy.shape[-1],), torch.float64, seed=9) if with_bias else None
    y, kept = keeping.forward_and_states(x, factors, bias, [True] * 3)
    check(y, x, factors, bias)
    assert kept.parts == [(1, False)] * 3
    assert [s.numel() for s in kept.states] == [6 * 3 * 33 * 50, 6 * 3 * 40 * 50]
    check_kept(x, dy, factors, kept)
    monkeypatch.setattr(keeping, "BYTES", 6 * 3 * (33 + 40) * 50 * 8 - 1)
    monkeypatch.setattr(keeping, "_known", {})
    choice = keeping.how(x, factors)
    assert (choice.states, choice.parts) == (1, [(1, False), (2, False)])


@pytest.mark.parametrize(
    ("sizes", "last", "dtype", "is_kept"),
    [
        ((13, 14, 40), 1, torch.float32, True),
        ((13, 14, 40, 30), 2, torch.float32, False),
        ((13, 14, 40, 30), 2, torch.bfloat16, True),  # as all of it else is a chain of GEMMs
        ((8, 16, 40), 1, torch.float64, True),
        ((8, 17, 40), 1, torch.float64, False),
        ((8, 12, 40, 30), 2, torch.float32, True),  # whose gradients a kernel has
    ],
    ids=str,
)
@pytest.mark.usefixtures("_no_kernels")
def test_states_before_a_group_whose_gradients_no_kernel_has_are_kept_where_copies_are_worth_it(
    sizes, last, dtype, is_kept, monkeypatch
):
    first = len(sizes) - last
    monkeypatch.setattr(keeping, "plan_of", lambda *_: [(0, first, True), (first, last, True)])
    x, factors = make((3, math.prod(sizes)), dtype), [make((n, n), dtype) for n in sizes]
    assert (keeping._of_groups(x, factors) is not None) == is_kept
    monkeypatch.setattr(keeping, "cut_before_squares", lambda *_: 1)
    others = dtype == torch.bfloat16 or max(sizes[:first]) <= 12
    assert (keeping._of_groups(x, factors) is not None) == (is_kept and others)


@pytest.mark.parametrize(
    ("rows", "sizes", "nothing_between"),
    [
        (40, [(40, 33), (36, 50)], True),
        (10, [(32, 200), (200, 32)], True),  # the first factor comes first, as in the last one
        (3, [(40, 33), (36, 50)], False),
        (3, [(6, 30), (5, 7)], False),
        (3, [(4, 4), (25, 30), (3, 7)], False),
        (3, [(2, 40), (3, 5), (7, 30)], False),
    ],
    ids=str,
)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.usefixtures("_no_kernels", "_either_way")
def test_states_between_gemms_are_kept(with_bias, rows, sizes, nothing_between, monkeypatch):
    monkeypatch.setattr(keeping, "tf32_allowed", lambda _: False)
    monkeypatch.setattr(keeping, "plan_of", lambda *_: [(0, len(sizes), True)])
    x, dy, factors = strided_arguments(sizes, rows)
    turned = gemm.turns(factors)
    in_order = factors[::-1] if turned else factors
    assert gemm._are_two(x.reshape(-1, x.shape[-1]), in_order) == nothing_between
    bias = make((dy.shape[-1],), torch.float64, seed=9) if with_bias else None
    monkeypatch.setattr(keeping, "_count_of_first", lambda *_: 0)
    monkeypatch.setattr(keeping, "_of_groups", lambda *_: None)
    y, kept = keeping.forward_and_states(x, factors, bias, [True] * len(factors))
    check(y, x, factors, bias)
    assert not kept.parts
    assert len(kept.states) == len(sizes) - 1
    check_kept(x, dy, factors, kept)
    needs = [False] * len(factors)
    needs[0 if turned else -1] = True  # of which the gradient is of x itself
    assert keeping.forward_and_states(x, factors, bias, needs)[1] == bwd.NOTHING
    monkeypatch.setattr(keeping, "BYTES", 0)
    monkeypatch.setattr(keeping, "_known", {})
    assert (keeping.how(x, factors) is not None) == (len(sizes) == 2)
    gemms = [(k, 1, False) for k in range(len(sizes))]
    for chain in (gemms, gemms[::-1]):
        monkeypatch.setattr(keeping, "plan_of", lambda *_, chain=chain: chain)
        monkeypatch.setattr(keeping, "_known", {})
        assert keeping.how(x, factors).states == 1
    y, kept = keeping.forward_and_states(x, factors, bias, [True] * len(factors))
    check(y, x, factors, bias)
    assert len(kept.states) == 1  # the last one, of where GEMMs go forward, too
    check_kept(x, dy, factors, kept)
    needs = [True] * len(factors)
    needs[-1 if turned else 0] = False  # the factor whose gradient is of that state
    assert keeping.forward_and_states(x, factors, bias, needs)[1] == bwd.NOTHING


@pytest.mark.parametrize(
    ("sizes", "most", "groups"),
    [
        ([(8, 8)] * 4, 64, [2, 2]),
        ([(8, 8)] * 3, 64, [1, 2]),
        ([(8, 8), (8, 8), (40, 30)], 64, [2, 1]),
        ([(12, 10), (9, 12), (12, 12)], 256, [1, 2]),
        ([(8, 9), (9, 8)], 81, [2]),
    ],
    ids=str,
)
@pytest.mark.usefixtures("_no_kernels")
def test_gradients_of_merged_neighbours_are_those_of_each(sizes, most, groups, monkeypatch):
    monkeypatch.setattr(cuts, "MERGED", most)
    monkeypatch.setitem(cuts.MANY, 8, 1)
    x, dy, factors = strided_arguments(sizes)
    assert [g.stop - g.start for g in cuts.neighbours_to_merge(x, factors)] == groups
    check_kept(x, dy, factors)


@pytest.mark.parametrize(
    ("sizes", "plan", "dtype", "is_one_product"),
    [
        ([(4, 6), (30, 20)], [(0, 2, False)], torch.bfloat16, True),
        ([(4, 6), (30, 20)], [(0, 2, False)], torch.float32, False),
        ([(4, 6), (30, 20)], [(0, 2, True)], torch.bfloat16, False),
        ([(5, 3), (2, 7), (6, 6)], [(0, 2, False), (2, 1, True)], torch.bfloat16, False),
        ([(30, 20)], [(0, 1, False)], torch.bfloat16, False),
    ],
    ids=str,
)
@pytest.mark.usefixtures("_no_kernels")
def test_gradients_of_a_forward_by_one_product_are_taken_from_the_products(
    sizes, plan, dtype, is_one_product, monkeypatch
):
    found, of_product = [], bwd._backward_of_product
    monkeypatch.setattr(bwd, "_backward_of_product", lambda *all: found.append(all[2].shape) or of_product(*all))
    monkeypatch.setattr(bwd, "plan_of", lambda *_: plan)
    monkeypatch.setattr(sums, "HAS_WIDE_PRODUCTS", False)  # which a CPU has not
    x, dy, factors = strided_arguments(sizes)
    x, dy, *factors = (t.to(dtype) for t in (x, dy, *factors))
    wanted = exact_gradients(dy, x, factors)[:-1]
    for needs in itertools.product((True, False), repeat=1 + len(factors)):
        dx, dfactors = bwd.fused_backward(dy, x, factors, needs[0], needs[1:])
        for got, want, needed in zip((dx, *dfactors), wanted, needs, strict=True):
            assert (got is not None) == needed
            if needed:
                assert (got - want).norm() <= 2 * (1 + len(sizes)) * torch.finfo(dtype).eps * want.norm()
        assert len(found) == (is_one_product and any(needs[1:]))
        assert all(shape == tuple(math.prod(n) for n in zip(*sizes, strict=True)) for shape in found)
        found.clear()


@pytest.mark.usefixtures("_no_kernels")
def test_products_whose_gradients_may_leave_the_range_of_float16_are_not_merged(monkeypatch):
    monkeypatch.setitem(cuts.MANY, 2, 1)
    groups = {}
    for dtype in (torch.float16, torch.bfloat16):
        factors = [make((12, 12), dtype, seed=k) for k in range(4)]
        groups[dtype] = len(cuts.neighbours_to_merge(make((2, 12**4), dtype), factors))
    assert groups == {torch.float16: 0, torch.bfloat16: 2}
    x, dy = make((640, 12**3), torch.float16), make((640, 12**3), torch.float16, seed=9)
    factors = [make((12, 12), torch.float16, seed=k) * (1, 90, 90)[k] for k in range(3)]
    monkeypatch.setattr(cuts, "plan_of_fibers", lambda *_: [1])
    for module in (bwd, cuts):
        monkeypatch.setattr(module, "are_small", lambda *_: False)
    dx, dfactors = bwd.fused_backward(dy * 1e-6, x * 1e-3, factors, True, [True] * 3)
    assert all(d.isfinite().all() for d in (dx, *dfactors))


@pytest.mark.parametrize(
    ("rows", "sizes", "dtype", "is_cut", "is_cut_rather_than_kept"),
    [
        (1, (100, 4), torch.float32, True, True),
        (1, (100, 4), torch.float64, False, False),
        (100, (100, 4), torch.float32, False, False),
        (1000, (100, 4), torch.float32, True, True),
        (1000, (100, 6), torch.float32, False, False),
        (1, (40, 30, 8), torch.bfloat16, True, True),
        (10, (40, 30, 3), torch.float64, True, False),
        (1000, (40, 30, 3), torch.float64, True, True),
        (1000, (40, 30, 12), torch.float64, True, False),
        (1000, (40, 30, 13), torch.float64, False, False),
        (1000, (40, 30, 4), torch.bfloat16, True, False),
        (2, (40, 30, 3, 8), torch.bfloat16, True, True),
    ],
)
@pytest.mark.usefixtures("_no_kernels")
def test_a_chain_is_cut_where_a_kernel_for_small_factors_is_worth_it(
    rows, sizes, dtype, is_cut, is_cut_rather_than_kept, monkeypatch
):
    monkeypatch.setattr(cuts, "plan_of_fibers", lambda *_: [1])
    monkeypatch.setattr(cuts, "two_of_a_size", lambda *_: Two(1, 64))  # what comes before the small one
    monkeypatch.setattr(cuts, "cut_before_squares", lambda *_: 0)
    x, factors = make((rows, math.prod(sizes)), dtype), [make((n, n), dtype) for n in sizes]
    assert (cuts.cut_of(x, factors) > 0) == is_cut
    assert (cuts.cut_of(x, factors, keeps=True) > 0) == is_cut_rather_than_kept


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [
        [(4, 4), (20, 20)],
        [(20, 18), (3, 5)],
        [(2, 3), (30, 17), (3, 2)],
        [(14, 16), (3, 2), (17, 20)],
        [(17, 14), (5, 4), (15, 18)],
        [(2, 2), (3, 4), (17, 17), (18, 3), (4, 1)],
    ],
    ids=str,
)
@pytest.mark.usefixtures("_no_kernels")
def test_gradients_of_small_and_large_factors_are_those_of_the_product(sizes, kernel, monkeypatch):
    monkeypatch.setattr(cuts, "FEW", 1 << 20)
    monkeypatch.setattr(cuts, "FROM_TWO", 0)
    for module in (bwd, cuts):
        monkeypatch.setattr(module, "plan_of_fibers", lambda x, w, inner: [1] * (kernel or inner == 1))
    monkeypatch.setattr(bwd, "backward_of_fibers", backward_of_product)
    x, dy, factors = strided_arguments(sizes)
    assert cuts.cut_of(x, factors) > 0
    check_kept(x, dy, factors)


@pytest.mark.parametrize(("sizes", "cut"), [([(14, 16), (3, 2), (17, 20)], 1), ([(14, 16), (3, 2), (17, 40)], 0)])
@pytest.mark.usefixtures("_no_kernels")
def test_factors_are_not_parted_where_the_last_ones_make_much_less_of_x(sizes, cut, monkeypatch):
    monkeypatch.setattr(cuts, "plan_of_fibers", lambda *_: [1])
    x, _, factors = strided_arguments(sizes)
    assert cuts.cut_of(x, factors) == cut
