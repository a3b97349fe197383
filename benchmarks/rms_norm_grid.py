"""RMSNorm at all sizes against every peer."""

from __future__ import annotations

import argparse
import math
import random
from typing import Any

from cuops._bench import report
from cuops._bench.case import DTYPES, Case
from cuops._bench.rms_norm import KINDS

from .comparison import Records, Timer, summary, sweep

SIZES = sorted(
    {1 << k for k in range(6, 21)}
    | {(1 << k) + 8 for k in range(7, 20, 2)}
    | {96, 776, 1000, 5120, 7168, 24576, 100_000, 640_000}
    | {65, 257, 1023, 4097, 33333, 262_143, 999_999}
)
ROWS = (1, 16, 256, 4096, 131_072)
ELEMENTS = 1 << 28  # a bound on memory, and on time
# Problems drawn at random: how many, and of what rows and sizes.
RANDOM, RANDOM_SEED = 60, 1
RANDOM_ROWS = (1, 2, 8, 32, 64, 100, 128, 192, 384, 512, 640, 768, 1024, 1536, 2048, 3000, 8192, 10_000, 16_384, 65_536)
RANDOM_SIZES = (
    *(128, 192, 256, 384, 512, 640, 768, 1024, 1152, 1536, 2048, 2304, 2560, 2880, 3072, 3584, 4096, 4608, 5120, 5376),
    *(6144, 6656, 7168, 8192, 9216, 10_240, 10_752, 11_008, 12_288, 13_824, 14_336, 16_384, 18_432, 24_576, 28_672),
    *(340, 771, 1111, 2049, 5003),
)
TINY = 1 << 21  # elements: such cases are replayed in a row, as launching takes longer than they do


def _shapes(options: argparse.Namespace) -> list[tuple[int, ...]]:
    sizes = SIZES[::6] if options.quick and options.part is None else SIZES
    most = 1 << 14 if options.device == "cpu" else ELEMENTS
    return options.shapes or [(rows, n) for n in sizes for rows in ROWS if rows * n <= most]


def _cases(options: argparse.Namespace) -> list[Case]:
    """All cases, or every k-th of them for a part of k, so that each part has some of every kind."""
    cases = [
        Case("rms_norm", kind, shape, DTYPES[letter])
        for letter in options.dtypes or ("b", "f")
        for kind in ("forward", "backward")
        for shape in _shapes(options)
    ]
    part, parts = options.part or (1, 1)
    return cases[part - 1 :: parts]


def _other_parts(options: argparse.Namespace) -> Records:
    """What runs of the other parts have left in the folder of results."""
    if options.part is None:
        return []
    part, parts = options.part
    records: Records = []
    for other in set(range(1, parts + 1)) - {part}:
        found = report.earlier_sections(options.output / f"rms_norm_grid_{other}of{parts}.json", options.facts)
        records += found.get("grid", [])
        if not found:
            print(f"part {other} of {parts}, of the same commit and arguments, is not in {options.output}")
    return records


def grid(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """forward and backward at all sizes: the geometric mean to the best peer, and the worst ratio last"""
    records = sweep(_cases(options), options, functions, timer, TINY)
    summary(records + _other_parts(options))
    return records


def _random_shapes(options: argparse.Namespace) -> list[tuple[int, ...]]:
    """Rows of as many tokens as a batch may have, of hidden sizes of models and of some that no model has."""
    draw, shapes = random.Random(RANDOM_SEED), set()
    bound = 1 << 14 if options.device == "cpu" else ELEMENTS // 2
    while len(shapes) < (RANDOM // 15 if options.quick else RANDOM):
        shape = draw.choice(RANDOM_ROWS), draw.choice(RANDOM_SIZES)
        if math.prod(shape) <= bound:
            shapes.add(shape)
    return sorted(shapes)


def at_random(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """forward, with a residual, and backward at sizes drawn at random: the mean to the best peer, the worst ratio last"""
    shapes, letters = options.shapes or _random_shapes(options), options.dtypes or ("b", "f")
    cases = [Case("rms_norm", kind, s, DTYPES[letter]) for kind in KINDS for letter in letters for s in shapes]
    records = sweep(cases, options, functions, timer, TINY)
    summary(records)
    return records
