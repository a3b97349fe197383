"""Products of neighbouring factors, and the factors' gradients from theirs, by the library and by PyTorch."""

from __future__ import annotations

import functools
import itertools
import math

import cuops
import kron_exact
import pytest
import torch
from cuops import _backend
from cuops._kron_linear import fused, merge
from kron_exact import distance, gradients, problem_of
from kron_samples import assert_repeatable, x_of
from samples import DTYPES, make

gpu = pytest.mark.gpu
CHAINS = [
    [(3, 5)],
    [(8, 8), (8, 8)],
    [(1, 7), (6, 1), (2, 3)],
    [(2, 2)] * 6,
    [(5, 3), (1, 1), (4, 9)],
    [(16, 16), (4, 4)],
    [(2, 3), (3, 2), (2, 2), (1, 4), (7, 1)],
    [(40, 25), (30, 41)],
    [(4, 4), (90, 130)],  # whose first one's sums are long
]


def factors_on(sizes, dtype, device):
    return [make(size, dtype, device, k) for k, size in enumerate(sizes)]


def kron(a, b):
    return (a[:, None, :, None] * b[None, :, None]).reshape(len(a) * len(b), -1)


def exact_product(factors):
    return functools.reduce(kron, [w.double() for w in factors])


def is_rounded(got, want, roundings):
    """Whether `got` is `want` but for so many roundings."""
    dtype = torch.finfo(got.dtype)
    return ((got.double() - want).abs() <= roundings * dtype.eps * (want.abs() + dtype.smallest_normal)).all()


def gradients_of_product(dproduct, factors, needs):
    leaves = [w.double().requires_grad_(needed) for w, needed in zip(factors, needs, strict=True)]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return torch.autograd.grad(functools.reduce(kron, leaves), wanted, dproduct.double())


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", CHAINS, ids=str)
def test_a_product_is_rounded_as_its_factors_are(sizes, dtype, across, device):
    factors = [w.mT.contiguous().mT if across else w for w in factors_on(sizes, dtype, device)]
    got, want = merge.product_of(factors), exact_product(factors)
    assert (got.shape, got.dtype) == (want.shape, dtype)
    assert is_rounded(got, want, len(sizes))  # by PyTorch, after each factor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", CHAINS, ids=str)
def test_gradients_of_factors_are_sums_over_their_product(sizes, dtype, device):
    factors = factors_on(sizes, dtype, device)
    dproduct = make(exact_product(factors).shape, dtype, device, 9)
    sums = torch.finfo(torch.promote_types(dtype, torch.float32) if device.type == "cuda" else dtype)
    for needs in itertools.islice(itertools.product((True, False), repeat=len(sizes)), 6):
        if len(sizes) == 1 or not any(needs):
            continue
        found = merge.unmerge(dproduct, factors, needs)
        assert [d is not None for d in found] == list(needs)
        want = gradients_of_product(dproduct, factors, needs)
        magnitudes = gradients_of_product(dproduct.abs(), [w.abs() for w in factors], needs)
        given = [d for d in found if d is not None]
        for got, exact, magnitude in zip(given, want, magnitudes, strict=True):
            terms = len(sizes) * (2 + dproduct.numel() / exact.numel())
            allowed = torch.finfo(dtype).eps * exact.abs() + sums.eps * terms * magnitude
            assert (got.shape, got.dtype) == (exact.shape, dtype)
            assert ((got.double() - exact).abs() <= allowed).all()


@gpu
@pytest.mark.parametrize("larger", [1, 500])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("sizes", "counts"),
    [
        ([(2, 2)] * 9, (4, 5)),
        ([(3, 5), (16, 16), (2, 4)], (1, 2)),
        ([(8, 8)] * 4, (3, 1)),
        ([(24, 24)] * 3, (2, 1)),  # in float16 some elements a thread
        ([(6, 5), (4, 9), (3, 3), (12, 12), (2, 7)], (2, 1, 2)),
        ([(2, 3)] * 16, (2,) * 8),
        ([(120, 110), (2, 3), (5, 5), (6, 6), (7, 1), (3, 2)], (2, 4)),  # sums of 2 threads, of 2 and of 8 blocks
    ],
)
def test_products_and_their_gradients_in_a_launch_each(sizes, counts, dtype, larger):
    factors = factors_on(sizes, dtype, "cuda")
    factors[0] *= larger
    groups = [factors[end - count : end] for end, count in zip(itertools.accumulate(counts), counts, strict=True)]
    products, scales = merge.products_of(groups)
    powers = [1.0] * len(groups) if scales is None else scales.tolist()
    assert (scales is not None) == (dtype == torch.float16)
    assert math.prod(powers) == 1
    assert len(set(powers)) > 1 or larger == 1 or scales is None or counts[0] == 1
    for product, power, group in zip(products, powers, groups, strict=True):
        assert is_rounded(product, exact_product(group) * power, len(group))
    sums = torch.promote_types(dtype, torch.float32)
    dproducts = [make(product.shape, sums, "cuda", 9) for product in products]
    found = merge.unmerge_groups(dproducts, groups, [True] * len(factors), scales)
    want = [
        gradient * power
        for dproduct, group, power in zip(dproducts, groups, powers, strict=True)
        for gradient in gradients_of_product(dproduct, group, [True] * len(group))
    ]
    for got, exact in zip(found, want, strict=True):
        terms = max(dproduct.numel() for dproduct in dproducts)  # of a sum
        assert distance(got, exact) <= 2 * torch.finfo(dtype).eps + terms**0.5 * torch.finfo(sums).eps


# Factors whose gradients are sums of a few lanes each, of up to 8 blocks, and of either beside the other.
SUMS = [[(3, 7), (5, 11)], [(5, 5), (6, 6), (7, 1), (3, 2)], [(4, 4), (90, 130)]]


@gpu
@pytest.mark.parametrize("merges", [True, False])
@pytest.mark.parametrize("sizes", SUMS, ids=str)
def test_all_of_a_result_is_written_and_nothing_beyond(sizes, merges):
    factors, size = factors_on(sizes, torch.float32, "cuda"), tuple(math.prod(n) for n in zip(*sizes, strict=True))
    dproduct, sizes = make(size, device="cuda"), [size] if merges else sizes
    around = [torch.full((math.prod(size) + 64,), float("nan"), device="cuda") for size in sizes]
    results = [a[32:-32].view(size) for a, size in zip(around, sizes, strict=True)]
    if merges:
        _backend.library().kron_linear_merge(results, None, factors, [len(factors)])
    else:
        _backend.library().kron_linear_unmerge(results, [dproduct], None, factors, [len(factors)])
    for whole, result in zip(around, results, strict=True):
        assert result.isfinite().all()
        assert whole.isnan().sum() == 64


@gpu
@pytest.mark.parametrize("sizes", [[(8, 8), (4, 4), (4, 2)], *SUMS], ids=str)
def test_gradients_of_factors_are_the_same_in_every_run(sizes):
    factors = factors_on(sizes, torch.float32, "cuda")
    dproduct = make(tuple(math.prod(n) for n in zip(*sizes, strict=True)), device="cuda")
    assert_repeatable(lambda: merge.unmerge(dproduct, factors, [True] * len(sizes)))


@gpu
@pytest.mark.parametrize("sizes", [[(4, 4), (128, 128)], [(128, 128), (4, 4)], [(3, 3), (100, 100)]], ids=str)
def test_gradients_of_a_bfloat16_chain_that_is_one_product(sizes):
    x, dy, factors = problem_of(8192, sizes, torch.bfloat16)
    assert fused.plan_of(x, factors, 1) == [(0, 2, False)]
    for got, want in zip(gradients(x, dy, factors), kron_exact.exact(x, dy, factors)[1:], strict=True):
        # The product of two is rounded, its gradient, and the result.
        assert distance(got, want) <= 3 * torch.finfo(torch.bfloat16).eps


# Whose products of neighbours float16 does not have: as large, as small, and beside a factor of zeros.
MAGNITUDES = [(300, 300, 1 / 300, 1 / 300), (2e-3, 1e-3, 200, 400), (300, 0, 2000, 1 / 300), (0, 300, 300, 300)]
RANGES = [
    *[(rows, [size] * 4, m) for rows, size in [(1024, 8), (128, 12), (16, 16)] for m in MAGNITUDES],
    *[(8192, [12] * 3, m) for m in [(1e-3, 300, 300), (300, 300, 1e-3), (3000, 5e-4, 1e-3)]],  # beside a single factor
    *[(128, [8] * 6, (*m, 1, 1)) for m in MAGNITUDES[:2]],  # beside a group of a fused kernel
]


@gpu
@pytest.mark.parametrize(("rows", "sizes", "magnitudes"), RANGES, ids=str)
def test_products_of_float16_may_be_beyond_its_range(rows, sizes, magnitudes):
    factors = [
        make((n, n), torch.float16, "cuda", k) * m for k, (n, m) in enumerate(zip(sizes, magnitudes, strict=True))
    ]
    x, dy = (make((rows, math.prod(sizes)), torch.float16, "cuda", seed) * 1e-2 for seed in (7, 8))
    leaves = [t.double().requires_grad_() for t in (x, *factors)]
    y = cuops.kron_linear(leaves[0], leaves[1:])
    wants = torch.autograd.grad(y, leaves, dy.double())
    half = torch.finfo(torch.float16)
    for got, want in zip(gradients(x, dy, factors), wants, strict=True):
        # Products of factors are rounded, what is between them and the result; terms cancel by half.
        lost = 4 * half.eps * want.square().mean().sqrt()
        beyond = want.abs() - half.max
        assert not got[beyond > 4 * lost].isfinite().any()
        is_finite = beyond < -4 * lost
        assert got[is_finite].isfinite().all()
        assert (got[is_finite].double() - want[is_finite]).norm() <= (lost + 2**-24) * is_finite.sum() ** 0.5


@gpu
@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "allow_fp16_accumulation"), reason="PyTorch before 2.7")
def test_gradients_of_products_where_the_vendors_sums_may_be_float16():
    rows, inner = 128, 12**2  # terms of a sum
    factors = [make((12, 12), torch.float16, "cuda", k) / 12**0.5 for k in range(4)]
    x, dy = (make((rows, 12**4), torch.float16, "cuda", seed) for seed in (7, 8))
    want = gradients(x, dy, factors)
    before = torch.backends.cuda.matmul.allow_fp16_accumulation
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        found = gradients(x, dy, factors)
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = before
    for got, exact in zip(found, want, strict=True):
        assert distance(got, exact.double()) <= 2 * torch.finfo(torch.float16).eps * (rows * inner) ** 0.5


# Groups of a plan, (first, count, whether a fused kernel has it), of products alone and beside others; and magnitudes.
PLANS = [
    ((8, 8, 8, 8), [(0, 2, False), (2, 2, False)], (300, 300, 1 / 300, 1 / 300)),
    ((8, 8, 8, 8), [(0, 2, False), (2, 2, False)], (2e-3, 1e-3, 200, 400)),
    ((12, 12, 12), [(0, 1, False), (1, 2, False)], (2e-3, 300, 300)),
    ((12, 12, 12), [(0, 1, False), (1, 2, False)], (3000, 5e-4, 1e-3)),
    ((2, 50, 3), [(0, 2, False), (2, 1, True)], (300, 400, 1e-3)),
    ((8, 8, 8, 8, 8, 8), [(0, 2, False), (2, 2, False), (4, 2, True)], (300, 300, 1e-3, 0.01, 1, 0.1)),
]


@gpu
@pytest.mark.parametrize(("sizes", "groups", "magnitudes"), PLANS, ids=str)
def test_products_in_a_chain_of_float16_keep_its_range_and_digits(sizes, groups, magnitudes, monkeypatch):
    monkeypatch.setattr(fused, "plan_of", lambda *_: groups)
    factors = [
        make((n, n), torch.float16, "cuda", k) * m for k, (n, m) in enumerate(zip(sizes, magnitudes, strict=True))
    ]
    x = make((64, math.prod(sizes)), torch.float16, "cuda", 9) * 1e-2
    want = x_of(x.double(), [w.double() for w in factors])
    # Some six roundings that have nothing to do with one another, each of a quarter of eps on the average.
    assert distance(cuops.kron_linear(x, factors), want) <= 2 * torch.finfo(torch.float16).eps


class Powers:
    """Instead of the library: products that are multiplied by powers of two, which undo one another."""

    def kron_linear_merge(self, products, scales, factors, counts):
        assert all(type(w) is torch.Tensor for w in factors)
        powers = torch.arange(len(counts)).float() - (len(counts) - 1) / 2
        assert scales is not None
        scales.copy_(4**powers)
        for product, end, count, scale in zip(products, itertools.accumulate(counts), counts, scales, strict=True):
            product.copy_(functools.reduce(torch.kron, factors[end - count : end]) * scale)


class Subclass(torch.Tensor):
    """What autograd's operators get as it is."""


@pytest.mark.parametrize("kind", [torch.Tensor, Subclass])
@pytest.mark.parametrize(
    ("counts", "is_merged"),
    [((2, 1), (True, False)), ((1, 2), (False, True)), ((2, 3), (True, False)), ((1, 2, 2), (False, True, True))],
)
def test_powers_of_two_undo_one_another_though_factors_are_the_same_tensor(counts, is_merged, kind, monkeypatch):
    monkeypatch.setattr(merge._backend, "library", Powers)
    monkeypatch.setattr(merge, "_has_kernel", lambda factors: True)
    factors = [torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float16).as_subclass(kind)] * sum(counts)
    parts = [factors[end - count : end] for end, count in zip(itertools.accumulate(counts), counts, strict=True)]
    found = merge.merged(parts, is_merged)
    assert [len(own.factors) for own in found] == [
        1 if merges else count for count, merges in zip(counts, is_merged, strict=True)
    ]
    product = functools.reduce(torch.kron, [w for own in found for w in own.factors])
    assert torch.equal(product, functools.reduce(torch.kron, factors))
    for own, part, merges in zip(found, parts, is_merged, strict=True):
        was = [functools.reduce(torch.kron, part)] if merges else part
        scales = [1 if own.scale is None or k != own.at else own.scale for k in range(len(was))]
        assert all(torch.equal(w, v * s) for w, v, s in zip(own.factors, was, scales, strict=True))


WIDE = {"dtype": torch.float64, "factors": factors_on([(3, 7), (5, 11)], torch.float64, "cpu")}
LONG = torch.ones(1, 1).expand(2048, 2048)
LARGE = [torch.ones(1, 1).expand(256, 256)] * 2


@gpu
@pytest.mark.parametrize(
    ("name", "results", "others", "error", "match"),
    [
        ("merge", [(15, 76)], {}, ValueError, "products: "),
        ("merge", [(15, 77)], {"dtype": torch.float64}, TypeError, "products: "),
        ("merge", [(3, 7)], {"counts": [1, 1]}, ValueError, "products: "),
        ("merge", [(15, 77)], {"counts": []}, ValueError, "counts: "),
        ("merge", [(15, 77)], {"counts": [0, 2]}, ValueError, "counts: "),
        ("merge", [(15, 77)], {"counts": [1]}, ValueError, "counts: "),
        ("merge", [(15, 77)], {"counts": [1 << 62, 2]}, ValueError, "counts: "),
        ("merge", [(1, 1)] * 9, {"factors": [torch.ones(1, 1)] * 9, "counts": [1] * 9}, ValueError, "counts: "),
        ("merge", [(1, 1)] * 3, {"factors": [torch.ones(1, 1)] * 33, "counts": [11] * 3}, ValueError, "counts: "),
        ("merge", [(15, 77)], {"scales": torch.ones(2)}, ValueError, "scales: "),
        ("merge", [(3, 7), (5, 11)], {"counts": [1, 1], "scales": torch.ones(3)}, ValueError, "scales: "),
        ("merge", [(3, 7), (5, 11)], WIDE | {"counts": [1, 1], "scales": torch.ones(2)}, TypeError, "scales: "),
        ("merge", [(1, 1)], {"factors": LARGE}, ValueError, "factors: "),
        ("merge", [(2048, 2048)], {"factors": [LONG], "scales": torch.ones(1)}, ValueError, "factors: "),
        ("merge", [(0, 8)], {"factors": [torch.ones(0, 4), torch.ones(2, 2)]}, ValueError, "factors: "),
        ("unmerge", [(3, 7), (5, 12)], {}, ValueError, "gradients: "),
        ("unmerge", [(3, 7)], {}, ValueError, "gradients: "),
        ("unmerge", [(3, 7), (5, 11)], {"dproducts": [None]}, ValueError, "dproducts: "),
    ],
)
def test_other_arrays_are_refused(name, results, others, error, match):
    factors = others.get("factors") or factors_on([(3, 7), (5, 11)], torch.float32, "cpu")
    dproducts = [others.get("dproducts", [torch.ones(15, 77, device="cuda")])] if name == "unmerge" else []
    arguments = (
        [torch.empty(size, device="cuda", dtype=others.get("dtype")) for size in results],
        *dproducts,
        others["scales"].cuda() if "scales" in others else None,
        [w.cuda() for w in factors],
        others.get("counts", [len(factors)]),
    )
    with pytest.raises(error, match=match):
        getattr(_backend.library(), f"kron_linear_{name}")(*arguments)
