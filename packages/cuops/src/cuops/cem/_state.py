"""What a Cross-Entropy Method knows from step to step, in arrays that every step changes in place."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from .._torch import torch
from ._elite_moments import sample_seed
from ._library import copied, library_of


@dataclasses.dataclass(frozen=True)
class Refit:
    """How mean and standard deviation follow the elites; the fields are arguments of `CrossEntropyMethod`."""

    maximize: bool
    smoothing_mu: float
    smoothing_sigma: float
    sigma_decay: float
    sigma_floor: float
    sigma_ceiling: float
    noise: float
    noise_decrease: float

    @functools.cached_property
    def as_tuple(self) -> tuple[Any, ...]:
        """The fields in their order, as the library takes them."""
        return dataclasses.astuple(self)


@dataclasses.dataclass
class State:
    """Arrays of one library on one device. Those of values have the dtype of sums: float32, float64 for float64."""

    mu: Any  # (problems, d)
    sigma: Any  # (problems, d)
    best_x: Any  # (problems, d)
    best_score: Any  # (problems), float64
    kept: Any  # (problems, kept, d): the best elites, for the next population
    kept_count: Any  # (problems), int32: how many there are yet
    indices: Any  # (problems, elites), int32: the last elites, ascending; -1 where there are fewer finite scores
    kept_indices: Any  # (problems, kept), int32: the best of them, likewise
    counts: Any  # (problems, 3), int32: finite elites; the best sample; the same where it beat all before it, or -1
    summary: Any  # (problems, 4), float64: best, mean and worst score of the last elites, best score so far
    clock: Any  # (4), int64: steps since the start, seed of the next samples, seed of the method, steps in all
    covariance: Any = None  # (problems, d, d)
    factor: Any = None  # (problems, d, d), lower: factor @ factor.T is the covariance

    @classmethod
    def create(cls, mu: Any, sigma: Any, elites: int, kept: int, refit: Refit, seed: int, full: bool) -> State:
        """The state before the first step; mu and sigma are (problems, d) and become part of it."""
        xp = library_of(mu)
        place = {"device": mu.device} if xp is torch else {}
        problems, d = mu.shape
        count = {"dtype": xp.int32, **place}
        wide = {"dtype": xp.float64, **place}
        matrices = [xp.zeros((problems, d, d), dtype=mu.dtype, **place) for _ in range(2)] if full else [None, None]
        state = cls(
            mu=mu,
            sigma=sigma,
            best_x=copied(mu),
            best_score=xp.full((problems,), -xp.inf if refit.maximize else xp.inf, **wide),
            kept=xp.zeros((problems, kept, d), dtype=mu.dtype, **place),
            kept_count=xp.zeros((problems,), **count),
            indices=xp.full((problems, elites), -1, **count),
            kept_indices=xp.full((problems, kept), -1, **count),
            counts=xp.zeros((problems, 3), **count),
            summary=xp.full((problems, 4), xp.nan, **wide),
            clock=xp.asarray([0, sample_seed(seed, 0), seed, 0], dtype=xp.int64, **place),
            covariance=matrices[0],
            factor=matrices[1],
        )
        if full:
            state.set_diagonal()
        return state

    def set_diagonal(self) -> None:
        """Makes the covariance that of independent values, from sigma."""
        for matrices, diagonal in ((self.covariance, self.sigma**2), (self.factor, self.sigma)):
            matrices[...] = 0
            matrices.reshape(len(matrices), -1)[:, :: matrices.shape[-1] + 1] = diagonal

    def arrays(self) -> dict[str, Any]:
        """The arrays by name."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def handed_out(self) -> tuple[Any, ...]:
        """The arrays that a method shows, for steps to change."""
        return self.mu, self.sigma, self.best_x, self.best_score, self.indices, self.covariance

    @functools.cached_property
    def seed(self) -> Any:
        """The part of `clock` that the next samples are drawn with."""
        return self.clock[1:2]

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles have: the arrays, and no view of one."""
        return self.arrays()

    def as_numpy(self) -> State:
        """The same memory as NumPy arrays, for torch tensors on the CPU."""
        return State(**{name: value.numpy() for name, value in self.arrays().items()})
