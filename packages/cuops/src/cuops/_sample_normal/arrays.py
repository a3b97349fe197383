"""Normal samples of NumPy arrays, and of arrays on CUDA of other libraries."""

from __future__ import annotations

import math
from typing import Any

from .. import _arguments, _backend, _dlpack, reference
from .._torch import torch
from . import checks as _checks
from .bounds import rounded_inwards
from .noise import Draw

if torch is not None:
    from . import random_state


def sample_numpy(given, shape, sizes, draw, dtype, generator, seed, out):  # type: ignore[no-untyped-def]
    """`sample_normal` of NumPy arrays, on the GPU where there is one."""
    import numpy as np

    dtype = _arguments.numpy_dtype("dtype", dtype)
    mu, sigma = (np.broadcast_to(given[name], shape) for name in ("mu", "sigma"))
    low, high = (None if given[name] is None else np.broadcast_to(given[name], shape) for name in ("low", "high"))
    if low is not None or high is not None:
        low = np.broadcast_to(-np.inf, shape) if low is None else low
        high = np.broadcast_to(np.inf, shape) if high is None else high
        low, high = rounded_inwards(low, dtype, True), rounded_inwards(high, dtype, False)
    with np.errstate(invalid="ignore"):  # which ml_dtypes says of NaN
        _checks.values(given, sigma, low, high)
    if out is None:
        out = np.empty(sizes, dtype)
    else:
        _arguments.out(out, sizes, dtype, mu, "mu")
        _arguments.apart("out", out)
        mu, sigma = (a.copy() if np.may_share_memory(out, a) else a for a in (mu, sigma))
    if 0 in sizes:
        _seeded(draw, generator, seed, True)
        return out
    device = _backend.gpu_for_host_arrays()
    if device is not None and _arguments.dtype_name(out.dtype) != "bfloat16":
        x = out if out.flags.c_contiguous else np.empty(sizes, out.dtype)
        wide = _arguments.accumulator(out.dtype.name)
        whole = [_dlpack.host_view(a, a.dtype if a.dtype == out.dtype else wide) for a in (mu, sigma)]
        bounds = [None if a is None else _dlpack.host_view(a, out.dtype) for a in (low, high)]
        draw = _seeded(draw, generator, seed, False)
        layout = draw.start, draw.sample_dim, draw.shared_noise, draw.antithetic, device
        _backend.library().sample_normal_fwd_host(x, *whole, *bounds, draw.seed, *layout)
        if x is not out:
            out[...] = x
        return out
    draw = _seeded(draw, generator, seed, False)
    reference.sample_normal_numpy(mu, sigma, low, high, draw, out)
    return out


def sample_dlpack(given, shape, sizes, draw, dtype, generator, seed, out):  # type: ignore[no-untyped-def]
    """`sample_normal` of arrays on CUDA that speak DLPack."""
    mu, sigma, low, high = given.values()
    if out is not None:
        raise TypeError("out: expected None for arrays of this library, whose results are new")
    xp, name = _dlpack.namespace(mu), _arguments.dtype_name(dtype)
    wide = _arguments.accumulator(name)

    def view(value: Any, as_dtype: str) -> Any:
        spread = hasattr(value, "shape") and value.size != 1
        with _dlpack.on_device_of(mu):
            array = xp.broadcast_to(xp.asarray(value), shape) if spread else xp.full(1, value, as_dtype)
            return _dlpack.view(array.astype(as_dtype).copy())

    views = [view(a, name if str(getattr(a, "dtype", wide)) == name else wide) for a in (mu, sigma)]
    bounds: list[Any] = [None, None]
    if low is not None or high is not None:
        low = _inwards(-math.inf if low is None else low, name, True)
        high = _inwards(math.inf if high is None else high, name, False)
        if all(isinstance(given[bound], (float, type(None))) for bound in ("low", "high")) and not low < high:
            raise _checks.why_unordered(given, name)
        bounds = [view(low, name), view(high, name)]
    draw = _seeded(draw, generator, seed, 0 in sizes)
    x = _dlpack.empty(sizes, name, mu)
    layout = draw.start, draw.sample_dim, draw.shared_noise, draw.antithetic
    _backend.library().sample_normal_fwd(x, *views, 0.0, *bounds, None, 0, draw.seed, 0, *layout)
    return _dlpack.give_back(x, mu)


def _inwards(bound: Any, name: str, up: bool) -> Any:
    """A bound in the samples' dtype, rounded to where it still holds; by NumPy, as some libraries round none."""
    import numpy as np

    if str(getattr(bound, "dtype", None)) == name:
        return bound
    exact = np.asarray(bound.get() if hasattr(bound, "get") else bound)  # CuPy's leave the GPU when they are told to
    rounded = rounded_inwards(exact, _arguments.numpy_dtype("dtype", name), up)
    return float(rounded.reshape(())) if rounded.size == 1 else rounded


def _seeded(draw: Draw, generator: Any, seed: Any, is_empty: bool) -> Draw:
    """The draw with its seed, once no argument can be wrong: a call that is refused advances no generator."""
    if seed is None:
        _expect_generator(generator)
        seed = 0 if is_empty else _fresh_seed(generator)
    return draw._replace(seed=_checks.seed(seed))


def _expect_generator(generator: Any) -> None:
    """It is one that arrays which are no tensors have seeds of."""
    import numpy as np

    if torch is not None and isinstance(generator, torch.Generator):
        if generator.device.type != "cpu":
            raise ValueError(f"generator: expected one of the CPU, got one of {generator.device}")
    elif generator is not None and not isinstance(generator, np.random.Generator):
        got = type(generator).__qualname__
        raise TypeError(f"generator: expected a torch.Generator or a numpy.random.Generator, got {got}")


def _fresh_seed(generator: Any) -> int:
    """A seed for arrays that are no tensors."""
    import numpy as np

    if generator is None:
        return int(np.random.randint(-(1 << 63), (1 << 63) - 1, dtype=np.int64))
    if isinstance(generator, np.random.Generator):
        return int(generator.integers(-(1 << 63), (1 << 63) - 1, dtype=np.int64))
    return int(random_state.fresh_seed(generator, "cpu"))
