"""Single rules of the Cross-Entropy Method, each by a step whose outcome is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cem_problems import bits, on_host
from cuops.cem import CrossEntropyMethod, History


def method_of(num_samples: int = 10, d: int = 2, **options: object) -> CrossEntropyMethod:
    return CrossEntropyMethod(np.zeros(d), 1.0, num_samples, seed=1, **options)


@pytest.mark.parametrize(("elites", "num_samples", "expected"), [(0.29, 100, 29), (None, 50, 10), (0.8, 10, 8)])
def test_elites_are_a_rounded_fraction_and_a_fifth_by_default(elites, num_samples, expected):
    method = method_of(num_samples, **({} if elites is None else {"elites": elites}))
    assert method.num_elites == expected
    assert method.ask().shape == (num_samples, 2)


def test_mu_moves_whole_and_sigma_by_three_fifths_by_default():
    method = method_of(elites=4)
    x = method.ask().copy()
    method.tell(np.arange(10.0))
    np.testing.assert_allclose(method.mu, x[:4].mean(0))
    np.testing.assert_allclose(method.sigma, 0.6 * x[:4].std(0) + 0.4)


def test_kept_elites_stay_through_a_step_without_finite_scores():
    method = method_of(elites=3, keep_elites=2)
    x = method.ask().copy()
    method.tell(np.arange(10.0))
    method.ask()
    method.tell(np.array([5.0] + [math.nan] * 9))
    assert (method.ask()[1] == x[1]).all()


def test_kept_elites_take_the_place_of_the_first_of_antithetic_samples(array):
    options = {"elites": 3, "antithetic": True, "seed": 1}
    kept, plain = (CrossEntropyMethod(array([0.0, 0.0]), 1.0, 6, keep_elites=keep, **options) for keep in (3, 0))
    for method in (kept, plain):
        method.tell(method.ask().sum(-1))
    assert kept.ask()[3:].tolist() == plain.ask()[3:].tolist()
    assert kept.ask()[:3].tolist() != plain.ask()[:3].tolist()


def test_the_first_population_has_no_kept_elites():
    assert (method_of(d=3, keep_elites=2).ask() != 0).all()


def test_the_first_of_equal_samples_stays_the_best():
    method = method_of()
    first = method.ask()[0].copy()
    for _ in range(2):
        method.tell(np.zeros(10))
        method.ask()
    assert (method.best_x == first).all()


def test_a_full_covariance_follows_the_formula_and_the_schedule_of_the_noise(array):
    options = {"noise": 0.3, "noise_decrease": 0.1, "smoothing": (0.7, 0.4), "sigma_decay": 0.9}
    method = CrossEntropyMethod(array([1.0, -2.0, 0.5]), 1.0, 40, elites=8, covariance="full", seed=4, **options)
    mean, covariance = on_host(method.mu), on_host(method.covariance)
    for step in range(5):
        x = on_host(method.ask())
        scores = (x**2).sum(-1)
        elite = x[scores.argsort()[:8]]
        mean = 0.7 * elite.mean(0) + 0.3 * mean
        noisy = np.cov(elite.T, bias=True) + max(0.3 - 0.1 * step, 0) * np.eye(3)
        covariance = 0.9**2 * (0.4 * noisy + 0.6 * covariance)
        method.tell(array(scores.tolist()))
        np.testing.assert_allclose(on_host(method.mu), mean, rtol=1e-12)
        np.testing.assert_allclose(on_host(method.covariance), covariance, rtol=1e-11, atol=1e-13)


def test_variances_about_a_mean_that_is_rounded_are_those_of_the_elites(array):
    """In float32, sigma is that of two steps between numbers as large as the mean."""
    options = {"elites": 16, "covariance": "full", "smoothing": 1.0, "seed": 1}
    method = CrossEntropyMethod(array([1000.0] * 6, "float32"), 1.2e-4, 40, **options)
    elite = on_host(method.ask())[:16].astype(float)
    method.tell(array([float(k) for k in range(40)]))
    np.testing.assert_allclose(on_host(method.covariance), np.cov(elite.T, bias=True), rtol=1e-4, atol=1e-13)


@pytest.mark.parametrize("maximize", [False, True])
def test_the_history_has_the_worst_of_the_elites(maximize, array):
    method = CrossEntropyMethod(array([[0.0], [0.0]]), 1.0, 6, elites=3, maximize=maximize, seed=1)
    history = History(method)
    method.ask()
    method.tell(array([[5.0, 1.0, 4.0, 2.0, 6.0, 3.0], [math.nan, 8.0, math.inf, 7.0, -math.inf, math.nan]]))
    history.record()
    assert history.elite_worst.tolist() == [[4.0, 7.0] if maximize else [3.0, 8.0]]


@pytest.mark.parametrize("library", [np, torch], ids=["numpy", "torch"])
def test_integer_scores_are_compared_beyond_float32(library):
    mu = np.zeros(2) if library is np else torch.zeros(2)
    method = CrossEntropyMethod(mu, 1.0, 2, elites=1, seed=1)
    second = method.ask()[1] + 0
    method.tell(library.asarray([2**24 + 1, 2**24]))
    assert (method.best_x == second).all()


def test_a_color_of_a_single_step_is_white():
    assert np.isfinite(CrossEntropyMethod(np.zeros((1, 3)), 1.0, 10, event_dims=2, color=1.0).ask()).all()


def test_the_floor_of_sigma_is_on_the_diagonal_of_the_covariance():
    method = CrossEntropyMethod(np.zeros(2), 0.0, 10, covariance="full", sigma_floor=0.7, smoothing=1.0, seed=1)
    method.tell((method.ask() ** 2).sum(-1))
    np.testing.assert_allclose(method.covariance, 0.49 * np.eye(2))


@pytest.mark.parametrize(("d", "elites"), [(20, 10), (5, 3)])
def test_samples_are_correlated_however_far_the_mean_is_from_zero(d, elites, array):
    """In float32, sigma is 160 of the steps between numbers as large as the mean."""
    options = {"elites": elites, "covariance": "full", "smoothing": 1.0, "seed": 1}
    method = CrossEntropyMethod(array([1000.0] * d, "float32"), 0.01, 2000, **options)
    x = method.ask()
    method.tell(((x - 1000.01) ** 2).sum(-1))
    covariance, factor = (np.asarray(a.tolist()) for a in (method.covariance, method._state.factor[0]))
    scale = method.sigma.tolist()
    error = (factor @ factor.T - covariance) / scale / np.reshape(scale, (-1, 1))
    assert abs(error).max() < 1e-3
    assert abs(np.tril(factor, -1)).max() > 0.1 * max(scale)


def test_sigma_of_a_full_covariance_decays():
    method = method_of(elites=4, covariance="full", sigma_decay=0.5, smoothing=1.0)
    x = method.ask().copy()
    method.tell(np.arange(10.0))
    np.testing.assert_allclose(method.sigma, x[:4].std(0) / 2)


def test_a_state_is_a_copy():
    method = method_of()
    saved = method.state_dict()
    method.tell((method.ask() ** 2).sum(-1))
    assert (saved["mu"] == 0).all()
    assert saved["clock"][0] == 0


def test_a_state_with_an_empty_population_is_refused():
    method = method_of()
    method.ask()
    saved = method.state_dict()
    with pytest.raises(ValueError, match="population: expected 1 to 10 samples, got 0"):
        method.load_state_dict({**saved, "population": saved["population"][:, :0]})


@pytest.mark.parametrize("options", [{}, {"covariance": "full"}, {"color": 1.0}], ids=str)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("library", [np, torch], ids=["numpy", "torch"])  # on a GPU values are not looked at
def test_an_elite_that_is_not_finite_is_refused_and_nothing_changes(library, bad, options):
    start = library.zeros((2, 3), dtype=library.float16)
    method = CrossEntropyMethod(start, 1.0, 10, elites=3, keep_elites=2, seed=1, **options)
    before = bits(method)
    x = method.ask()
    x[1, 0, 2] = bad
    scores = library.asarray([[math.nan, *range(1, 10)], [*range(10)]])
    with pytest.raises(ValueError, match="^samples: expected finite numbers in the elites, got infinity or NaN"):
        method.tell(scores)
    assert bits(method) == before
    x[1, 0, 2] = 1.0
    x[0, 0] = bad  # which is no elite
    method.tell(scores)
    assert library.isfinite(method.mu).all()
