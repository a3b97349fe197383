"""`cuops run sample_normal`: samples of the distributions whose means are in a file."""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import cuops

from .. import _sample_normal_checks
from .._torch import torch

CHUNK = 256 << 20  # bytes of samples at once


def arguments(command: argparse.ArgumentParser) -> None:
    """The options beside the two files."""
    command.add_argument("--num-samples", type=int, required=True, metavar="N")
    command.add_argument("--sigma", default="1", metavar="NUMBER or FILE", help="by default 1")
    command.add_argument("--low", type=float, help="lower bound")
    command.add_argument("--high", type=float, help="upper bound")
    command.add_argument("--seed", type=int, default=0, help="by default 0")
    command.add_argument("--start", type=int, default=0, help="the number of the first sample, by default 0")
    command.add_argument("--antithetic", action="store_true", help="samples in pairs, mu + sigma z and mu - sigma z")
    command.add_argument("--shared-noise", action="store_true", help="one z a sample for all dimensions")


def main(options: argparse.Namespace) -> int:
    """Draws (..., N, d) from IN, (..., d), into OUT; says what ran where."""
    from .files import read, spare, writing
    from .run import _device, _tensors, parameter, read_rows

    mu = read_rows(options.input)
    if options.num_samples < 0:
        raise ValueError(f"--num-samples: expected at least 0, got {options.num_samples}")
    device, where = _device()
    means: Any = parameter(mu, mu)
    number = _number(options.sigma)
    sigma: Any = parameter(read(options.sigma), mu) if number is None else number
    spare(options.output, options.input, [options.sigma] if number is None else [])
    if mu.dtype == "bfloat16":
        means, sigma = _tensors(means, device), _tensors(sigma, device)
    keywords = {name: getattr(options, name) for name in ("low", "high", "seed", "antithetic", "shared_noise")}
    # No samples tell the shape of more, and arguments are checked before there is any output.
    *leading, _, d = cuops.sample_normal(means, sigma, 0, start=options.start, **keywords).shape
    _sample_normal_checks.draw(options.num_samples, 0, options.start, math.prod((*leading, d)))
    shape, start = (*leading, options.num_samples, d), time.perf_counter()
    step = max(1, CHUNK // max(math.prod((*leading, d)) * mu.values.itemsize, 1))
    with writing(options.output, shape, mu.dtype, mu.name) as out:
        for first in range(0, options.num_samples, step):
            count = min(step, options.num_samples - first)
            x = cuops.sample_normal(means, sigma, count, start=options.start + first, **keywords)
            out[..., first : first + count, :] = x.cpu().view(torch.uint16).numpy() if mu.dtype == "bfloat16" else x
    seconds = time.perf_counter() - start
    speed = f"{seconds:.2f} s, {math.prod(shape) * mu.values.itemsize / seconds / 1e9:.2f} GB/s"
    print(f"sample_normal of {'x'.join(map(str, shape))} {mu.dtype} on {where}: {speed}, wrote {options.output}")
    return 0


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
