"""`CrossEntropyMethod.reset` and `shift`: nothing of the search before is left."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cuops.cem import CrossEntropyMethod


def after_a_step(num_samples: int = 10, **options: object) -> CrossEntropyMethod:
    method = CrossEntropyMethod(np.zeros(2), 1.0, num_samples, seed=1, **options)
    method.ask()
    method.tell(np.arange(float(num_samples)))
    return method


def test_reset_forgets_the_elites_that_were_kept():
    method = after_a_step(30, keep_elites=2)
    method.reset(50.0, 0.1)
    assert (method.ask() > 40).all()


@pytest.mark.parametrize("again", [lambda m: m.reset(0.0, 1.0), lambda m: m.shift()], ids=["reset", "shift"])
def test_samples_of_before_a_new_start_are_not_to_be_told_of(again, array):
    method = CrossEntropyMethod(array([0.0, 0.0]), 1.0, 10, seed=1)
    scores = method.ask().sum(-1)
    again(method)
    assert tuple(method.population.shape) == (0, 2)
    with pytest.raises(RuntimeError, match=r"^tell: expected ask\(\) before it"):
        method.tell(scores)


@pytest.mark.parametrize("maximize", [False, True])
def test_reset_forgets_the_best_sample(maximize):
    method = after_a_step(maximize=maximize)
    method.reset(5.0, 0.5)
    assert (method.best_x == 5).all()
    assert method.best_score == (-math.inf if maximize else math.inf)
    method.ask()
    method.tell(np.arange(10.0))
    assert method.best_score == (9 if maximize else 0)


@pytest.mark.parametrize("maximize", [False, True])
def test_a_restart_may_keep_the_best_sample(maximize, array):
    method = CrossEntropyMethod(array([0.0, 0.0]), 1.0, 10, seed=1, maximize=maximize)
    best = method.ask()[9 if maximize else 0].tolist()
    method.tell(array([float(k) for k in range(10)]))
    method.reset(5.0, 0.5, keep_best=True)
    method.ask()
    method.tell(array([4.5] * 10))
    assert method.best_x.tolist() == best
    assert method.best_score == (9 if maximize else 0)


def test_a_mean_beyond_the_range_of_the_samples_is_refused_again(array):
    method = CrossEntropyMethod(array([0.0], "float32"), 1.0, 10, dtype="float16")
    if "cuda" not in str(getattr(method.mu, "device", "")):  # where it would have to be looked at
        with pytest.raises(ValueError, match="^mu: expected numbers in the range of the samples' dtype"):
            method.reset(1e5, 1.0)


def test_a_search_that_has_come_to_rest_can_be_shifted():
    method = after_a_step(covariance="full")
    method.reset(0.0, 0.0)
    method._state.sigma[...] = 1e-200
    method.shift()
    assert (method.sigma == 1e-200).all()


@pytest.mark.parametrize("again", [lambda m, sigma: m.reset(0.0, sigma), lambda m, sigma: m.shift(sigma=sigma)])
@pytest.mark.parametrize("sigma", [1e-200, 1e200])
def test_a_sigma_whose_square_is_no_number_is_refused_again(again, sigma):
    method = after_a_step(covariance="full")
    before = method.covariance.copy()
    with pytest.raises(ValueError, match=r"^sigma: expected 0 or 1\.5e-154 to 1\.3e\+154 with covariance"):
        again(method, sigma)
    assert (method.covariance == before).all()


def test_reset_takes_arrays_of_the_method_itself(array):
    method = CrossEntropyMethod(array([2.0, 3.0]), 0.5, 10, seed=1)
    method.reset(method.sigma, method.mu)
    assert [*method.mu, *method.sigma] == [0.5, 0.5, 2.0, 3.0]
    method.reset(array([-0.0, 2.0]), 1.0)
    assert math.copysign(1, method.mu[0]) == -1


def test_shift_takes_arrays_of_the_method_itself(array):
    method = CrossEntropyMethod(array([[2.0], [3.0], [4.0]]), 0.5, 10, seed=1, event_dims=2)
    method.shift(1, method.mu)
    assert [*method.mu.flatten(), *method.sigma.flatten()] == [3.0, 4.0, 4.0, 2.0, 3.0, 4.0]


def test_reset_sets_the_covariance():
    method = after_a_step(covariance="full")
    method.reset(0.0, 3.0)
    np.testing.assert_allclose(method.covariance, 9 * np.eye(2))


def test_reset_begins_with_the_first_population():
    method = after_a_step(40, elites=2, population_decay=2.0)
    assert method.population_size == 20
    method.reset(0.0, 1.0)
    assert method.population_size == 40


def test_reset_begins_with_the_first_noise():
    method = after_a_step(smoothing=1.0, noise=4.0, noise_decrease=4.0)
    method.reset(0.0, 1.0)
    method.ask()
    method.tell(np.arange(10.0))
    assert (method.sigma >= 2).all()


def test_shift_by_nothing_changes_nothing():
    method = CrossEntropyMethod(np.arange(4.0), 1.0, 10, seed=1)
    method.shift(0)
    assert (method.mu == np.arange(4.0)).all()
