"""Draws populations: independent, of full covariance, or coloured over a horizon; bounded; with elites of before."""

from __future__ import annotations

import dataclasses
from typing import Any

from .. import _backend
from .._arguments import is_tensor
from .._torch import torch
from ..sample_normal import sample_normal
from ._library import exact, library_of, mark_written, writing
from ._state import State


def color_filter(horizon: int, beta: float) -> Any:
    """The (horizon, horizon) circulant matrix that gives white noise of variance 1 the power spectrum 1 / f**beta.

    The lowest frequency, 0, has the power of the next one. Source: Timmer and König, On generating power law noise,
    1995; Pinneri et al., https://arxiv.org/abs/2008.06389, use such noise for planning.
    """
    import numpy as np

    frequencies = np.fft.rfftfreq(horizon)
    frequencies[0] = frequencies[min(1, len(frequencies) - 1)] or 1.0
    response = np.fft.irfft((frequencies / frequencies[0]) ** (-beta / 2), horizon)
    response /= np.sqrt(np.square(response).sum())
    steps = np.arange(horizon)
    return response[(steps[:, None] - steps) % horizon]


@dataclasses.dataclass(frozen=True)
class Sampler:
    """How samples are drawn, the distribution's state apart."""

    limits: tuple[Any, Any]  # low and high, (problems, d) in the samples' dtype; or None and None
    antithetic: bool
    filter: Any  # None, or (horizon, horizon)

    def fill(self, population: Any, state: State) -> None:
        """Draws all of a population, (problems, n, d), and puts the kept elites first."""
        low, high = self.limits
        if state.factor is None and self.filter is None and is_tensor(population) and population.is_cuda:
            # The seed stays where it is, so that the host need not wait, and a graph's replays draw anew.
            _backend.library().sample_normal_fwd(
                population, state.mu, state.sigma, 0.0, low, high, state.seed, 0, 0, 0, 0, 0, False, self.antithetic
            )
            mark_written(population)
        elif state.factor is None and self.filter is None:
            options = {"low": low, "high": high, "dtype": population.dtype, "out": population}
            with writing(population):
                self._normal(state.mu, state.sigma, population.shape[1], state, **options)
        else:
            with exact(population):
                self._fill_dependent(population, state)
        kept = state.kept.shape[1]
        if kept > 0:
            xp = library_of(population)
            there = xp.asarray(range(kept)) if xp is not torch else torch.arange(kept, device=population.device)
            first = population[:, :kept]
            with writing(population):
                first[...] = xp.where((there < state.kept_count[:, None])[..., None], state.kept, first)

    def clip(self, values: Any) -> None:
        """Brings values of every problem, (problems, d) or (problems, n, d), into its bounds."""
        if self.limits[0] is None:
            return
        low, high = (limit if values.ndim == 2 else limit[:, None] for limit in self.limits)
        with writing(values):
            library_of(values).clip(values, low, high, out=values)

    def _normal(self, mu: Any, sigma: Any, num_samples: int, state: State, **options: Any) -> Any:
        seed = state.seed if is_tensor(mu) else int(state.clock[1])
        return sample_normal(mu, sigma, num_samples, antithetic=self.antithetic, seed=seed, **options)

    def _fill_dependent(self, population: Any, state: State) -> None:
        """Linear in white noise, and bounded by clipping: no distribution of dependent values is easy to truncate."""
        xp = library_of(population)
        zero, one = xp.zeros_like(state.mu), xp.ones_like(state.mu)
        noise = self._normal(zero, one, population.shape[1], state)
        if state.factor is not None:
            noise = noise @ state.factor.swapaxes(-1, -2)
        else:
            horizon = self.filter.shape[0]
            noise = (self.filter @ noise.reshape(-1, horizon, noise.shape[-1] // horizon)).reshape(noise.shape)
            noise = noise * state.sigma[:, None]
        values = state.mu[:, None] + noise
        self.clip(values)
        with writing(values):
            population[...] = values
