"""A quick test of each operator against its definition, on the CPU or one GPU, for `cuops doctor`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from .. import reference
from .._sample_normal import noise
from .._torch import cuda_tensors, torch

EPS = 1e-6
LIMIT = 4.0  # in units of the dtype's epsilon, relative to each value


def _rounded(error: float) -> float:
    """The error in few digits; the largest number for one that is not finite, as JSON has no infinity."""
    return round(error, 3) if math.isfinite(error) else sys.float_info.max


def _rms_norm(place: int | None) -> dict[str, float]:
    """The largest error by dtype, in epsilons relative to each value; `place` is a GPU's index, None is the CPU."""
    import numpy as np

    x, weight = (np.random.default_rng(0).standard_normal(shape) for shape in ((67, 1000), (1000,)))
    with_torch = torch is not None and (place is None or cuda_tensors())
    found = {}
    for dtype, epsilon in {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}.items():
        if dtype == "bfloat16" and not with_torch:
            continue  # NumPy has no such dtype
        given, y = _by_torch(x, weight, dtype, place) if with_torch else _by_numpy(x, weight, dtype, place)
        wide_x, wide_weight, wide_y = (a.astype(np.longdouble) for a in (*given, y))
        exact = wide_x / np.sqrt(np.mean(wide_x**2, -1, keepdims=True) + EPS) * wide_weight
        least = 2.0**-14 if dtype == "float16" else 0.0  # below, its values have fewer digits
        error = float(np.max(np.abs(wide_y - exact) / np.maximum(np.abs(exact), least)) / epsilon)
        found[dtype] = _rounded(error)
    return found


def _by_torch(x: Any, weight: Any, dtype: str, place: int | None) -> tuple[list[Any], Any]:
    import cuops

    given = [torch.from_numpy(a).to(getattr(torch, dtype)) for a in (x, weight)]
    device = torch.device("cpu") if place is None else torch.device("cuda", place)
    y = cuops.rms_norm(given[0].to(device), given[1].to(device), eps=EPS)
    return [a.double().numpy() for a in given], y.double().cpu().numpy()


def _by_numpy(x: Any, weight: Any, dtype: str, place: int | None) -> tuple[list[Any], Any]:
    import cuops

    given = [a.astype(dtype) for a in (x, weight)]
    if place is None:  # the public function would take a GPU that is there
        return given, reference.rms_norm_numpy(given[0], None, given[1], None, EPS, 0.0, None)[0]
    return given, cuops.rms_norm(given[0], given[1], eps=EPS)


def _sample_normal(place: int | None) -> dict[str, float]:
    """The largest difference from the seed's numbers by dtype, in epsilons relative to the larger of 1 and each."""
    import numpy as np

    found = {}
    for dtype, epsilon in {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10}.items():
        zeros, ones = np.zeros(33, dtype), np.ones(33, dtype)
        draw = noise.Draw(7, 0, 40)
        exact = noise.noise(np, draw, np.arange(33), dtype == "float64", False)
        if place is None:  # the public function would take a GPU that is there
            x = np.empty((40, 33), dtype)
            reference.sample_normal_numpy(zeros, ones, None, None, draw, x)
        else:
            x = _on_gpu(zeros, ones, place)
        error = float(np.max(np.abs(x - exact) / np.maximum(np.abs(exact), 1)) / epsilon)
        found[dtype] = _rounded(error)
    return found


def _kron_linear(place: int | None) -> dict[str, float]:
    """The largest error by dtype, in epsilons of each value. All are positive: no sum is less than its terms."""
    import numpy as np

    import cuops

    drawn = [np.random.default_rng(0).uniform(0.5, 1.5, shape) for shape in ((67, 54), (6, 6), (9, 9))]
    found = {}
    for dtype, epsilon in {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10}.items():
        x, w, v = (a.astype(dtype) for a in drawn)
        if place is None:  # the public function would take a GPU that is there
            y = reference.kron_linear_numpy(x, [w, v], None)
        elif cuda_tensors():
            on_gpu = [torch.from_numpy(a).to(torch.device("cuda", place)) for a in (x, w, v)]
            y = cuops.kron_linear(on_gpu[0], on_gpu[1:]).cpu().numpy()
        else:
            y = cuops.kron_linear(x, [w, v])
        exact = x.astype(np.longdouble) @ np.kron(w.astype(np.longdouble), v.astype(np.longdouble)).T
        error = float(np.max(np.abs(y - exact) / exact) / epsilon)
        found[dtype] = _rounded(error)
    return found


def _on_gpu(zeros: Any, ones: Any, place: int) -> Any:
    import cuops

    if not cuda_tensors():
        return cuops.sample_normal(zeros, ones, 40, seed=7)
    device = torch.device("cuda", place)
    mu, sigma = (torch.from_numpy(a).to(device) for a in (zeros, ones))
    return cuops.sample_normal(mu, sigma, 40, seed=7).cpu().numpy()


SELF_TESTS: dict[str, Callable[[int | None], dict[str, float]]] = {
    "rms_norm": _rms_norm,
    "sample_normal": _sample_normal,
    "kron_linear": _kron_linear,
}
