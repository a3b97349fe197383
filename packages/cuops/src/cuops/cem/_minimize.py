"""The Cross-Entropy Method in one call: `minimize` and `maximize`, with callbacks, early stopping, a progress bar."""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from .. import _arguments
from .._arguments import is_tensor
from . import _options
from ._history import History
from ._library import copied, library_of
from ._method import CrossEntropyMethod

if sys.version_info >= (3, 11):
    from typing import Unpack
elif TYPE_CHECKING:
    from typing_extensions import Unpack  # which type checkers have


@dataclasses.dataclass(frozen=True, eq=False, repr=False)  # neither is of use for large arrays
class Result:
    """What `minimize` and `maximize` return; shapes are those of `CrossEntropyMethod`. Equal to itself alone."""

    x: Any  #: the best sample that was evaluated (since a `reset` that did not keep it); mu, where no score was finite
    score: Any  #: its score, in float64; infinite, where none was finite
    mu: Any  #: the last mean, for noisy functions a better choice than the luckiest sample
    sigma: Any  #: the last standard deviation
    steps: int  #: how many were done
    evaluations: int  #: how many samples of each problem were scored
    stopped_by: Any  #: the callback that stopped it, or None
    history: History  #: the scores by step
    method: CrossEntropyMethod  #: to go on with

    def __repr__(self) -> str:
        """A line, however many numbers there are."""
        shown = ("score", "x", "steps", "evaluations", "stopped_by")
        return f"Result({', '.join(f'{name}={_brief(getattr(self, name))}' for name in shown)})"


def _brief(value: Any) -> str:
    """A number as it is, an array by its dtype and shape."""
    if not hasattr(value, "shape"):
        return repr(value)
    return f"<{value.dtype} {tuple(value.shape)}>" if value.shape else f"{float(value):.6g}"


Callback = Callable[[CrossEntropyMethod, History], Any]


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """A callback that stops once every problem has reached its target, has come to rest, or no longer gets better.

    Which of these it is may differ from problem to problem.

    Args:
        target: stop when the best score is at least as good.
        sigma: stop when the mean of the standard deviations is at most this.
        patience: stop when so many steps have improved the best score by no more than `tolerance`. A lucky first sample
            is hard to beat while sigma is wide: 20 and more steps, or sigma, are safer.
        tolerance: by how much the best score has to improve within `patience` steps for the search to go on.
        every: look every so many steps only: each look waits for the GPU.

    Raises:
        TypeError: an argument is no number.
        ValueError: there is nothing to stop for, patience or every is less than 1, sigma or tolerance is below 0, or a
            number is not finite.
    """

    target: float | None = None
    sigma: float | None = None
    patience: int | None = None
    tolerance: float = 0.0
    every: int = 10

    def __post_init__(self) -> None:
        if self.target is self.sigma is self.patience is None:
            raise ValueError("target, sigma, patience: expected at least one of them, got none")
        if self.target is not None:
            _arguments.number("target", self.target)
        if self.sigma is not None:
            _arguments.number("sigma", self.sigma, least=0)
        _arguments.number("tolerance", self.tolerance, least=0)
        for name in ("patience", "every"):
            if (steps := getattr(self, name)) is not None or name == "every":
                steps = _arguments.integer(name, steps, 1)  # Python's: some of NumPy's have no -1
                object.__setattr__(self, name, steps)

    def __call__(self, method: CrossEntropyMethod, history: History) -> bool:
        """Whether to stop."""
        if not len(history) or len(history) % self.every:
            return False
        import numpy as np

        sign = -1 if method.maximize else 1
        costs = sign * history.best_so_far.reshape(len(history), -1)
        rested = [history.sigma[-1].reshape(-1) <= self.sigma] if self.sigma is not None else []
        if self.target is not None:
            rested.append(costs[-1] <= sign * self.target)
        if self.patience is not None and len(history) > self.patience:
            rested.append(costs[-1 - self.patience] <= costs[-1] + self.tolerance)  # as infinities are, too
        return bool(np.any(rested, axis=0).all())


class Options(TypedDict, total=False):
    """The arguments that `minimize` and `maximize` hand on to `CrossEntropyMethod`, for editors and type checkers."""

    elites: float
    covariance: str
    event_dims: int
    smoothing: float | tuple[float, float]
    sigma_floor: float
    sigma_ceiling: float
    sigma_decay: float
    noise: float
    noise_decrease: float
    low: Any
    high: Any
    keep_elites: int
    population_decay: float
    color: float
    antithetic: bool
    dtype: Any
    generator: Any
    seed: int | None


def minimize(
    function: Callable[[Any], Any],
    mu: Any,
    sigma: Any,
    num_samples: int | None = None,
    *,
    steps: int = 100,
    callbacks: Callback | Sequence[Callback] = (),
    progress: bool = False,
    vectorized: bool = True,
    cuda_graph: bool = False,
    **options: Unpack[Options],
) -> Result:
    """Searches the x of the least ``function(x)``, from mu and sigma on.

    Args:
        function: takes samples ``(*batch, num_samples, *event)`` in the library of mu, and returns their scores
            ``(*batch, num_samples)``. It may change the samples in place, to repair or round them, but not keep them:
            the next step's take their place.
        mu, sigma: as those of `CrossEntropyMethod`.
        num_samples: in each step; by default 10 for each dimension, and at least 50.
        steps: how many at most; 0 evaluates nothing, and x is mu, with an infinite score.
        callbacks: called after each step, all of them, with the method and the history; the search stops once one
            returns true. One that restarts it (`CrossEntropyMethod.reset`) says ``keep_best=True``.
        progress: whether to show a bar, with the best score of the first problem.
        vectorized: False where ``function`` takes one x, ``(*event)``, and returns a real number, or an array with one.
            Where this is left out for such a function, results that happen to have the shape of all scores are taken
            for these; others are refused.
        cuda_graph: whether to capture a step in a CUDA graph and to replay it, which saves the time of launching; see
            `CrossEntropyMethod.capture`.
        options: the other arguments of `CrossEntropyMethod`.

    Returns:
        A `Result`, which has the best x and its score, the last mu and sigma, and how it went.

    Raises:
        TypeError, ValueError: an argument, or what ``function`` returns, is not as described; the message names it.
    """
    search = steps, callbacks, progress, vectorized, cuda_graph
    return _search(False, function, mu, sigma, num_samples, *search, options)


def maximize(
    function: Callable[[Any], Any],
    mu: Any,
    sigma: Any,
    num_samples: int | None = None,
    *,
    steps: int = 100,
    callbacks: Callback | Sequence[Callback] = (),
    progress: bool = False,
    vectorized: bool = True,
    cuda_graph: bool = False,
    **options: Unpack[Options],
) -> Result:
    """Searches the x of the greatest ``function(x)``; arguments, result and errors are those of `minimize`."""
    search = steps, callbacks, progress, vectorized, cuda_graph
    return _search(True, function, mu, sigma, num_samples, *search, options)


def _search(maximize, function, mu, sigma, num_samples, steps, callbacks, progress, vectorized, cuda_graph, options):  # type: ignore[no-untyped-def]
    from tqdm import tqdm

    if "maximize" in options:
        raise TypeError("maximize: expected no such argument, as minimize and maximize say it by their names")
    known = inspect.signature(CrossEntropyMethod).parameters
    if unknown := [name for name in options if name not in known]:
        own = "steps", "callbacks", "progress", "vectorized", "cuda_graph"
        raise TypeError(f"{unknown[0]}: expected one of {', '.join(n for n in (*known, *own) if n != 'maximize')}")
    callbacks = [callbacks] if callable(callbacks) or not isinstance(callbacks, Iterable) else list(callbacks)
    for name, value in (("function", function), *(("callbacks", callback) for callback in callbacks)):
        if not callable(value):
            raise TypeError(f"{name}: expected a function, got {type(value).__qualname__}")
    if num_samples is None:
        shape = mu.shape if hasattr(mu, "shape") else _options.like("mu", mu, None).shape
        event_dims = _arguments.integer("event_dims", options.get("event_dims", 1), 1)
        num_samples = max(50, 10 * math.prod(shape[len(shape) - event_dims :]))
    steps = _arguments.integer("steps", steps, 0)
    flags = {"progress": progress, "vectorized": vectorized, "cuda_graph": cuda_graph}
    progress, vectorized, cuda_graph = (_arguments.flag(name, value) for name, value in flags.items())
    method = CrossEntropyMethod(mu, sigma, num_samples, maximize=maximize, **options)
    history = History(method)
    score = _all_at_once(function, method) if vectorized else _one_by_one(function, method)
    if cuda_graph and not (is_tensor(method.mu) and method.mu.is_cuda):
        raise ValueError("cuda_graph: expected mu as a tensor on CUDA")
    step = method.capture(score) if cuda_graph else lambda: method.tell(score(method.ask()))
    stopped_by = None
    with tqdm(total=steps, disable=not progress, unit="step") as bar:
        for _ in range(steps):
            step()
            history.record()
            stopping = [callback for callback in callbacks if callback(method, history)]
            stopped_by = stopping[0] if stopping else None
            if bar.update() or len(history) == steps or stopped_by is not None:  # the bar was drawn, or is so at last
                bar.set_postfix_str("" if bar.disable else f"best {history.best_so_far[-1].flat[0]:.6g}")
            if stopped_by is not None:
                break
    x, last_mu, last_sigma = map(copied, (method.best_x, method.mu, method.sigma))
    score = method.best_score + 0  # of one problem a number, in NumPy
    evaluations = history.evaluations[-1] if len(history) else 0
    return Result(x, score, last_mu, last_sigma, len(history), evaluations, stopped_by, history, method)


def _all_at_once(function: Callable[[Any], Any], method: CrossEntropyMethod) -> Callable[[Any], Any]:
    def scores(samples: Any) -> Any:
        found = function(samples)
        shape = () if isinstance(found, numbers.Real) else getattr(found, "shape", None)
        wanted = tuple(samples.shape[: samples.ndim - len(method.event_shape)])
        if shape is not None and tuple(shape) != wanted:
            got = "one number" if shape == () else f"shape {tuple(shape)}"
            raise ValueError(
                f"function: expected a score for each of the samples, all of which it gets at once, in shape {wanted}, "
                f"got {got}; for a function of one x, pass vectorized=False"
            )
        return _options.scores(found, wanted, samples, "function")

    return scores


def _one_by_one(function: Callable[[Any], Any], method: CrossEntropyMethod) -> Callable[[Any], Any]:
    def scores(samples: Any) -> Any:
        shape = samples.shape[: samples.ndim - len(method.event_shape)]
        values = [_options.score(function(x)) for x in samples.reshape(-1, *method.event_shape)]
        xp = library_of(samples)
        return xp.asarray(
            values, dtype=xp.float64, **({"device": samples.device} if is_tensor(samples) else {})
        ).reshape(shape)

    return scores
