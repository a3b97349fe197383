"""The Cross-Entropy Method as an object that is asked for samples and told their scores."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

from .. import _arguments
from .._arguments import is_tensor
from .._torch import torch
from . import _checkpoint, _options
from ._graph import capture
from ._library import copied, library_of, outside_of_graphs, writing
from ._sampling import Sampler, color_filter
from ._state import Refit, State
from ._update import update


class CrossEntropyMethod:
    """Finds the x of the least score (or greatest), by sampling x and moving the distribution to the best samples.

    ``ask()`` gives samples of a normal distribution, ``tell(scores)`` refits it to the elites among them:

        mu    = a * mean(elites) + (1 - a) * mu
        sigma = clip(sigma_decay * (b * sqrt(var(elites) + noise_t) + (1 - b) * sigma), sigma_floor, sigma_ceiling)
        noise_t = max(noise - t * noise_decrease, 0)        after t steps,  smoothing = (a, b)

    Variances are those of the elites alone (divided by their number). Scores that are NaN or infinite are never
    elite; a problem none of whose scores is finite keeps its distribution. On a GPU no step makes the host wait, so
    that values are not looked at there: an elite that is infinite itself, as float16 is beyond 65504, makes the mean
    infinite and sigma NaN, until a `reset`. On the CPU `tell` refuses it.

    Args:
        mu: the initial mean, ``(*batch, *event)``: a torch tensor on CUDA or CPU, a NumPy array, or numbers that make
            one; float64, float32, float16 or bfloat16. Everything else is of its library and on its device. Each entry
            of batch is a problem of its own.
        sigma: the initial standard deviation, of at least 0: a number, or numbers that broadcast with mu: a
            list, a NumPy array, or an array like mu. The refitted one is no finite number where the squares of the
            distances between elites are beyond the dtype that they are summed in: by 1e154 in float64, and by 1e19 in
            float32, as a full covariance and a GPU have them of a float32 state.
        num_samples: how many samples a problem has in each step, at most 2**31 - 1.
        elites: how many of them are elite, an integer, or which fraction of them, a float over 0 and at most 1; at
            least one. The variance of a single one is 0, so that sigma shrinks in each step without noise or a floor.
        maximize: whether the greatest scores are best.
        covariance: "diagonal", or "full": the covariance of the elites, ``event`` as one vector, is learned too. sigma
            is the root of its diagonal then, and its square a number of the state's dtype; b applies to the covariance,
            and noise, decay and limits to its diagonal.
        event_dims: how many of the last dimensions of mu belong to one x.
        smoothing: weight of the new moments, over 0 and at most 1: one for both, or a pair for mu and sigma. Less
            than 1 for sigma keeps it from shrinking before mu has come far.
        sigma_floor: the least that the refitted sigma becomes; in the range of the samples' dtype.
        sigma_ceiling: the most that it becomes.
        sigma_decay: a factor that it gets before these limits.
        noise: added to the variance of the elites (Szita and Lőrincz); its root is in the range of the samples' dtype.
        noise_decrease: what the noise loses in each step.
        low, high: bounds of x, numbers or arrays like mu, within which the mean stays, too. Independent samples are
            drawn from the truncated normal distribution; those of a full covariance or a color are clipped. The first
            mu has to lie within them; that of `reset` is clipped. What the caller changes in samples counts as it is,
            beyond the bounds too: as a kept elite and as the best.
        keep_elites: how many of the best elites, at most all, take the place of the next population's first samples, to
            be evaluated again; fewer than num_samples. Antithetic samples whose place is taken leave their pair's other
            half alone.
        population_decay: the number of samples is divided by this after each step, down to twice the elites.
        color: exponent beta of the power spectrum 1 / f**beta of the noise along the first dimension of event, a
            horizon; 0 is white noise, independent from step to step. Not with a full covariance.
        antithetic: whether samples come in pairs mu + sigma * z, mu - sigma * z.
        dtype: of the samples; mu's by default. float32, float16 or, with PyTorch, bfloat16 for a mu of at most 32 bits;
            float64 goes with a float64 mu alone, as lists and `numpy.zeros` give one. State is float32, float64 for
            float64.
        generator: a torch.Generator, for NumPy arrays a numpy.random.Generator, to take the seed from; by default the
            library's global one.
        seed: instead of it, an integer of 0 to 2**63 - 1: the same seed gives the same samples.

    Attributes:
        num_samples, num_elites: of a problem, in a full step.
        batch_shape, event_shape: the two parts of mu's shape.
        dtype: of the samples.
        maximize: whether the greatest scores are best.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.

    Source: Rubinstein, The Cross-Entropy Method for Combinatorial and Continuous Optimization, 1999; noise: Szita and
    Lőrincz, Learning Tetris Using the Noisy Cross-Entropy Method, 2006; kept elites, colored noise, population decay:
    Pinneri et al., Sample-efficient Cross-Entropy Method for Real-time Planning, https://arxiv.org/abs/2008.06389.
    """

    def __init__(
        self,
        mu: Any,
        sigma: Any,
        num_samples: int,
        *,
        elites: float = 0.2,
        maximize: bool = False,
        covariance: str = "diagonal",
        event_dims: int = 1,
        smoothing: float | tuple[float, float] = (1.0, 0.6),
        sigma_floor: float = 0.0,
        sigma_ceiling: float = math.inf,
        sigma_decay: float = 1.0,
        noise: float = 0.0,
        noise_decrease: float = 0.0,
        low: Any = None,
        high: Any = None,
        keep_elites: int = 0,
        population_decay: float = 1.0,
        color: float = 0.0,
        antithetic: bool = False,
        dtype: Any = None,
        generator: Any = None,
        seed: int | None = None,
    ) -> None:
        mu, sigma = _options.distribution(mu, sigma, event_dims)
        self.maximize = _arguments.flag("maximize", maximize)
        self.num_samples = _arguments.integer("num_samples", num_samples, 1, 2**31 - 1)  # indices have 32 bits
        self.num_elites = _options.elites(elites, self.num_samples)
        self.event_shape = tuple(mu.shape[mu.ndim - event_dims :])
        self.batch_shape = tuple(mu.shape[: mu.ndim - event_dims])
        self.dtype = _options.dtype(dtype, mu)
        _options.held(mu, self.dtype)
        a, b = _options.smoothing(smoothing)
        _options.limits(sigma_floor, sigma_ceiling, sigma_decay, noise, noise_decrease)
        _options.spread(float(sigma_floor), float(noise), self.dtype, mu)
        self._refit = Refit(
            self.maximize, a, b, float(sigma_decay), float(sigma_floor),
            _arguments.real("sigma_ceiling", sigma_ceiling), float(noise), float(noise_decrease),
        )  # fmt: skip
        _options.choice("covariance", covariance, ("diagonal", "full"))
        limits = _options.bounds(low, high, mu, event_dims, self.dtype)
        pairs = _arguments.flag("antithetic", antithetic)
        self._sampler = Sampler(limits, pairs, self._filter(color, covariance, mu))
        kept = _arguments.integer("keep_elites", keep_elites, 0, min(self.num_elites, self.num_samples - 1))
        _arguments.number("population_decay", population_decay)
        if population_decay < 1:
            raise ValueError(
                f"population_decay: expected a number of at least 1, got {_arguments.short(population_decay)}"
            )
        self._population_decay = float(population_decay)
        if covariance == "full":
            _options.variances(sigma)
        flat_mu, flat_sigma = (_options.wide(array).reshape(self.problems, -1) for array in (mu, sigma))
        self._sampler.clip(flat_mu)
        base = _options.seed(seed, generator, mu)
        self._state = State.create(flat_mu, flat_sigma, self.num_elites, kept, self._refit, base, covariance == "full")
        xp = library_of(mu)
        place = {"device": mu.device} if xp is torch else {}
        self._memory = xp.empty(self.problems * self.num_samples * self.dimensions, dtype=self.dtype, **place)
        self._last_rows: tuple[int, Any] = (-1, None)  # of no size
        self._steps = 0
        self._asked = 0  # samples of a problem that await their scores
        self._evaluated = 0  # samples of a problem in the last step

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles have: no views, whose memory would not be that of the copy."""
        return {**self.__dict__, "_last_rows": (-1, None)}

    def __copy__(self) -> CrossEntropyMethod:
        """With arrays of its own, as steps write to them."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__getstate__())
        other._state, other._memory = copy.deepcopy((self._state, self._memory))
        return other

    def __repr__(self) -> str:
        """A line, without waiting for the device."""
        shown = {"batch_shape": self.batch_shape, "event_shape": self.event_shape, "dtype": self.dtype}
        shown |= {"num_samples": self.num_samples, "elites": self.num_elites, "maximize": self.maximize}
        return f"CrossEntropyMethod({', '.join(f'{name}={value}' for name, value in shown.items())})"

    def _filter(self, color: float, covariance: str, mu: Any) -> Any:
        _arguments.number("color", color, least=0)
        if color == 0:
            return None
        if covariance == "full":
            raise ValueError('color: expected 0 with covariance="full"')
        matrix = color_filter(self.event_shape[0], float(color))
        wide = _options.wide(mu)
        return torch.from_numpy(matrix).to(wide) if library_of(mu) is torch else matrix.astype(wide.dtype)

    @property
    def problems(self) -> int:
        """How many problems are solved at once."""
        return math.prod(self.batch_shape)

    @property
    def dimensions(self) -> int:
        """How many numbers one x has."""
        return math.prod(self.event_shape)

    @property
    def population_size(self) -> int:
        """How many samples of a problem the next ``ask`` gives."""
        shrunk = round(self.num_samples * self._population_decay**-self._steps)
        return max(shrunk, min(2 * self.num_elites, self.num_samples))

    @outside_of_graphs
    def ask(self) -> Any:
        """The samples to evaluate, ``(*batch, population_size, *event)``.

        They stay as they are until the next ask, may be changed in place before ``tell`` (to repair or round them,
        say), and are the same when asked for again before it.
        """
        size, self._asked = self.population_size, 0  # should it fail, there is nothing to tell scores of
        self._sampler.fill(self._rows(size), self._state)
        self._asked = size
        return self._samples(size)

    def _rows(self, size: int) -> Any:
        """The first part of the memory as (problems, size, d)."""
        if self._last_rows[0] != size:
            rows = self._memory[: self.problems * size * self.dimensions].reshape(self.problems, size, self.dimensions)
            self._last_rows = size, rows
        return self._last_rows[1]

    def _samples(self, size: int) -> Any:
        """The same in the shape of samples, a view of its own each time: what is done to one, such as asking for its
        gradient, is done to no other.
        """
        return self._rows(size).reshape(*self.batch_shape, size, *self.event_shape)

    @property
    def population(self) -> Any:
        """What ``ask`` gave last; empty where none did since the method was made.

        So it is where a state from between two steps was loaded since, or ``reset`` dropped the only ones.
        """
        return self._samples(self._asked or self._evaluated)

    @outside_of_graphs
    def tell(self, scores: Any) -> None:
        """Refits the distribution to the elites. scores: ``(*batch, population_size)``, of any real dtype.

        Raises RuntimeError without an ``ask`` before it; TypeError and ValueError for scores that do not fit the
        samples; on the CPU, ValueError for elites that are not finite. The state is as before then.
        """
        if self._asked == 0:
            raise RuntimeError("tell: expected ask() before it, to score its samples")
        scores = _options.scores(scores, (*self.batch_shape, self._asked), self._memory)
        update(self._rows(self._asked), scores, self._state, self._refit)
        self._sampler.clip(self._state.mu)  # a mean of what is within the bounds may leave them by a rounding
        self._evaluated = self._asked
        self._steps += 1
        self._asked = 0

    @property
    def mu(self) -> Any:
        """The mean, ``(*batch, *event)``, of which each step changes the values in place."""
        return self._state.mu.reshape(*self.batch_shape, *self.event_shape)

    @property
    def sigma(self) -> Any:
        """The standard deviation, of mu's shape and kind."""
        return self._state.sigma.reshape(*self.batch_shape, *self.event_shape)

    @property
    def covariance(self) -> Any:
        """The covariance, ``(*batch, d, d)`` with d = ``dimensions``; None where it is diagonal."""
        full = self._state.covariance
        return None if full is None else full.reshape(*self.batch_shape, self.dimensions, self.dimensions)

    @property
    def best_x(self) -> Any:
        """The sample of the best score so far, ``(*batch, *event)``; mu before there is one."""
        return self._state.best_x.reshape(*self.batch_shape, *self.event_shape)

    @property
    def best_score(self) -> Any:
        """The best score so far, ``(*batch)`` in float64."""
        return self._state.best_score.reshape(self.batch_shape)

    @property
    def elites(self) -> Any:
        """Indices of the last elites, ``(*batch, num_elites)``, ascending; -1 where fewer scores were finite."""
        return self._state.indices.reshape(*self.batch_shape, self.num_elites)

    @property
    def steps(self) -> int:
        """How many steps are done, those of a graph too; the host waits for the device to know."""
        return int(self._state.clock[0])

    @outside_of_graphs
    def reset(self, mu: Any, sigma: Any, *, keep_best: bool = False) -> None:
        """Starts anew at this mean and standard deviation; random numbers go on.

        Both broadcast to the shape of the first mu, which is clipped to the bounds. May be captured in a CUDA graph:
        values on CUDA are not looked at.

        Args:
            mu, sigma: as those of the constructor.
            keep_best: whether the best so far stays, as where a search of one problem is restarted; else it is
                forgotten, as that of another problem.

        Raises:
            TypeError: mu or sigma is neither a number nor an array like the first mu, or keep_best is no bool.
            ValueError: one is on another device, does not broadcast to its shape, or is not finite; mu is beyond the
                range of the samples' dtype; sigma is below 0, or with a full covariance its square is no number of the
                state's dtype.
        """
        keep_best = _arguments.flag("keep_best", keep_best)
        # Copies, as either may be a view of this method's own.
        mu, sigma = (copied(_options.together(name, value, self.mu)) for name, value in (("mu", mu), ("sigma", sigma)))
        self._expect_finite(mu, sigma)
        self._expect_variances(sigma)
        with writing(self._state.mu):
            self._restart(mu, sigma, keep_best)
            self._state.kept_count[...] = 0

    @outside_of_graphs
    def shift(self, steps: int = 1, sigma: Any = None) -> None:
        """For planning with a receding horizon, the first dimension of event: drops first steps, repeats the last one.

        The kept elites move too, and both stay within the bounds; the best so far is forgotten, as it was of another
        problem. sigma is the standard deviation to start the next plan with, by default as it is; a full covariance
        starts anew from it, without correlations, and what changes with the steps, such as noise, starts anew, too. May
        be captured in a CUDA graph: values on CUDA are not looked at.

        Raises:
            TypeError: steps is not an integer, or sigma neither a number nor an array like mu.
            ValueError: steps is not from 0 to the horizon; sigma is on another device, of a shape that does not
                broadcast to mu's, not finite, below 0, or with a full covariance has squares that are no numbers of the
                state's dtype; or the mean is not finite, after which `reset` starts anew.
        """
        horizon = self.event_shape[0]
        steps = _arguments.integer("steps", steps, 0, horizon)
        spread = copied(self.sigma if sigma is None else _options.together("sigma", sigma, self.mu))
        self._expect_finite(self.mu, spread)
        if sigma is not None:
            self._expect_variances(spread)
        with writing(self._state.mu):
            for rows in (self._state.mu, self._state.kept):
                by_step = rows.reshape(rows.shape[0], -1, horizon, self.dimensions // horizon)
                moved, last = copied(by_step[:, :, steps:]), copied(by_step[:, :, -1:])
                by_step[:, :, : horizon - steps], by_step[:, :, horizon - steps :] = moved, last
            self._sampler.clip(self._state.kept)
            self._restart(self.mu, spread)

    def _expect_finite(self, mu: Any, sigma: Any) -> None:
        if not (is_tensor(mu) and mu.is_cuda):  # where the host would wait, and a graph cannot
            _options.finite(mu, sigma)
            _options.held(mu, self.dtype)

    def _expect_variances(self, sigma: Any) -> None:
        if self._state.covariance is not None and not (is_tensor(sigma) and sigma.is_cuda):
            _options.variances(sigma)

    def _restart(self, mu: Any, sigma: Any, keep_best: bool = False) -> None:
        state = self._state
        state.mu[...] = mu.reshape(state.mu.shape)
        self._sampler.clip(state.mu)
        state.sigma[...] = sigma.reshape(state.mu.shape)
        if not keep_best:
            state.best_x[...] = state.mu
            state.best_score[...] = -math.inf if self.maximize else math.inf
        state.clock[0] = 0
        if state.covariance is not None:
            state.set_diagonal()
        self._steps = self._asked = 0

    @outside_of_graphs
    def state_dict(self) -> dict[str, Any]:
        """All that the next steps depend on, copied: a method of the same arguments goes on from it bit for bit."""
        return _checkpoint.save(self)

    @outside_of_graphs
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a ``state_dict`` of a method with the same sizes, dtypes and direction.

        All else is as this method's arguments say. Mean and kept elites are those saved, whatever the bounds are here.
        TypeError or ValueError, with the state unchanged, for what does not fit.
        """
        _checkpoint.load(self, state_dict)

    def capture(self, function: Callable[[Any], Any]) -> Callable[[], None]:
        """A CUDA graph of ``tell(function(ask()))``: each call of what is returned does one step.

        ``function`` takes samples and returns scores, with CUDA operations on the current stream alone. It is called
        three times for warming up and once for the graph; the state is then as before. Every replay draws
        fresh samples.

        Raises:
            ValueError: mu is no tensor on CUDA, or `population_decay` is not 1, as a graph has samples of one number.
        """
        return capture(self, function)
