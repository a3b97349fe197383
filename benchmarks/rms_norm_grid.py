"""RMSNorm at all sizes against every peer."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from cuops._bench import report
from cuops._bench.case import DTYPES, Case

from .comparison import Records, Timer, comparison

SIZES = sorted(
    {1 << k for k in range(6, 21)}
    | {(1 << k) + 8 for k in range(7, 20, 2)}
    | {96, 776, 1000, 5120, 7168, 24576, 100_000, 640_000}
    | {65, 257, 1023, 4097, 33333, 262_143, 999_999}
)
ROWS = (1, 16, 256, 4096, 131_072)
ELEMENTS = 1 << 28  # a bound on memory, and on time
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


def _ratio(record: dict[str, Any]) -> float:
    return float(record["to_best_peer"])


def grid(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """forward and backward at all sizes, the worst ratio to the best peer last"""
    records: Records = []
    cases = _cases(options)
    for kind in ("forward", "backward"):
        for tiny in (True, False):
            chosen = [case for case in cases if case.kind == kind and (case.shape[0] * case.shape[1] <= TINY) == tiny]
            if chosen:
                print(f"\n{kind}{', 20 calls in one CUDA graph' if tiny else ''}", flush=True)
                records += comparison(chosen, options, functions, timer, calls=20 if tiny else 1)
    every = records + _other_parts(options)
    compared = sorted((record for record in every if "to_best_peer" in record), key=_ratio)
    slower = sum(_ratio(record) > 1.02 for record in compared)
    mean = f"geometric mean {statistics.geometric_mean(map(_ratio, compared)):.3f}x" if compared else "no peer"
    print(f"\n{len(compared)} cases, {mean}; in {slower} of them a peer is more than 2 % faster")
    print("the slowest against the best peer:")
    for record in compared[-25:]:
        shape = "x".join(map(str, record["shape"]))
        print(f"{_ratio(record):.3f}x {record['best_peer']}: {record['kind']} {record['dtype']} {shape}")
    return records
