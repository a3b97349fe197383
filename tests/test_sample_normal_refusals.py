"""What cuops.sample_normal refuses, by name, and what it leaves as it was."""

from __future__ import annotations

import math

import cuops
import ml_dtypes
import numpy as np
import pytest
import torch
from cuops._sample_normal import checks
from sample_normal_samples import parameters

gpu = pytest.mark.gpu


def bad_calls(mu, sigma, other):
    """(arguments, options, error, the message's start)"""
    three = mu[:3]
    return [
        ((mu, sigma, -1), {}, ValueError, "num_samples: "),
        ((mu, sigma, 2.5), {}, TypeError, "num_samples: "),
        ((mu, sigma, True), {}, TypeError, "num_samples: "),
        ((mu, sigma, 5), {"start": -1}, ValueError, "start: "),
        ((mu, sigma, 5), {"start": 2**60}, ValueError, "start: "),
        ((mu, sigma, 5), {"start": 2**44 - 4}, ValueError, f"start: expected an integer from 0 to {2**44 - 5}"),
        ((mu, sigma, 5), {"sample_dim": 1}, ValueError, "sample_dim: "),
        ((mu, three, 5), {}, ValueError, "sigma: "),
        ((mu, "1", 5), {}, TypeError, "sigma: expected a number or an array like mu, got str"),
        ((mu, sigma, 5), {"low": [1.0]}, TypeError, "low: expected a number or an array like mu, got list"),
        ((mu, -1.0, 5), {}, ValueError, "sigma: expected a finite number of at least 0, got -1.0"),
        ((mu, sigma, 5), {"low": three}, ValueError, "low: "),
        ((mu, other, 5), {}, TypeError, "sigma: "),
        ((mu, None, 5), {}, TypeError, "sigma: "),
        ((0.0, sigma, 5), {}, TypeError, "mu: "),
        ((mu[0], sigma[0], 5), {}, (TypeError, ValueError), "mu: "),
        ((mu, math.nan, 5), {}, ValueError, "sigma: "),
        ((mu, sigma, 5), {"low": 1.0, "high": 1.0}, ValueError, "low: "),
        ((mu, sigma, 5), {"low": 2.0, "high": 1.0}, ValueError, "low: "),
        ((mu, sigma, 5), {"low": math.nan}, ValueError, "low: "),
        ((mu, sigma, 5), {"seed": 1.5}, TypeError, "seed: "),
        ((mu, sigma, 5), {"seed": 2**64}, ValueError, "seed: "),
        ((mu, sigma, 5), {"generator": 7}, TypeError, "generator: "),
        ((mu, sigma, 5), {"dtype": "complex64"}, TypeError, "dtype: "),
        ((mu, sigma, 5), {"out": mu}, ValueError, "out: "),
    ]


def assert_refused(calls):
    for arguments, options, error, message in calls:
        with pytest.raises(error, match=f"^{message}"):
            cuops.sample_normal(*arguments, **options)


def test_bad_arguments_are_refused_by_name_and_change_nothing(device):
    mu, sigma = parameters((4,), device=device)
    torch.manual_seed(2)
    expected = torch.randn(3, device=device)
    torch.manual_seed(2)
    assert_refused(bad_calls(mu, sigma, sigma.cpu().numpy()))
    generator = torch.Generator(device)
    with pytest.raises(ValueError, match="^seed: expected either a seed or a generator"):
        cuops.sample_normal(mu, sigma, 5, seed=1, generator=generator)
    assert torch.equal(torch.randn(3, device=device), expected)


def test_bad_arguments_are_refused_by_name_with_numpy():
    mu, sigma = (a.numpy() for a in parameters((4,)))
    assert_refused(bad_calls(mu, sigma, torch.from_numpy(sigma)))
    for bad in (np.array([1, 1, -1, 1], np.float32), np.array([1, 1, np.nan, 1], np.float32)):
        with pytest.raises(ValueError, match="^sigma: "):
            cuops.sample_normal(mu, bad, 5)
    with pytest.raises(ValueError, match="^low: "):
        cuops.sample_normal(mu, sigma, 5, low=np.zeros(4, np.float32), high=np.array([1, 1, 0, 1], np.float32))
    locked = np.empty((5, 4), np.float32)
    locked.flags.writeable = False
    with pytest.raises(ValueError, match="^out: "):
        cuops.sample_normal(mu, sigma, 5, out=locked)


@pytest.mark.parametrize("value", [-1.0, -math.inf, math.nan])
def test_a_bad_sigma_is_an_error_on_the_cpu_and_on_cuda_where_it_is_asked_for(value, device):
    mu, sigma = parameters((6,), device=device)
    sigma[2] = value
    with pytest.raises(ValueError, match="^sigma: "):
        cuops.sample_normal(mu, sigma, 5, validate=True)
    if device.type == "cpu":
        with pytest.raises(ValueError, match="^sigma: "):
            cuops.sample_normal(mu, sigma, 5)
    else:
        for options in ({}, {"sample_dim": -1}, {"low": -1.0}):
            x = cuops.sample_normal(mu, sigma, 5, **options)
            x = x if options.get("sample_dim") is None else x.T
            assert x[:, 2].isnan().all()
            assert x[:, [0, 1, 3, 4, 5]].isfinite().all()


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor], ids=["numpy", "torch"])
def test_bounds_between_which_the_dtype_has_no_number_are_told_from_those_in_the_wrong_order(kind):
    mu = kind([0.0, 1.0])
    with pytest.raises(ValueError, match=r"^low: expected less than high everywhere in the samples' dtype, .*float16$"):
        cuops.sample_normal(mu, 1.0, 4, low=0.10001, high=0.10002, dtype="float16")
    with pytest.raises(ValueError, match="^low: expected less than high everywhere$"):
        cuops.sample_normal(mu, 1.0, 4, low=0.2, high=0.1, dtype="float16")


def test_bounds_in_the_wrong_order_are_an_error_on_the_cpu_and_on_cuda_where_it_is_asked_for(device):
    mu, sigma = parameters((3,), device=device)
    low, high = torch.zeros(3, device=device), torch.tensor([1.0, 0.0, 1.0], device=device)
    with pytest.raises(ValueError, match="^low: "):
        cuops.sample_normal(mu, sigma, 5, low=low, high=high, validate=True)
    if device.type == "cuda":
        x = cuops.sample_normal(mu, sigma, 5, low=low, high=high)
        assert x[:, 1].isnan().all()
        assert ((x[:, 0] >= 0) & (x[:, 0] <= 1)).all()


@pytest.mark.parametrize(
    ("bounds", "dtype", "message"),
    [
        ({"high": [math.nan, 1.0, 1.0]}, "float64", "high: expected numbers, got NaN"),
        ({"low": [0.0, math.nan, 0.0], "high": 1.0}, "float32", "low: expected numbers, got NaN"),
        ({"low": 0.0, "high": [1.0, -1.0, math.nan]}, "float32", "high: expected numbers, got NaN"),
        ({"high": -math.inf}, "float32", "high: expected more than -inf everywhere"),
        ({"high": [1.0, 1.0, -math.inf]}, "float32", "high: expected more than -inf everywhere"),
        ({"low": math.inf}, "float64", "low: expected less than inf everywhere"),
        ({"low": [math.inf, 0.0, 0.0]}, "float64", "low: expected less than inf everywhere"),
        ({"low": [1.0] * 3, "high": [-1.0] * 3}, "float32", "low: expected less than high everywhere"),
        ({"low": 1.0, "high": [2.0, 1.0, 2.0]}, "float64", "low: expected less than high everywhere"),
        ({"low": -math.inf, "high": -math.inf}, "float64", "low: expected less than high everywhere"),
        ({"low": 0.10001, "high": [0.10002] * 3}, "float16", "low: expected less than high everywhere in the samples'"),
        ({"low": [70000.0] * 3}, "float16", "low: expected less than inf everywhere in the samples'"),
        ({"high": -70000.0}, "float16", "high: expected more than -inf everywhere in the samples'"),
    ],
)
def test_a_bound_that_leaves_no_numbers_is_refused_by_its_name_and_for_its_reason(bounds, dtype, message, array):
    ending = "" if dtype != "float16" else f" dtype, .*{dtype}"
    given = {name: array(value) if isinstance(value, list) else value for name, value in bounds.items()}
    with pytest.raises(ValueError, match=f"^{message}{ending}$"):
        cuops.sample_normal(array([0.0] * 3, dtype), 1.0, 2, validate=True, **given)


@pytest.mark.parametrize("name", ["sigma", "low", "high"])
def test_nan_of_numpys_bfloat16_is_refused_by_name_without_a_warning(name):
    mu = np.zeros(2, ml_dtypes.bfloat16)
    given = {"sigma": 1.0} | {name: np.array([1.0, math.nan], ml_dtypes.bfloat16)}
    with pytest.raises(ValueError, match=f"^{name}: expected numbers"):
        cuops.sample_normal(mu, num_samples=2, seed=1, **given)


def test_out_whose_elements_share_memory_is_refused_and_not_written(device):
    mu, sigma = parameters((4,), device=device)
    memory = torch.full((20,), 7.0, device=device)
    for out in (memory[:4].expand(5, 4), memory.as_strided((5, 4), (1, 1)), memory[:1].expand(5, 4)):
        with pytest.raises(ValueError, match="^out: expected elements with memory of their own"):
            cuops.sample_normal(mu, sigma, 5, seed=1, out=out)
    assert (memory == 7).all()
    array = np.full(20, 7, np.float32)
    for strides in ((0, 4), (4, 4), (-4, 4)):
        shared = np.lib.stride_tricks.as_strided(array[5:], (5, 4), strides)
        with pytest.raises(ValueError, match="^out: expected elements with memory of their own"):
            cuops.sample_normal(mu.cpu().numpy(), sigma.cpu().numpy(), 5, seed=1, out=shared)
    assert (array == 7).all()


def test_out_of_any_order_and_with_gaps_is_written(device):
    mu, sigma = parameters((2, 4), device=device)
    expected = cuops.sample_normal(mu, sigma, 5, seed=1)
    array = np.zeros((9, 4, 12), np.float32)
    for view in (array[::-4, :, 1:11:2][:2].swapaxes(1, 2), array[:2].transpose(0, 2, 1)[:, 8:3:-1]):
        cuops.sample_normal(mu.cpu().numpy(), sigma.cpu().numpy(), 5, seed=1, out=view)
        np.testing.assert_allclose(view, expected.cpu().numpy(), rtol=1e-6, atol=2e-6)
    empty = torch.empty((1, 0, 4), device=device).expand(2, 0, 4)
    assert cuops.sample_normal(mu, sigma, 0, out=empty) is empty


def test_tensors_without_values_give_the_shape_of_samples():
    mu, sigma = (a.to("meta") for a in parameters((4,)))
    for given in ({}, {"seed": 1}, {"low": -1.0, "high": mu + 1}):
        x = cuops.sample_normal(mu, sigma, 5, **given)
        assert x.is_meta
        assert (x.shape, x.dtype) == ((5, 4), mu.dtype)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused_by_name(layout, device):
    rows = [torch.ones(2, 4, device=device), torch.ones(3, 4, device=device)]
    with pytest.raises(TypeError, match="^mu: expected a dense tensor, got "):
        cuops.sample_normal(torch.nested.nested_tensor(rows, layout=layout), 1.0, 3)


def test_parameters_without_values_are_refused_by_name(device):
    with pytest.raises(ValueError, match="^mu: expected a tensor with values, got a UninitializedP"):
        cuops.sample_normal(torch.nn.UninitializedParameter(device=device), 1.0, 3)


def test_tensors_of_two_devices_are_refused():
    mu, sigma = parameters((4,))
    with pytest.raises(ValueError, match="^sigma: expected a tensor on mu's device"):
        cuops.sample_normal(mu, sigma.to("meta"), 5, seed=1)


def test_out_and_gradients_do_not_go_together(device):
    mu, sigma = parameters((3,), device=device)
    with pytest.raises(ValueError, match="^out: "):
        cuops.sample_normal(mu.requires_grad_(), sigma, 5, out=torch.empty(5, 3, device=device))


def test_out_that_may_not_be_written_is_refused_before_a_generator_moves(device):
    mu, sigma = parameters((3,), device=device)
    generator = torch.Generator(device)
    before = generator.get_state()
    leaf = torch.zeros(5, 3, device=device, requires_grad=True)
    with torch.inference_mode():
        for_inference = torch.zeros(5, 3, device=device)
    for out in (leaf, leaf * 1, for_inference):
        with pytest.raises(ValueError, match="^out: expected no"):
            cuops.sample_normal(mu, sigma, 5, generator=generator, out=out)
        assert (out == 0).all()
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_out_is_written_where_no_gradients_are_followed(without, device):
    mu, sigma = parameters((3,), device=device)
    out = torch.zeros(5, 3, device=device, requires_grad=True)
    with without():
        for given in (out, torch.zeros(5, 3, device=device)):
            assert torch.equal(
                cuops.sample_normal(mu, sigma, 5, seed=1, out=given), cuops.sample_normal(mu, sigma, 5, seed=1)
            )


@gpu
def test_seeds_and_generators_are_of_mus_device():
    mu, sigma = parameters(device="cuda")
    with pytest.raises(ValueError, match="^seed: "):
        cuops.sample_normal(mu, sigma, 5, seed=torch.tensor(1))
    with pytest.raises(ValueError, match="^seed: "):
        cuops.sample_normal(mu, sigma, 5, seed=torch.zeros(3, dtype=torch.int64, device="cuda"))
    with pytest.raises(ValueError, match="^generator: "):
        cuops.sample_normal(mu, sigma, 5, generator=torch.Generator())


def test_a_call_that_fails_advances_no_generator():
    generator = np.random.default_rng(1)
    before, outer = generator.bit_generator.state, np.random.get_state()[2]
    mu = np.zeros(2)
    for wrong in (
        {"sigma": np.array([-1.0, 1.0])},
        {"sigma": 1.0, "low": mu + 1, "high": mu},
        {"sigma": 1.0, "out": mu},
    ):
        for given in ({"generator": generator}, {}):
            with pytest.raises((ValueError, TypeError)):
                cuops.sample_normal(mu, num_samples=3, **wrong, **given)
    assert generator.bit_generator.state == before
    assert np.random.get_state()[2] == outer


@pytest.mark.parametrize(
    ("error", "message", "keywords"),
    [
        (ValueError, "high: expected a number, got nan", {"high": math.nan}),
        (TypeError, "low: expected a number or an array like mu, got bool", {"low": False}),
        (TypeError, "sample_dim: expected an integer, got ndarray", {"sample_dim": np.array([0, 1])}),
        (TypeError, "sample_dim: expected an integer, got bool", {"sample_dim": False}),
        (TypeError, "seed: expected an int64 tensor", {"seed": torch.tensor([1], dtype=torch.int32)}),
        (
            ValueError,
            "seed: expected a tensor on mu's device",
            {"seed": torch.empty(1, dtype=torch.int64, device="meta")},
        ),
        (
            ValueError,
            "out: expected no argument that requires a gradient",
            {"low": torch.full((3,), -1.0, requires_grad=True), "out": torch.empty(2, 3)},
        ),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_what_makes_no_draw_is_refused_by_name(error, message, keywords):
    with pytest.raises(error, match=f"^{message}"):
        cuops.sample_normal(torch.zeros(3), 1.0, 2, **keywords)


def test_more_columns_than_there_are_counters_are_refused():
    checks.draw(1, 0, 0, 1 << 40)
    with pytest.raises(ValueError, match="^mu: expected at most"):
        checks.draw(1, 0, 0, (1 << 40) + 1)


@pytest.mark.parametrize("mu", [np.zeros(3), torch.zeros(3)], ids=["numpy", "torch"])
def test_integers_beyond_all_floats_are_bounds_that_hold_nothing_back(mu):
    x = cuops.sample_normal(mu, 1.0, 2, low=-(10**400), high=10**400, seed=1)
    assert (x == cuops.sample_normal(mu, 1.0, 2, low=-math.inf, seed=1)).all()


def test_a_draw_of_no_samples_advances_no_generator():
    used, other = np.random.default_rng(0), np.random.default_rng(0)
    cuops.sample_normal(np.zeros(3), 1.0, 0, generator=used)
    assert used.random() == other.random()


def test_second_derivatives_of_truncated_samples_are_refused():
    mu = torch.zeros(3, requires_grad=True)
    x = cuops.sample_normal(mu, 1.0, 4, low=-1.0, seed=1)
    (gradient,) = torch.autograd.grad(x.square().sum(), mu, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(gradient.sum(), mu)


@pytest.mark.parametrize("options", [{"seed": "x"}, {"generator": "x"}, {"generator": 5}], ids=str)
def test_a_draw_of_nothing_refuses_what_others_refuse(options, array):
    (name,) = options
    for count in (0, 3):
        with pytest.raises(TypeError, match=f"^{name}: expected"):
            cuops.sample_normal(array([0.0, 1.0]), 1.0, count, **options)


def test_pythons_float_is_the_dtype_of_its_numbers(array):
    mu = array([0.0, 1.0], "float32")
    for result in (cuops.sample_normal(mu, 1.0, 2, seed=1, dtype=float), cuops.rms_norm(mu, out_dtype=float)):
        assert str(result.dtype).removeprefix("torch.") == "float64"
