"""Gradients of kron_linear: values, second derivatives, only what is needed, a training run."""

from __future__ import annotations

import cuops
import kron_exact
import kron_samples
import pytest
import torch
from cuops import _backend, reference
from cuops._kron_linear import kept
from kron_samples import SAMPLES, TO_DIFFERENTIATE, arguments, assert_repeatable, exact_gradients, x_of
from samples import DTYPES, make

SUBSETS = {"x": (True, False, False), "factors": (False, True, False), "bias": (False, False, True), "all": (True,) * 3}


def leaves(sample, dtype, device):
    x, factors, bias = arguments(SAMPLES[sample], dtype, device)
    return x.requires_grad_(), [w.requires_grad_() for w in factors], bias.requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sample", SAMPLES)
def test_gradients_agree_with_the_definition(sample, dtype, device):
    x, factors, bias = leaves(sample, dtype, device)
    y = cuops.kron_linear(x, factors, bias)
    dy = make(y.shape, dtype, device, 20)
    got = torch.autograd.grad(y, [x, *factors, bias], dy)
    want = exact_gradients(dy, x, factors)
    # What the sums would be of magnitudes bounds what rounding may add up to.
    terms = exact_gradients(dy.abs(), x.detach().abs(), [w.detach().abs() for w in factors])
    result = torch.finfo(dtype)
    sums = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    added = sum(o + i + 2 for o, i in SAMPLES[sample][1]) + dy.numel() ** 0.5
    between = result.eps * len(factors) if device.type == "cuda" else 0.0  # GEMMs of 16 bits round in between
    for a, b, magnitude in zip(got, want, terms, strict=True):
        assert (a.shape, a.dtype) == (b.shape, dtype)
        allowed = result.eps / 2 * b.abs() + (sums.eps * added + between) * magnitude + result.smallest_normal
        assert ((a.detach().cpu().double() - b).abs() <= allowed).all()
    again = torch.autograd.grad(cuops.kron_linear(x, factors, bias), [x, *factors, bias], dy)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.parametrize("sample", TO_DIFFERENTIATE)
def test_first_and_second_derivatives(sample, device):
    x, factors, bias = leaves(sample, torch.float64, device)

    def call(x, bias, *factors):
        return cuops.kron_linear(x, factors, bias)

    assert torch.autograd.gradcheck(call, (x, bias, *factors), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (x, bias, *factors), fast_mode=True)


def test_third_derivatives_are_those_of_the_formula(device):
    def third(function):
        x, factors, _ = leaves("growing", torch.float64, device)

        def sines(t):  # of numbers up to 1, where a rounding stays one
            return (t / t.detach().abs().amax()).sin().sum()

        found = sines(function(x, factors))
        for _ in range(3):
            found = sum(sines(g) for g in torch.autograd.grad(found, [x, *factors], create_graph=True))
        return found

    torch.testing.assert_close(third(cuops.kron_linear), third(x_of), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("wanted", SUBSETS)
@pytest.mark.parametrize("sample", ["one factor", "primes", "empty batch"])
def test_only_what_is_needed_is_computed(sample, wanted, device):
    x, factors, bias = leaves(sample, torch.float32, device)
    inputs = [x, *factors, bias]
    dy = torch.ones_like(cuops.kron_linear(x, factors, bias))
    want = torch.autograd.grad(cuops.kron_linear(x, factors, bias), inputs, dy)
    needs_x, needs_factors, needs_bias = SUBSETS[wanted]
    x.requires_grad_(needs_x)
    bias.requires_grad_(needs_bias)
    for w in factors:
        w.requires_grad_(needs_factors)
    cuops.kron_linear(x, factors, bias).backward(dy)
    for a, gradient in zip(inputs, want, strict=True):
        assert (a.grad is None) != a.requires_grad
        # A GPU may add in another order where x's gradient is all there is to find.
        assert a.grad is None or (a.grad - gradient).norm() <= 1e-6 * gradient.norm()
    needs = needs_x, [needs_factors] * len(factors), needs_bias
    dx, dfactors, dbias = torch.ops.cuops.kron_linear_bwd(dy, x.detach(), [w.detach() for w in factors], *needs)
    sizes = [x.numel() * needs_x, *(w.numel() * needs_factors for w in factors), bias.numel() * needs_bias]
    assert [d.numel() for d in (dx, *dfactors, dbias)] == sizes


@pytest.mark.parametrize("k", range(3))
def test_one_factor_alone_gets_a_gradient(k, device):
    x, factors, _ = leaves("primes", torch.float64, device)
    dy = make((2, 3, 7 * 13 * 3), torch.float64, device, 9)
    got = torch.autograd.grad(
        cuops.kron_linear(x.detach(), [w if j == k else w.detach() for j, w in enumerate(factors)]), factors[k], dy
    )
    torch.testing.assert_close(got[0].cpu(), exact_gradients(dy, x, factors)[1 + k])


def test_a_factor_used_twice_gets_the_sum(device):
    x, w = make((4, 36), torch.float64, device), make((5, 6), torch.float64, device, 1).requires_grad_()
    dy = make((4, 25), torch.float64, device, 2)
    (dw,) = torch.autograd.grad(cuops.kron_linear(x, [w, w]), w, dy)
    _, first, second, _ = exact_gradients(dy, x, [w, w])
    torch.testing.assert_close(dw.cpu(), first + second)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_twenty_runs_give_the_same_bits(dtype, device):
    x, factors, bias = leaves("squares of 16", dtype, device)
    dy = make((65, 256), dtype, device, 9)

    def run():
        y = cuops.kron_linear(x, factors, bias)
        return [y, *torch.autograd.grad(y, [x, *factors, bias], dy)]

    assert_repeatable(run)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "rows", "sizes"),
    [
        (torch.float32, 1000, [(37, 38), (10, 1), (5, 5), (1, 8)]),
        (torch.float16, 1000, [(64, 64), (8, 1), (3, 7), (1, 11)]),
        (torch.float16, 1000, [(38, 1), (32, 34), (7, 1), (13, 1)]),
        (torch.bfloat16, 100_000, [(15, 2), (1, 13), (16, 1)]),
        (torch.float64, 1000, [(16, 4), (14, 12), (5, 13), (16, 1)]),
        (torch.float64, 2, [(73, 57), (8, 2), (4, 4), (8, 8), (2, 8), (2, 12)]),
        (torch.float64, 1000, [(33, 68), (12, 1), (2, 9)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", ["eager", "operator"])
def test_gradients_of_chains_that_shrink_and_grow_agree_with_the_definition(way, dtype, rows, sizes):
    x = kron_samples.random((rows, kron_samples.columns_of(sizes)), dtype).requires_grad_()
    factors = [w.requires_grad_() for w in kron_samples.factors_of(sizes, dtype)]
    run = cuops.kron_linear if way == "eager" else torch.ops.cuops.kron_linear_fwd
    y = run(x, factors, None)
    dy = kron_samples.random(y.shape, dtype, seed=20) / 8
    got = torch.autograd.grad(y, [x, *factors], dy)
    limit = max(16 * torch.finfo(dtype).eps, 1e-13 * rows**0.5)  # the definition rounds as float64 does
    for one, exact in zip(got, exact_gradients(dy, x, factors), strict=False):
        assert kron_samples.row_distance(one.cpu().reshape(1, -1), exact.reshape(1, -1)) <= limit


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_training_has_the_loss_curve_of_the_whole_matrix(dtype, device):
    def losses(apply):
        torch.manual_seed(0)
        layers = [cuops.nn.KronLinear(i, o) for i, o in (((4, 6), (5, 8)), ((5, 8), (2, 3)))]
        layers = [layer.to(device, dtype) for layer in layers]
        optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.2)
        x = make((64, 24), dtype, device)
        target = x[:, :6].abs()
        found = []
        for _ in range(30):
            loss = (apply(layers[1], apply(layers[0], x).relu()) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    def whole(layer, x):
        return torch.nn.functional.linear(x, torch.kron(*layer.factors), layer.bias)

    got = losses(lambda layer, x: layer(x))
    # Each step rounds otherwise, to either side, and passes that on: what 30 steps may add up to, and as much again.
    assert got == pytest.approx(losses(whole), rel=16 * torch.finfo(dtype).eps)
    assert got[-1] < 0.9 * got[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (1300, [(12, 12)] * 3),
        (110, [(12, 12)] * 4),
        (10, [(12, 8), (8, 12), (12, 12), (12, 12), (12, 16)]),
        (2, [(8, 8)] * 7),
        (1, [(16, 16)] * 6),
        (1, [(8, 8)] * 8),
    ],
    ids=str,
)
def test_gradients_of_many_elements(rows, sizes, dtype):
    x, dy, factors = kron_exact.problem_of(rows, sizes, dtype)
    kron_exact.check_results(kron_exact.value_and_gradients(x, dy, factors), x, dy, factors)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "sizes", "dtype", "states"),
    [
        (300, [(80, 80), (96, 96)], torch.float64, 1),
        (2, [(80, 80), (40, 56), (96, 88)], torch.float64, 2),
        (1, [(32, 32)] * 4, torch.float64, 2),
        (1, [(96, 96)] * 3, torch.float64, 2),  # of a chain of GEMMs
        (1, [(300, 200), (160, 160)], torch.float64, 1),
        (4, [(200, 160), (50, 72), (160, 200)], torch.float32, 2),
        (2, [(160, 200), (50, 50), (200, 160)], torch.bfloat16, 2),
        (2, [(48, 56)] * 4, torch.float32, 2),
        (1, [(64, 64)] * 4, torch.bfloat16, 2),
        (4, [(64, 64)] * 3, torch.bfloat16, 1),
        (1, [(96, 96)] * 3, torch.bfloat16, 1),
        (1, [(96, 96)] * 3, torch.float32, 1),
        (33, [(14, 14), (64, 64), (86, 28)], torch.float16, 2),
        (1, [(12, 12)] * 6, torch.float16, 2),  # between products of two factors
        (1, [(8, 8)] * 7, torch.float16, 1),
        (500, [(10, 10), (18, 18), (100, 100)], torch.bfloat16, 1),  # after a GEMM of two factors' product
        (100, [(24, 72), (96, 96), (36, 20)], torch.float64, 2),
        (300, [(4, 4), (60, 60)], torch.float32, 1),
        (40, [(80, 80)] * 3, torch.float64, 1),  # of two, which are more than is worth keeping
        (100, [(112, 112), (60, 60)], torch.float32, 1),  # and those of GEMMs, which lie between the factors
        (256, [(18, 18), (30, 30)], torch.bfloat16, 1),
        (500, [(30, 100), (18, 40)], torch.float64, 1),
        (33, [(100, 100), (7, 7), (24, 60)], torch.float32, 2),
        (300, [(32, 32)] * 3, torch.float64, 1),
    ],
    ids=str,
)
def test_gradients_of_states_that_were_kept(rows, sizes, dtype, states):
    if dtype == torch.bfloat16 and sizes in ([(64, 64)] * 3, [(96, 96)] * 3) and _backend.choose().name == "cu118":
        states = 0  # there GEMMs go forward, and two kernels back
    scales = [columns**-0.5 for _, columns in sizes]  # gradients of six factors would leave float16's range
    factors = [w.mul_(s).requires_grad_() for w, s in zip(kron_samples.factors_of(sizes, dtype), scales, strict=True)]
    x = kron_samples.random((rows, kron_samples.columns_of(sizes)), dtype).requires_grad_()
    y = cuops.kron_linear(x, factors)
    assert len(y.grad_fn.saved_tensors) == 1 + len(sizes) + states
    choice = kept.how(x, factors)
    begins = 0 if choice is None or choice.parts else -1  # where the gradient is of x itself
    alone = [w.detach() for w in factors]
    alone[begins] = factors[begins]
    assert len(cuops.kron_linear(x, alone).grad_fn.saved_tensors) == 1 + len(sizes)
    without = cuops.kron_linear(x.detach(), alone)
    dy = torch.randn_like(y)
    got = torch.autograd.grad(y, [x, *factors], dy, retain_graph=True)
    again = torch.autograd.grad(y, [x, *factors], dy, retain_graph=True)
    leaves = [t.detach().double().requires_grad_() for t in (x, *factors)]
    exact = reference.kron_linear_torch(leaves[0], leaves[1:], None)
    # Sums of some 200 products are rounded as often, by eps / 2 to either side: by sqrt(200) eps / 2 for each factor.
    limit = 8 * len(sizes) * torch.finfo(dtype).eps
    assert all(kron_exact.distance(one, exact) <= limit for one in (y, without))
    if dtype.itemsize == 2:
        assert torch.equal(y, without)
    want = torch.autograd.grad(exact, leaves, dy.double())
    for a, b, c in zip(got, again, want, strict=True):
        assert torch.equal(a, b)
        assert kron_exact.distance(a, c) <= limit
    if dtype == torch.float64:  # differentiable again, without the states
        dx = torch.autograd.grad(y, x, dy, create_graph=True)[0]
        second = torch.autograd.grad(dx.square().sum(), factors[0])[0]
        exact = reference.kron_linear_torch(leaves[0], leaves[1:], None)
        exact = torch.autograd.grad(exact, leaves[0], dy.double(), create_graph=True)[0]
        torch.testing.assert_close(
            second, torch.autograd.grad(exact.square().sum(), leaves[1])[0], rtol=1e-9, atol=1e-6
        )


def test_sums_over_chunks_of_rows_are_wider_than_16_bits():
    x = torch.full((1 << 20, 2), 2.0**-18, dtype=torch.bfloat16)
    x[: 1 << 17] = 2.0**-9  # 256, and seven times a half that bfloat16 would round away
    w = torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)
    y = cuops.kron_linear(x, [w])
    y.backward(torch.ones_like(y))
    assert w.grad.eq(260).all()
