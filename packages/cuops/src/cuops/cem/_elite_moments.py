"""A step of the method in plain NumPy: what csrc/elite_moments.cu computes, and the CPU runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from ._state import Refit, State


def sample_seed(seed: int, step: int) -> int:
    """The seed of a step's samples, from that of the method (SplitMix64)."""
    mask = (1 << 64) - 1
    z = (seed + step * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    return (z ^ z >> 31) >> 1


def elite_moments(population: np.ndarray, scores: np.ndarray, state: State, refit: Refit) -> None:
    """One step of the Cross-Entropy Method, from (problems, n, d) samples and (problems, n) scores; changes `state`.

    Elites are the best finite scores, ties by index. A problem without any keeps its mean and standard deviation.

    Raises:
        ValueError: an elite is not finite, which kernels do not look for; the state is as before.
    """
    import numpy as np

    elites, kept = state.indices.shape[1], state.kept.shape[1]
    noise = max(refit.noise - refit.noise_decrease * int(state.clock[0]), 0.0)
    with np.errstate(all="ignore"):
        wide = scores.astype(np.float64)
        finite = np.isfinite(wide)
        costs = np.where(finite, -wide if refit.maximize else wide, np.inf)
        orders = np.argsort(costs, -1, kind="stable")
        counts = [min(int(n), elites) for n in finite.sum(-1)]
        chosen = [np.sort(order[:count]) for order, count in zip(orders, counts, strict=True)]
        elite_rows = [samples[indices] for samples, indices in zip(population, chosen, strict=True)]
        if not all(np.isfinite(rows).all() for rows in elite_rows):
            raise ValueError(
                "samples: expected finite numbers in the elites, got infinity or NaN, as beyond the range of their "
                "dtype; low and high keep samples within it"
            )
        for problem, order in enumerate(orders):
            count = counts[problem]
            state.indices[problem], state.kept_indices[problem] = -1, -1
            state.counts[problem] = count, -1, -1
            state.summary[problem, :3] = np.nan
            if count > 0:
                best = order[0]
                elite = wide[problem, order[:count]]
                state.indices[problem, :count] = chosen[problem]
                state.counts[problem, 1] = best
                state.summary[problem, :3] = elite[0], elite.mean(), elite[-1]
                if costs[problem, best] < (-1 if refit.maximize else 1) * state.best_score[problem]:
                    state.best_score[problem] = elite[0]
                    state.best_x[problem] = population[problem, best]
                    state.counts[problem, 2] = best
                held = min(count, kept)
                state.kept_indices[problem, :held] = np.sort(order[:held])
                state.kept[problem, :held] = population[problem, state.kept_indices[problem, :held]]
                state.kept_count[problem] = max(state.kept_count[problem], held)
                rows = elite_rows[problem].astype(np.float64)
                mean = rows.mean(0)
                deviation = np.sqrt(np.square(rows - mean).mean(0) + noise)
                mu, sigma = state.mu[problem], state.sigma[problem]
                mu[...] = refit.smoothing_mu * mean + (1 - refit.smoothing_mu) * mu
                sigma[...] = refit.smoothing_sigma * deviation + (1 - refit.smoothing_sigma) * sigma
                sigma[...] = np.clip(sigma * refit.sigma_decay, refit.sigma_floor, refit.sigma_ceiling)
            state.summary[problem, 3] = state.best_score[problem]
    state.clock[0] += 1
    state.clock[3] += 1
    state.clock[1] = sample_seed(int(state.clock[2]), int(state.clock[3]))
