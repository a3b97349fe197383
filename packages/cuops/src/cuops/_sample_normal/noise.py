"""The random numbers of cuops, for NumPy arrays and torch tensors alike: Philox words, and the normals made of them.

A column is a distribution: one element of mu. Samples 4g to 4g + 3 of a column are one call of Philox-4x32-10, a group:

    key      the seed, its lower 32 bits first
    counter  (group, column, stream, top), the lower 32 bits of each; top holds what is above them:
             bit 31 set | part (1 bit) | stream (12) | column (8) | group (10)

No counter depends on how a draw is split, laid out or launched. Part 0 gives the words, part 1 gives each word 32 more
bits, for float64 and for truncation. The counters of PyTorch's own generator have bit 31 of top clear: they never meet.

Words (w0, w1) make the normals of the first two samples of a group, (w2, w3) those of the others, by Box and Muller:

    u = (w0 + 1/2) / 2^32, cut to 24 bits             radius = sqrt(-2 ln u), at most 6.76
    a = ((w1 mod 2^23, its last bit set) / 2^22) - 1  angle = pi/4 a, within the eighth of a turn on each side of 0
    c = cos(angle), negative where bit 31 of w1 is set; s = sin(angle)
    the normals are radius (c, s), or radius (s, c) where bit 30 of w1 is set

In float64, part 1's words v0 and v1 continue them:

    u = (w0 + (v0 + 1/2) / 2^32) / 2^32, cut to 53 bits
    a = ((w1 mod 2^23, its last bit cleared) + floor(v1 / 4) / 2^29) / 2^22 - 1

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011), https://doi.org/10.1145/2063384.2063405.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

MOST_SAMPLES, MOST_COLUMNS = 1 << 44, 1 << 40
WORD = 0xFFFFFFFF


class Draw(NamedTuple):
    """Which numbers a call draws, and how it lays them out. Seed and stream are ints, or arrays of one element."""

    seed: Any
    stream: Any
    num_samples: int
    start: int = 0
    sample_dim: int = 0
    shared_noise: bool = False
    antithetic: bool = False


def sizes_of(shape: Any, num_samples: Any, sample_dim: int) -> list[Any]:
    """The sizes of the samples of distributions of a shape."""
    return [*shape[:-1], num_samples, shape[-1]] if sample_dim == 0 else [*shape, num_samples]


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Philox-4x32-10 of int64 arrays that hold 32-bit words; they broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 wraps around, which leaves the 64 bits of the product right.
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (second >> 32 & WORD) ^ c1 ^ k0, second & WORD, (first >> 32 & WORD) ^ c3 ^ k1, first & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def words(seed: Any, stream: Any, groups: Any, columns: Any, part: int) -> tuple[Any, Any, Any, Any]:
    """The four words of each group and column, int64 arrays."""
    top = 2 + part << 30 | (stream >> 32 & 0xFFF) << 18 | (columns >> 32) << 10 | groups >> 32
    return philox((groups & WORD, columns & WORD, stream & WORD, top), (seed & WORD, seed >> 32 & WORD))


def normals(xp: Any, first: tuple[Any, ...], second: tuple[Any, ...] | None) -> Any:
    """Standard normals in float64, the four samples of a group along a new axis 1; `second` are part 1's words."""
    result = []
    for i in (0, 2):
        w0, w1 = first[i : i + 2]
        if second is None:
            bits = (wide(w0) + 0.5).view(xp.int64)
            u = (bits >> 29 << 29).view(xp.float64) * 2.0**-32
            fraction = wide(w1 & 0x7FFFFE | 1)
        else:
            rest = (wide(second[i]) + 0.5) * 2.0**-32
            u = wide(w0) + rest
            bits = u.view(xp.int64)
            u = xp.where(u - w0 > rest, bits - 1, bits).view(xp.float64) * 2.0**-32
            fraction = wide((w1 & 0x7FFFFE) << 29 | second[i + 1] >> 2) * 2.0**-29
        radius = xp.sqrt(-2 * xp.log(u))
        angle = (fraction * 2.0**-22 - 1) * (math.pi / 4)
        c, s = radius * xp.cos(angle), radius * xp.sin(angle)
        c = xp.where(w1 >> 31 != 0, -c, c)
        swapped = w1 >> 30 & 1 != 0
        result += [xp.where(swapped, s, c), xp.where(swapped, c, s)]
    return xp.stack(result, 1)


def uniforms(xp: Any, first: tuple[Any, ...], second: tuple[Any, ...]) -> Any:
    """Uniform numbers of 53 bits in (0, 1), the four samples of a group along a new axis 1."""
    u = [(wide(a) + (wide(b) + 0.5) * 2.0**-32) * 2.0**-32 for a, b in zip(first, second, strict=True)]
    return xp.clip(xp.stack(u, 1), None, 1 - 2.0**-53)


def noise(xp: Any, draw: Draw, columns: Any, precise: bool, uniform: bool) -> Any:
    """The normals, or uniform numbers, of some columns: (num_samples, columns), or (num_samples, 1) where it is shared.

    `columns` is an int64 array, `xp` its module; `precise` asks for the normals of float64.
    """
    pairs = 2 if draw.antithetic else 1
    first, last = draw.start // pairs, (draw.start + draw.num_samples - 1) // pairs
    groups = _arange(columns, first // 4, last // 4 + 1)[:, None]
    columns = groups[:1] * 0 if draw.shared_noise else columns[None]
    w = words(draw.seed, draw.stream, groups, columns, 0)
    more = words(draw.seed, draw.stream, groups, columns, 1) if precise or uniform else None
    z = uniforms(xp, w, more or ()) if uniform else normals(xp, w, more)
    z = z.reshape(math.prod(z.shape[:-1]), z.shape[-1])[first % 4 :]
    if draw.antithetic:
        z = xp.stack([z, 1 - z if uniform else -z], 1).reshape(2 * z.shape[0], z.shape[1])[draw.start % 2 :]
    return z[: draw.num_samples]


def wide(x: Any) -> Any:
    return x.double() if hasattr(x, "double") else x.astype("float64")


def _arange(like: Any, start: int, end: int) -> Any:
    if hasattr(like, "double"):
        import torch

        return torch.arange(start, end, device=like.device)
    import numpy as np

    return np.arange(start, end)
