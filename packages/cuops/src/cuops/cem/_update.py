"""Refits the distribution to the elites, on the CPU by _elite_moments.py, on a GPU by csrc/elite_moments.cc."""

from __future__ import annotations

import dataclasses
from typing import Any

from .. import _backend
from .._arguments import is_tensor
from .._torch import torch
from ._elite_moments import elite_moments
from ._library import copied, exact, library_of, mark_written, writing
from ._state import Refit, State


def update(population: Any, scores: Any, state: State, refit: Refit) -> None:
    """One step, in place, from (problems, n, d) samples and as many scores."""
    _update(population, scores, state, refit)
    mark_written(*state.handed_out)


def _update(population: Any, scores: Any, state: State, refit: Refit) -> None:
    if is_tensor(population) and not population.is_cuda:
        _update_on_cpu(population, scores, state, refit)
        return
    if state.covariance is None:
        _moments(population, scores, state, refit)
        return
    mu, sigma = copied(state.mu), copied(state.sigma)
    plain = Refit(refit.maximize, 1.0, 1.0, 1.0, 0.0, float("inf"), 0.0, 0.0)
    _moments(population, scores, dataclasses.replace(state, mu=mu, sigma=sigma), plain)
    with exact(population), writing(population):
        _full(population, mu, state, refit)


def _update_on_cpu(population: Any, scores: Any, state: State, refit: Refit) -> None:
    """By NumPy, which works on the same memory, but has no bfloat16."""
    rows, values = (a.float() if a.dtype == torch.bfloat16 else a for a in (population, scores))
    _update(rows.numpy(), values.numpy(), state.as_numpy(), refit)


def _moments(population: Any, scores: Any, state: State, refit: Refit) -> None:
    if not is_tensor(population):
        elite_moments(population, scores.reshape(population.shape[:2]), state, refit)
    else:
        _backend.library().elite_moments(
            population, scores, state.indices, state.kept_indices, state.counts, state.summary, state.best_score,
            state.best_x, state.kept, state.kept_count, state.mu, state.sigma, state.clock, *refit.as_tuple,
        )  # fmt: skip


def _full(population: Any, elite_mu: Any, state: State, refit: Refit) -> None:
    """The full covariance: smoothed, scaled so that its standard deviations keep their limits, and factored."""
    xp = library_of(population)
    d = state.mu.shape[1]
    count = state.counts[:, :1]
    rows, elite = _elite_rows(population, state.indices), (state.indices >= 0)[..., None]
    elites = xp.empty_like(elite_mu[:, :1])
    elites[...] = xp.clip(count, 1, None)
    centred = xp.where(elite, rows - elite_mu[:, None], xp.zeros_like(rows))
    # The mean was rounded: far from zero that is as much as a small sigma.
    centred = xp.where(elite, centred - (centred.sum(1) / elites)[:, None], centred)
    centred = centred / xp.sqrt(elites)[..., None]
    covariance = centred.swapaxes(-1, -2) @ centred
    eye = xp.eye(d, dtype=rows.dtype) if xp is not torch else torch.eye(d, dtype=rows.dtype, device=rows.device)
    if refit.noise > 0:
        past = state.clock[:1] - 1  # steps before this one
        past = past.double() if xp is torch else past
        noise = xp.clip(refit.noise - refit.noise_decrease * past, 0, None)
        covariance = covariance + eye * (noise.to(rows.dtype) if xp is torch else noise.astype(rows.dtype))
    alpha = refit.smoothing_sigma
    covariance = alpha * covariance + (1 - alpha) * state.covariance
    deviation = xp.sqrt((covariance * eye).sum(-1))
    limited = xp.clip(deviation * refit.sigma_decay, refit.sigma_floor, refit.sigma_ceiling)
    scale = limited / xp.where(deviation > 0, deviation, 1)
    covariance = covariance * scale[..., None] * scale[:, None]
    covariance = covariance * (1 - eye) + eye * (limited**2)[..., None]
    factor = _factor(covariance, eye, xp)
    learned = count > 0
    mu = refit.smoothing_mu * elite_mu + (1 - refit.smoothing_mu) * state.mu
    for old, new in ((state.mu, mu), (state.sigma, limited)):
        old[...] = xp.where(learned, new, old)
    for old, new in ((state.covariance, covariance), (state.factor, factor)):
        old[...] = xp.where(learned[..., None], new, old)


def _elite_rows(population: Any, indices: Any) -> Any:
    """The elites, in the dtype of the state; any sample where there are fewer."""
    if is_tensor(population):
        rows = torch.take_along_dim(population, indices.long().clamp(min=0)[..., None], 1)
        return rows if rows.dtype == torch.float64 else rows.float()
    import numpy as np

    rows = np.take_along_axis(population, np.maximum(indices, 0)[..., None].astype(np.int64), 1)
    return rows if rows.dtype == np.float64 else rows.astype(np.float32)


def _factor(covariance: Any, eye: Any, xp: Any) -> Any:
    """Lower factors of covariances, with a little added to their diagonals, as those of few elites are singular.

    What has no factor even then gets that of its diagonal.
    """
    variance = (covariance * eye).sum(-1)
    epsilon = float(xp.finfo(covariance.dtype).eps)
    ridge = covariance + eye * (8 * epsilon * covariance.shape[-1] * variance)[..., None]
    diagonal = eye * xp.sqrt(variance)[..., None]
    if xp is torch:
        factor, failed = torch.linalg.cholesky_ex(ridge)
        return torch.where((failed > 0)[:, None, None], diagonal, factor)
    for problem, matrix in enumerate(ridge):
        try:
            diagonal[problem] = xp.linalg.cholesky(matrix)
        except xp.linalg.LinAlgError:
            continue
    return diagonal
