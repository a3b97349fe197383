"""What the arguments of `sample_normal` must be: each function raises an error that names its argument."""

from __future__ import annotations

import math
from typing import Any

from .. import _arguments
from .._torch import torch
from .noise import MOST_COLUMNS, MOST_SAMPLES, wide


def number(name: str, value: Any) -> Any:
    """What is given in place of an array: a number, here as kernels can have it, or None."""
    if name == "mu":
        raise TypeError(f"mu: expected an array, got {type(value).__qualname__}")
    if isinstance(value, bool):
        raise TypeError(f"{name}: expected a number or an array like mu, got bool")
    if name == "sigma":
        _arguments.number(name, value, least=0)
    elif value is not None and value != value:
        raise ValueError(f"{name}: expected a number, got {value}")
    return value if value is None else _arguments.real(name, value)


def order(given: dict[str, Any]) -> None:
    """Bounds without arrays are in order."""
    low, high = _or_infinite(given)
    if isinstance(low, float) and isinstance(high, float) and not low < high:
        raise _unordered(given)


def values(given: dict[str, Any], sigma: Any, low: Any, high: Any) -> None:
    """What arrays of either library hold; low and high are those given, in the samples' dtype, or both None."""
    if not bool((sigma >= 0).all()):
        raise ValueError("sigma: expected numbers of at least 0, got a negative one or NaN")
    if low is None:
        return
    if not bool((low < high).all()):
        raise why_unordered(given, low.dtype)
    if bool(((sigma == math.inf) & ((low == -math.inf) | (high == math.inf))).any()):
        raise ValueError("sigma: expected finite numbers where not both bounds are finite, got an infinite one")


def _or_infinite(given: dict[str, Any]) -> tuple[Any, Any]:
    low, high = given["low"], given["high"]
    return -math.inf if low is None else low, math.inf if high is None else high


def why_unordered(given: dict[str, Any], dtype: Any) -> ValueError:
    """What to raise of bounds between which there is no number of that dtype."""
    low, high = (a if isinstance(a, float) else wide(a) for a in _or_infinite(given))
    for name, bound in (("low", low), ("high", high)):
        if not isinstance(bound, float) and bool((bound != bound).any()):
            return ValueError(f"{name}: expected numbers, got NaN")
    ordered: Any = low < high  # of numbers it is True, as `order` has seen
    return _unordered(given, f" in the samples' dtype, {dtype}" if ordered is True or bool(ordered.all()) else "")


def _unordered(given: dict[str, Any], where: str = "") -> ValueError:
    if given["low"] is None:
        return ValueError(f"high: expected more than -inf everywhere{where}")
    return ValueError(f"low: expected less than {'inf' if given['high'] is None else 'high'} everywhere{where}")


def draw(num_samples: Any, sample_dim: Any, start: Any, columns: int) -> tuple[int, int, int]:
    """The three integers; there are counters for these samples and columns.

    Sizes that may stay open in compiled and exported programs are not compared with that many: it would bound them.
    """
    bounded = not _is_open(num_samples)
    num_samples = _arguments.integer("num_samples", num_samples, 0, MOST_SAMPLES if bounded else None)
    start = _arguments.integer("start", start, 0, MOST_SAMPLES - num_samples if bounded else None)
    if not _is_open(columns) and columns > MOST_COLUMNS:
        raise ValueError(f"mu: expected at most {MOST_COLUMNS} elements, got {columns}")
    return num_samples, start, _arguments.integer("sample_dim", sample_dim, -1, 0)


def _is_open(size: Any) -> bool:
    return torch is not None and (torch.compiler.is_compiling() or isinstance(size, torch.SymInt))


def seed(given: Any) -> int:
    """The seed's 64 bits as a signed number, which is what operators take."""
    given = _arguments.integer("seed", given, -(1 << 63), (1 << 64) - 1)
    return given - (1 << 64) if given >= 1 << 63 else given
