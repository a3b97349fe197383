"""The state of a Cross-Entropy Method as a dictionary, from which it goes on bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import _arguments
from .._arguments import is_tensor
from ._library import copied, writing


def save(method: Any) -> dict[str, Any]:
    """Copies of all arrays, and where between ask and tell the method is."""
    arrays = {name: copied(array) for name, array in method._state.arrays().items()}
    pending = copied(method._rows(method._asked)) if method._asked else None
    return {**arrays, "population": pending, "steps_of_host": method._steps, **_search(method)}


def _search(method: Any) -> dict[str, Any]:
    """What a method searches, where arrays do not tell."""
    shape = *method.batch_shape, method.num_samples, *method.event_shape
    return {"samples_shape": shape, "maximize": method.maximize}


def load(method: Any, saved: Mapping[str, Any]) -> None:
    """Takes over what `save` gave for a method of the same sizes and dtypes; errors leave the state unchanged."""
    if not isinstance(saved, Mapping):
        raise TypeError(f"state_dict: expected a dictionary that state_dict() gave, got {type(saved).__qualname__}")
    arrays, search = method._state.arrays(), _search(method)
    expected = {*arrays, "population", "steps_of_host", *search}
    if saved.keys() != expected:
        raise ValueError(f"state_dict: expected the keys {sorted(expected)}, got {sorted(saved, key=str)}")
    for name, array in arrays.items():
        check(name, saved[name], array, tuple(array.shape))
    for name, own in search.items():
        if type(saved[name]) is not type(own) or saved[name] != own:
            raise ValueError(f"state_dict: {name}: expected {own}, as this method has, got {saved[name]}")
    steps = _arguments.integer("state_dict: steps_of_host", saved["steps_of_host"], 0)
    pending = saved["population"]
    if pending is not None:
        size = pending.shape[1] if getattr(pending, "ndim", 0) == 3 else method.num_samples
        check("population", pending, method._memory, (method.problems, size, method.dimensions))
        if not 1 <= size <= method.num_samples:
            raise ValueError(f"state_dict: population: expected 1 to {method.num_samples} samples, got {size}")
    values = {name: _to(saved[name], array) for name, array in arrays.items()}
    rows = None if pending is None else _to(pending, method._memory)
    with writing(method._memory):
        for name, array in arrays.items():
            array[...] = values[name]
        method._steps = steps
        method._asked, method._evaluated = 0 if rows is None else rows.shape[1], 0
        if rows is not None:
            method._rows(method._asked)[...] = rows


def check(name: str, value: Any, like: Any, shape: tuple[int, ...]) -> None:
    """The value may go where `like` is: of its library, dtype and this shape."""
    wanted = f"{type(like).__qualname__} {shape} {like.dtype}"
    if is_tensor(value) != is_tensor(like) or not hasattr(value, "shape"):
        raise TypeError(f"state_dict: {name}: expected {wanted}, got {type(value).__qualname__}")
    if tuple(value.shape) != shape or value.dtype != like.dtype:
        got = f"{type(value).__qualname__} {tuple(value.shape)} {value.dtype}"
        raise ValueError(f"state_dict: {name}: expected {wanted}, got {got}")
    if is_tensor(value) and (value.is_meta or value.layout != like.layout):
        raise ValueError(f"state_dict: {name}: expected {wanted}, got one of layout {value.layout} on {value.device}")


def _to(value: Any, like: Any) -> Any:
    return value.detach().to(like.device) if is_tensor(like) else value
