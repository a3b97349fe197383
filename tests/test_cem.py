"""The Cross-Entropy Method finds optima, and its options do what their names say, on NumPy, on PyTorch and on a GPU."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from cem_problems import on_host, rastrigin, rosenbrock, sphere, told
from cuops.cem import CrossEntropyMethod, EarlyStopping, maximize, minimize


def test_sphere_to_a_millionth_in_10000_evaluations(array):
    found = minimize(sphere, array([2.0] * 10), 1.0, 100, steps=100, seed=1)
    assert found.evaluations == 10_000
    assert float(found.score) < 1e-6
    assert np.allclose(on_host(found.mu), 0, atol=1e-3)


def test_sphere_in_float32(array):
    found = minimize(sphere, array([2.0] * 10, "float32"), 1.0, 100, steps=100, seed=1)
    assert float(found.score) < 1e-6
    assert str(found.x.dtype).endswith("float32")


def test_maximize_is_minimize_of_the_negative(array):
    least = minimize(sphere, array([2.0] * 3), 1.0, 50, steps=20, seed=3)
    greatest = maximize(lambda x: -sphere(x), array([2.0] * 3), 1.0, 50, steps=20, seed=3)
    assert float(greatest.score) == -float(least.score)
    assert (on_host(greatest.x) == on_host(least.x)).all()


def test_rosenbrock_in_10_dimensions_to_a_hundredth_in_240000_evaluations(array):
    found = minimize(
        rosenbrock,
        array([0.0] * 10),
        0.5,
        300,
        steps=800,
        elites=0.1,
        smoothing=(1.0, 0.3),
        covariance="full",
        noise=0.003,
        noise_decrease=0.003 / 640,  # none is left for the last fifth
        seed=1,
    )
    assert found.evaluations == 240_000
    assert float(found.score) < 1e-2


def test_a_result_is_shown_in_a_line_and_equal_to_itself_alone(array):
    one, other = (minimize(sphere, array([2.0] * 300), 1.0, 50, steps=3, seed=1) for _ in range(2))
    assert str(one) == repr(one)
    assert len(repr(one)) < 120
    assert f"score={float(one.score):.6g}" in repr(one)
    assert "(300,)" in repr(one)
    assert "evaluations=150" in repr(one)
    assert one == one
    assert one != other
    assert one.history != other.history
    assert len({one, other}) == 2
    batch = minimize(sphere, array([[2.0]] * 900), 1.0, 50, steps=1, seed=1)
    assert len(repr(batch)) < 120


def test_rastrigin_in_10_dimensions_in_60000_evaluations(array):
    found = minimize(rastrigin, array([2.0] * 10), 3.0, 400, steps=150, elites=0.1, smoothing=(1.0, 0.4), seed=1)
    assert found.evaluations == 60_000
    assert float(found.score) < 1e-2


def test_independent_problems_in_one_batch_find_their_own_optima(array):
    optima = array(np.linspace(-3, 3, 12).reshape(2, 3, 2).tolist())
    found = minimize(
        lambda x: ((x - optima[..., None, :]) ** 2).sum(-1),
        array(np.zeros((2, 3, 2)).tolist()),
        2.0,
        60,
        steps=60,
        seed=1,
    )
    assert found.score.shape == (2, 3)
    assert np.allclose(on_host(found.x), on_host(optima), atol=1e-3)


def test_full_covariance_follows_a_narrow_ridge(array):
    def ridge(x):
        return (x[..., 0] + x[..., 1]) ** 2 * 1e4 + (x[..., 0] - x[..., 1] - 4) ** 2

    # Scores of a few tenths end the random walk along the ridge; only samples along it get there.
    arguments = {"elites": 0.25, "smoothing": 1.0, "steps": 40, "seed": 2}
    full = minimize(ridge, array([4.0, -4.0]), 2.0, 100, covariance="full", **arguments)
    diagonal = minimize(ridge, array([4.0, -4.0]), 2.0, 100, covariance="diagonal", **arguments)
    assert float(full.score) < 1e-6
    assert float(diagonal.score) > 100 * float(full.score)


def test_the_refit_is_the_formula(array):
    mu, sigma = array([1.0, -2.0, 0.5]), array([0.5, 1.0, 2.0])
    method = CrossEntropyMethod(
        mu, sigma, 40, elites=8, smoothing=(0.7, 0.4), sigma_decay=0.9, noise=0.3, noise_decrease=0.1, seed=4
    )
    expected_mu, expected_sigma = on_host(mu), on_host(sigma)
    for step in range(5):
        x = on_host(method.ask())
        scores = sphere(x)
        elite = x[np.argsort(scores)[:8]]
        expected_mu = 0.7 * elite.mean(0) + 0.3 * expected_mu
        deviation = np.sqrt(elite.var(0) + max(0.3 - 0.1 * step, 0))
        expected_sigma = 0.9 * (0.4 * deviation + 0.6 * expected_sigma)
        method.tell(array(scores.tolist()))
        assert np.allclose(on_host(method.mu), expected_mu, rtol=1e-12)
        assert np.allclose(on_host(method.sigma), expected_sigma, rtol=1e-12)
        assert on_host(method.elites).tolist() == sorted(np.argsort(scores)[:8])


def test_sigma_keeps_its_limits(array):
    low = told(CrossEntropyMethod(array([0.0] * 4), 1.0, 50, sigma_floor=0.25, seed=1), sphere, 30)
    assert (on_host(low.sigma) == 0.25).all()
    high = told(CrossEntropyMethod(array([0.0] * 4), 1.0, 50, sigma_ceiling=0.5, noise=9.0, seed=1), sphere, 3)
    assert (on_host(high.sigma) == 0.5).all()


def test_repr_of_a_method_tells_problems_and_population(array):
    shown = repr(CrossEntropyMethod(array([[0.0] * 3] * 2), 1.0, 30, elites=10, maximize=True))
    for part in ("batch_shape=(2,)", "event_shape=(3,)", "float64", "num_samples=30", "elites=10", "maximize=True"):
        assert part in shown, shown


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_limits_hold_for_either_covariance(array, covariance):
    method = CrossEntropyMethod(array([0.0] * 4), 1.0, 50, sigma_floor=0.25, covariance=covariance, seed=1)
    assert np.allclose(on_host(told(method, sphere, 30).sigma), 0.25, rtol=1e-12)


def test_samples_that_are_no_elites_do_not_count(array):
    method = CrossEntropyMethod(array([0.0] * 3), 1.0, 20, elites=8, smoothing=1.0, covariance="full", seed=1)
    x = method.ask()
    x[0] = math.inf
    scores = array([math.inf] * 20)
    scores[5:7] = 0
    elite = on_host(x)[5:7]
    method.tell(scores)
    assert np.allclose(on_host(method.mu), elite.mean(0), rtol=1e-12)
    assert np.allclose(on_host(method.covariance), np.cov(elite.T, bias=True), rtol=1e-11, atol=1e-13)


def test_covariance_is_that_of_the_elites(array):
    method = CrossEntropyMethod(array([1.0, 2.0, 3.0]), 1.0, 200, elites=50, smoothing=1.0, covariance="full", seed=1)
    x = on_host(method.ask())
    scores = rosenbrock(x)
    method.tell(array(scores.tolist()))
    elite = x[np.argsort(scores)[:50]]
    assert np.allclose(on_host(method.covariance), np.cov(elite.T, bias=True), rtol=1e-11, atol=1e-13)
    drawn = on_host(method.ask()) - on_host(method.mu)
    # The covariance of 200 draws has a relative standard error of sqrt(2 / 200) on its diagonal.
    assert np.allclose(np.diag(drawn.T @ drawn / 200), np.diag(np.cov(elite.T, bias=True)), rtol=5 * 0.1)


def test_one_elite_is_the_new_mean(array):
    method = CrossEntropyMethod(array([1.0, 2.0]), 1.0, 20, elites=1, smoothing=1.0, seed=1)
    x = on_host(method.ask())
    method.tell(array(sphere(x).tolist()))
    assert (on_host(method.mu) == x[sphere(x).argmin()]).all()
    assert (on_host(method.sigma) == 0).all()


@pytest.mark.parametrize("maximal", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_are_never_elite(array, bad, maximal):
    method = CrossEntropyMethod(array([0.0] * 3), 1.0, 30, elites=10, maximize=maximal, smoothing=1.0, seed=1)
    x = on_host(method.ask())
    scores = np.arange(30.0)
    scores[:26] = bad
    method.tell(array(scores.tolist()))
    assert np.allclose(on_host(method.mu), x[26:].mean(0), rtol=1e-12)  # four elites are left of ten
    assert np.allclose(on_host(method.sigma), x[26:].std(0), rtol=1e-12)
    assert float(method.best_score) == (29 if maximal else 26)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_without_a_finite_score_the_distribution_stays(array, covariance):
    method = CrossEntropyMethod(array([[1.0, 2.0]] * 2), 1.0, 30, covariance=covariance, seed=1)
    method.ask()
    scores = np.stack([np.full(30, math.nan), np.arange(30.0)])
    method.tell(array(scores.tolist()))
    assert (on_host(method.mu)[0] == [1, 2]).all()
    assert (on_host(method.sigma)[0] == 1).all()
    assert math.isinf(on_host(method.best_score)[0])
    assert (on_host(method.mu)[1] != [1, 2]).all()


def test_equal_scores_are_taken_in_their_order(array):
    method = CrossEntropyMethod(array([0.0]), 1.0, 64, elites=8, seed=1)
    method.ask()
    method.tell(array([1.0] * 50 + [0.0] * 14))
    assert on_host(method.elites).tolist() == list(range(50, 58))


def test_the_best_of_all_steps_is_kept(array):
    method = CrossEntropyMethod(array([0.0] * 2), 1.0, 30, seed=1)
    seen_x, seen = [], []
    for step in range(6):
        x = on_host(method.ask()).copy()
        scores = sphere(x) + (0 if step == 2 else 5)
        seen_x.append(x)
        seen.append(scores)
        method.tell(array(scores.tolist()))
    seen_x, seen = np.concatenate(seen_x), np.concatenate(seen)
    assert float(method.best_score) == seen.min()
    assert (on_host(method.best_x) == seen_x[seen.argmin()]).all()


def test_kept_elites_come_first_in_the_next_population(array):
    method = CrossEntropyMethod(array([1.0] * 3), 1.0, 40, keep_elites=4, seed=1)
    fresh = on_host(method.ask()).copy()
    scores = sphere(fresh)
    assert len(np.unique(scores)) == 40  # nothing is kept before the first step
    method.tell(array(scores.tolist()))
    following = on_host(method.ask())
    assert (following[:4] == fresh[sorted(np.argsort(scores)[:4])]).all()
    assert not np.isin(following[4:], fresh).any()


def test_the_population_shrinks_down_to_twice_the_elites(array):
    method = CrossEntropyMethod(array([1.0] * 3), 1.0, 100, elites=10, population_decay=1.5, seed=1)
    sizes = []
    for _ in range(7):
        x = method.ask()
        sizes.append(x.shape[0])
        method.tell(sphere(x))
    assert sizes == [100, 67, 44, 30, 20, 20, 20]


@pytest.mark.parametrize("color", [400.0, 1e5])
def test_noise_of_any_color_has_its_variance(array, color):
    x = on_host(CrossEntropyMethod(array([0.0] * 10), 1.0, 4000, color=color, seed=1).ask())
    assert 0.9 < x.var() < 1.1


def test_antithetic_samples_come_in_pairs(array):
    mu = array([1.0, -1.0])
    x = on_host(CrossEntropyMethod(mu, 1.0, 50, antithetic=True, seed=1).ask()) - on_host(mu)
    assert np.allclose(x[0::2], -x[1::2], atol=1e-14)


def test_colored_noise_has_its_spectrum_and_variance(array):
    horizon, samples = 64, 4000
    method = CrossEntropyMethod(array(np.zeros((horizon, 2)).tolist()), 2.0, samples, event_dims=2, color=2.0, seed=1)
    x = on_host(method.ask())
    assert x.shape == (samples, horizon, 2)
    # A variance of n values that depend on each other over the horizon: at least sqrt(2 / samples) of relative error.
    assert np.allclose(x.var(0), 4, rtol=6 * math.sqrt(2 / samples))
    power = (np.abs(np.fft.rfft(x, axis=1)) ** 2).mean((0, 2))
    slope = np.polyfit(np.log(np.arange(1, horizon // 2)), np.log(power[1 : horizon // 2]), 1)[0]
    assert abs(slope + 2) < 0.1
    assert np.isclose(power[0], power[1] * 1.0, rtol=0.2)


def test_white_noise_is_independent_over_the_horizon(array):
    x = on_host(CrossEntropyMethod(array(np.zeros((16, 1)).tolist()), 1.0, 4000, event_dims=2, seed=1).ask())[..., 0]
    correlation = np.corrcoef(x.T) - np.eye(16)
    assert np.abs(correlation).max() < 5 / math.sqrt(4000)


def test_asking_again_gives_the_same_and_steps_give_others(array):
    method = CrossEntropyMethod(array([0.0] * 3), 1.0, 20, sigma_floor=1.0, sigma_ceiling=1.0, seed=1)
    first, again = on_host(method.ask()).copy(), on_host(method.ask()).copy()
    assert (first == again).all()
    method.tell(sphere(method.population))
    assert not np.isin(on_host(method.ask()) - on_host(method.mu), first).any()


def test_seeds_and_generators_reproduce(array):
    def draw(**options):
        return on_host(CrossEntropyMethod(array([0.0] * 3), 1.0, 20, **options).ask()).copy()

    assert (draw(seed=5) == draw(seed=5)).all()
    assert not (draw(seed=5) == draw(seed=6)).any()
    torch.manual_seed(7)
    np.random.seed(7)
    first = draw()
    assert not (first == draw()).any()
    torch.manual_seed(7)
    np.random.seed(7)
    assert (first == draw()).all()


def test_numpy_and_torch_draw_the_same():
    x = CrossEntropyMethod(np.zeros(3), 1.0, 20, seed=5).ask()
    drawn = CrossEntropyMethod(torch.zeros(3, dtype=torch.float64), 1.0, 20, seed=5).ask().numpy()
    assert np.allclose(drawn, x, rtol=1e-12)  # where there is a GPU, it draws for NumPy


def test_numpy_is_silent_where_it_is_told_to_raise():
    method = CrossEntropyMethod(np.zeros(3), 1e-170, 20, seed=1)
    with np.errstate(all="raise"):
        method.ask()
        method.tell(np.linspace(1e308, 1.7e308, 20))


def test_samples_of_16_bits_have_a_state_of_32():
    method = CrossEntropyMethod(torch.zeros(4), 1.0, 200, dtype=torch.bfloat16, seed=1)
    told(method, lambda x: (x.float() - 1).square().sum(-1), 30)
    assert method.ask().dtype == torch.bfloat16
    assert method.mu.dtype == torch.float32
    assert torch.allclose(method.mu, torch.ones(4), atol=2**-6)


def test_shifting_a_plan_drops_its_first_steps(array):
    mu = np.arange(12.0).reshape(4, 3)
    method = CrossEntropyMethod(array(mu.tolist()), 1.0, 30, event_dims=2, keep_elites=2, smoothing=1e-9, seed=1)
    x = on_host(method.ask()).copy()
    method.tell(array(np.arange(30.0).tolist()))
    method.shift(1, sigma=3.0)
    assert np.allclose(on_host(method.mu), mu[[1, 2, 3, 3]], atol=1e-6)
    assert (on_host(method.sigma) == 3).all()
    assert (on_host(method.ask())[:2] == x[:2][:, [1, 2, 3, 3]]).all()  # the first two samples had the best scores
    assert math.isinf(float(method.best_score))


def test_a_reset_starts_anew_with_other_numbers(array):
    method = CrossEntropyMethod(array([0.0] * 3), 1.0, 30, noise=4.0, noise_decrease=1.0, keep_elites=2, seed=1)
    first = on_host(method.ask()).copy()
    method.tell(sphere(method.population))
    method.reset(5.0, 0.5)
    assert method.steps == 0
    again = on_host(method.ask())
    assert abs(again.mean() - 5) < 0.5
    assert not np.isin(np.round((again - 5) / 0.5, 9), np.round(first, 9)).any()


def test_early_stopping_and_callbacks(array):
    calls = []
    found = minimize(
        sphere,
        array([2.0] * 3),
        1.0,
        60,
        steps=500,
        seed=1,
        callbacks=[lambda *_: calls.append(1), EarlyStopping(target=1e-4, every=5)],
    )
    assert float(found.score) <= 1e-4
    assert found.steps % 5 == 0
    assert len(calls) == found.steps < 500
    assert isinstance(found.stopped_by, EarlyStopping)
    assert (
        minimize(sphere, array([2.0] * 3), 1.0, 60, steps=500, seed=1, callbacks=EarlyStopping(sigma=1e-3)).steps < 100
    )
    assert (
        minimize(
            lambda x: 0 * sphere(x), array([2.0]), 1.0, steps=500, callbacks=EarlyStopping(patience=20, every=1)
        ).steps
        == 21
    )
    assert minimize(sphere, array([2.0]), 1.0, steps=7).stopped_by is None


def test_a_problem_without_finite_scores_does_not_get_better(array):
    def half(x):
        scores = sphere(x)
        scores[1] = math.nan
        return scores

    rest = EarlyStopping(patience=5, tolerance=1e9, every=1)
    assert minimize(half, array([[2.0], [2.0]]), 1.0, steps=50, callbacks=rest).steps == 6


@pytest.mark.parametrize("name", ["every", "patience"])
def test_early_stopping_refuses_less_than_a_step(name):
    with pytest.raises(ValueError, match=f"{name}: expected an integer of at least 1, got 0"):
        EarlyStopping(**{"target": 0.0, name: 0})


@pytest.mark.parametrize("name", ["target", "sigma", "tolerance"])
def test_early_stopping_refuses_what_is_no_number(name):
    with pytest.raises(TypeError, match=f"{name}: expected a number, got str"):
        EarlyStopping(**{"target": 0.0, name: "1"})


def test_early_stopping_needs_something_to_stop_for():
    with pytest.raises(ValueError, match="target, sigma, patience: expected at least one of them"):
        EarlyStopping(every=5)


def test_bfloat16_of_numpy_arrays_takes_its_own_scores():
    start = np.zeros(3, ml_dtypes.bfloat16)
    found = minimize(lambda x: ((x - 1) ** 2).sum(-1), start, 1.0, 100, steps=30, seed=1)
    assert float(found.score) < 0.01


def test_indices_of_elites_are_none_before_the_first_step(array):
    assert (on_host(CrossEntropyMethod(array([0.0]), 1.0, 9, elites=3, seed=1).elites) == -1).all()
