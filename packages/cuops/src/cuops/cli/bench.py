"""Measure an operator beside its peers: kernel time against the device's own copy or fill; JSON and a plot."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
from collections.abc import Sequence
from typing import Any

from . import cases


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `cuops bench`."""
    cases.add_arguments(parser)
    parser.add_argument("--output", type=cases.path, metavar="FOLDER", help="write JSON and a plot there")
    parser.add_argument("--quick", action="store_true", help="shorter measurements")


def main(options: argparse.Namespace) -> int:
    """Prints the table; with --output writes JSON and, where matplotlib is installed, a plot."""
    chosen = cases.chosen(options)
    from .._bench import report
    from .._bench.case import available, measure_all
    from .._bench.timing import timer

    functions = available(options.operator, options.device, options.without)
    if options.output:
        cases.folder(options.output)
    shapes = dict.fromkeys(case.shape for case in chosen)
    facts = report.provenance(options.device, options.quick, options.without, shapes, [options.dtype])
    print(report.headline(facts), end="\n\n", flush=True)
    clock = timer(options.device, options.quick)
    sections: dict[str, Sequence[dict[str, Any]]] = {}
    for kind in dict.fromkeys(case.kind for case in chosen):
        of_kind = [case for case in chosen if case.kind == kind]
        print(kind, *(f"{case.title}: {case.module.facts(case)}" for case in of_kind), sep="\n", flush=True)
        sections[kind] = measure_all(of_kind, functions, clock, options.device)
        print(report.comparison(sections[kind]), end="\n\n", flush=True)
    if aliases := chosen[0].module.ALIASES:
        print(", ".join(f"{alias} is {name}" for alias, name in aliases.items()))
    if options.output:
        _write(options, facts, sections, chosen[0].module.ROOF)
    records = itertools.chain.from_iterable(sections.values())
    return int(any("failure" in record["results"].get("cuops", {}) for record in records))


def _write(
    options: argparse.Namespace, facts: dict[str, Any], sections: dict[str, Sequence[dict[str, Any]]], roof: str
) -> None:
    from .._bench import report

    path = options.output / f"{options.operator}.json"
    report.write_json(path, {"operator": options.operator, "provenance": facts, "sections": sections})
    print(f"wrote {path}")
    path.with_suffix(".png").unlink(missing_ok=True)  # of an earlier run
    if importlib.util.find_spec("matplotlib"):
        report.plot(path.with_suffix(".png"), sections, f"{options.operator} on {facts['device']}", roof)
        print(f"wrote {path.with_suffix('.png')}")
    else:
        print("no plot without matplotlib: pip install 'cuops[bench]'")
