"""Normal samples, from the public function down to the library's `sample_normal_fwd` (csrc/sample_normal.cc)."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any, overload

from . import _arguments, errors
from ._sample_normal import arrays as _arrays
from ._sample_normal import checks as _checks
from ._sample_normal.noise import Draw, sizes_of
from ._torch import torch

if torch is not None:
    from ._sample_normal.eager import direct
    from ._sample_normal.operators import forward_torch

if TYPE_CHECKING:
    from ._arguments import Array


@overload
def sample_normal(
    mu: Array,
    sigma: Array | float,
    num_samples: int,
    *,
    sample_dim: int = 0,
    shared_noise: bool = False,
    antithetic: bool = False,
    low: Array | float | None = None,
    high: Array | float | None = None,
    dtype: Any = None,
    generator: Any = None,
    seed: Any = None,
    start: int = 0,
    out: Array | None = None,
    validate: bool = False,
) -> Array: ...


@overload
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
) -> Any: ...


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
            (computed on the GPU where there is one, in bfloat16, that of ml_dtypes, on the CPU), or an array on CUDA of
            CuPy, JAX, or a library like them that speaks DLPack. With sigma and the bounds, it broadcasts to at most
            2**40 elements.
        sigma: the standard deviations, at least 0: an array like mu, or a finite number. In arrays it may be infinite,
            which between finite bounds is the uniform distribution, if their distances from each other and from mu are
            in float64's range (else NaN), and without bounds gives infinities; with others it has to be finite, too.
        num_samples: N, at least 0. With 0 the result is empty, and no random state is used. start + N is at most 2**44.
        sample_dim: 0 puts N before the last dimension, ``(..., N, d)``; -1 puts it last, ``(..., d, N)``.
        shared_noise: one z a sample for all distributions: that of the first element of mu.
        antithetic: samples in pairs, mu + sigma z and mu - sigma z; pair k has the z of sample k of the plain draw. Of
            an odd number, the last one is without its pair. With bounds, the quantiles of u and 1 - u.
        low: the lower bound, a number or an array like mu; None is no bound. An infinite one changes no distribution,
            but where a bound is given samples are quantiles, and so other numbers than without.
        high: the upper bound, likewise, more than low. mu, sigma and both bounds broadcast together to ``(..., d)``.
        dtype: the result's dtype, one of these four, as PyTorch or NumPy has it or by name; by default mu's.
        generator: a torch.Generator of mu's device, for other arrays a numpy.random.Generator or a torch.Generator of
            the CPU, that is advanced. By default PyTorch's own for tensors, so that `torch.manual_seed` reproduces, and
            NumPy's global one for other arrays. Each replay of a CUDA graph draws fresh numbers.
        seed: instead of a generator, an integer of 64 bits, or an int64 tensor on mu's device of one or two elements:
            the seed, and the number of the stream, 0 by default, of which the lower 44 bits count. Nothing is advanced.
        start: the number of the first sample.
        out: for tensors and NumPy arrays, one of the result's shape and dtype that the samples are written into, and
            that is returned. No two of its elements may share memory; where autograd records, neither it nor another
            argument may require a gradient; and outside of inference mode, it is no inference tensor.
        validate: for torch tensors on CUDA, look at the values of sigma and the bounds, which waits for the GPU.
            Without it, a negative sigma, low not below high, or an infinite sigma with an infinite bound gives NaN.
            Values of arrays on the CPU are always looked at, except in compiled code and under transforms.

    Returns:
        x, ``(..., N, d)``, or ``(..., d, N)`` with sample_dim=-1, in mu's kind of array, on mu's device.

    Raises:
        TypeError: an argument is of a kind or dtype that is not listed here.
        ValueError: shapes or devices do not go together, a number is out of range, or both a seed and a generator are
            given.
        NotImplementedError: from autograd, for the second derivative of truncated samples.
        cuops.errors.CuopsError: the installation or the GPU fails; the message has the command that fixes it.

    Source: Box and Muller, A note on the generation of random normal deviates (1958),
    https://doi.org/10.1214/aoms/1177706645; Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011),
    https://doi.org/10.1145/2063384.2063405.
    """
    if low is None and high is None and dtype is None and out is None and validate is False and torch is not None:
        try:
            x = direct(mu, sigma, num_samples, sample_dim, shared_noise, antithetic, generator, seed, start)
            if x is not None:
                return x
        except errors.CuopsError:
            raise
        except (TypeError, ValueError, RuntimeError, BufferError):
            pass  # the library refuses an argument, which below is converted or gets its error
    _arguments.computable("mu", mu, ("cpu", "cuda", "meta"))
    given = {"mu": mu, "sigma": sigma, "low": low, "high": high}
    for name, value in given.items():
        if isinstance(value, numbers.Real) or (value is None and name != "sigma"):
            given[name] = _checks.number(name, value)
        elif name != "mu" and not hasattr(value, "shape"):
            raise TypeError(f"{name}: expected a number or an array like mu, got {type(value).__qualname__}")
        else:
            _arguments.array(name, value, mu, "mu")
    arrays = {name: v for name, v in given.items() if v is not None and not isinstance(v, numbers.Real)}
    shape = _arguments.broadcast({name: tuple(v.shape) for name, v in arrays.items()})
    if not shape:
        raise ValueError("mu: expected at least 1 dimension, got 0")
    num_samples, start, sample_dim = _checks.draw(num_samples, sample_dim, start, math.prod(shape))
    dtype = mu.dtype if dtype is None else dtype
    if _arguments.dtype_name(dtype) not in _arguments.DTYPES:
        raise TypeError(f"dtype: expected float64, float32, float16 or bfloat16, got {dtype}")
    if seed is not None and generator is not None:
        raise ValueError("seed: expected either a seed or a generator, got both")
    _checks.order(given)
    sizes = tuple(sizes_of(shape, num_samples, sample_dim))
    flags = {"shared_noise": shared_noise, "antithetic": antithetic, "validate": validate}
    shared_noise, antithetic, validate = (_arguments.flag(name, value) for name, value in flags.items())
    draw = Draw(0, 0, num_samples, start, sample_dim, shared_noise, antithetic)
    if _arguments.is_tensor(mu):
        dtype = dtype if isinstance(dtype, torch.dtype) else getattr(torch, _arguments.dtype_name(dtype))
        return forward_torch(given, shape, sizes, draw, dtype, generator, seed, out, validate)
    sample = _arrays.sample_numpy if _arguments.is_ndarray(mu) else _arrays.sample_dlpack
    return sample(given, shape, sizes, draw, dtype, generator, seed, out)
