"""Normal samples: which cases the benchmark runs."""

from __future__ import annotations

import argparse
import math
import statistics
from functools import partial
from typing import Any

import torch
from cuops._bench import report
from cuops._bench.case import Case, measure_all
from cuops._bench.sample_normal import SEED

from .comparison import Records, Shapes, Timer, cases_of, comparison
from .sample_normal_article import article, samples

LARGE: Shapes = {
    "f": [(65536, 4096), (65536, 4097), (1 << 20, 64)],
    "b": [(65536, 4096)],
    "h": [(65536, 4096)],
    "d": [(65536, 2048)],
}
ALONE = [(65536, 4096), (1024, 4910), (1024, 110)]
ROUNDS = 7  # a draw of a few microseconds takes more or less by a tenth of them from one capture to the next
SMALL = [(1024, 10), (1024, 110), (1024, 1010), (1024, 4910), (300, 30), (4096, 512)]


def _beside_fills(records: Records, timer: Timer, calls: int = 1) -> Records:
    """Prints the time of cuops over that of fills: of the same bytes as float32, and of elements of the same dtype."""
    rows = []
    for record in records:
        dtype = getattr(torch, record["dtype"])
        own = timer.fill(math.prod(record["shape"]) * dtype.itemsize, calls, dtype) if dtype.itemsize == 2 else None
        record["fill_of_dtype_us"] = record["roof_us"] if own is None else own
        us = record["results"].get("cuops", {}).get("us", math.nan)
        fills = [f"{fill:.2f} {us / fill:.2f}x" for fill in (record["roof_us"], record["fill_of_dtype_us"])]
        rows.append([f"{record['dtype']} {'x'.join(map(str, record['shape']))}", f"{us:.2f}", *fills])
    print(report.table(["µs, and times as long as", "cuops", "fill as float32", "fill of that dtype"], rows))
    return records


def _compare(kind: str, options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    standard: Shapes = {"f": [(256, 64)]} if options.device == "cpu" else LARGE
    return comparison(cases_of("sample_normal", kind, standard, options, other="f"), options, functions, timer)


def independent(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """kernel time of independent noise, against a fill of the samples"""
    return _beside_fills(_compare("independent", options, functions, timer), timer)


def shared(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """kernel time of one z a sample, against a fill of the samples"""
    return _beside_fills(_compare("shared", options, functions, timer), timer)


def backward(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """gradients for mu and sigma by torch.autograd.grad, against a fill of as many bytes as they read"""
    return _compare("backward", options, functions, timer)


def alone(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """draws alone: one call a CUDA graph, the L2 cache being empty, as the fill is; medians of rounds of all of them"""
    records = measure_all(_of_float32(ALONE, options), functions, timer, options.device)
    for record in records:
        case = Case("sample_normal", "independent", tuple(record["shape"]), torch.float32)
        arguments, target = (
            case.module.inputs(case, options.device),
            torch.empty(record["shape"], device=options.device),
        )
        timed = {name: result for name, result in record["results"].items() if "us" in result}
        rounds = [
            [timer.kernel(lambda target=target: target.zero_)]
            + [timer.kernel(partial(case.module.call, case, functions[name], arguments)) for name in timed]
            for _ in range(ROUNDS)
        ]
        record["roof_us"], *times = map(statistics.median, zip(*rounds, strict=True))
        for result, us in zip(timed.values(), times, strict=True):
            result.update(us=us, of_roof=record["roof_us"] / us)
    print(report.comparison(records))
    return _beside_fills(records, timer)


def small(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """small draws, 50 calls in one CUDA graph, and 50 fills"""
    return _beside_fills(comparison(_of_float32(SMALL, options), options, functions, timer, 50), timer, 50)


def small_backward(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """gradients of small draws, 50 calls in one CUDA graph"""
    return comparison(_of_float32(SMALL, options, "backward"), options, functions, timer, 50)


def seed_on_device(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """draws of cuops whose seed is on the device, where a CUDA graph can be given another one, and on the host"""
    standard: Shapes = {"f": [(256, 64)]} if options.device == "cpu" else LARGE
    records: Records = []
    for case in cases_of("sample_normal", "independent", standard, options, other="f"):
        arguments = case.module.inputs(case, options.device)
        records.append({"dtype": str(case.dtype).removeprefix("torch."), "shape": case.shape})
        for where, seed in (("device", torch.tensor(SEED, device=options.device)), ("host", SEED)):
            draw = partial(functions["cuops"], *arguments.values(), case.shape[0], False, seed)
            records[-1][f"{where}_us"] = timer.kernel(lambda draw=draw: draw)
    cells = (
        [f"{r['dtype']} {'x'.join(map(str, r['shape']))}", f"{r['device_us']:.2f}", f"{r['host_us']:.2f}"]
        for r in records
    )
    print(report.table(["µs by the place of the seed", "device", "host"], list(cells)))
    return records


def _of_float32(shapes: list[tuple[int, ...]], options: argparse.Namespace, kind: str = "independent") -> list[Case]:
    few = options.quick or options.device == "cpu"
    shapes = options.shapes or (shapes[-1:] if few else shapes)
    return [Case("sample_normal", kind, shape, torch.float32) for shape in shapes]


def host(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """time of a call on the host, 1024 samples of 110 dimensions"""
    records: Records = []
    case = Case("sample_normal", "independent", (1024, 110), torch.float32)
    arguments = case.module.inputs(case, options.device)
    for name, function in functions.items():
        make = lambda f=function: case.module.call(case, f, arguments)  # noqa: E731
        records.append({"implementation": name, "host_us": timer.host(make)})
    print(report.table(["µs", "a call"], [[r["implementation"], f"{r['host_us']:.1f}"] for r in records]))
    return records


SECTIONS = {
    f.__name__: f
    for f in (independent, shared, backward, alone, small, small_backward, seed_on_device, host, samples, article)
}
PLOTTED = ("independent", "shared", "backward")
ON_REQUEST, PARTED, NEED_CUOPS = (), ("article",), ("seed_on_device", "article")
