"""`cuops run sample_normal`: samples of the distributions whose means are in a file."""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import cuops

from .._sample_normal import checks
from . import operands

GROUP = 4  # samples that share the work of their random numbers
MOST_CHUNKS = 4  # times as much as a chunk that a group may take


def arguments(command: argparse.ArgumentParser) -> None:
    """The options beside the two files."""
    number_or_file = "NUMBER or FILE"
    command.add_argument("--num-samples", type=int, required=True, metavar="N", help="samples of each distribution")
    command.add_argument("--sigma", default="1", metavar=number_or_file, help="standard deviation, by default 1")
    command.add_argument("--low", metavar=number_or_file, help="lower bound; a negative number as --low=-1e-3")
    command.add_argument("--high", metavar=number_or_file, help="upper bound")
    command.add_argument("--seed", type=int, default=0, help="of the random numbers, by default 0")
    command.add_argument("--start", type=int, default=0, help="the number of the first sample, by default 0")
    command.add_argument("--antithetic", action="store_true", help="samples in pairs, mu + sigma z and mu - sigma z")
    command.add_argument("--shared-noise", action="store_true", help="one z a sample for all dimensions")


def main(options: argparse.Namespace) -> int:
    """Draws (..., N, d) from IN, (..., d), into OUT; says what ran where."""
    from tqdm import tqdm

    from .files import read, spare, writing

    mu = operands.read_rows(options.input)
    if options.num_samples < 0:
        raise ValueError(f"--num-samples: expected at least 0, got {options.num_samples}")
    device, where = operands.place(mu.dtype)
    means: Any = operands.parameter(mu, mu)
    keywords: dict[str, Any] = {name: getattr(options, name) for name in ("seed", "antithetic", "shared_noise")}
    files = []
    for name in ("sigma", "low", "high"):
        keywords[name] = given = _number(getattr(options, name))
        if isinstance(given, str):
            files.append(given)
            try:
                keywords[name] = operands.parameter(read(given), mu)
            except FileNotFoundError as error:
                raise ValueError(f"--{name}: expected a number or the name of a file, got {given}") from error
    spare(options.output, files)
    if mu.dtype == "bfloat16":
        means, keywords = operands.tensors(means, device), {k: operands.tensors(v, device) for k, v in keywords.items()}
    # No samples tell the shape of more, and arguments are checked before there is any output.
    *leading, _, d = cuops.sample_normal(means, num_samples=0, start=options.start, **keywords).shape
    checks.draw(options.num_samples, 0, options.start, math.prod((*leading, d)))
    shape, start = (*leading, options.num_samples, d), time.perf_counter()
    together, each = 2 * GROUP if options.antithetic else GROUP, max(math.prod((*leading, d)) * mu.values.itemsize, 1)
    if together * each > MOST_CHUNKS * operands.CHUNK_BYTES:
        together = 1
    step = max(together, operands.CHUNK_BYTES // each // together * together)
    nbytes = math.prod(shape) * mu.values.itemsize
    with (
        writing(options.output, shape, mu.dtype, mu.name) as out,
        tqdm(total=nbytes, unit="B", unit_scale=True, delay=1, leave=False) as bar,
    ):
        first = 0
        while first < options.num_samples:
            count = min(step - (options.start + first) % together, options.num_samples - first)
            x = cuops.sample_normal(means, num_samples=count, start=options.start + first, **keywords)
            out[..., first : first + count, :] = operands.stored(x, mu.dtype)
            bar.update(nbytes // options.num_samples * count)
            first += count
    operands.report("sample_normal", shape, mu.dtype, where, time.perf_counter() - start, nbytes, options.output)
    return 0


def _number(given: str | None) -> float | str | None:
    """A number where it is one; else the name of a file, or nothing."""
    try:
        return None if given is None else float(given)
    except ValueError:
        return given
