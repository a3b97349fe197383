"""What the benchmarks of operators share: the cases that are asked for, measured and printed as a table."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from cuops._bench import report
from cuops._bench.case import DTYPES, Case, measure_all, why
from cuops._bench.timing import CpuTimer, CudaTimer
from cuops.cli.cases import folder

RESULTS = Path("benchmarks/results")  # of the standard cases, by every peer
Records = list[dict[str, Any]]
Timer = CudaTimer | CpuTimer
Shapes = Mapping[str, Sequence[tuple[int, ...]]]  # by the letter of a dtype


class Benchmark(Protocol):
    """What a module of this folder has, one for each operator."""

    SECTIONS: dict[str, Callable[[argparse.Namespace, dict[str, Any], Timer], Records]]  # titled by their docstrings
    PLOTTED: tuple[str, ...]  # those of the picture
    ON_REQUEST: tuple[str, ...]  # those that take long: they run where they are named, and have files of their own
    PARTED: tuple[str, ...]  # those of which a run may do a part
    NEED_CUOPS: tuple[str, ...]  # those that measure nothing else


def output(given: Path | None, device: str) -> Path:
    """The folder for results, which is made; by default that of the published ones. Raises ValueError."""
    if given is None and device != "cuda":
        raise ValueError(f"--output: expected a folder, as what {RESULTS} has is of a GPU")
    folder(given or RESULTS)
    return given or RESULTS


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


def sweep(
    cases: list[Case], options: argparse.Namespace, functions: dict[str, Any], timer: Timer, tiny: int
) -> Records:
    """Measures cases of all sizes, kind by kind; those of up to `tiny` elements in a row: launching takes longer."""
    records: Records = []
    for kind in dict.fromkeys(case.kind for case in cases):
        for in_a_row in (True, False):
            chosen = [c for c in cases if c.kind == kind and (math.prod(c.shape) <= tiny) == in_a_row]
            if chosen:
                print(f"\n{kind}{', 20 calls in one CUDA graph' if in_a_row else ''}", flush=True)
                records += comparison(chosen, options, functions, timer, calls=20 if in_a_row else 1)
    return records


def summary(records: Records) -> None:
    """Prints the geometric mean against the best peer, by kind; and last the cases where cuops does worst."""
    compared = sorted((r for r in records if "to_best_peer" in r), key=lambda record: float(record["to_best_peer"]))
    print()
    for kind in dict.fromkeys(record["kind"] for record in compared):
        ratios = [record["to_best_peer"] for record in compared if record["kind"] == kind]
        print(
            f"{kind}: {1 / statistics.geometric_mean(ratios):.2f} times as fast as the best peer, geometric mean of "
            f"{len(ratios)} cases; {sum(ratio > 1.02 for ratio in ratios)} take more than 1.02 times as long"
        )
    print("\nthe slowest against the best peer:")
    for r in compared[-25:]:
        print(f"{r['to_best_peer']:.3f}x {r['best_peer']}: {r['kind']} {r['dtype']} {'x'.join(map(str, r['shape']))}")


def calls_on_the_host(
    functions: dict[str, Any], timer: Timer, plain: Sequence[Any], differentiated: Sequence[Any]
) -> Records:
    """Times a call on arguments that need no gradient, and one on such that do, and prints the table."""
    records: Records = []
    for name, function in functions.items():
        try:
            calls = [partial(function, *arguments) for arguments in (plain, differentiated)]
            without, with_gradient = (timer.host(lambda call=call: call) for call in calls)
        except Exception as error:  # a peer may fail in any way, and the others are still to be measured
            print(f"{name} fails: {why(error)}")
            continue
        records.append({"implementation": name, "without_gradient_us": without, "with_gradient_us": with_gradient})
    rows = [[r["implementation"], f"{r['without_gradient_us']:.1f}", f"{r['with_gradient_us']:.1f}"] for r in records]
    print(report.table(["µs", "without gradient", "with gradient"], rows))
    return records
