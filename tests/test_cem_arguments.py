"""What the Cross-Entropy Method takes as numbers, and what it refuses by name."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from decimal import Decimal
from fractions import Fraction
from functools import partial

import cuops.cem as cem
import ml_dtypes
import numpy as np
import pytest
import torch
from cem_problems import sphere, told


@pytest.mark.parametrize("mu", [np.zeros((3, 2), "float32"), torch.zeros(3, 2)], ids=["numpy", "torch"])
@pytest.mark.parametrize("kind", [list, tuple, np.array], ids=["list", "tuple", "array"])
def test_numbers_of_each_dimension_come_in_any_kind(mu, kind):
    method = cem.CrossEntropyMethod(mu, kind([1.0, 0.5]), 20, low=kind([-1.0, -2.0]), high=kind([1.0, 2.0]), seed=1)
    samples = method.ask()
    assert type(samples) is type(mu)
    assert samples.shape == (3, 20, 2)
    assert all(0 < abs(samples[..., k]).max() <= k + 1 for k in range(2))
    assert [float(a) for a in method.sigma[1]] == [1.0, 0.5]
    method.reset(kind([0.5, -0.5]), kind([0.0, 0.25]))
    assert [float(a) for a in (*method.mu[0], *method.sigma[2])] == [0.5, -0.5, 0.0, 0.25]


@pytest.mark.parametrize("mu", [np.zeros(2), torch.zeros(2)], ids=["numpy", "torch"])
@pytest.mark.parametrize("wrong", [None, "abc", b"1", ["a", "b"], [[1.0, 2.0], [3.0]], {}, object], ids=repr)
def test_what_is_no_number_is_refused_by_name(mu, wrong):
    with pytest.raises(TypeError, match="^sigma: expected a number or an array like mu, got"):
        cem.CrossEntropyMethod(mu, wrong, 10)
    with pytest.raises(TypeError, match="^high: expected a number or an array like mu, got"):
        cem.CrossEntropyMethod(mu, 1.0, 10, high=object if wrong is None else wrong)
    with pytest.raises(TypeError, match="^mu: expected a number or an array like mu, got"):
        cem.CrossEntropyMethod(mu, 1.0, 10).reset(wrong, 1.0)


@pytest.mark.parametrize("mu", [np.zeros(2), torch.zeros(2)], ids=["numpy", "torch"])
@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (["1", "2"], "list of str"),
        ([Decimal(1), 2.0], "list of Decimal, float"),
        ((True, False), "tuple of bool"),
        ([None, 1.0], "list of NoneType, float"),
        (Decimal(1), "Decimal"),
        (np.True_, np.True_.__class__.__name__),
        (np.timedelta64(1, "s"), "timedelta64"),
        (bytearray(b"12"), "bytearray"),
    ],
    ids=repr,
)
def test_text_decimals_flags_and_times_are_no_numbers(mu, wrong, got):
    for name in ("sigma", "low", "high", "mu"):
        given = {"mu": mu, "sigma": 1.0, name: wrong}
        with pytest.raises(TypeError, match=f"^{name}: expected a number or an array like mu, got {got}$"):
            cem.CrossEntropyMethod(given.pop("mu"), given.pop("sigma"), 10, **given)


@pytest.mark.parametrize("mu", [np.zeros(2), torch.zeros(2)], ids=["numpy", "torch"])
@pytest.mark.parametrize(
    "kind",
    [
        lambda a, b: [Fraction(a), Fraction(b)],
        lambda a, b: [np.float32(a), np.float64(b)],
        lambda a, b: [torch.tensor(a), torch.tensor(b)],
        lambda a, b: [ml_dtypes.bfloat16(a), ml_dtypes.bfloat16(b)],
        lambda a, b: memoryview(np.array([a, b])),
    ],
    ids=["fractions", "numpy", "torch", "bfloat16", "buffer"],
)
def test_real_numbers_of_other_kinds_are_numbers(mu, kind):
    method = cem.CrossEntropyMethod(mu, kind(0.5, 2.0), 10, low=[-(10**400), -1])
    assert method.sigma.tolist() == [0.5, 2.0]


def test_numpy_mu_and_a_tensor_do_not_go_together():
    with pytest.raises(TypeError, match=r"^sigma: expected numbers or a numpy\.ndarray"):
        cem.CrossEntropyMethod(np.zeros(2), torch.ones(2), 10)


def test_smoothing_takes_a_list_as_a_pair():
    given = [
        cem.CrossEntropyMethod(np.zeros(2), 1.0, 20, smoothing=pair, seed=1) for pair in ([0.5, 0.25], (0.5, 0.25))
    ]
    for method in given:
        method.tell((method.ask() ** 2).sum(-1))
    assert (given[0].mu == given[1].mu).all()
    assert (given[0].sigma == given[1].sigma).all()


@pytest.mark.parametrize("search", [cem.minimize, cem.maximize])
@pytest.mark.parametrize("value", [True, False])
def test_the_name_of_the_function_says_which_way(search, value):
    with pytest.raises(TypeError, match="^maximize: expected no such argument"):
        search(lambda x: (x**2).sum(-1), np.zeros(2), 1.0, maximize=value)


@pytest.mark.parametrize("wrong", [1.0, "1", True])
def test_event_dims_are_refused_by_name_before_samples_are_counted(wrong):
    with pytest.raises(TypeError, match="^event_dims: expected an integer"):
        cem.minimize(lambda x: (x**2).sum(-1), np.zeros(2), 1.0, event_dims=wrong)


@pytest.mark.parametrize(
    ("mu", "sigma", "options", "message"),
    [
        (5.0, 1.0, {"high": 1.0}, "mu: expected values from low to high"),
        (0.0, 1.0, {"noise_decrease": -1.0}, "noise_decrease: expected a finite number of at least 0"),
        (0.0, np.inf, {}, "sigma: expected finite numbers"),
        (0.0, 1e-200, {"covariance": "full"}, "sigma: expected 0 or 1.5e-154 to 1.3e+154"),
        (0.0, 1e200, {"covariance": "full"}, "sigma: expected 0 or"),
        (0.0, 10**400, {}, "sigma: expected finite numbers"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(mu, sigma, options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        cem.CrossEntropyMethod(np.full(2, mu), sigma, 10, **options)


HUGE = 10**5000  # which Python does not print


@pytest.mark.parametrize(
    ("got", "value"),
    [(r"2\^16609 or more", HUGE), (r"-2\^16609 or less", -HUGE), ("a Fraction", Fraction(1 - HUGE, HUGE))],
    ids=["positive", "negative", "fraction"],
)
@pytest.mark.parametrize(
    "name", ["elites", "smoothing", "sigma_floor", "sigma_decay", "noise", "population_decay", "color", "keep_elites"]
)
def test_numbers_that_python_does_not_print_are_refused_by_name(name, value, got):
    error = TypeError if name == "keep_elites" and isinstance(value, Fraction) else ValueError
    with pytest.raises(error, match=f"^{name}: expected .*, got {'Fraction' if error is TypeError else got}$"):
        cem.CrossEntropyMethod(np.zeros(2), 1.0, 10, **{name: value})


def test_a_ceiling_that_python_does_not_print_is_refused_by_name():
    with pytest.raises(ValueError, match=r"^sigma_ceiling: expected at least sigma_floor, 0.0, got -2\^16609 or less$"):
        cem.CrossEntropyMethod(np.zeros(2), 1.0, 10, sigma_ceiling=-HUGE)


def test_a_mean_beyond_the_range_of_the_samples_is_refused(array):
    mu = array([0.0, 1e5], "float32")
    with pytest.raises(ValueError, match="^mu: expected numbers in the range of the samples' dtype, "):
        cem.CrossEntropyMethod(mu, 1.0, 10, dtype="float16")


@pytest.mark.parametrize(
    ("dtype", "option", "message"),
    [
        ("float16", {"sigma_floor": 65504.0, "noise": 65504.0**2}, None),
        ("float16", {"sigma_floor": 1e6}, "sigma_floor: expected a number in the range of float16, got 1000000.0"),
        (
            "float16",
            {"noise": 1e10},
            "noise: expected a number whose root is in the range of float16, got 10000000000.0",
        ),
        ("float32", {"sigma_floor": 1e38, "noise": 1e38}, None),
        ("float32", {"sigma_floor": 1e39}, "sigma_floor: expected a number in the range of float32"),
        ("float32", {"noise": 1e39}, "noise: expected a number in the range of float32"),
        ("float64", {"sigma_floor": 1e308, "noise": 1e308}, None),
    ],
)
def test_spreads_beyond_the_range_of_the_samples_are_refused(dtype, option, message, array):
    mu = array([0.0, 0.0], "float64" if dtype == "float64" else "float32")
    with pytest.raises(ValueError, match=f"^{message}") if message else nullcontext():
        cem.CrossEntropyMethod(mu, 1.0, 10, dtype=dtype, **option)


@pytest.mark.parametrize("low", [-1e39, -(10**400), -math.inf])
def test_a_bound_beyond_the_range_of_the_samples_is_none(low, array):
    kept = [cem.CrossEntropyMethod(array([0.0], "float32"), 1.0, 10, seed=1, high=1.0, low=of) for of in (low, None)]
    assert kept[0].ask().tolist() == kept[1].ask().tolist()


@pytest.mark.parametrize("name", ["mu", "sigma", "low", "high"])
def test_a_mask_is_refused_by_name(name):
    given = {"mu": np.zeros(2), "sigma": np.ones(2), "low": np.full(2, -9.0), "high": np.full(2, 9.0)}
    given[name] = np.ma.masked_array(given[name], [False, True])
    with pytest.raises(TypeError, match=f"^{name}: expected a plain numpy.ndarray, got a "):
        cem.CrossEntropyMethod(given.pop("mu"), given.pop("sigma"), 10, **given)


def test_scores_that_are_not_dense_are_refused_by_name():
    method = cem.CrossEntropyMethod(torch.zeros(3), 1.0, 10)
    scores = method.ask().sum(-1)
    with pytest.raises(TypeError, match="^scores: expected a dense tensor, got layout torch.sparse_coo"):
        method.tell(scores.to_sparse())
    method.tell(scores)


def test_scores_of_8_bits_are_numbers():
    found = []
    for dtype in (torch.float8_e4m3fn, torch.float32):
        method = cem.CrossEntropyMethod(torch.zeros(3), 1.0, 10, seed=1)
        method.tell(method.ask().sum(-1).to(torch.float8_e4m3fn).to(dtype))
        found.append(method.mu)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("mu", "make"), [(np.zeros(3), np.random.default_rng), (torch.zeros(3), lambda n: torch.Generator().manual_seed(n))]
)
def test_a_generator_reproduces_and_is_advanced(mu, make):
    generator = make(5)
    first, second, again = (
        cem.CrossEntropyMethod(mu, 1.0, 20, generator=g).ask() for g in (generator, generator, make(5))
    )
    assert (first == again).all()
    assert not (first == second).any()


def test_the_arrays_given_stay_as_they_are(array):
    mu, sigma = array([1.0, 2.0]), array([3.0, 4.0])
    told(cem.CrossEntropyMethod(mu, sigma, 20, seed=1), sphere, 1)
    assert (mu.tolist(), sigma.tolist()) == ([1.0, 2.0], [3.0, 4.0])


def test_elites_that_are_missing_are_marked(array):
    method = cem.CrossEntropyMethod(array([0.0]), 1.0, 4, elites=3, seed=1)
    method.ask()
    method.tell(array([math.nan, 1.0, math.inf, math.nan]))
    assert method.elites.tolist() == [1, -1, -1]


def test_a_ceiling_beyond_all_floats_holds_nothing_back(array):
    search = partial(cem.minimize, lambda x: (x**2).sum(-1), array([1.0]), 2.0, steps=3, seed=1)
    assert float(search(sigma_ceiling=10**400).x[0]) == float(search().x[0])


@pytest.mark.parametrize("given", [np.float16, "float16", np.dtype("float16")])
def test_the_dtype_of_samples_is_one_of_their_library(given):
    method = cem.CrossEntropyMethod(np.zeros(3, np.float32), 1.0, 5, dtype=given)
    assert (method.dtype, type(method.dtype)) == (np.dtype("float16"), type(np.dtype("float16")))


@pytest.mark.parametrize("kind", [np.array, list], ids=["array", "list"])
def test_integers_are_numbers_in_lists_and_arrays_of_numpy(kind):
    method = cem.CrossEntropyMethod(kind([1, 2]), kind([1, 2]), 10, low=kind([0, 0]), high=kind([9, 9]), seed=1)
    assert (method.dtype, method.sigma.tolist()) == ("float64", [1.0, 2.0])


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (
            ValueError,
            "function: expected a score for each of the samples, .* got shape .*; for a function of one x, pass",
            lambda: cem.minimize(lambda x: x[0] ** 2, np.zeros(2), 1.0),
        ),
        (
            ValueError,
            r"mu: expected at least 1 dimension, such as \[0.0\], and no empty one, got shape \(\)",
            lambda: cem.minimize(abs, 0.0, 1.0),
        ),
        (
            TypeError,
            "n_samples: expected one of mu, sigma, num_samples, .* steps, callbacks, progress",
            lambda: cem.minimize(abs, [0.0], 1.0, n_samples=10),
        ),
        (
            TypeError,
            r"scores: expected a numpy.ndarray, .* got a list; numpy.array\(scores\) makes one",
            lambda: told_a_list(),
        ),
    ],
)
def test_common_mistakes_are_told_what_mends_them(error, message, call):
    with pytest.raises(error, match=f"^{message}"):
        call()


def told_a_list():
    method = cem.CrossEntropyMethod([0.0], 1.0, 3)
    method.tell([0.0 for _ in method.ask()])
