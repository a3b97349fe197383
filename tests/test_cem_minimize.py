"""`minimize` and `maximize`: what is passed on, when they stop, and what they return."""

from __future__ import annotations

import inspect
import math
import sys
import typing
from fractions import Fraction

import matplotlib as mpl
import numpy as np
import pytest
import torch
from cuops.cem import CrossEntropyMethod, EarlyStopping, History, maximize, minimize
from cuops.cem._minimize import Options


def flat(x):
    return 0 * x.sum(-1)


def hill(x):
    return -(x**2).sum(-1)


def test_a_target_that_is_met_exactly_stops():
    assert minimize(flat, np.zeros(2), 1.0, steps=5, callbacks=EarlyStopping(target=0.0, every=1)).steps == 1


def test_a_sigma_that_is_met_exactly_stops():
    rest = EarlyStopping(sigma=0.5, every=1)
    assert minimize(flat, np.zeros(2), 1.0, steps=5, sigma_floor=0.5, sigma_ceiling=0.5, callbacks=rest).steps == 1


@pytest.mark.parametrize(("search", "score"), [(minimize, math.inf), (maximize, -math.inf)])
def test_no_steps_are_no_evaluations(search, score, array):
    found = search(lambda x: 1 / 0, array([1.0, 2.0]), 1.0, steps=0)
    assert found.evaluations == found.steps == 0
    assert (found.x.tolist(), found.mu.tolist(), float(found.score)) == ([1.0, 2.0], [1.0, 2.0], score)


def test_of_one_sample_sigma_is_what_smoothing_leaves_of_it(array):
    found = minimize(lambda x: (x**2).sum(-1), array([1.0, 2.0]), 1.0, 1, steps=2, smoothing=(1.0, 0.75), seed=1)
    assert found.sigma.tolist() == [0.0625, 0.0625]
    assert found.mu.tolist() == found.method.population[0].tolist()


def test_both_take_the_same_arguments():
    assert inspect.signature(minimize) == inspect.signature(maximize)


def test_both_hand_on_the_arguments_of_the_method():
    parameters = inspect.signature(CrossEntropyMethod).parameters.values()
    options = {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "maximize"}
    assert {name: annotation.__forward_arg__ for name, annotation in Options.__annotations__.items()} == options


@pytest.mark.skipif(sys.version_info < (3, 11), reason="has no typing.Unpack")
def test_annotations_can_be_read_at_run_time():
    assert typing.get_type_hints(minimize)["options"]


def test_a_target_is_met_by_all_problems():
    found = minimize(
        lambda x: flat(x) + np.array([[0.0], [1.0]]), np.zeros((2, 1)), 1.0, steps=5,
        callbacks=EarlyStopping(target=0.5, every=1),
    )  # fmt: skip
    assert found.stopped_by is None


def test_each_problem_may_rest_for_a_reason_of_its_own(array):
    steps = iter(range(50))

    def score(x):  # the first problem is below the target and gets ever better; the second one never does
        return flat(x) + array([[-float(next(steps))], [1.0]])

    rest = EarlyStopping(target=0.5, patience=3, every=1)
    found = minimize(score, array([[0.0], [0.0]]), 1.0, steps=20, callbacks=rest)
    assert found.steps == 4
    assert found.stopped_by is rest


def test_a_problem_without_a_reason_keeps_all_going(array):
    steps = iter(range(50))

    def score(x):
        return flat(x) + array([[-1.0], [100.0 - next(steps)]])

    rest = EarlyStopping(target=0.0, sigma=1e-9, patience=3, every=1)
    assert minimize(score, array([[0.0], [0.0]]), 1.0, steps=20, callbacks=rest).stopped_by is None


def test_stopping_is_looked_at_every_ten_steps_by_default():
    assert minimize(flat, np.zeros(2), 1.0, steps=50, callbacks=EarlyStopping(target=1.0)).steps == 10


def test_steps_may_be_small_integers_of_numpy():
    few = EarlyStopping(patience=np.uint8(3), every=np.uint8(1))
    assert minimize(flat, np.zeros(2), 1.0, steps=50, callbacks=few).steps == 4
    method = CrossEntropyMethod(np.arange(400.0).reshape(200, 2), 1.0, 6, event_dims=2)
    method.shift(np.int8(2))
    np.testing.assert_array_equal(method.mu[:-2], np.arange(400.0).reshape(200, 2)[2:])


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


@pytest.mark.parametrize(
    "kind",
    [
        Fraction,
        np.float64,
        np.array,
        lambda value: np.array([value]),
        lambda value: torch.tensor(value, dtype=torch.float64),
        lambda value: torch.tensor([[value]], dtype=torch.float64, requires_grad=True),
    ],
    ids=["number", "numpy's number", "array ()", "array (1,)", "tensor ()", "tensor (1, 1)"],
)
def test_the_score_of_one_x_may_be_a_number_of_any_kind(kind, array):
    found, want = (
        minimize(
            lambda x, kind=kind: kind(float((x**2).sum())),
            array([1.0, 2.0]),
            1.0,
            20,
            steps=2,
            seed=1,
            vectorized=False,
        )
        for kind in (kind, float)
    )
    assert found.score == want.score


@pytest.mark.parametrize("infinite", [10**400, np.inf, torch.tensor(np.inf)], ids=["integer", "float", "tensor"])
def test_a_score_beyond_all_floats_is_never_elite(infinite, array):
    found = minimize(
        lambda x: infinite if x[0] < 0 else float(x[0]), array([0.0]), 1.0, 50, steps=3, seed=1, vectorized=False
    )
    assert math.isfinite(found.score)
    assert float(found.x[0]) >= 0


@pytest.mark.parametrize(
    ("error", "value"),
    [
        (TypeError, None),
        (TypeError, "1"),
        (TypeError, b"1"),
        (TypeError, 1j),
        (TypeError, [1.0]),
        (TypeError, np.array("1")),
        (TypeError, np.str_("1")),
        (TypeError, np.complex64(1)),
        (TypeError, np.array([1.0], object)),
        (TypeError, np.ma.masked),
        (TypeError, torch.tensor(1j)),
        (TypeError, torch.tensor([1.0]).to_sparse()),
        (ValueError, np.ones(2)),
        (ValueError, np.ones((1, 2))),
        (ValueError, np.ones(0)),
        (ValueError, torch.ones(2)),
        (ValueError, torch.ones(2, 1)),
        (ValueError, torch.ones(0)),
    ],
    ids=lambda value: repr(value) if not isinstance(value, type) else value.__name__,
)
def test_what_is_no_score_of_one_x_is_refused_by_the_functions_name(error, value, array):
    with pytest.raises(error, match="^function: expected "):
        minimize(lambda x: value, array([0.0, 1.0]), 1.0, 20, steps=1, vectorized=False)


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
    scores, _ = maximize(hill, np.ones(3), 1.0, 20, steps=3, seed=1).history.plot(offset=0.0).axes
    assert scores.lines
    assert all((np.asarray(line.get_ydata()) > 0).all() for line in scores.lines)
    assert scores.get_yscale() == "log"


@pytest.mark.parametrize("search", [minimize, maximize])
def test_both_find_the_middle(search):
    found = search(hill if search is maximize else lambda x: -hill(x), np.ones(3), 1.0, steps=60, seed=1)
    np.testing.assert_allclose(found.x, 0, atol=1e-3)


@pytest.mark.parametrize("score", [lambda x: float((x**2).sum()), lambda x: (x**2).sum()], ids=["a number", "of all"])
def test_one_score_for_all_samples_is_refused_with_what_mends_it(score, array):
    with pytest.raises(ValueError, match=r"^function: expected a score for each of the samples.* vectorized=False$"):
        minimize(score, array([0.0, 1.0]), 1.0, 20, steps=1)


@pytest.mark.parametrize(
    "score", [lambda x: None, lambda x: [0.0] * len(x), lambda x: "0"], ids=["None", "list", "str"]
)
def test_what_are_no_scores_is_refused_by_the_functions_name(score, array):
    with pytest.raises(TypeError, match=r"^function: expected a (torch.Tensor|numpy.ndarray), as the samples, got a "):
        minimize(score, array([0.0, 1.0]), 1.0, 20, steps=1)


def test_every_callback_sees_the_last_step():
    seen = []
    stop, log = (lambda method, history: len(history) == 3), (lambda method, history: seen.append(len(history)))
    found = minimize(flat, np.zeros(3), 1.0, 20, steps=5, callbacks=[stop, log])
    assert seen == [1, 2, 3]
    assert found.stopped_by is stop


def test_a_restart_that_keeps_the_best_goes_on_from_it(array):
    def restart(method, history):
        if len(history) == 20:
            method.reset(50.0, 1.0, keep_best=True)

    patient = EarlyStopping(patience=15, every=1)
    search = {"steps": 40, "callbacks": [restart, patient], "seed": 1}
    found = minimize(lambda x: (x**2).sum(-1), array([1.0, 1.0]), 1.0, 50, **search)
    assert found.score == found.history.best.min() < 1e-4
    assert (np.diff(found.history.best_so_far) <= 0).all()
    assert found.steps > 30


def test_a_history_is_not_written_to():
    history = minimize(flat, np.ones(3), 1.0, 20, steps=2).history
    history.best_so_far[...] = -1
    assert (history.best_so_far == 0).all()


@pytest.mark.parametrize(("offset", "error"), [(math.nan, ValueError), ("0", TypeError)])
def test_an_offset_that_is_no_number_is_refused(offset, error):
    with pytest.raises(error, match="^offset: expected a "):
        minimize(flat, np.ones(3), 1.0, 20, steps=2).history.plot(offset=offset)


@pytest.mark.parametrize("name", ["sigma", "tolerance"])
def test_what_nothing_can_fall_below_is_refused_as_a_reason_to_stop(name):
    with pytest.raises(ValueError, match=f"^{name}: expected a finite number of at least 0, got -1"):
        EarlyStopping(**{"target": 0.0, name: -1.0})


def test_nothing_stops_before_the_first_step():
    method = CrossEntropyMethod(np.zeros(3), 1.0, 5)
    assert not EarlyStopping(sigma=5.0, target=0.0, patience=1, every=1)(method, History(method))
