"""Runs an operator's benchmark: a table on the terminal, JSON and a plot into --output."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path

import torch
from cuops._bench import OPERATORS, report
from cuops._bench.case import DTYPES, available
from cuops._bench.timing import timer

from . import cem

ON_REQUEST = ("grid", "at_random", "plan")  # sections that take long, whose results have files of their own
PARTED = [("rms_norm", ["grid"]), ("sample_normal", ["article"])]  # sections that a run may do a part of


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in re.split("[x,]", text))


def _part(text: str) -> tuple[int, int]:
    part, parts = (int(number) for number in text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError(text)
    return part, parts


def parser() -> argparse.ArgumentParser:
    """The command line."""
    own = "cem, the Cross-Entropy Method, has options of its own: cem --help"
    made = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, epilog=own)
    made.add_argument("operator", choices=OPERATORS)
    made.add_argument("sections", nargs="*", help="what to run; by default all but grids, at_random and the plan")
    made.add_argument("--shapes", nargs="+", type=_shape, metavar="32768x4096", help="instead of the standard ones")
    made.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), help="f d h b: float32, float64, float16, bfloat16")
    made.add_argument("--without", nargs="+", default=[], metavar="PEER", help="leave peers out: torch.compile Liger …")
    made.add_argument(
        "--part", type=_part, metavar="2/8", help="of a section that takes long; parts add up in --output"
    )
    made.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    made.add_argument("--quick", action="store_true", help="fewer shapes, shorter measurements")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Runs the sections one by one; what is measured by then is on the disk when a later one fails."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["cem"]:
        return cem.main(given[1:])
    options = parser().parse_args(given)
    benchmark = importlib.import_module(f"benchmarks.{options.operator}")
    names = options.sections or [name for name in benchmark.SECTIONS if name not in ON_REQUEST]
    unknown = set(names) - benchmark.SECTIONS.keys()
    if unknown:
        parser().error(f"no section {', '.join(sorted(unknown))}: choose from {', '.join(benchmark.SECTIONS)}")
    if options.part and (options.operator, names) not in PARTED:
        parser().error("--part: only RMSNorm's grid and the article's comparison have parts")
    functions = available(options.operator, options.device, options.without)
    clock = timer(options.device, options.quick)
    facts = report.provenance(options.device) | {"quick": options.quick}
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    print(f"{facts['device']}, {versions}, commit {facts['commit']}")
    alone = len(names) == 1 and names[0] in ON_REQUEST
    stem = options.output / (f"{options.operator}_{names[0]}" if alone else options.operator)
    if options.part and names == ["grid"]:
        stem = stem.with_name("{}_{}of{}".format(stem.name, *options.part))
    options.earlier = report.earlier_sections(stem.with_suffix(".json"), facts)
    content = {"operator": options.operator, "provenance": facts, "sections": {**options.earlier}}
    for name in names:
        print(f"\n{name}: {benchmark.SECTIONS[name].__doc__}", flush=True)
        content["sections"][name] = benchmark.SECTIONS[name](options, functions, clock)
        report.write_json(stem.with_suffix(".json"), content)
    plotted = {name: found for name, found in content["sections"].items() if name in benchmark.PLOTTED and found}
    if plotted:
        report.plot(stem.with_suffix(".png"), plotted, f"{options.operator} on {facts['device']}")
    print(f"\nwrote {', '.join(str(path) for path in sorted(options.output.glob(f'{stem.name}.*')))}")
    records = [record for section in content["sections"].values() for record in section]
    return int(any("failure" in record.get("results", {}).get("cuops", {}) for record in records))


if __name__ == "__main__":
    sys.exit(main())
