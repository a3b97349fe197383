"""A quick test of each operator against its definition, on the CPU or one GPU, for `cuops doctor`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .. import reference
from .._sample_normal import noise
from .._torch import cuda_tensors, torch

EPS = 1e-6
EPSILONS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
LIMIT = 4.0  # in units of the dtype's epsilon, relative to each value
Function = Callable[..., Any]


def _rounded(error: float) -> float:
    """The error in few digits; the largest number for one that is not finite, as JSON has no infinity."""
    return round(error, 3) if math.isfinite(error) else sys.float_info.max


def _errors(place: int | None, given: Sequence[Any], operator: Function, on_cpu: Function, exact: Function) -> Any:
    """The largest error by dtype, in epsilons.

    Args:
        place: a GPU's index; None is the CPU.
        given: what the operator is given, as NumPy arrays of float64.
        operator: of arrays or tensors, which takes a GPU that is there.
        on_cpu: the same of NumPy arrays, without a GPU.
        exact: of a dtype and what is given, as NumPy's longest floats: the result, and what its errors are relative to.
    """
    import numpy as np

    found = {}
    for dtype, epsilon in EPSILONS.items():
        if (dtype == "bfloat16" and torch is not None) if place is None else cuda_tensors():
            tensors = [torch.from_numpy(a).to(getattr(torch, dtype)) for a in given]
            device = torch.device("cpu") if place is None else torch.device("cuda", place)
            y = operator(*(t.to(device) for t in tensors)).double().cpu().numpy()
            arrays = [t.double().numpy() for t in tensors]
        elif dtype == "bfloat16":
            continue  # which NumPy has not
        else:
            arrays = [a.astype(dtype) for a in given]
            y = (on_cpu if place is None else operator)(*arrays)
        want, scale = exact(dtype, *(a.astype(np.longdouble) for a in arrays))
        found[dtype] = _rounded(float(np.max(np.abs(y - want) / scale)) / epsilon)
    return found


def _rms_norm(place: int | None) -> dict[str, float]:
    import numpy as np

    import cuops

    def exact(dtype: str, x: Any, weight: Any) -> tuple[Any, Any]:
        y = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + EPS) * weight
        return y, np.maximum(np.abs(y), 2.0**-14 if dtype == "float16" else 0.0)  # below, it has fewer digits

    given = [np.random.default_rng(0).standard_normal(shape) for shape in ((67, 1000), (1000,))]
    return _errors(
        place,
        given,
        lambda x, weight: cuops.rms_norm(x, weight, eps=EPS),
        lambda x, weight: reference.rms_norm_numpy(x, None, weight, None, EPS, 0.0, None)[0],
        exact,
    )


def _sample_normal(place: int | None) -> dict[str, float]:
    import numpy as np

    import cuops

    draw = noise.Draw(7, 0, 40)

    def on_cpu(mu: Any, sigma: Any) -> Any:
        x = np.empty((draw.num_samples, mu.size), mu.dtype)
        reference.sample_normal_numpy(mu, sigma, None, None, draw, x)
        return x

    def exact(dtype: str, mu: Any, sigma: Any) -> tuple[Any, Any]:
        z = noise.noise(np, draw, np.arange(mu.size), dtype == "float64", False)
        return z, np.maximum(np.abs(z), 1)

    def operator(mu: Any, sigma: Any) -> Any:
        return cuops.sample_normal(mu, sigma, draw.num_samples, seed=draw.seed)

    return _errors(place, [np.zeros(33), np.ones(33)], operator, on_cpu, exact)


def _kron_linear(place: int | None) -> dict[str, float]:
    """Of positive numbers alone: no sum is less than its terms."""
    import numpy as np

    import cuops

    def exact(dtype: str, x: Any, w: Any, v: Any) -> tuple[Any, Any]:
        y = x @ np.kron(w, v).T
        return y, y

    given = [np.random.default_rng(0).uniform(0.5, 1.5, shape) for shape in ((67, 54), (6, 6), (9, 9))]
    return _errors(
        place,
        given,
        lambda x, *factors: cuops.kron_linear(x, factors),
        lambda x, *factors: reference.kron_linear_numpy(x, factors, None),
        exact,
    )


SELF_TESTS: dict[str, Callable[[int | None], dict[str, float]]] = {
    "rms_norm": _rms_norm,
    "sample_normal": _sample_normal,
    "kron_linear": _kron_linear,
}
