"""What the arguments of `sample_normal` must be: each function raises an error that names its argument."""

from __future__ import annotations

from typing import Any

from .. import _arguments
from .._torch import torch
from .noise import MOST_COLUMNS, MOST_SAMPLES


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


def bounds(ordered: bool, dtype: Any = None) -> None:
    """`ordered` says whether low is less than high everywhere: as given, or rounded to the samples' dtype."""
    if not ordered:
        where = "" if dtype is None else f" in the samples' dtype, {dtype}"
        raise ValueError(f"low: expected less than high everywhere{where}")


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
