"""Runs an operator's benchmark: a table on the terminal, JSON and a plot into --output."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, cast

from cuops._bench import OPERATORS, report
from cuops._bench.case import DTYPES, available, module_of
from cuops._bench.timing import timer
from cuops.cli import cases
from cuops.errors import CuopsError

from . import cem
from .comparison import RESULTS, Benchmark, Timer, output


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"expected a part such as 2/8, got {text}")
    return int(part), int(parts)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    own = "cem, the Cross-Entropy Method, has options of its own: cem --help"
    made = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, epilog=own, allow_abbrev=False)
    made.add_argument("operator", choices=OPERATORS)
    made.add_argument("sections", nargs="*", help="what to run; by default all that do not take long")
    made.add_argument(
        "--shapes", nargs="+", type=cases.sizes, metavar="32768x4096", help="instead of the standard ones"
    )
    made.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), help="f d h b: float32, float64, float16, bfloat16")
    made.add_argument("--without", nargs="+", default=[], metavar="PEER", help="leave peers out: torch.compile Liger …")
    made.add_argument(
        "--part", type=_part, metavar="2/8", help="of a section that takes long; parts add up in --output"
    )
    made.add_argument("--output", type=cases.path, metavar="FOLDER", help=f"with a GPU by default {RESULTS}")
    made.add_argument("--quick", action="store_true", help="shorter measurements, and of most sections fewer shapes")
    made.add_argument("--device", choices=("cuda", "cpu"), help="by default cuda where there is a GPU")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Runs the sections one by one; what is measured by then is on the disk when a later one fails."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["cem"]:
        return cem.main(given[1:])
    options = parser().parse_intermixed_args(given)
    benchmark = cast("Benchmark", importlib.import_module(f"benchmarks.{options.operator}"))
    chosen = list(dict.fromkeys(options.sections)) or [n for n in benchmark.SECTIONS if n not in benchmark.ON_REQUEST]
    try:
        functions = _checked(options, benchmark, chosen)
    except (CuopsError, ValueError) as error:
        parser().error(str(error).partition("\n")[0])
    clock = timer(options.device, options.quick)
    facts = report.provenance(options.device, options.quick, options.without, options.shapes, options.dtypes)
    print(report.headline(facts))
    standard = [name for name in chosen if name not in benchmark.ON_REQUEST]
    files = {options.operator: standard} if standard else {}
    files |= {f"{options.operator}_{name}": [name] for name in chosen if name in benchmark.ON_REQUEST}
    options.facts, options.written = facts, []
    try:
        records = [
            record
            for stem, names in files.items()
            for record in _measured(benchmark, stem, names, options, functions, clock)
        ]
    except CuopsError as error:  # of a section that needs a GPU
        parser().exit(1, f"python -m benchmarks: {error}\n")
    print(f"\nwrote {', '.join(map(str, options.written))}")
    return int(any("failure" in record.get("results", {}).get("cuops", {}) for record in records))


def _checked(options: argparse.Namespace, benchmark: Benchmark, chosen: Sequence[str]) -> dict[str, Any]:
    """The implementations, once all options make sense; sets those that have defaults. Raises ValueError."""
    if unknown := set(chosen) - benchmark.SECTIONS.keys():
        raise ValueError(f"no section {', '.join(sorted(unknown))}: choose from {', '.join(benchmark.SECTIONS)}")
    if options.part and (len(chosen) != 1 or chosen[0] not in benchmark.PARTED):
        raise ValueError(f"--part: expected one section that has parts ({', '.join(benchmark.PARTED) or 'none has'})")
    if options.shapes:
        module = module_of(options.operator)
        options.shapes = [module.shape(cases.checked(shape)) for shape in options.shapes]
    options.device = cases.device(options.device)
    functions = available(options.operator, options.device, options.without)
    if "cuops" not in functions and (needy := [name for name in chosen if name in benchmark.NEED_CUOPS]):
        raise ValueError(f"--without cuops: {', '.join(needy)} measures what cuops does")
    others = options.quick or options.shapes or options.dtypes or options.without
    if others and options.output is None and not set(chosen) <= set(benchmark.ON_REQUEST):
        raise ValueError(
            f"--output: expected another folder than {RESULTS} with --quick, --shapes, --dtypes or --without"
        )
    options.output = output(options.output, options.device)
    return functions


def _measured(
    benchmark: Benchmark,
    stem: str,
    names: Sequence[str],
    options: argparse.Namespace,
    functions: dict[str, Any],
    clock: Timer,
) -> list[dict[str, Any]]:
    """Runs the sections that share a file, writes it after each, and its plot; all records in it."""
    if options.part and stem.endswith("_grid"):
        stem += "_{}of{}".format(*options.part)
    path = options.output / f"{stem}.json"
    options.earlier = report.earlier_sections(path, options.facts)
    sections = {**options.earlier}
    for name in names:
        print(f"\n{name}: {benchmark.SECTIONS[name].__doc__}", flush=True)
        sections[name] = benchmark.SECTIONS[name](options, functions, clock)
        content = {"operator": options.operator, "provenance": options.facts, "sections": sections}
        report.write_json(path, content)
        stale = [stem, *(f"{stem}_{other}" for other in benchmark.SECTIONS.keys() - sections.keys())]
        for plot in stale:  # of figures that are no longer in the JSON
            (options.output / f"{plot}.png").unlink(missing_ok=True)
    options.written.append(path)
    plotted = {name: found for name, found in sections.items() if name in benchmark.PLOTTED and found}
    if plotted:
        roof = module_of(options.operator).ROOF
        report.plot(path.with_suffix(".png"), plotted, f"{options.operator} on {options.facts['device']}", roof)
        options.written.append(path.with_suffix(".png"))
    return [record for section in sections.values() for record in section]


if __name__ == "__main__":
    sys.exit(main())
