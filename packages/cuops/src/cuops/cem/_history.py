"""What happened in each step of a Cross-Entropy Method, and its plot."""

from __future__ import annotations

import dataclasses
from typing import Any

from .. import _arguments
from .._arguments import is_tensor
from .._torch import torch
from ._library import copied


@dataclasses.dataclass(eq=False, repr=False)
class History:
    """Scores and spread by step. Recording does not make the host wait for a GPU; reading does, once for new steps.

    Each of `best`, `elite_mean`, `elite_worst`, `best_so_far` and `sigma` is an array ``(steps, *batch)`` of float64;
    the first three are NaN where no score of a step was finite. `evaluations` are those of one problem by then.
    """

    method: Any
    evaluations: list[int] = dataclasses.field(default_factory=list)
    _pending: list[Any] = dataclasses.field(default_factory=list)
    _fetched: list[Any] = dataclasses.field(default_factory=list)

    def __repr__(self) -> str:
        """A line, without waiting for the device."""
        return f"History({self.method!r}, steps={len(self)})"

    def record(self) -> None:
        """Notes the step that `method` has just done."""
        state = self.method._state
        self._pending.append((copied(state.summary), state.sigma.mean(-1)))
        before = self.evaluations[-1] if self.evaluations else 0
        self.evaluations.append(before + self.method._evaluated)

    def __len__(self) -> int:
        return len(self.evaluations)

    @property
    def best(self) -> Any:
        """The best score of each step."""
        return self._column(0)

    @property
    def elite_mean(self) -> Any:
        """The mean score of each step's elites."""
        return self._column(1)

    @property
    def elite_worst(self) -> Any:
        """The worst score among each step's elites."""
        return self._column(2)

    @property
    def best_so_far(self) -> Any:
        """The best score up to each step, since a `reset` that did not keep it."""
        return self._column(3)

    @property
    def sigma(self) -> Any:
        """The mean of the standard deviations after each step."""
        return self._column(4)

    def _column(self, number: int) -> Any:
        return self._table()[..., number].reshape(len(self), *self.method.batch_shape).copy()

    def _table(self) -> Any:
        """(steps, problems, 5) on the host."""
        import numpy as np

        if self._pending:
            summaries, sigmas = zip(*self._pending, strict=True)
            if is_tensor(summaries[0]):
                summaries, sigmas = torch.stack(summaries).cpu().numpy(), torch.stack(sigmas).cpu().numpy()
            self._fetched.append(np.concatenate([summaries, np.asarray(sigmas, np.float64)[..., None]], -1))
            self._pending.clear()
        if len(self._fetched) != 1:
            empty = np.empty((0, self.method.problems, 5))
            self._fetched = [np.concatenate([empty, *self._fetched])]
        return self._fetched[0]

    def plot(self, path: Any = None, *, offset: float | None = None) -> Any:
        """Scores and sigma over the evaluations, as a matplotlib figure; written to `path` where there is one.

        Of several problems, the median and the range from the first to the ninth decile.

        Args:
            path: a file to write, in a format that matplotlib knows; None writes none.
            offset: where it is given, the scores' distance from it (the optimum, say) is shown on a logarithmic scale.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: there is no step yet, or offset is not finite.
        """
        if len(self) == 0:
            raise ValueError("plot: expected a history of at least one step, got none")
        if offset is not None:
            _arguments.number("offset", offset)
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError("plot needs matplotlib; run: pip install matplotlib") from error
        import numpy as np

        figure, (scores, spread) = plt.subplots(2, 1, sharex=True, figsize=(7, 6), layout="constrained")
        for axes, name, label in (
            (scores, "best_so_far", "best so far"),
            (scores, "best", "best of the step"),
            (scores, "elite_mean", "mean of the elites"),
            (spread, "sigma", "mean of sigma"),
        ):
            values = getattr(self, name).reshape(len(self), -1)
            if axes is scores and offset is not None:
                values = np.abs(values - offset)
            with np.errstate(invalid="ignore"):  # between infinite scores
                low, middle, high = np.quantile(values, (0.1, 0.5, 0.9), axis=1)
            (line,) = axes.plot(self.evaluations, middle, label=label)
            if values.shape[1] > 1:
                axes.fill_between(self.evaluations, low, high, color=line.get_color(), alpha=0.2)
            axes.legend()
            axes.grid(alpha=0.3)
        if offset is not None:
            scores.set_yscale("log")
        spread.set_yscale("log")
        scores.set_ylabel("score" if offset is None else f"distance of the score from {offset:g}")
        spread.set_ylabel("sigma")
        spread.set_xlabel("evaluations of a problem" if self.method.problems > 1 else "evaluations")
        if path is not None:
            try:
                figure.savefig(path)
            finally:
                plt.close(figure)
        return figure
