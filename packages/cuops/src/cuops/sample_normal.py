"""Normal samples, from the public function down to the library's `sample_normal_fwd` (csrc/sample_normal.cc)."""

from __future__ import annotations

import math
import numbers
from typing import Any

from . import _arguments, _backend, _dlpack, errors, reference
from ._noise import MOST_COLUMNS, MOST_SAMPLES, Draw
from ._torch import torch

if torch is not None:
    from . import _random_state, _sample_normal_torch


def sample_normal(
    mu: Any,
    sigma: Any,
    num_samples: int,
    *,
    sample_dim: int = 0,
    shared_noise: bool = False,
    antithetic: bool = False,
    low: Any = None,
    high: Any = None,
    dtype: Any = None,
    generator: Any = None,
    seed: Any = None,
    start: int = 0,
    out: Any = None,
    validate: bool = False,
) -> Any:
    """Samples of normal distributions, or of normal distributions truncated to [low, high].

        x[n, j] = mu[j] + sigma[j] * z[n, j],    z[n, j] standard normal and independent

    z is a function of the seed, n and j alone. So the same seed gives the same numbers on any GPU, in either layout,
    and however a draw is split: `start=k` gives samples k, k + 1, … of the whole draw, bit for bit. The CPU gives the
    same to rounding. With bounds, x is the exact quantile of the truncated distribution, however far out they are.

    Gradients for mu, sigma, low and high are those of x with the same noise, which is drawn again and never stored.

    Args:
        mu: ``(..., d)``, the means, float64, float32, float16 or bfloat16: a torch tensor on CUDA or CPU, a NumPy array
            (computed on the GPU where there is one), or an array on CUDA of any library that speaks DLPack.
        sigma: the standard deviations, at least 0: an array like mu, or a number. Both broadcast to ``(..., d)``.
        num_samples: N, at least 0. With 0 the result is empty, and no random state is used.
        sample_dim: 0 for ``(..., N, d)``; -1 for ``(..., d, N)``.
        shared_noise: one z a sample, that of dimension 0, for all dimensions and distributions.
        antithetic: samples in pairs, mu + sigma z and mu - sigma z; pair k has the z of sample k of the plain draw.
        low: the lower bound, a number or an array like mu, that broadcasts to mu's shape; None is none.
        high: the upper bound, likewise, more than low.
        dtype: the result's dtype; by default mu's.
        generator: a torch.Generator of mu's device, or a numpy.random.Generator for other arrays, that is advanced. By
            default PyTorch's own for tensors, so that `torch.manual_seed` reproduces, and NumPy's global one for other
            arrays. Each replay of a CUDA graph draws fresh numbers.
        seed: instead of a generator, an integer of 64 bits, or an int64 tensor on mu's device of one or two elements:
            the seed, and the number of the stream, 0 by default. Nothing is advanced.
        start: the number of the first sample.
        out: an array of the result's shape and dtype that the samples are written into, and that is returned.
        validate: for arrays on CUDA, look at the values of sigma and the bounds, which waits for the GPU. Without it, a
            negative sigma, or low not below high, gives NaN. Values of arrays on the CPU are always looked at.

    Returns:
        x in mu's kind of array, on mu's device.

    Raises:
        TypeError: an argument is of a kind or dtype that is not listed here.
        ValueError: shapes or devices do not go together, a number is out of range, or both a seed and a generator are
            given.
        cuops.errors.CuopsError: the installation or the GPU fails; the message has the command that mends it.

    Source: Box and Muller, A note on the generation of random normal deviates (1958),
    https://doi.org/10.1214/aoms/1177706645; Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011),
    https://doi.org/10.1145/2063384.2063405.
    """
    if low is None and high is None and dtype is None and out is None and not validate and torch is not None:
        try:
            x = _sample_normal_torch.direct(
                mu, sigma, num_samples, sample_dim, shared_noise, antithetic, generator, seed, start
            )
            if x is not None:
                return x
        except errors.CuopsError:
            raise
        except (TypeError, ValueError, RuntimeError, BufferError):
            pass  # the library refuses an argument, which below is converted or gets its error
    _arguments.array("mu", mu)
    given = {"mu": mu, "sigma": sigma, "low": low, "high": high}
    for name, value in given.items():
        if isinstance(value, numbers.Real) or (value is None and name != "sigma"):
            _check_number(name, value)
        else:
            _arguments.array(name, value, mu, "mu")
    shape = _arguments.broadcast({n: tuple(v.shape) for n, v in given.items() if hasattr(v, "shape")})
    if not shape:
        raise ValueError("mu: expected at least 1 dimension, got 0")
    _check_draw(num_samples, sample_dim, start, math.prod(shape))
    dtype = mu.dtype if dtype is None else dtype
    if _arguments.dtype_name(dtype) not in _arguments.DTYPES:
        raise TypeError(f"dtype: expected float64, float32, float16 or bfloat16, got {dtype}")
    if seed is not None and generator is not None:
        raise ValueError("seed: expected either a seed or a generator, got both")
    if low is not None and high is not None and isinstance(low, numbers.Real) and isinstance(high, numbers.Real):
        _check_bounds(low < high)  # type: ignore[operator]
    sizes = (*shape[:-1], num_samples, shape[-1]) if sample_dim == 0 else (*shape, num_samples)
    draw = Draw(0, 0, int(num_samples), int(start), int(sample_dim), bool(shared_noise), bool(antithetic))
    if _arguments.is_tensor(mu):
        return _sample_normal_torch.sample(given, shape, sizes, draw, dtype, generator, seed, out, validate)
    if seed is None and 0 not in sizes:
        seed = _numpy_seed(generator)
    draw = draw._replace(seed=0 if seed is None else check_seed(seed))
    sample = _sample_numpy if _arguments.is_ndarray(mu) else _sample_dlpack
    return sample(given, shape, sizes, draw, dtype, out)


def _check_number(name: str, value: Any) -> None:
    if name == "mu" or isinstance(value, bool):
        raise TypeError(f"{name}: expected an array, got {type(value).__qualname__}")
    if value is not None and (math.isnan(value) or (name == "sigma" and not 0 <= value < math.inf)):
        raise ValueError(f"{name}: expected a {'finite ' if name == 'sigma' else ''}number, got {value}")


def _check_bounds(ordered: bool) -> None:
    if not ordered:
        raise ValueError("low: expected less than high everywhere")


def _check_draw(num_samples: Any, sample_dim: Any, start: Any, columns: int) -> None:
    _arguments.integer("start", start, 0, MOST_SAMPLES)
    _arguments.integer("num_samples", num_samples, 0, MOST_SAMPLES - start)
    if sample_dim not in (0, -1):
        raise ValueError(f"sample_dim: expected 0 or -1, got {sample_dim}")
    if columns > MOST_COLUMNS:
        raise ValueError(f"mu: expected at most {MOST_COLUMNS} elements, got {columns}")


def _sample_numpy(given, shape, sizes, draw, dtype, out):  # type: ignore[no-untyped-def]
    import numpy as np

    mu, sigma = (np.broadcast_to(given[name], shape) for name in ("mu", "sigma"))
    low, high = (None if given[name] is None else np.broadcast_to(given[name], shape) for name in ("low", "high"))
    if not (sigma >= 0).all():
        raise ValueError("sigma: expected numbers of at least 0, got a negative one or NaN")
    if low is not None or high is not None:
        low = np.broadcast_to(-np.inf, shape) if low is None else low
        high = np.broadcast_to(np.inf, shape) if high is None else high
        low, high = _inwards(low, dtype, np.inf), _inwards(high, dtype, -np.inf)
        _check_bounds(bool((low < high).all()))
    if out is None:
        out = np.empty(sizes, dtype)
    else:
        check_out(out, sizes, dtype, mu)
    if 0 in sizes:
        return out
    device = _backend.gpu_for_host_arrays()
    if device is not None and out.flags.c_contiguous and _arguments.dtype_name(out.dtype) != "bfloat16":
        wide = _arguments.accumulator(out.dtype.name)
        whole = [np.require(a, a.dtype if a.dtype == out.dtype else wide, ["C", "W"]) for a in (mu, sigma)]
        bounds = [None if a is None else np.require(a, out.dtype, ["C", "W"]) for a in (low, high)]
        layout = draw.start, draw.sample_dim, draw.shared_noise, draw.antithetic, device
        _backend.library().sample_normal_fwd_host(out, *whole, *bounds, draw.seed, *layout)
        return out
    reference.sample_normal_numpy(mu, sigma, low, high, draw, out)
    return out


def _inwards(bound: Any, dtype: Any, towards: float) -> Any:
    """A bound in the result's dtype, rounded to where it still holds."""
    import numpy as np

    rounded = bound.astype(dtype)
    outside = rounded < bound if towards > 0 else rounded > bound
    return np.where(outside, np.nextafter(rounded, np.asarray(towards, dtype)), rounded)


def _sample_dlpack(given, shape, sizes, draw, dtype, out):  # type: ignore[no-untyped-def]
    mu, sigma, low, high = given.values()
    if not _dlpack.on_cuda(mu):
        raise TypeError("mu: expected an array on a CUDA device")
    if out is not None:
        raise TypeError("out: expected None for arrays of this library, whose results are new")
    xp, name = _dlpack.namespace(mu), _arguments.dtype_name(dtype)
    wide = _arguments.accumulator(name)

    def view(value: Any, as_dtype: Any) -> Any:
        spread = hasattr(value, "shape") and value.size > 1
        array = xp.broadcast_to(value, shape) if spread else xp.full(1, value, as_dtype)
        return _dlpack.view(array.astype(as_dtype).copy())

    views = [view(a, dtype if getattr(a, "dtype", wide) == dtype else wide) for a in (mu, sigma)]
    bounds = [None, None]
    if low is not None or high is not None:
        bounds = [view(-math.inf if low is None else low, dtype), view(math.inf if high is None else high, dtype)]
    x = _dlpack.empty(sizes, name, mu)
    layout = draw.start, draw.sample_dim, draw.shared_noise, draw.antithetic
    _backend.library().sample_normal_fwd(x, *views, 0.0, *bounds, None, 0, draw.seed, 0, *layout)
    return _dlpack.give_back(x, mu)


def check_out(out: Any, sizes: tuple[int, ...], dtype: Any, like: Any) -> None:
    """Raises what the documentation of `sample_normal` says of `out`."""
    _arguments.array("out", out, like, "mu")
    wanted, got = _arguments.dtype_name(dtype), _arguments.dtype_name(out.dtype)
    if tuple(out.shape) != tuple(sizes) or wanted != got:
        raise ValueError(f"out: expected shape {tuple(sizes)} and dtype {wanted}, got {tuple(out.shape)} and {got}")
    if _arguments.is_ndarray(out) and not out.flags.writeable:
        raise ValueError("out: expected a writable array, got a read-only one")


def check_seed(seed: Any) -> int:
    """The seed's 64 bits as a signed number, which is what operators take."""
    _arguments.integer("seed", seed, -(1 << 63), (1 << 64) - 1)
    return (int(seed) + (1 << 63)) % (1 << 64) - (1 << 63)


def _numpy_seed(generator: Any) -> int:
    """A seed for arrays that are no tensors."""
    if torch is not None and isinstance(generator, torch.Generator):
        return _random_state.host_seed(generator)
    import numpy as np

    if generator is None:
        return int(np.random.randint(-(1 << 63), (1 << 63) - 1, dtype=np.int64))
    if not isinstance(generator, np.random.Generator):
        got = type(generator).__qualname__
        raise TypeError(f"generator: expected a torch.Generator or a numpy.random.Generator, got {got}")
    return int(generator.integers(-(1 << 63), (1 << 63) - 1, dtype=np.int64))
