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


@pytest.mark.parametrize("maximize", [False, True])
def test_reset_forgets_the_best_sample(maximize):
    method = after_a_step(maximize=maximize)
    method.reset(5.0, 0.5)
    assert (method.best_x == 5).all()
    assert method.best_score == (-math.inf if maximize else math.inf)
    method.ask()
    method.tell(np.arange(10.0))
    assert method.best_score == (9 if maximize else 0)


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
