"""`minimize` and `maximize`: what is passed on, when they stop, and what they return."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pytest
from cuops.cem import EarlyStopping, maximize, minimize


def flat(x):
    return 0 * x.sum(-1)


def hill(x):
    return -(x**2).sum(-1)


def test_a_target_that_is_met_exactly_stops():
    assert minimize(flat, np.zeros(2), 1.0, steps=5, callbacks=EarlyStopping(target=0.0, every=1)).steps == 1


def test_a_target_is_met_by_all_problems():
    found = minimize(
        lambda x: flat(x) + np.array([[0.0], [1.0]]), np.zeros((2, 1)), 1.0, steps=5,
        callbacks=EarlyStopping(target=0.5, every=1),
    )  # fmt: skip
    assert found.stopped_by is None


def test_stopping_is_looked_at_every_ten_steps_by_default():
    assert minimize(flat, np.zeros(2), 1.0, steps=50, callbacks=EarlyStopping(target=1.0)).steps == 10


def test_samples_are_counted_by_all_dimensions_of_an_event():
    shapes = []

    def score(x):
        shapes.append(x.shape)
        return (x**2).sum((-1, -2))

    minimize(score, np.zeros((3, 4)), 1.0, steps=1, event_dims=2)
    assert shapes == [(120, 3, 4)]


def test_maximize_takes_a_function_of_one_x():
    found = maximize(lambda x: -float(x @ x), np.ones(3), 1.0, 20, steps=2, vectorized=False, seed=1)
    assert found.score == -float(found.x @ found.x)


def test_maximize_shows_a_bar(capsys):
    maximize(hill, np.ones(3), 1.0, 20, steps=2, progress=True)
    assert "best" in capsys.readouterr().err


def test_a_result_stays_when_its_method_goes_on():
    found = minimize(lambda x: -hill(x), np.ones(3), 1.0, 20, steps=2, seed=1)
    before = [a.copy() for a in (found.mu, found.sigma, found.x)]
    found.method.tell(-hill(found.method.ask()))
    for a, b in zip((found.mu, found.sigma, found.x), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_plot_shows_how_far_a_maximum_is_from_the_offset(monkeypatch):
    monkeypatch.setitem(mpl.rcParams, "backend", "Agg")
    lines = maximize(hill, np.ones(3), 1.0, 20, steps=3, seed=1).history.plot(offset=0.0).axes[0].lines
    assert lines
    assert all((np.asarray(line.get_ydata()) > 0).all() for line in lines)


@pytest.mark.parametrize("search", [minimize, maximize])
def test_both_find_the_middle(search):
    found = search(hill if search is maximize else lambda x: -hill(x), np.ones(3), 1.0, steps=60, seed=1)
    np.testing.assert_allclose(found.x, 0, atol=1e-3)
