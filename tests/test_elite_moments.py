"""The kernels of a step of the Cross-Entropy Method against the reference."""

import math

import pytest
import torch
from cuops.cem._state import Refit, State
from cuops.cem._update import update

pytestmark = pytest.mark.gpu

REFIT = Refit(False, 0.7, 0.6, 0.99, 1e-3, 5.0, 0.01, 0.002)
# problems, samples, dimensions, elites, kept: of one sample, of odd sizes, of vectors and tiles that end within a row, of many
SHAPES = [
    (1, 1, 1, 1, 0),
    (3, 17, 5, 1, 1),
    (1, 300, 30, 30, 3),
    (5, 64, 33, 64, 0),
    (7, 100, 100, 10, 10),
    (2, 3000, 40, 900, 20),
    (2, 4096, 512, 410, 5),
    (1, 70000, 9, 7000, 2),
]


def scores_of(kind, *shape):
    scores = torch.randn(shape, dtype=torch.float64)
    if kind == "ties":
        return scores.round()
    if kind == "not finite":
        chance = torch.rand(shape)
        for below, value in ((0.5, math.inf), (0.4, -math.inf), (0.3, math.nan)):
            scores[chance < below] = value
    if kind == "none finite":
        scores[0] = math.nan
    if kind == "close":  # that differ in their last digits alone
        return 1 + scores * 2.0**-22
    return scores


@pytest.mark.parametrize("kind", ["ordinary", "ties", "not finite", "none finite", "close"])
@pytest.mark.parametrize(
    ("dtype", "score_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.float64),
        (torch.float64, torch.float64),
        (torch.float64, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_is_that_of_the_reference(shape, dtype, score_dtype, kind):
    problems, n, d, elites, kept = shape
    torch.manual_seed(n + d)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    mu, sigma = torch.randn(problems, d, dtype=wide), torch.rand(problems, d, dtype=wide) + 0.1
    refit = Refit(n % 2 == 0, *REFIT.as_tuple[1:])
    on_cpu = State.create(mu.clone(), sigma.clone(), elites, kept, refit, 7, False)
    on_gpu = State.create(mu.cuda(), sigma.cuda(), elites, kept, refit, 7, False)
    for step in range(2):
        # In the second step elites are far from the old mean and near each other, where a variance loses digits.
        population = (torch.randn(problems, n, d) * 0.25 + 64 * step).to(dtype)
        scores = scores_of(kind, problems, n).to(score_dtype)
        update(population, scores, on_cpu, refit)
        update(population.cuda(), scores.cuda(), on_gpu, refit)
    epsilon = torch.finfo(wide).eps
    for name, expected in on_cpu.arrays().items():
        got = on_gpu.arrays()[name].cpu()
        if name in ("mu", "sigma"):
            # Sums of up to 7000 numbers near the first of them, in a tree of at least 32 branches.
            assert torch.allclose(got, expected, rtol=64 * epsilon, atol=16 * epsilon), name
        elif name == "summary":
            assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
        else:
            assert torch.equal(got, expected), name


@pytest.mark.parametrize("d", [8, 33])
@pytest.mark.parametrize("value", [math.inf, math.nan, 3e38])
def test_samples_that_are_no_elites_do_not_count(value, d):
    """Two of eight elites: threads without one have to leave sample 0 alone."""
    population, scores = torch.randn(1, 64, d), torch.full((1, 64), math.inf)
    scores[0, 5:7] = 0
    population[0, 0] = value
    state = State.create(torch.zeros(1, d).cuda(), torch.ones(1, d).cuda(), 8, 0, REFIT, 7, False)
    update(population.cuda(), scores.cuda(), state, Refit(False, 1.0, 1.0, 1.0, 0.0, 5.0, 0.0, 0.0))
    torch.testing.assert_close(state.mu.cpu(), population[:, 5:7].mean(1), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(state.sigma.cpu(), population[:, 5:7].std(1, correction=0), rtol=1e-5, atol=1e-6)


def test_every_run_gives_the_same_bits():
    population, scores = torch.randn(2, 5000, 100, device="cuda"), torch.randn(2, 5000, device="cuda")
    found = set()
    for _ in range(5):
        state = State.create(
            torch.zeros(2, 100, device="cuda"), torch.ones(2, 100, device="cuda"), 700, 3, REFIT, 1, False
        )
        update(population, scores, state, REFIT)
        found.add(b"".join(a.cpu().numpy().tobytes() for a in state.arrays().values()))
    assert len(found) == 1


def test_problems_beyond_2_to_31_elements():
    problems, n, d = 2, 4096, 300_000
    if torch.cuda.mem_get_info()[0] < 12e9:
        pytest.skip("needs 12 GB of GPU memory")
    population = torch.zeros(problems, n, d, dtype=torch.float16, device="cuda")
    population[1, 4000:, -1] = torch.arange(96, device="cuda").half()
    scores = torch.ones(problems, n, device="cuda")
    scores[1, 4000:] = 0
    mu = torch.zeros(problems, d, device="cuda")
    state = State.create(mu, torch.ones_like(mu), 96, 1, Refit(False, 1.0, 1.0, 1.0, 0.0, math.inf, 0.0, 0.0), 1, False)
    update(population, scores, state, Refit(False, 1.0, 1.0, 1.0, 0.0, math.inf, 0.0, 0.0))
    assert state.mu[1, -1].item() == 47.5
    assert abs(state.sigma[1, -1].item() ** 2 - (96**2 - 1) / 12) < 1e-2
    assert state.mu[0].abs().max().item() == 0


def test_wrong_arrays_never_reach_a_kernel():
    from cuops import _backend

    state = State.create(torch.zeros(1, 8, device="cuda"), torch.ones(1, 8, device="cuda"), 4, 0, REFIT, 1, False)
    population, scores = torch.zeros(1, 16, 8, device="cuda"), torch.zeros(1, 16, device="cuda")

    def call(population=population, scores=scores, **changed):
        arrays = {**state.arrays(), **changed}
        names = (
            "indices", "kept_indices", "counts", "summary", "best_score", "best_x", "kept", "kept_count", "mu", "sigma",
            "clock",
        )  # fmt: skip
        _backend.library().elite_moments(population, scores, *(arrays[name] for name in names), *REFIT.as_tuple)

    call()
    for name, wrong in (
        ("population", population[:, ::2]),
        ("population", population[0]),
        ("scores", scores[:, :15]),
        ("scores", scores.cpu()),
        ("mu", state.mu.double()),
        ("counts", state.counts[:, :2]),
        ("clock", state.clock[:3]),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            call(**{name: wrong})
    with pytest.raises(TypeError, match="scores: expected float64"):
        call(scores=scores.int())
