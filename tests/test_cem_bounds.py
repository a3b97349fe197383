"""Samples of the Cross-Entropy Method stay within bounds, however they are drawn and rounded."""

import numpy as np
import pytest
from cem_problems import on_host, sphere
from cuops.cem import CrossEntropyMethod, minimize


def test_samples_keep_bounds_without_piling_up_on_them(array):
    method = CrossEntropyMethod(array([0.1, 0.9]), 1.0, 500, low=0.0, high=array([1.0, 2.0]), seed=1)
    for _ in range(3):
        x = on_host(method.ask())
        assert (x >= 0).all()
        assert (x <= [1, 2]).all()
        assert len(np.unique(x)) == x.size
        method.tell(array(sphere(x).tolist()))


@pytest.mark.parametrize("options", [{"covariance": "full"}, {"color": 1.0}], ids=str)
def test_dependent_samples_are_clipped_to_bounds(array, options):
    method = CrossEntropyMethod(array([0.1, 0.9]), 1.0, 500, low=0.0, high=array([1.0, 2.0]), seed=1, **options)
    x = on_host(method.ask())
    assert x.min() == 0
    assert (x.max(0) == [1, 2]).all()


@pytest.mark.parametrize("options", [{}, {"covariance": "full"}, {"color": 1.0}], ids=str)
def test_no_rounding_leads_past_a_bound(array, options):
    mu = array([0.0, 0.0], "float32")
    for dtype in ("float32", "float16") if isinstance(mu, np.ndarray) else ("float32", "float16", "bfloat16"):
        x = on_host(CrossEntropyMethod(mu, 1.0, 500, low=-0.1, high=0.3, dtype=dtype, seed=1, **options).ask())
        assert -0.1 <= x.min().astype(float) < -0.09
        assert 0.29 < x.max().astype(float) <= 0.3


def test_bounds_between_which_no_sample_is_are_refused(array):
    with pytest.raises(ValueError, match="low: expected less than high everywhere in the samples' dtype"):
        CrossEntropyMethod(array([1.0], "float32"), 1.0, 500, low=0.9999, high=1.0001, dtype="float16")


def test_what_the_caller_makes_of_a_sample_is_kept_as_it_is(array):
    method = CrossEntropyMethod(array([0.0, 0.0]), 1.0, 10, low=-1.0, high=1.0, elites=3, keep_elites=1, seed=1)
    x = method.ask()
    x[3] = 5.0
    method.tell(-x.sum(-1))
    assert method.best_x.tolist() == method.ask()[0].tolist() == [5.0, 5.0]
    assert method.mu.tolist() == [1.0, 1.0]
    assert (abs(method.population[1:]) <= 1).all()


@pytest.mark.parametrize("options", [{}, {"covariance": "full"}, {"color": 1.0}], ids=str)
def test_a_shifted_plan_stays_within_the_bounds_of_each_step(array, options):
    low, high = array([0.0, 0.0, 5.0, 0.0]), array([3.0, 3.0, 8.0, 3.0])
    method = CrossEntropyMethod(
        array([1.0, 1.0, 6.0, 1.0]), 0.5, 40, low=low, high=high, keep_elites=2, seed=1, **options
    )
    for steps in (1, 2):
        method.tell(method.ask().sum(-1))
        method.shift(steps)
        for values in (method.mu, method.ask()):
            assert (values >= low).all()
            assert (values <= high).all()


@pytest.mark.parametrize("options", [{}, {"covariance": "full"}, {"color": 1.0}], ids=str)
def test_every_problem_has_bounds_of_its_own(array, options):
    low, high = np.array([[-1.0], [-2.0], [-3.0]]), np.array([[0.1], [0.2], [0.3]])
    method = CrossEntropyMethod(array([[0.0, 0.0]] * 3), 1.0, 60, seed=1, low=array(low), high=array(high), **options)
    for _ in range(30):
        x = on_host(method.ask())
        assert ((low[:, None] <= x) & (x <= high[:, None])).all()
        method.tell(array((-x.sum(-1)).tolist()))
    assert (on_host(method.mu) <= high).all()
    np.testing.assert_allclose(on_host(method.mu), np.broadcast_to(high, (3, 2)), rtol=0.05)


def test_without_a_finite_score_the_mean_stays_where_it_is_within_the_bounds(array):
    below = np.nextafter(np.float32(0.1), np.float32(0))  # 0.1 itself is less than float32's
    method = CrossEntropyMethod(array([[0.1, 0.0]], "float32"), 1.0, 20, seed=1, low=-1.0, high=0.1)
    for mu, want in ((None, [below, 0.0]), ([[5.0, 0.05]], [below, 0.05]), ([[-5.0, 0.0]], [-1.0, 0.0])):
        if mu is not None:
            method.reset(array(mu, "float32"), 1.0)
        for _ in range(2):
            np.testing.assert_array_equal(on_host(method.mu), np.array([want], np.float32))
            np.testing.assert_array_equal(on_host(method.best_x), np.array([want], np.float32))
            method.ask()
            method.tell(array([[np.nan] * 20]))


@pytest.mark.parametrize("options", [{}, {"covariance": "full"}, {"smoothing": 0.3}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_mean_stays_within_the_bounds_to_the_last_bit(array, dtype, options):
    for seed, high in enumerate((0.1, 0.3, 0.7, 1 / 3, 0.9)):
        mu = array([0.0, 0.0, 0.0], dtype)
        high = np.asarray(high, dtype)
        result = minimize(lambda x: -x.sum(-1), mu, 1.0, 60, steps=40, low=-1.0, high=high, seed=seed, **options)
        assert (on_host(result.mu) <= high).all()
        again = minimize(lambda x: -x.sum(-1), result.mu, 0.1, 60, steps=2, low=-1.0, high=high, **options)
        assert (on_host(again.mu) <= high).all()
