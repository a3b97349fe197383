"""What measurements hold for right: how far results are from the reference."""

from __future__ import annotations

import math

import pytest
import torch
from cuops._bench import rms_norm as operator
from cuops._bench import sample_normal
from cuops._bench.case import TOLERANCE, Case, available, compared, largest_error


@pytest.mark.parametrize("kind", operator.KINDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_right_results_pass_the_check_and_a_wrong_row_does_not(kind, dtype):
    case = Case("rms_norm", kind, (4, 48), dtype)
    arguments = operator.inputs(case, "cpu")
    computed = operator.results(case, available("rms_norm", "cpu")["torch"], arguments)
    assert max(operator.errors(case, computed, arguments).values()) <= TOLERANCE[dtype]
    for result in computed.values():
        result[-1] = 99
    wrong = operator.errors(case, computed, arguments)
    assert len(wrong) == len(computed)
    assert min(wrong.values()) > TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (1, 2), (5, 64)], ids=str)
def test_a_gradient_is_judged_by_the_terms_that_cancel_in_it(shape, dtype):
    case, functions = Case("rms_norm", "backward", shape, dtype), available("rms_norm", "cpu", ["torch.compile"])
    for seed in range(10):
        torch.manual_seed(seed)
        arguments = operator.inputs(case, "cpu")
        computed = operator.results(case, functions["cuops"], arguments)
        assert operator.errors(case, computed, arguments)["dx"] < case.tolerance
        x, weight, grad = (arguments[name].double() for name in ("x", "weight", "grad"))
        terms = (grad * weight) * (x.square().mean(-1, keepdim=True) + operator.EPS).rsqrt()
        computed["dx"] = computed["dx"].double() + terms * 4 * case.tolerance
        assert operator.errors(case, computed, arguments)["dx"] > case.tolerance


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_a_factor_whose_terms_cancel_are_not_wrong(dtype):
    case = Case("kron_linear", "backward", (3, 5, 3, 1), dtype)
    functions, operator = available("kron_linear", "cpu", ["torch.compile"]), case.module
    for seed in range(120):
        torch.manual_seed(seed)
        arguments = operator.inputs(case, "cpu")
        for name in ("loop", "transposed", "cuops"):
            computed = operator.results(case, functions[name], arguments)
            errors = operator.errors(case, computed, arguments)
            assert max(errors.values()) < case.tolerance, (seed, name, errors)
    computed["dw3"] = computed["dw3"] + 1
    assert operator.errors(case, computed, arguments)["dw3"] > case.tolerance


@pytest.mark.parametrize("kind", ["independent", "shared"])
def test_own_samples_of_tiny_draws_are_not_wrong(kind):
    case = Case("sample_normal", kind, (1, 1), torch.float32)
    for seed in range(3000):
        torch.manual_seed(seed)
        arguments = case.module.inputs(case, "cpu")
        own = arguments["mu"] + arguments["sigma"] * torch.randn(1, 1)
        assert case.module.errors(case, {"own": own}, arguments)["own"] == 0
    far = arguments["mu"] + 9 * arguments["sigma"]
    assert case.module.errors(case, {"own": far[None]}, arguments)["own"] == math.inf


def test_what_is_not_finite_is_infinitely_wrong():
    assert largest_error(torch.tensor([1.0, math.nan]), torch.ones(2).double()) == math.inf


def test_pytorch_shares_its_noise_where_that_is_measured():
    x = sample_normal.IMPLEMENTATIONS["torch"]()(torch.zeros(5), torch.ones(5), 4, True, None)
    assert (x == x[:, :1]).all()


@pytest.mark.parametrize("kind", ["independent", "shared", "backward"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (64, 32), (1000, 1)], ids=str)
def test_samples_of_own_numbers_are_judged_by_themselves(shape, kind, dtype):
    case, functions = Case("sample_normal", kind, shape, dtype), available("sample_normal", "cpu", ["torch.compile"])
    names = {"x", "dmu", "dsigma"} if kind == "backward" else {"x"}
    for seed in range(5):
        torch.manual_seed(seed)
        arguments = case.module.inputs(case, "cpu")
        computed, errors = compared(case, "torch", functions["torch"], arguments)
        assert set(errors) == names - {"x"} | {"own"}
        assert errors.pop("own") == 0
        assert max(errors.values(), default=0) <= case.tolerance
        assert set(compared(case, "cuops", functions["cuops"], arguments)[1]) == names
    if kind == "backward" and shape == (64, 32):
        computed["dsigma"].zero_()
        assert case.module.errors(case, computed, arguments)["dsigma"] > case.tolerance
