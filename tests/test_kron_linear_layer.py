"""cuops.nn.KronLinear, and the Kronecker product nearest to a linear layer."""

from __future__ import annotations

import copy
import io
import math

import cuops
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cuops.nn import KronLinear
from samples import make
from torch.nn.utils import prune

FACTORS = [((4, 6), (5, 3)), ((7,), (2,)), ((2, 3, 4), (3, 1, 5)), ((2,) * 10, (2,) * 10)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("in_factors", "out_factors"), FACTORS, ids=str)
def test_is_the_function_of_its_parameters(in_factors, out_factors, bias, device):
    layer = KronLinear(in_factors, out_factors, bias, device=device, dtype=torch.float64)
    x = make((2, 3, layer.in_features), torch.float64, device)
    y = layer(x)
    assert y.shape == (2, 3, math.prod(out_factors))
    assert torch.equal(y, cuops.kron_linear(x, list(layer.factors), layer.bias))
    names = [f"factors.{k}" for k in range(len(in_factors))] + ["bias"] * bias
    assert sorted(layer.state_dict()) == sorted(names)
    assert [tuple(w.shape) for w in layer.factors] == list(zip(out_factors, in_factors, strict=True))
    y.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_the_repr_shows_what_it_was_made_of():
    shown = repr(KronLinear([4, 6], [5, 3], bias=False))
    assert "in_factors=(4, 6), out_factors=(5, 3), bias=False" in shown


def test_sizes_of_numpy_are_stored_as_plain_integers():
    layer = KronLinear(list(np.array([4, 6])), torch.Size([5, 3]))
    assert {type(size) for size in (*layer.in_factors, *layer.out_factors, layer.in_features)} == {int}
    assert "in_factors=(4, 6), out_factors=(5, 3)" in repr(layer)


def test_parameters_are_where_and_what_was_asked_for(device):
    layer = KronLinear((4, 6), (5, 3), device=device, dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {(device.type, torch.bfloat16)}
    nowhere = KronLinear((4, 6), (5, 3), device="meta")
    assert nowhere.factors[0].is_meta
    assert nowhere(torch.ones(2, 24, device="meta")).shape == (2, 15)


def test_copies_and_stored_states_keep_the_function(device):
    layer, other = (KronLinear((4, 6), (5, 3), device=device) for _ in range(2))
    x = make((3, 24), device=device)
    assert not torch.equal(layer(x), other(x))
    stored = io.BytesIO()
    torch.save(layer, stored)
    stored.seek(0)
    other.load_state_dict(layer.state_dict())
    for same in (other, copy.deepcopy(layer), torch.load(stored, weights_only=False)):
        assert torch.equal(same(x), layer(x))
    assert copy.deepcopy(layer).to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("in_factors", "out_factors"), [((512,), (512,)), ((48, 40), (40, 36)), ((12, 8, 10), (9, 10, 8))]
)
def test_starts_with_the_variance_of_a_linear_layer(in_factors, out_factors):
    torch.manual_seed(0)
    drawn = [KronLinear(in_factors, out_factors) for _ in range(50)]
    n = math.prod(in_factors)
    linear = torch.nn.Linear(n, 64)
    # The variance of the product's entries is the product of those of the factors, whose draws scatter it.
    found = sum(math.prod(w.square().mean().item() for w in layer.factors) for layer in drawn) / len(drawn)
    assert found == pytest.approx(linear.weight.var().item(), rel=0.05)
    assert torch.cat([layer.bias for layer in drawn]).var().item() == pytest.approx(1 / (3 * n), rel=0.05)
    first = [w.clone() for w in drawn[0].parameters()]
    drawn[0].reset_parameters()
    assert not any(torch.equal(a, b) for a, b in zip(first, drawn[0].parameters(), strict=True))


@pytest.mark.parametrize(("in_factors", "out_factors"), FACTORS[:3], ids=str)
def test_a_kronecker_product_is_found(in_factors, out_factors, device):
    torch.manual_seed(0)
    truth = KronLinear(in_factors, out_factors, device=device, dtype=torch.float64)
    linear = torch.nn.Linear(truth.in_features, truth.out_features, device=device, dtype=torch.float64)
    product = torch.eye(1, device=device, dtype=torch.float64)
    for w in truth.factors:
        product = torch.kron(product, w.detach())
    linear.weight.data.copy_(product)
    linear.bias.data.copy_(truth.bias)
    found, error = KronLinear.from_linear(linear, in_factors, out_factors)
    assert error < 1e-13
    x = make((5, truth.in_features), torch.float64, device)
    torch.testing.assert_close(found(x), linear(x), rtol=1e-11, atol=1e-11)
    norms = [torch.linalg.vector_norm(w).item() for w in found.factors]
    assert norms == pytest.approx([norms[0]] * len(norms))


def test_two_factors_are_the_nearest_there_are():
    linear = torch.nn.Linear(24, 15, bias=False, dtype=torch.float64)
    found, error = KronLinear.from_linear(linear, (4, 6), (5, 3))
    assert found.bias is None
    entries = linear.weight.detach().reshape(5, 3, 4, 6).transpose(1, 2).reshape(20, 18)
    values = torch.linalg.svdvals(entries)  # Eckart and Young: the distance to the nearest of rank one
    assert error == pytest.approx((values[1:].square().sum() / values.square().sum()).sqrt().item(), rel=1e-12)
    distance = torch.linalg.norm(linear.weight - torch.kron(*found.factors)) / torch.linalg.norm(linear.weight)
    assert error == pytest.approx(distance.item(), rel=1e-12)


def test_more_factors_are_a_local_optimum_whatever_the_default_device():
    torch.manual_seed(0)
    linear = torch.nn.Linear(24, 30, dtype=torch.float64)
    with torch.device("meta"):
        found, error = KronLinear.from_linear(linear, (2, 3, 4), (3, 5, 2))

    def distance(factors):
        product = torch.kron(factors[0], torch.kron(factors[1], factors[2]))
        return torch.linalg.norm(linear.weight.detach() - product) / torch.linalg.norm(linear.weight.detach())

    factors = [w.detach().requires_grad_() for w in found.factors]
    at_optimum = distance(factors)
    assert error == pytest.approx(at_optimum.item(), rel=1e-12)
    assert max(g.abs().max() for g in torch.autograd.grad(at_optimum, factors)) < 1e-5
    assert error < 1


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 3, 3), (4, 4, 4)], ids=str)
def test_more_factors_are_no_saddle_where_singular_values_are_equal(sizes):
    """The adjacency of a grid, a sum of three products of which any alone is 0.816 off."""
    chains = [torch.diag(torch.ones(n - 1), 1) for n in sizes]
    a, b, c = (chain + chain.mT for chain in chains)
    i, j, k = (torch.eye(n) for n in sizes)
    linear = torch.nn.Linear(math.prod(sizes), math.prod(sizes), bias=False)
    linear.weight.data = sum(torch.kron(x, torch.kron(y, z)) for x, y, z in ((a, j, k), (i, b, k), (i, j, c)))
    assert KronLinear.from_linear(linear, sizes, sizes)[1] < 0.75


def test_a_layer_whose_rows_were_pruned_has_the_sizes_of_its_weight():
    linear = torch.nn.Linear(12, 10)
    linear.weight, linear.bias = (torch.nn.Parameter(p[:6].detach()) for p in (linear.weight, linear.bias))
    found, _ = KronLinear.from_linear(linear, iter([3, 4]), iter([2, 3]))
    assert found(torch.ones(5, 12)).shape == (5, 6)
    with pytest.raises(ValueError, match="^out_factors: expected sizes whose product is 6, as linear has it, got 10$"):
        KronLinear.from_linear(linear, (3, 4), (2, 5))


def test_float32_and_half_keep_their_dtype():
    for dtype in (torch.float32, torch.bfloat16):
        found, error = KronLinear.from_linear(torch.nn.Linear(6, 4, dtype=dtype), (2, 3), (2, 2))
        assert {p.dtype for p in found.parameters()} == {dtype}
        assert 0 < error < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_error_is_that_of_the_rounded_factors(dtype):
    linear = torch.nn.Linear(6, 4, dtype=dtype)
    linear.weight.data = torch.kron(make((2, 2), dtype), make((2, 3), dtype, seed=1))
    found, error = KronLinear.from_linear(linear, (2, 3), (2, 2))
    wide, product = linear.weight.detach().double(), torch.kron(*(w.detach().double() for w in found.factors))
    want = torch.linalg.norm(wide - product) / torch.linalg.norm(wide)
    assert error == pytest.approx(want.item(), rel=1e-9)


def test_zeros_are_a_product_too():
    linear = torch.nn.Linear(6, 4)
    linear.weight.data.zero_()
    found, error = KronLinear.from_linear(linear, (2, 3), (2, 2))
    assert error == 0
    assert not any(w.any() for w in found.factors)


@pytest.mark.parametrize("magnitude", [1e-300, 1e-170, 1e160, 1.7e308])
@pytest.mark.parametrize("sizes", [((6,), (4,)), ((2, 3), (2, 2)), ((2, 3, 1), (1, 2, 2))], ids=str)
def test_the_magnitude_of_the_weight_does_not_matter(sizes, magnitude):
    linear = torch.nn.Linear(6, 4, dtype=torch.float64)
    linear.weight.data /= linear.weight.data.abs().max()
    ordinary, want = KronLinear.from_linear(linear, *sizes)
    linear.weight.data *= magnitude
    found, error = KronLinear.from_linear(linear, *sizes)
    assert error == pytest.approx(want, rel=1e-12, abs=1e-15)
    for w, v in zip(found.factors, ordinary.factors, strict=True):
        torch.testing.assert_close(w / magnitude ** (1 / len(sizes[0])), v, rtol=1e-10, atol=1e-12)


def test_what_is_frozen_and_no_longer_trained_stays_so():
    linear = torch.nn.Linear(6, 4).eval()
    assert not KronLinear.from_linear(linear, (2, 3), (2, 2))[0].training
    linear.weight.requires_grad_(False)
    found, _ = KronLinear.from_linear(linear.train(), (2, 3), (2, 2))
    assert found.training
    assert [w.requires_grad for w in (*found.factors, found.bias)] == [False, False, True]


@pytest.mark.parametrize("is_trained", [True, False])
def test_what_parametrizations_make_is_trained_as_they_are(is_trained):
    linear = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(6, 4)).requires_grad_(is_trained)
    with torch.no_grad():
        found, _ = KronLinear.from_linear(linear, (2, 3), (2, 2))
    assert [p.requires_grad for p in found.parameters()] == [is_trained] * 3


def test_a_pruned_weight_is_trained_as_what_was_pruned_is():
    linear = prune.l1_unstructured(torch.nn.Linear(6, 4), "weight", 0.3).requires_grad_(False)
    found, _ = KronLinear.from_linear(linear, (2, 3), (2, 2))
    assert not any(p.requires_grad for p in found.parameters())


def test_a_weight_that_processes_share_is_refused():
    linear = torch.nn.Linear(6, 4)
    linear.weight.full_tensor = None  # as a DTensor has it
    with pytest.raises(TypeError, match="^linear: expected a plain weight, got a Parameter$"):
        KronLinear.from_linear(linear, (2, 3), (2, 2))


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_a_weight_of_another_dtype_is_refused(dtype):
    linear = torch.nn.Linear(6, 4)
    linear.weight = torch.nn.Parameter(torch.ones(4, 6).to(dtype), requires_grad=False)
    with pytest.raises(TypeError, match=f"^linear: expected a weight of float64, .*, got {dtype}$"):
        KronLinear.from_linear(linear, (2, 3), (2, 2))


@pytest.mark.parametrize(
    ("argument", "error", "call"),
    [
        ("in_factors", ValueError, lambda: KronLinear((), ())),
        ("in_factors", ValueError, lambda: KronLinear((2, 0), (2, 3))),
        ("in_factors", TypeError, lambda: KronLinear(4, 4)),
        ("in_factors", TypeError, lambda: KronLinear({2, 3}, (2, 3))),
        ("out_factors", TypeError, lambda: KronLinear((2, 3), {2: 2, 3: 3})),
        ("out_factors", TypeError, lambda: KronLinear((2, 3), (2.0, 3))),
        ("out_factors", ValueError, lambda: KronLinear((2, 3), (6,))),
        ("out_factors", ValueError, lambda: KronLinear((1, 1), (1 << 32, 1 << 31), device="meta")),
        ("in_factors", ValueError, lambda: KronLinear((2,) * 20_000, (1,) * 20_000, device="meta")),
        ("in_factors", TypeError, lambda: KronLinear((True, 3), (2, 3))),
        ("dtype", TypeError, lambda: KronLinear((2, 3), (2, 3), dtype=torch.int64)),
        ("dtype", TypeError, lambda: KronLinear((2, 3), (2, 3), dtype=torch.complex64)),
        ("dtype", TypeError, lambda: KronLinear((2, 3), (2, 3), device="meta", dtype=torch.int64)),
        ("x", TypeError, lambda: KronLinear((2, 3), (2, 3))(torch.ones(6).numpy())),
        ("linear", TypeError, lambda: KronLinear.from_linear(torch.nn.Identity(), (2, 3), (2, 2))),
        ("in_factors", ValueError, lambda: KronLinear.from_linear(torch.nn.Linear(7, 4), (2, 3), (2, 2))),
        ("out_factors", ValueError, lambda: KronLinear.from_linear(torch.nn.Linear(6, 5), (2, 3), (2, 2))),
        (
            "in_factors",
            ValueError,
            lambda: KronLinear.from_linear(torch.nn.Linear(2, 2), (2, *[1] * 64), (2, *[1] * 64)),
        ),
    ],
)
def test_bad_arguments_are_refused_by_name(argument, error, call):
    with pytest.raises(error, match=f"^{argument}: expected "):
        call()


def linear_of(**parameters):
    linear = torch.nn.Linear(6, 4)
    for name, value in parameters.items():
        setattr(linear, name, torch.nn.Parameter(value))
    return linear


@pytest.mark.parametrize(
    ("linear", "wanted"),
    [
        (torch.nn.Linear(6, 4, device="meta"), "a weight with values, got one on meta"),
        (linear_of(bias=torch.ones(4, device="meta")), "a bias with values, got one on meta"),
        (torch.nn.LazyLinear(4), "a weight with values, got a LazyLinear without"),
        (linear_of(weight=torch.ones(4, 6).to_sparse()), "a dense weight, got one of torch.sparse_coo"),
        (linear_of(bias=torch.ones(4).to_sparse()), "a dense bias, got one of torch.sparse_coo"),
        (linear_of(weight=torch.ones(6)), r"a weight that is a matrix, got one of shape \(6,\)"),
        (linear_of(bias=torch.ones(1, 4)), r"a bias of shape \(4,\), got \(1, 4\)"),
    ],
    ids=["meta", "a bias on meta", "lazy", "sparse", "a sparse bias", "a vector", "a row as bias"],
)
def test_parameters_that_are_none_of_a_linear_layer_are_refused(linear, wanted):
    with pytest.raises(ValueError, match=f"^linear: expected {wanted}$"):
        KronLinear.from_linear(linear, (2, 3), (2, 2))


def test_sizes_are_checked_before_anything_is_allocated():
    with pytest.raises(
        ValueError, match=r"^in_factors: expected sizes whose product is 6, as linear has it, got 2\d+$"
    ):
        KronLinear.from_linear(torch.nn.Linear(6, 4), (2 * 10**9, 10**9), (2, 2))


def test_from_linear_draws_nothing(device):
    linear = torch.nn.Linear(6, 4, device=device)
    generator = torch.get_rng_state if device.type == "cpu" else torch.cuda.get_rng_state
    before = generator()
    found, _ = KronLinear.from_linear(linear, (2, 3), (2, 2))
    assert torch.equal(generator(), before)
    assert {p.device for p in found.parameters()} == {linear.weight.device}
    assert all(p.requires_grad for p in found.parameters())


def test_from_linear_takes_what_inference_mode_made():
    with torch.inference_mode():
        linear = torch.nn.Linear(6, 4)
    found, _ = KronLinear.from_linear(linear, (2, 3), (2, 2))
    assert not any(p.is_inference() for p in found.parameters())


class Scaled(KronLinear):
    """Has more than the parameters, and no argument for a device."""

    def __init__(self, in_factors, out_factors, bias=True, dtype=None):
        super().__init__(in_factors, out_factors, bias, dtype=dtype)
        self.register_buffer("scale", torch.full((1,), 3.0))


def test_from_linear_calls_the_constructor_of_a_derived_class(device):
    linear = torch.nn.Linear(6, 4, device=device, dtype=torch.float64)
    found, _ = Scaled.from_linear(linear, (2, 3), (2, 2))
    assert type(found) is Scaled
    assert found.scale.tolist() == [3.0]
    assert {p.device for p in found.parameters()} == {linear.weight.device}
    assert {p.dtype for p in found.parameters()} == {torch.float64}


def test_a_weight_that_is_not_finite_is_refused():
    linear = torch.nn.Linear(6, 4)
    linear.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="^linear: expected a finite weight"):
        KronLinear.from_linear(linear, (2, 3), (2, 2))


def test_compiles_into_one_graph(device):
    model = torch.nn.Sequential(KronLinear((4, 6), (5, 3)), torch.nn.ReLU(), KronLinear((5, 3), (2, 2))).to(device)
    x = make((3, 24), device=device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    whole = F.linear(x, torch.kron(*model[0].factors), model[0].bias)
    torch.testing.assert_close(model[0](x), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strict", [False, True])
def test_exports_as_one_operator_for_any_batch(strict, device):
    layer = KronLinear((4, 6), (5, 3), device=device)
    program = torch.export.export(
        layer, (make((3, 24), device=device),), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},), strict=strict
    )
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert calls == ["cuops.kron_linear_fwd.default"]
    x = make((7, 24), device=device)
    assert torch.equal(program.module()(x), layer(x))


def test_a_bias_is_registered_later_as_with_pytorch():
    for layer in (torch.nn.Linear(4, 4, bias=False), KronLinear((2, 2), (2, 2), bias=False)):
        layer.register_parameter("bias", torch.nn.Parameter(torch.ones(4)))
        assert "bias" in layer.state_dict()
        assert torch.equal(layer(torch.zeros(1, 4)), torch.ones(1, 4))


def test_a_negative_weight_may_be_of_any_size():
    linear = torch.nn.Linear(4, 4, dtype=torch.float64)
    linear.weight.data = -1e200 * torch.eye(4, dtype=torch.float64)
    assert KronLinear.from_linear(linear, (2, 2), (2, 2))[1] < 1e-12
