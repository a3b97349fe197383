"""What the benchmarks of operators share: the cases that are asked for, measured and printed as a table."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from cuops._bench import report
from cuops._bench.case import DTYPES, Case, measure_all
from cuops._bench.timing import CpuTimer, CudaTimer

Records = list[dict[str, Any]]
Timer = CudaTimer | CpuTimer
Shapes = Mapping[str, Sequence[tuple[int, ...]]]  # by the letter of a dtype


def cases_of(operator: str, kind: str, standard: Shapes, options: argparse.Namespace, other: str) -> list[Case]:
    """The standard cases, or those of the options; dtypes that the standard has not take the shapes of `other`."""
    chosen = (
        {letter: standard.get(letter, standard[other]) for letter in options.dtypes} if options.dtypes else standard
    )
    cases = []
    for letter, shapes in chosen.items():
        shapes = options.shapes or (shapes[:2] if options.quick else shapes)
        cases += [Case(operator, kind, shape, DTYPES[letter]) for shape in shapes]
    return cases


def comparison(
    cases: list[Case], options: argparse.Namespace, functions: dict[str, Any], timer: Timer, calls: int = 1
) -> Records:
    """Measures every function on every case, and prints the table."""
    records = measure_all(cases, functions, timer, options.device, calls)
    print(report.comparison(records))
    return records
