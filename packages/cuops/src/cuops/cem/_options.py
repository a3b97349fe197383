"""Checks of the arguments of a Cross-Entropy Method. Every error names the argument, what it got, what is accepted."""

from __future__ import annotations

import math
import numbers
from typing import Any

from .. import _arguments
from .._arguments import is_tensor
from .._sample_normal.bounds import rounded_inwards
from .._torch import torch
from ._library import copied, library_of


def elites(value: Any, num_samples: int) -> int:
    """The number of elites, from it or from their fraction."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return _arguments.integer("elites", value, 1, num_samples)
    _arguments.number("elites", value)
    if not 0 < value <= 1:
        raise ValueError(
            f"elites: expected a fraction over 0 and at most 1, or an integer, got {_arguments.short(value)}"
        )
    return max(1, round(value * num_samples))


def choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """`value` is one of the words."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: expected {' or '.join(map(repr, choices))}, got {value!r}")


def smoothing(value: Any) -> tuple[float, float]:
    """The weights of the new mean and of the new standard deviation."""
    pair = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"smoothing: expected a number or a pair, got {value}")
    for weight in pair:
        _arguments.number("smoothing", weight)
        if not 0 < weight <= 1:
            raise ValueError(f"smoothing: expected numbers over 0 and at most 1, got {_arguments.short(weight)}")
    return float(pair[0]), float(pair[1])


def limits(floor: Any, ceiling: Any, decay: Any, noise: Any, decrease: Any) -> None:
    """What bounds and changes sigma."""
    for name, value in (("sigma_floor", floor), ("noise", noise), ("noise_decrease", decrease)):
        _arguments.number(name, value, least=0)
    _arguments.number("sigma_decay", decay)
    if decay <= 0:
        raise ValueError(f"sigma_decay: expected a number over 0, got {_arguments.short(decay)}")
    if not _arguments.real("sigma_ceiling", ceiling) >= floor:
        least, got = _arguments.short(floor), _arguments.short(ceiling)
        raise ValueError(f"sigma_ceiling: expected at least sigma_floor, {least}, got {got}")


def wide(array: Any) -> Any:
    """A copy in the dtype of sums: float32, float64 for float64."""
    xp = library_of(array)
    dtype = getattr(xp, _arguments.accumulator(_arguments.dtype_name(array.dtype)))
    return array.to(dtype, copy=True).contiguous() if xp is torch else xp.array(array, dtype=dtype, order="C")


def like(name: str, value: Any, mu: Any) -> Any:
    """A number, a list of them, or an array, in the library of mu, on its device."""
    if is_tensor(value):
        if mu is not None and not is_tensor(mu):
            raise TypeError(f"{name}: expected numbers or a numpy.ndarray, as mu is one, got a torch.Tensor")
        _arguments.array(name, value, mu, "mu")
        return value.detach()
    _arguments.no_refused_tensor(name, value)
    import numpy as np

    if _arguments.is_ndarray(value):
        _arguments.plain(name, value)
        array = value.astype(np.float64) if value.dtype.kind in "iu" else value  # integers are numbers, as in a list
    else:
        array = _numbers(name, value)
    _arguments.array(name, array)
    return torch.from_numpy(array.astype(np.float64)).to(mu.device) if is_tensor(mu) else array


def _numbers(name: str, value: Any) -> Any:
    """Real numbers of any kind and size, or a sequence of them, as an array of float64."""
    import numpy as np

    if isinstance(value, int):
        value = _arguments.real(name, value)
    try:
        array = np.asarray(value)
        if array.dtype.kind == "O":  # fractions, and integers of more than 64 bits
            array = np.array([_arguments.real(name, number) for number in array.flat]).reshape(array.shape)
        if isinstance(value, (bytes, bytearray)) or (array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16"):
            raise TypeError
        return array.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        elements = {type(element).__qualname__ for element in value} if isinstance(value, (list, tuple)) else ()
        got = type(value).__qualname__ + (f" of {', '.join(sorted(elements))}" if elements else "")
        raise TypeError(f"{name}: expected a number or an array like mu, got {got}") from None


def distribution(mu: Any, sigma: Any, event_dims: Any) -> tuple[Any, Any]:
    """mu and sigma in one shape, finite, sigma of at least 0."""
    event_dims = _arguments.integer("event_dims", event_dims, 1)
    if not is_tensor(mu):
        mu = like("mu", mu, None)
    _arguments.computable("mu", mu)
    mu = mu.detach() if is_tensor(mu) else mu
    sigma = together("sigma", sigma, mu)
    if mu.ndim < event_dims or math.prod(mu.shape) == 0:
        least = "1 dimension, such as [0.0]," if event_dims == 1 else f"{event_dims} dimensions"
        raise ValueError(f"mu: expected at least {least} and no empty one, got shape {tuple(mu.shape)}")
    finite(mu, sigma)
    return mu, sigma


def finite(mu: Any, sigma: Any) -> None:
    """Both are, and sigma is at least 0."""
    xp = library_of(mu)
    if not xp.isfinite(mu).all():
        raise ValueError("mu: expected finite numbers")
    if not (xp.isfinite(sigma) & (sigma >= 0)).all():
        raise ValueError("sigma: expected finite numbers of at least 0")


def variances(sigma: Any) -> None:
    """The squares of sigma are numbers of its dtype, with all their digits."""
    xp = library_of(sigma)
    limits = xp.finfo(sigma.dtype)
    least, most = float(limits.tiny) ** 0.5, float(limits.max) ** 0.5
    if not ((sigma == 0) | ((sigma >= least) & (sigma <= most))).all():
        raise ValueError(f'sigma: expected 0 or {least:.1e} to {most:.1e} with covariance="full", whose squares it has')


def together(name: str, value: Any, mu: Any) -> Any:
    """The array in mu's shape and the dtype of mu's sums."""
    value = like(name, value, mu)
    xp = library_of(mu)
    if len(value.shape) > len(mu.shape) or any(
        size not in (1, there) for size, there in zip(reversed(value.shape), reversed(mu.shape), strict=False)
    ):
        raise ValueError(
            f"{name}: expected a shape that broadcasts to mu's {tuple(mu.shape)}, got {tuple(value.shape)}"
        )
    dtype = getattr(xp, _arguments.accumulator(_arguments.dtype_name(mu.dtype)))
    if xp is torch:
        return xp.broadcast_to(value.to(dtype), mu.shape)
    with xp.errstate(over="ignore"):  # infinite, which is what bounds may be, and others are refused for
        return xp.broadcast_to(value.astype(dtype), mu.shape)


def bounds(low: Any, high: Any, mu: Any, event_dims: int, dtype: Any) -> tuple[Any, Any]:
    """Both as (problems, d) in the samples' dtype, rounded to where they still hold, or None; mu is within them."""
    if low is None and high is None:
        return None, None
    xp = library_of(mu)
    limits, rounded = [], []
    for name, value, none in (("low", low, -math.inf), ("high", high, math.inf)):
        exact = like(name, none if value is None else value, mu)
        limits.append(together(name, exact, mu))
        if xp.isnan(limits[-1]).any():
            raise ValueError(f"{name}: expected numbers, {none} for none, got NaN")
        rounded.append(rounded_inwards(exact, dtype, name == "low"))
    if not (limits[0] < limits[1]).all():
        raise ValueError("low: expected less than high everywhere")
    if (mu < limits[0]).any() or (mu > limits[1]).any():
        raise ValueError("mu: expected values from low to high")
    if not (rounded[0] < rounded[1]).all():
        raise ValueError(f"low: expected less than high everywhere in the samples' dtype, {dtype}")
    problems = math.prod(mu.shape[: mu.ndim - event_dims])
    first, last = (copied(xp.broadcast_to(value, mu.shape).reshape(problems, -1)) for value in rounded)
    return first, last


def held(mu: Any, dtype: Any) -> None:
    """mu's numbers are in the range of the samples' dtype."""
    if not _is_in_range(mu, dtype):
        raise ValueError(f"mu: expected numbers in the range of the samples' dtype, {dtype}")


def spread(floor: float, noise: float, dtype: Any, mu: Any) -> None:
    """The least that sigma becomes is in the range of the samples' dtype, and noise in that of the state's."""
    xp = library_of(mu)
    state = getattr(xp, _arguments.accumulator(_arguments.dtype_name(mu.dtype)))
    for name, given, what, value, within in (
        ("sigma_floor", floor, "a number", floor, dtype),
        ("noise", noise, "a number", noise, state),
        ("noise", noise, "a number whose root is", math.sqrt(noise), dtype),
    ):
        if not _is_in_range(xp.asarray(value, dtype=xp.float64), within):
            raise ValueError(f"{name}: expected {what} in the range of {_arguments.dtype_name(within)}, got {given}")


def _is_in_range(values: Any, dtype: Any) -> bool:
    import numpy as np

    with np.errstate(over="ignore"):
        cast = values.to(dtype) if is_tensor(values) else values.astype(dtype)
    return bool(library_of(values).isfinite(cast).all())


def dtype(value: Any, mu: Any) -> Any:
    """The samples' dtype, of mu's library; mu's where the value is None."""
    if value is None:
        return mu.dtype
    name = _arguments.dtype_name(value)
    if name not in _arguments.DTYPES or (name == "bfloat16" and not is_tensor(mu)):
        raise TypeError(f"dtype: expected float64, float32, float16 or, with PyTorch, bfloat16, got {value}")
    if _arguments.accumulator(name) != _arguments.accumulator(_arguments.dtype_name(mu.dtype)):
        raise TypeError(f"dtype: expected float64 samples of a float64 mu, and of no other, got {value} and {mu.dtype}")
    return getattr(torch, name) if is_tensor(mu) else _arguments.numpy_dtype("dtype", name)


def seed(value: Any, generator: Any, mu: Any) -> int:
    """The seed, or one that the generator draws."""
    if value is not None:
        if generator is not None:
            raise ValueError("seed: expected None with a generator")
        return _arguments.integer("seed", value, 0, 2**63 - 1)
    if is_tensor(mu):
        if generator is not None and not isinstance(generator, torch.Generator):
            got = f"{type(generator).__module__}.{type(generator).__qualname__}"
            raise TypeError(f"generator: expected a torch.Generator, got {got}")
        device = "cpu" if generator is None else generator.device
        return int(torch.randint(2**63 - 1, (), device=device, generator=generator))
    import numpy as np

    if generator is None:
        return int(np.random.randint(2**63 - 1, dtype=np.int64))
    if not isinstance(generator, np.random.Generator):
        raise TypeError(f"generator: expected a numpy.random.Generator, got {type(generator).__qualname__}")
    return int(generator.integers(2**63 - 1))


def score(value: Any) -> float:
    """What a function made of one x: a real number, or an array with one, of the dtypes that `scores` takes."""
    if not hasattr(value, "__array__"):
        return float(value) if isinstance(value, bool) else _arguments.real("function", value)
    if not is_tensor(value):
        import numpy as np

        value = np.asanyarray(value)
    if math.prod(value.shape) != 1:
        raise ValueError(f"function: expected a number, got an array of shape {tuple(value.shape)}")
    return float(scores(value, tuple(value.shape), value, "function").reshape(()))


def scores(value: Any, shape: tuple[int, ...], memory: Any, name: str = "scores") -> Any:
    """Scores of this shape, contiguous, where the samples are, in a floating dtype."""
    if is_tensor(value) != is_tensor(memory) or not hasattr(value, "__array__"):
        kind, make = ("a torch.Tensor", "torch.tensor") if is_tensor(memory) else ("a numpy.ndarray", "numpy.array")
        hint = f"; {make}(scores) makes one" if isinstance(value, (list, tuple)) else ""
        raise TypeError(f"{name}: expected {kind}, as the samples, got a {type(value).__qualname__}{hint}")
    if not is_tensor(value):
        import numpy as np

        value = np.asanyarray(value)  # those of pandas and JAX, say
    if tuple(value.shape) != shape:
        raise ValueError(f"{name}: expected one for each sample, shape {shape}, got {tuple(value.shape)}")
    if is_tensor(memory):
        if value.device != memory.device:
            raise ValueError(f"{name}: expected a tensor on the samples' device, {memory.device}, got {value.device}")
        if value.is_complex():
            raise TypeError(f"{name}: expected real numbers, got {value.dtype}")
        if value.layout is not torch.strided:
            raise TypeError(f"{name}: expected a dense tensor, got layout {value.layout}")
        value = value.detach() if value.is_floating_point() else value.double()
        return (value if value.dtype in _arguments.TORCH_DTYPES else value.float()).contiguous().resolve_neg()
    _arguments.plain(name, value)
    if value.dtype.name == "bfloat16":  # of ml_dtypes
        return value.astype("float32")
    if value.dtype.kind not in "fiub":
        raise TypeError(f"{name}: expected real numbers, got {value.dtype}")
    return value if value.dtype.kind == "f" else value.astype("float64")
