"""What every operator computes, in plain NumPy and plain PyTorch: what the CPU runs, and tests compare kernels with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from . import _arguments
from ._kron_linear.sizes import elements_between
from ._sample_normal import noise as _noise
from ._sample_normal import truncation

if TYPE_CHECKING:
    import numpy as np
    import torch


CHUNK = 1 << 13  # elements, columns or calls of Philox at once: what they need stays in the cache
KRON_CHUNK = 1 << 18  # elements of float64 of a Kronecker product, likewise
CUDA_CHUNK = 1 << 20  # likewise on a GPU, which each operation must fill


def some_rows(rows: int, columns: int, chunk: int) -> Iterator[slice]:
    """As many rows at a time as have `chunk` elements, or one."""
    step = max(chunk // max(columns, 1), 1)
    return (slice(first, first + step) for first in range(0, rows, step))


def rms_norm_numpy(
    x: np.ndarray,
    residual: np.ndarray | None,
    weight: np.ndarray | None,
    bias: np.ndarray | None,
    eps: float,
    weight_offset: float,
    out_dtype: Any,
    out: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(y, h, rstd) of RMSNorm over the last dimension; h is x where there is no residual.

    `out`: where y goes, contiguous, which may be x: rows are written once they have been read.
    """
    import numpy as np

    *leading, n = x.shape
    rows = math.prod(leading)
    flat = x.reshape(rows, n)
    added = None if residual is None else residual.reshape(rows, n)
    dtype = x.dtype.name if residual is None else _arguments.promoted(x.dtype.name, residual.dtype.name)
    h = flat if added is None else np.empty((rows, n), dtype)
    y = np.empty((rows, n), out_dtype or x.dtype) if out is None else out.reshape(rows, n)
    rstd = np.empty((rows, 1), _arguments.accumulator(dtype))
    with np.errstate(all="ignore"):  # a GPU warns of nothing
        factor = None if weight is None else weight.astype(np.float64) + weight_offset
        term = 0.0 if bias is None else bias.astype(np.float64)
        for part in some_rows(rows, n, CHUNK):
            if added is not None:
                h[part] = flat[part].astype(np.float64) + added[part]
            wide = h[part].astype(np.float64)
            largest = np.max(np.abs(wide), axis=-1, keepdims=True, initial=np.sqrt(eps))
            # A power of two, itself no denormal, keeps the squares of float64 in range, exactly.
            exponent = np.clip(np.frexp(np.where(np.isfinite(largest), largest, 1))[1], -1000, 1022)
            scale = np.exp2(-exponent.astype(np.float64))
            scaled = wide * scale
            rms = np.sqrt(np.square(scaled).sum(-1, keepdims=True) / max(n, 1) + eps * scale * scale)
            normalized = np.where(rms == 0, 0.0, scaled / rms)
            y[part] = (normalized if factor is None else normalized * factor) + term
            rstd[part] = np.where(rms == 0, 0.0, scale / rms)
    return y.reshape(x.shape), x if added is None else h.reshape(x.shape), rstd.reshape(leading)


def _rstd(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """1 / sqrt(mean(x^2) + eps) as factors (rstd, scale): a power of two keeps float64's squares in range."""
    import torch

    fixed = x.detach()  # in forward mode, too
    largest = torch.cat([fixed.abs(), fixed.new_full((*x.shape[:-1], 1), eps**0.5)], -1).amax(-1, keepdim=True)
    largest = torch.where(largest.isfinite() & (largest > 0), largest, 1.0)
    # The power of two that brings it to 0.5 to 1. Of exponents, as integers, torch.compile makes no code for CPUs.
    scale = (torch.frexp(largest).mantissa / largest).clamp(2.0**-1022, 2.0**1000)
    mean = (x * scale).square().sum(-1, keepdim=True) / max(x.shape[-1], 1) + eps * scale * scale
    zero = mean == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, mean).rsqrt()), scale


def rms_norm_torch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, h, rstd) of RMSNorm over the last dimension; h is x where there is no residual. Differentiable."""
    import torch

    h = x if residual is None else (x.double() + residual.double()).to(torch.promote_types(x.dtype, residual.dtype))
    rstd, scale = _rstd(h.double(), eps)
    y = h.double() * scale * rstd
    if weight is not None:
        y = y * (weight.double() + weight_offset)
    if bias is not None:
        y = y + bias.double()
    return (
        y.to(out_dtype or x.dtype),
        h,
        (rstd * scale)[..., 0].to(_arguments.sums_dtype(h.dtype)),
    )


def rms_norm_torch_backward(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Gradients for (h and so x and residual, weight, bias), from those for (y, h). Differentiable."""
    rstd, scale = _rstd(h.double(), eps)
    y = h.double() * scale * rstd  # without weight and bias
    grad = dy.double()
    through = grad if weight is None else grad * (weight.double() + weight_offset)
    dx = (through - y * (through * y).sum(-1, keepdim=True) / max(h.shape[-1], 1)) * rstd * scale
    if dh is not None:
        dx = dx + dh
    dweight = None if weight is None else _over_rows(grad * y).to(weight.dtype)
    return dx.to(h.dtype), dweight, _over_rows(grad)


def _over_rows(terms: torch.Tensor) -> torch.Tensor:
    """The sum over all but the last dimension."""
    return terms.sum(tuple(range(terms.ndim - 1))) if terms.ndim > 1 else terms


def _rests(factors: Sequence[Any]) -> list[int]:
    """Beside each factor's columns, when its turn comes: the rows of those before it, the columns of those after."""
    # From lists, since torch.compile follows no generator through vmap and its like.
    outs, ins = [w.shape[0] for w in factors], [w.shape[1] for w in factors]
    return [math.prod([*ins[k + 1 :], *outs[:k]]) for k in range(len(factors))]


def kron_linear_numpy(x: np.ndarray, factors: Sequence[np.ndarray], bias: np.ndarray | None) -> np.ndarray:
    """x @ kron(factors).T + bias: products from the first dimension on, or from the last where less lies between."""
    import numpy as np

    sizes, rows, n = [w.shape for w in factors], math.prod(x.shape[:-1]), x.shape[-1]
    out = math.prod(o for o, _ in sizes)
    y = np.zeros((*x.shape[:-1], out), x.dtype)
    if 0 in (rows, n, out):  # sums of nothing, whatever the other factors have
        return y if bias is None else y + bias
    most, most_from_last = max(elements_between(sizes)), max(elements_between(sizes[::-1]))
    from_last, flat, to = most_from_last < most, x.reshape(rows, n), y.reshape(rows, out)
    with np.errstate(all="ignore"):
        term = 0.0 if bias is None else bias.astype(np.float64)
        wide = [w.astype(np.float64) for w in (factors[::-1] if from_last else factors)]
        for part in some_rows(rows, min(most, most_from_last), KRON_CHUNK):
            state = flat[part].astype(np.float64)
            for w, rest in zip(wide, _rests(wide), strict=True):
                if from_last:
                    state = np.matmul(w, state.reshape(len(state), rest, w.shape[1]).swapaxes(1, 2))
                else:  # not by tensordot: of one number that is 0, np.dot takes no NaN along
                    columns = state.reshape(len(state), w.shape[1], rest).swapaxes(1, 2)
                    state = np.matmul(columns.reshape(len(state) * rest, w.shape[1]), w.T)
                    state = state.reshape(len(columns), rest, w.shape[0])
            to[part] = state.reshape(len(state), out) + term
    return y


def _begins_with_last(factors: Sequence[Any]) -> bool:
    """Whether less lies between the factors where the last one comes first: not in traced code, for any sizes."""
    import torch

    sizes = [w.shape for w in factors]
    if torch.compiler.is_compiling() or any(isinstance(n, torch.SymInt) for size in sizes for n in size):
        return False
    return max(elements_between(sizes[::-1])) < max(elements_between(sizes))


def _columns(state: torch.Tensor, size: int, rest: int, from_last: bool) -> torch.Tensor:
    """What one factor reads or writes of a state: (rows, size, rest), or (rows, rest, size)."""
    return state.reshape(state.shape[0], *((rest, size) if from_last else (size, rest)))


def _applied(columns: torch.Tensor, w: torch.Tensor, from_last: bool) -> torch.Tensor:
    """What a factor makes of them: (rows, rest, o), or (rows, o, rest)."""
    import torch

    product = torch.tensordot(columns, w.double(), dims=([2 if from_last else 1], [1]))
    return product.mT if from_last else product


def kron_linear_torch(x: torch.Tensor, factors: Sequence[torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
    """x @ kron(factors).T + bias: from the first dimension on, or the last, as `kron_linear_numpy`. Differentiable."""
    from_last = _begins_with_last(factors)
    ordered = factors[::-1] if from_last else factors
    state = x.double().reshape(math.prod(x.shape[:-1]), x.shape[-1])
    for w, rest in zip(ordered, _rests(ordered), strict=True):
        state = _applied(_columns(state, w.shape[1], rest, from_last), w, from_last)
    y = state.reshape(*x.shape[:-1], math.prod([w.shape[0] for w in factors]))
    return (y if bias is None else y + bias.double()).to(x.dtype)


def kron_linear_torch_backward(
    dy: torch.Tensor, x: torch.Tensor, factors: Sequence[torch.Tensor], needs_x: bool, needs_factors: Sequence[bool]
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """Gradients for x and the factors, None where not needed: the products again, then back through them.

    Differentiable.
    """
    import torch

    from_last = _begins_with_last(factors)
    ordered, needs = (factors[::-1], needs_factors[::-1]) if from_last else (factors, needs_factors)
    rows, rests, states = math.prod(x.shape[:-1]), _rests(ordered), {}
    state, grad = (t.double().reshape(rows, t.shape[-1]) for t in (x, dy))
    for k, (w, rest) in enumerate(zip(ordered, rests, strict=True)):
        if any(needs[k:]):
            states[k] = _columns(state, w.shape[1], rest, from_last)
        if any(needs[k + 1 :]):
            state = _applied(states[k], w, from_last)
    found: list[torch.Tensor | None] = [None] * len(factors)
    for k in reversed(range(len(factors))):
        w = ordered[k]
        grad = _columns(grad, w.shape[0], rests[k], not from_last)
        if needs[k]:
            over = ([0, 2], [0, 1]) if from_last else ([0, 1], [0, 2])
            found[k] = torch.tensordot(grad, states.pop(k), dims=over).to(w.dtype)
        if not needs_x and not any(needs[:k]):
            break
        grad = torch.tensordot(grad, w.double(), dims=([1 if from_last else 2], [0]))
        grad = grad if from_last else grad.mT
    dx = grad.reshape(x.shape).to(x.dtype) if needs_x else None
    return dx, found[::-1] if from_last else found


def _samples(xp: Any, parameters: list[Any], noise: Any) -> Any:
    """Samples in float64; `parameters` are mu and sigma, or mu, sigma, low and high with uniform noise."""
    mu, sigma, *bounds = parameters
    x = truncation.truncated(xp, parameters, noise) if bounds else mu + sigma * noise
    return xp.where(sigma >= 0, x, float("nan"))


def _parts(shape: tuple[int, ...], draw: _noise.Draw, chunk: int) -> Iterator[tuple[slice, slice, _noise.Draw]]:
    """A draw in parts of `chunk` calls of Philox: columns, samples of the whole draw, and the part's own draw."""
    columns = int(math.prod(shape))
    for column in range(0, columns, chunk):
        step = max(chunk // min(columns, chunk), 1) * 4
        for sample in range(0, draw.num_samples, step):
            count = min(step, draw.num_samples - sample)
            part = draw._replace(start=draw.start + sample, num_samples=count)
            yield slice(column, min(column + chunk, columns)), slice(sample, sample + count), part


def sample_normal_numpy(
    mu: np.ndarray,
    sigma: np.ndarray,
    low: np.ndarray | None,
    high: np.ndarray | None,
    draw: _noise.Draw,
    out: np.ndarray,
) -> None:
    """Writes the samples of mu + sigma z into `out`; mu, sigma, low and high are of one shape."""
    import numpy as np

    rows = np.moveaxis(out, -2 if draw.sample_dim == 0 else -1, 0)
    samples = rows if rows.ndim == 2 else np.empty((draw.num_samples, mu.size), out.dtype)
    wide = _arguments.accumulator(out.dtype.name)  # 16 bits are rounded from float32's numbers, as everywhere
    with np.errstate(all="ignore"):
        given = [np.asarray(a, np.float64).reshape(-1) for a in (mu, sigma, low, high) if a is not None]
        for columns, place, part in _parts(mu.shape, draw, CHUNK):
            numbers = np.arange(columns.start, columns.stop)
            noise = _noise.noise(np, part, numbers, out.dtype == np.float64, low is not None)
            samples[place, columns] = _samples(np, [a[columns] for a in given], noise).astype(wide, copy=False)
    if samples is not rows:
        rows[...] = samples.reshape(rows.shape)


def sample_normal_torch(
    mu: torch.Tensor,
    sigma: torch.Tensor,
    low: torch.Tensor | None,
    high: torch.Tensor | None,
    draw: _noise.Draw,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The samples of mu + sigma z; mu, sigma, low and high are of one shape."""
    import torch

    from ._sample_normal.operators import noise_of

    given = [a.double().reshape(-1) for a in (mu, sigma, low, high) if a is not None]
    samples = mu.new_empty((draw.num_samples, mu.numel()), dtype=dtype)
    for columns, place, part in _parts(mu.shape, draw, CHUNK if mu.device.type == "cpu" else CUDA_CHUNK):
        noise = noise_of(part, columns, mu.device, dtype == torch.float64, low is not None)
        samples[place, columns] = _samples(torch, [a[columns] for a in given], noise).to(dtype)
    return laid_out(samples.reshape(draw.num_samples, *mu.shape), draw)


def laid_out(samples: torch.Tensor, draw: _noise.Draw) -> torch.Tensor:
    """Samples along the first dimension, moved to where the draw wants them."""
    return samples.movedim(0, -2 if draw.sample_dim == 0 else -1).contiguous()


def sample_normal_formula(
    mu: torch.Tensor,
    sigma: torch.Tensor,
    low: torch.Tensor | None,
    high: torch.Tensor | None,
    draw: _noise.Draw,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The same, out of place and differentiable once, for transforms."""
    import torch

    from ._sample_normal.operators import noise_of
    from ._sample_normal.quantile import Quantile

    given = [a.double() for a in (mu, sigma, low, high) if a is not None]
    noise = noise_of(draw, slice(0, mu.numel()), mu.device, dtype == torch.float64, low is not None)
    noise = noise.reshape(noise.shape[0], *(mu.shape if noise.shape[1] == mu.numel() else [1] * mu.ndim))
    if low is None:
        x = given[0] + given[1] * noise
    elif torch.compiler.is_compiling():  # which does not follow the other way; nor does it see second derivatives
        fixed = [a.detach() for a in given]
        x = truncation.truncated(torch, fixed, noise)
        for slope, a, f in zip(truncation.slopes(torch, fixed, noise), given, fixed, strict=True):
            x = x + slope * torch.where(f.isfinite(), a - f, 0)
    else:
        x = Quantile.apply(*torch.broadcast_tensors(noise, *given))
    x = torch.where(given[1] >= 0, x, math.nan)
    return laid_out(x, draw).to(dtype)


def sample_normal_torch_backward(
    grad: torch.Tensor,
    mu: torch.Tensor,
    sigma: torch.Tensor,
    low: torch.Tensor | None,
    high: torch.Tensor | None,
    draw: _noise.Draw,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients for mu, sigma, low and high. The noise is drawn again. Differentiable."""
    import torch

    from ._sample_normal.operators import noise_of

    g = grad.double().movedim(-2 if draw.sample_dim == 0 else -1, 0).reshape(draw.num_samples, mu.numel())
    given = [a.double().reshape(-1) for a in (mu, sigma, low, high) if a is not None]
    sums: list[list[torch.Tensor]] = []
    chunk = CHUNK if mu.device.type == "cpu" else CUDA_CHUNK
    for columns, place, part in _parts(mu.shape, draw, chunk):
        parameters = [a[columns] for a in given]
        noise = noise_of(part, columns, mu.device, grad.dtype == torch.float64, low is not None)
        slopes: list[torch.Tensor] = [torch.ones_like(noise), noise]
        if low is not None:
            slopes = list(truncation.slopes(torch, parameters, noise))
        found = [(g[place, columns] * slope).sum(0) for slope in slopes]
        if columns.start == len(sums) * chunk:
            sums.append(found)
        else:
            sums[-1] = [a + b for a, b in zip(sums[-1], found, strict=True)]
    kinds = [a for a in (mu, sigma, low, high) if a is not None]
    results = [torch.cat(parts).reshape(mu.shape) for parts in zip(*sums, strict=True)]
    results = results or [torch.zeros_like(a) for a in kinds]
    gradients = [a.to(like.dtype) for a, like in zip(results, kinds, strict=True)]
    return (*gradients, *([None, None] if low is None else []))  # type: ignore[return-value]
