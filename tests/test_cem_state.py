"""What surrounds the steps of a Cross-Entropy Method: its state, its history, its errors."""

import copy
import io
import math
import pickle
import types

import numpy as np
import pytest
import torch
from cem_problems import OPTIONS, bits, on_host, sphere, told
from cuops.cem import CrossEntropyMethod, minimize


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("pending", [False, True], ids=["after tell", "after ask"])
def test_a_saved_state_goes_on_bit_for_bit(array, options, pending):
    def make(seed):
        return CrossEntropyMethod(array([[1.0, 2.0, 3.0]] * 2), 1.0, 40, seed=seed, **options)

    method = told(make(1), sphere, 3)
    if pending:
        method.ask()
    saved = method.state_dict()
    other = make(2)
    other.load_state_dict(saved)
    for one in (method, other):
        if pending:
            one.tell(sphere(one.population))
        told(one, sphere, 3)
    assert bits(method) == bits(other)
    assert method.steps == other.steps == 6 + pending
    told(method, sphere)
    assert bits(method) != bits(other)


def test_there_is_no_population_before_the_first_ask(array):
    method, saved = (CrossEntropyMethod(array([[1.0, 2.0, 3.0]] * 2), 1.0, 40, seed=1) for _ in range(2))
    assert tuple(method.population.shape) == (2, 0, 3)
    told(method, sphere, 2)
    assert tuple(method.population.shape) == (2, 40, 3)
    method.load_state_dict(saved.state_dict())
    assert tuple(method.population.shape) == (2, 0, 3)


def test_a_saved_state_keeps_the_sign_of_zero(array):
    method, other = (CrossEntropyMethod(array([start]), 0.0, 4, seed=1) for start in (-0.0, 1.0))
    method.ask()
    other.load_state_dict(method.state_dict())
    assert bits(other) == bits(method)
    assert on_host(other.population).tobytes() == on_host(method.population).tobytes()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda method: pickle.loads(pickle.dumps(method))])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_copies_go_on_bit_for_bit_and_alone(array, options, copied):
    method = told(CrossEntropyMethod(array([[1.0, 2.0, 3.0]] * 2), 1.0, 40, seed=1, **options), sphere, 3)
    method.ask()
    other = copied(method)
    before = bits(method)
    told(other, sphere, 4)
    assert bits(method) == before
    assert bits(told(method, sphere, 4)) == bits(other) != before


def test_a_shallow_copy_shares_what_a_subclass_has_beside():
    class Planner(CrossEntropyMethod):
        model = None

    method = Planner(torch.zeros(2), 1.0, 10, seed=1)
    method.model = torch.nn.Linear(2, 1)
    other = copy.copy(method)
    assert type(other) is Planner
    assert other.model is method.model


@pytest.mark.parametrize("options", [{"keep_elites": 2}, {"covariance": "full"}, {"color": 1.0}], ids=str)
def test_methods_that_were_made_for_inference_go_on(array, options):
    def method():
        made = CrossEntropyMethod(array([0.0, 0.0, 0.0]), 1.0, 20, seed=1, low=-2.0, high=2.0, **options)
        return told(made, sphere)

    def used(method):
        told(method, sphere).shift()
        told(method, sphere).reset(1.0, 0.5)
        told(method, sphere).load_state_dict(method.state_dict())
        return told(method, sphere)

    with torch.inference_mode():
        for_inference = method()
    assert bits(used(for_inference)) == bits(used(method()))


@pytest.mark.parametrize("kind", [np.array, torch.tensor], ids=["numpy", "torch"])  # on a GPU values are not looked at
def test_samples_that_could_not_be_drawn_are_not_to_be_told_of(kind):
    method = told(CrossEntropyMethod(kind([1.0, 2.0]), 1.0, 30, seed=1), sphere)
    method.sigma[0] = -1.0
    with pytest.raises(ValueError, match="sigma: expected numbers of at least 0"):
        method.ask()
    with pytest.raises(RuntimeError, match=r"tell: expected ask\(\) before it"):
        method.tell(kind([0.0] * 30))


def test_a_state_goes_through_a_file(array):
    method = told(CrossEntropyMethod(array([1.0, 2.0]), 1.0, 30, seed=1), sphere, 2)
    file = io.BytesIO()
    torch.save(method.state_dict(), file)
    file.seek(0)
    other = CrossEntropyMethod(array([0.0, 0.0]), 1.0, 30)
    other.load_state_dict(torch.load(file, weights_only=isinstance(method.mu, torch.Tensor)))
    assert bits(told(method, sphere)) == bits(told(other, sphere))


def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(array):
    method = told(CrossEntropyMethod(array([1.0, 2.0]), 1.0, 30, seed=1), sphere, 2)
    before = bits(method)
    saved = told(CrossEntropyMethod(array([1.0, 2.0, 3.0]), 1.0, 30, seed=1), sphere).state_dict()
    with pytest.raises(ValueError, match="state_dict: mu: expected .* \\(1, 2\\)"):
        method.load_state_dict(saved)
    with pytest.raises(ValueError, match="state_dict: expected the keys"):
        method.load_state_dict({"mu": saved["mu"]})
    assert bits(method) == before


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((2, 3), {"num_samples": 40, "elites": 6}, r"samples_shape: expected \(2, 40, 3\), as .*, got \(2, 30, 3\)"),
        ((2, 1, 3), {}, r"samples_shape: expected \(2, 1, 30, 3\), as .*, got \(2, 30, 3\)"),
        ((2, 3, 1), {"event_dims": 2}, r"samples_shape: expected \(2, 30, 3, 1\), as .*, got \(2, 30, 3\)"),
        ((2, 3), {"maximize": True}, "maximize: expected True, as this method has, got False"),
    ],
    ids=str,
)
def test_a_state_of_another_search_is_refused_and_nothing_changes(array, shape, options, message):
    saved = told(CrossEntropyMethod(array(np.ones((2, 3)).tolist()), 1.0, 30, seed=1), sphere).state_dict()
    method = CrossEntropyMethod(array(np.ones(shape).tolist()), 1.0, **{"num_samples": 30, "seed": 1, **options})
    before = bits(method)
    with pytest.raises(ValueError, match=f"^state_dict: {message}"):
        method.load_state_dict(saved)
    assert bits(method) == before


def test_a_state_that_is_none_is_refused_and_nothing_changes(array):
    method = told(CrossEntropyMethod(array([1.0, 2.0]), 1.0, 30, seed=1), sphere, 2)
    before, saved = bits(method), method.state_dict()
    wrong = {
        "expected a dictionary that state_dict\\(\\) gave, got NoneType": None,
        "expected a dictionary .* got list": [],
        "sigma: expected .* \\(1, 2\\) .* got NoneType": {**saved, "sigma": None},
        "population: expected .* \\(1, 30, 2\\) .* got int": {**saved, "population": 3},
        "population: expected .* \\(1, 30, 2\\) .* got .* \\(2,\\)": {**saved, "population": saved["mu"][0]},
        "steps_of_host: expected an integer, got NoneType": {**saved, "steps_of_host": None},
    }
    if isinstance(method.mu, torch.Tensor):
        wrong["clock: expected .* got one of layout torch.strided on meta"] = {
            **saved,
            "clock": saved["clock"].to("meta"),
        }
        wrong["sigma: expected .* got one of layout torch.sparse"] = {**saved, "sigma": saved["sigma"].to_sparse()}
    for message, state in wrong.items():
        with pytest.raises((TypeError, ValueError), match=f"^state_dict: {message}"):
            method.load_state_dict(state)
    assert bits(method) == before
    assert method.steps == 2


ZERO = np.zeros(3)
WRONG = {
    "num_samples: expected an integer from 1 to 2147483647, got 0": lambda: CrossEntropyMethod(ZERO, 1.0, 0),
    "num_samples: expected an integer from 1 to 2147483647, got 2147483648": lambda: CrossEntropyMethod(
        ZERO, 1.0, 2**31
    ),
    "num_samples: expected an integer, got float": lambda: CrossEntropyMethod(ZERO, 1.0, 10.0),
    "elites: expected an integer from 1 to 10, got 11": lambda: CrossEntropyMethod(ZERO, 1.0, 10, elites=11),
    "elites: expected a fraction over 0": lambda: CrossEntropyMethod(ZERO, 1.0, 10, elites=0.0),
    "sigma: expected finite numbers of at least 0": lambda: CrossEntropyMethod(ZERO, -1.0, 10),
    "sigma: expected finite numbers of": lambda: CrossEntropyMethod(ZERO, np.array([1, math.nan, 1]), 10),
    "sigma: expected a shape that broadcasts to mu's \\(3,\\), got \\(2,\\)": lambda: CrossEntropyMethod(
        ZERO, np.ones(2), 10
    ),
    "mu: expected finite numbers": lambda: CrossEntropyMethod(ZERO + math.inf, 1.0, 10),
    "mu: expected at least 2 dimensions": lambda: CrossEntropyMethod(ZERO, 1.0, 10, event_dims=2),
    "mu: expected .* no empty one": lambda: CrossEntropyMethod(np.zeros((0, 3)), 1.0, 10),
    "mu: expected float64, float32": lambda: CrossEntropyMethod(np.zeros(3, bool), 1.0, 10),
    "mu: expected values from low to high": lambda: CrossEntropyMethod(ZERO, 1.0, 10, low=1.0),
    "low: expected less than high": lambda: CrossEntropyMethod(ZERO, 1.0, 10, low=1.0, high=1.0),
    "low: expected numbers, -inf for none, got NaN": lambda: CrossEntropyMethod(ZERO, 1.0, 10, low=math.nan),
    "covariance: expected 'diagonal' or 'full'": lambda: CrossEntropyMethod(ZERO, 1.0, 10, covariance="low rank"),
    "covariance: expected 'diagonal' or 'full', got array": lambda: CrossEntropyMethod(
        ZERO, 1.0, 10, covariance=np.eye(3)
    ),
    "smoothing: expected numbers over 0": lambda: CrossEntropyMethod(ZERO, 1.0, 10, smoothing=(1.0, 0.0)),
    "smoothing: expected numbers over 0 and at most 1, got 1.5": lambda: CrossEntropyMethod(
        ZERO, 1.0, 10, smoothing=1.5
    ),
    "color: expected a finite number of at least 0": lambda: CrossEntropyMethod(ZERO, 1.0, 10, color=-1.0),
    "sigma_ceiling: expected a number, got str": lambda: CrossEntropyMethod(ZERO, 1.0, 10, sigma_ceiling="1"),
    "dtype: expected float64, float32, float16 or, with": lambda: CrossEntropyMethod(ZERO, 1.0, 10, dtype="int64"),
    "smoothing: expected a number or a pair": lambda: CrossEntropyMethod(ZERO, 1.0, 10, smoothing=(1.0, 0.5, 0.5)),
    "sigma_floor: expected a finite number of at least 0": lambda: CrossEntropyMethod(ZERO, 1.0, 10, sigma_floor=-1.0),
    "sigma_ceiling: expected at least sigma_floor": lambda: CrossEntropyMethod(
        ZERO, 1.0, 10, sigma_floor=2.0, sigma_ceiling=1.0
    ),
    "sigma_decay: expected a number over 0": lambda: CrossEntropyMethod(ZERO, 1.0, 10, sigma_decay=0.0),
    "keep_elites: expected an integer from 0 to 2": lambda: CrossEntropyMethod(ZERO, 1.0, 10, elites=2, keep_elites=3),
    "keep_elites: expected an integer from 0 to 9, got 10": lambda: CrossEntropyMethod(
        ZERO, 1.0, 10, elites=10, keep_elites=10
    ),
    "keep_elites: expected an integer from 0 to 0, got 1": lambda: CrossEntropyMethod(ZERO, 1.0, 1, keep_elites=1),
    "population_decay: expected a number of at least 1": lambda: CrossEntropyMethod(
        ZERO, 1.0, 10, population_decay=0.5
    ),
    "color: expected 0 with": lambda: CrossEntropyMethod(ZERO, 1.0, 10, color=1.0, covariance="full"),
    "dtype: expected float64 samples": lambda: CrossEntropyMethod(ZERO, 1.0, 10, dtype="float32"),
    "seed: expected None with a generator": lambda: CrossEntropyMethod(
        ZERO, 1.0, 10, seed=1, generator=np.random.default_rng()
    ),
    "seed: expected an integer of at least 0|seed: .* from 0 to": lambda: CrossEntropyMethod(ZERO, 1.0, 10, seed=-1),
    "generator: expected a numpy.random.Generator": lambda: CrossEntropyMethod(
        ZERO, 1.0, 10, generator=torch.Generator()
    ),
    "generator: expected a torch.Generator": lambda: CrossEntropyMethod(
        torch.zeros(3), 1.0, 10, generator=np.random.default_rng()
    ),
    "capture: expected a method of CUDA tensors": lambda: CrossEntropyMethod(ZERO, 1.0, 10).capture(sphere),
    "cuda_graph: expected mu as a tensor on CUDA": lambda: minimize(sphere, ZERO, 1.0, cuda_graph=True),
    "steps: expected an integer of at least 0": lambda: minimize(sphere, ZERO, 1.0, steps=-1),
    "function: expected a function, got int": lambda: minimize(3, ZERO, 1.0),
    "callbacks: expected a function, got float": lambda: minimize(sphere, ZERO, 1.0, callbacks=0.5),
    "callbacks: expected a function, got str": lambda: minimize(sphere, ZERO, 1.0, callbacks=["stop"]),
    "mu: expected a tensor on CUDA or the CPU, got one on meta": lambda: CrossEntropyMethod(
        torch.zeros(3, device="meta"), 1.0, 10
    ),
    "sigma: expected a tensor on mu's device, cpu, got one on meta": lambda: CrossEntropyMethod(
        torch.zeros(3), torch.ones(3, device="meta"), 10
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_argument_is_named(message):
    with pytest.raises((TypeError, ValueError), match=message):
        WRONG[message]()


def test_wrong_scores_leave_the_state_as_it_was(array):
    method = CrossEntropyMethod(array([1.0, 2.0]), 1.0, 30, seed=1)
    with pytest.raises(RuntimeError, match="tell: expected ask"):
        method.tell(array([0.0] * 30))
    before = bits(method)
    scores = sphere(method.ask())
    for wrong, error in (
        (scores[:29], ValueError),
        ([1.0] * 30, TypeError),
        (types.SimpleNamespace(shape=(30,)), TypeError),
        (scores[None], ValueError),
        (scores + 1j, TypeError),
    ):
        with pytest.raises(error, match="scores: expected"):
            method.tell(wrong)
    assert bits(method) == before
    method.tell(scores)
    with pytest.raises(RuntimeError, match="tell: expected ask"):
        method.tell(scores)


def test_scores_of_another_library_are_refused():
    method = CrossEntropyMethod(np.zeros(2), 1.0, 30)
    method.ask()
    with pytest.raises(TypeError, match="scores: expected a numpy.ndarray"):
        method.tell(torch.zeros(30))
    with pytest.raises(TypeError, match="scores: expected a plain numpy.ndarray"):
        method.tell(np.ma.zeros(30))


def test_scores_that_numpy_makes_an_array_of():
    class Series:
        """As pandas has it: a shape and values, but no methods of an array."""

        shape = (30,)

        def __array__(self, dtype=None, copy=None):
            return np.arange(30.0)

    methods = [CrossEntropyMethod(np.zeros(2), 1.0, 30, seed=1) for _ in range(2)]
    for method, scores in zip(methods, (np.arange(30.0), Series()), strict=True):
        method.ask()
        method.tell(scores)
    assert bits(methods[0]) == bits(methods[1])


@pytest.mark.filterwarnings("error")
def test_what_leaves_the_range_of_a_dtype_is_no_warning():
    for options in ({"color": 1.0}, {"covariance": "full"}):
        method = CrossEntropyMethod(np.zeros((2, 3), "float16"), 3e4, 50, seed=1, **options)
        told(method, lambda x: np.abs(x).max(-1).astype("float32"), 2)
    method = CrossEntropyMethod(np.zeros(3), 1.0, 10, seed=1)
    method.ask()
    method.tell(np.full(10, np.longdouble("1e4000")))
    assert method.best_score == np.inf


@pytest.mark.parametrize("dtype", ["int64", "int32", "float16", "float32", "bool"])
def test_scores_of_any_real_dtype(array, dtype):
    method = CrossEntropyMethod(array([0.0, 0.0]), 1.0, 8, elites=2, seed=1)
    method.ask()
    method.tell(array([1, 1, 0, 1, 1, 0, 1, 1], dtype))
    assert on_host(method.elites).tolist() == [2, 5]


def test_the_history_has_every_step(array):
    found = minimize(sphere, array([[1.0, 2.0], [2.0, 3.0]]), 1.0, 40, steps=12, elites=4, population_decay=1.1, seed=1)
    history = found.history
    assert len(history) == found.steps == 12
    assert history.evaluations[:3] == [40, 76, 109]
    assert history.best.shape == history.sigma.shape == (12, 2)
    assert (np.minimum.accumulate(history.best) == history.best_so_far).all()
    assert (history.best <= history.elite_mean).all()
    assert (history.elite_mean <= history.elite_worst).all()
    assert (history.best_so_far[-1] == on_host(found.score)).all()
    assert np.allclose(history.sigma[-1], on_host(found.sigma).mean(-1))
    method = found.method  # which goes on, and so does what is recorded
    told(method, sphere)
    history.record()
    assert len(history.best) == 13


def test_the_history_is_plotted(array, tmp_path):
    history = minimize(sphere, array([[1.0, 2.0], [2.0, 3.0]]), 1.0, 40, steps=12, seed=1).history
    figure = history.plot(tmp_path / "plot.png", offset=0.0)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert [line.get_label() for line in figure.axes[0].get_lines()] == [
        "best so far",
        "best of the step",
        "mean of the elites",
    ]
    assert len(figure.axes[1].get_lines()[0].get_xdata()) == 12


@pytest.mark.filterwarnings("error")
def test_a_history_without_finite_scores_is_plotted(tmp_path):
    history = minimize(lambda x: x.sum(-1) * np.nan, np.zeros((4, 3)), 1.0, 20, steps=3, seed=1).history
    history.plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").exists()


def test_a_history_without_steps_is_not_plotted(array, tmp_path):
    history = minimize(sphere, array([1.0, 2.0]), 1.0, 40, steps=0, seed=1).history
    assert len(history.best) == 0
    with pytest.raises(ValueError, match="plot: expected a history of at least one step, got none"):
        history.plot(tmp_path / "plot.png")
    assert not (tmp_path / "plot.png").exists()


def test_progress_is_shown_with_the_best_score(array, capfd):
    minimize(sphere, array([1.0, 2.0]), 1.0, 40, steps=12, seed=1, progress=True)
    shown = capfd.readouterr().err
    assert "12/12" in shown
    assert "best " in shown
    minimize(sphere, array([1.0, 2.0]), 1.0, 40, steps=12, seed=1)
    assert capfd.readouterr().err == ""


def test_a_function_of_one_x(array):
    many = minimize(sphere, array([1.0, 2.0]), 1.0, 40, steps=10, seed=1)
    one = minimize(
        lambda x: float(x[0] ** 2 + x[1] ** 2), array([1.0, 2.0]), 1.0, 40, steps=10, seed=1, vectorized=False
    )
    assert np.allclose(on_host(one.x), on_host(many.x), rtol=1e-12)


@pytest.mark.parametrize("kind", [np.array, torch.tensor], ids=["numpy", "torch"])  # on a GPU values are not looked at
@pytest.mark.parametrize("options", [{}, {"covariance": "full"}, {"color": 1.0}], ids=str)
def test_a_new_start_takes_the_numbers_that_a_first_one_takes(kind, options):
    method = told(CrossEntropyMethod(kind([1.0, 2.0]), 1.0, 30, seed=1, **options), sphere)
    before = bits(method)
    for change in (lambda bad: method.shift(sigma=bad), lambda bad: method.reset(0.0, bad)):
        for bad in (-1.0, math.nan, math.inf):
            with pytest.raises(ValueError, match="^sigma: expected finite numbers of at least 0"):
                change(bad)
    with pytest.raises(ValueError, match="^mu: expected finite numbers"):
        method.reset(math.nan, 1.0)
    assert bits(method) == before


def test_a_history_is_a_line():
    history = minimize(sphere, np.zeros(3), 1.0, steps=50).history
    assert repr(history) == f"History({history.method!r}, steps=50)"
