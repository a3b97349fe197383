"""The chain of GEMMs that CUDA tensors take where no fused kernel does, tried on the CPU in float64."""

from __future__ import annotations

import functools
import itertools
import math
import tracemalloc

import pytest
import torch
from cuops import reference
from cuops._kron_linear import fused as _fused
from cuops._kron_linear import gemm
from cuops._kron_linear.gemm import back_through_chain, chain_of_matmuls, chain_of_matmuls_backward
from cuops._kron_linear.merge import product_of
from cuops._kron_linear.sums import sum_of_products
from kron_samples import EMPTY, LARGE, SAMPLES, Largest, OneLaunch, arguments, check, close, exact_gradients
from samples import make
from torch.utils.flop_counter import FlopCounterMode

FULL = {name: s for name, s in SAMPLES.items() if name not in EMPTY} | {"large factors": LARGE["large factors"]}


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("sample", FULL)
def test_is_the_product(sample, with_bias):
    x, factors, bias = arguments(FULL[sample], torch.float64)
    bias = bias if with_bias else None
    check(chain_of_matmuls(x, factors, bias), x, factors, bias)


@pytest.mark.parametrize("sizes", [[(1, 4), (4, 1), (4, 4)], [(1, 1)] * 3, [(3, 2), (1, 5), (2, 1), (4, 3)]], ids=str)
def test_a_product_of_factors_lies_in_memory_as_they_would(sizes):
    factors = [make((i, o), torch.float64, seed=k).mT for k, (o, i) in enumerate(sizes)]
    product = product_of(factors)
    assert product.is_contiguous()
    want = functools.reduce(torch.kron, [w.clone().reshape(-1).view(w.shape) for w in factors])
    assert torch.equal(product, want)


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize(
    "sample",
    [name for name, (_, s) in FULL.items() if len(s) in (2, 3) and math.prod(o * i for o, i in s) <= 1 << 20],
)
def test_groups_of_factors_make_the_product_however_they_are_computed(sample, monkeypatch):
    x, factors, bias = arguments(FULL[sample], torch.float64)
    monkeypatch.setattr(_fused, "library", OneLaunch)
    for counts in [(1, 1, 1), (2, 1), (1, 2), (3,)] if len(factors) == 3 else [(1, 1), (2,)]:
        for kinds in itertools.product((True, False), repeat=len(counts)):
            groups = list(zip(itertools.accumulate(counts, initial=0), counts, kinds, strict=False))
            monkeypatch.setattr(_fused, "plan_of", lambda *_, groups=groups: groups)
            check(_fused.fused_chain(x, factors, bias), x, factors, bias)


@pytest.mark.parametrize("sizes", [[(37, 38), (10, 1), (5, 5), (1, 8)], [(16, 4), (14, 12), (5, 13), (16, 1)]], ids=str)
def test_a_plan_of_gemms_alone_begins_with_the_last_factor(sizes, monkeypatch):
    x, factors, bias = arguments(((20,), sizes), torch.float64)
    monkeypatch.setattr(_fused, "plan_of", lambda *_: [(first, 1, False) for first in reversed(range(len(sizes)))])
    for run in (_fused.apply, lambda x, factors, _, bias: _fused.fused_chain(x, factors, bias)):
        check(run(x, factors, 1, bias), x, factors, bias)


def gradient_alone(g, x, w):
    return (None, sum_of_products(g, x)) if w is None else None


KERNELS = {
    "none": None,
    "of any sum": gradient_alone,
    "of sums along one axis": lambda g, x, w: gradient_alone(g, x, w) if g.shape[2] == 1 else None,
    "of both gradients": lambda g, x, w: None if w is None else (w.mT @ g, sum_of_products(g, x)),
}


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sample", FULL)
def test_gradients_are_those_of_the_product(sample, kernel):
    x, factors, _ = arguments(FULL[sample], torch.float64)
    dy = make((*x.shape[:-1], math.prod(w.shape[0] for w in factors)), torch.float64, seed=9)
    want, *wanted, _ = exact_gradients(dy, x, factors)
    dx, dfactors = back_through_chain([dy], x, factors, True, [True] * len(factors), KERNELS[kernel])
    close(dx, want)
    for got, gradient in zip(dfactors, wanted, strict=True):
        close(got, gradient)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sizes", [[(9, 7), (5, 6)], [(3, 8), (2, 2)], [(6, 6), (1, 4)]], ids=str)
def test_gradients_of_two_whose_state_stays_as_it_lies(sizes, kernel):
    x = make((4, 5, math.prod(i for _, i in sizes)), torch.float64)
    factors = [make(size, torch.float64, seed=k) for k, size in enumerate(sizes)]
    dy = make((4, 5, math.prod(o for o, _ in sizes)), torch.float64, seed=9)
    for needs in itertools.product((True, False), repeat=3):
        found = back_through_chain([dy], x, factors, needs[0], needs[1:], KERNELS[kernel], stays=True)
        for got, want, needed in zip((found[0], *found[1]), exact_gradients(dy, x, factors)[:-1], needs, strict=True):
            assert (got is not None) == needed
            if needed:
                close(got, want)


@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        ([(1, 90), (90, 1)], 90),
        ([(90, 1), (1, 90)], 90),
        ([(1, 9)] * 3 + [(9, 1)] * 3, 9**3),
        ([(90, 40), (40, 90)], 40 * 90),
        ([(90, 90), (32, 32)], 90 * 32),
    ],
    ids=str,
)
def test_nothing_in_between_is_larger_than_it_must_be(sizes, most):
    rows = 1000  # so that even products that are few have no more room
    x, dy = (make((rows, math.prod(s[d] for s in sizes)), torch.float64) for d in (1, 0))
    factors = [make(size, torch.float64) for size in sizes]
    with Largest() as forward:
        chain_of_matmuls(x, factors, None)
    with Largest() as backward:
        chain_of_matmuls_backward(dy, x, factors, True, [True] * len(factors))
    assert max(forward.bytes, backward.bytes) <= rows * most * 8
    array, matrices = x.numpy(), [w.numpy() for w in factors]
    tracemalloc.start()
    reference.kron_linear_numpy(array, matrices, None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * rows * most * 8 + 20_000  # of several copies


@pytest.mark.parametrize(
    ("rows", "size", "columns", "is_batch", "dtype"),
    [
        (20, 300, 20, True, torch.float64),
        (100, 100, 2, True, torch.float64),
        (400, 100, 2, False, torch.float64),
        (6, 600, 4, False, torch.float64),
        (6, 600, 32, True, torch.float64),
        (150, 256, 144, True, torch.bfloat16),
        (150, 256, 145, False, torch.bfloat16),  # whose rows a batch would find unaligned
    ],
)
def test_few_products_of_few_columns_are_a_batch(rows, size, columns, is_batch, dtype):
    x, w = make((rows, columns * size), torch.float64).to(dtype), make((size, size), torch.float64).to(dtype)
    with FlopCounterMode(display=False) as counter:
        y = gemm._apply_factor([x], w)
    want = (w.double() @ x.double().reshape(rows, columns, size).mT).reshape(rows, -1)
    bound = max(1e-9, torch.finfo(dtype).eps)  # of a sum that is rounded once
    torch.testing.assert_close(y.double(), want, rtol=bound, atol=bound * 1e-3 * want.abs().max().item())
    assert list(counter.get_flop_counts()["Global"]) == [torch.ops.aten.bmm if is_batch else torch.ops.aten.mm]


@pytest.mark.parametrize("needs", list(itertools.product((True, False), repeat=4)))
def test_only_products_that_are_needed_are_computed(needs):
    rows, sizes = 6, [(7, 11), (13, 5), (3, 2)]
    x, dy = (make((rows, math.prod(s[d] for s in sizes)), torch.float64) for d in (1, 0))
    needs_x, needs_factors = needs[0], needs[1:]
    with FlopCounterMode(display=False) as counter:
        chain_of_matmuls_backward(dy, x, [make(size, torch.float64) for size in sizes], needs_x, needs_factors)
    # Forward the last factor first, and back from the first one: as many for each product, and for each gradient.
    first = min([k for k in range(3) if needs_factors[k]], default=3)
    last = 3 if needs_x else max([k for k in range(3) if needs_factors[k]], default=0)
    of = [math.prod(i for _, i in sizes[:k]) * math.prod(o for o, _ in sizes[k:]) * sizes[k][1] for k in range(3)]
    want = sum(of[first + 1 :]) + sum(of[:last]) + sum(n for n, needed in zip(of, needs_factors, strict=True) if needed)
    assert counter.get_total_flops() == 2 * rows * want


@pytest.mark.parametrize("k", [None, 0, 1, 2])
def test_what_is_not_needed_is_not_returned(k):
    x, factors, _ = arguments(SAMPLES["primes"], torch.float64)
    dy = make((2, 3, 7 * 13 * 3), torch.float64, seed=9)
    want, *wanted, _ = exact_gradients(dy, x, factors)
    dx, dfactors = chain_of_matmuls_backward(dy, x, factors, k is None, [j == k for j in range(3)])
    assert [d is not None for d in (dx, *dfactors)] == [k is None, *(j == k for j in range(3))]
    if k is None:
        close(dx, want)
    else:
        close(dfactors[k], wanted[k])
