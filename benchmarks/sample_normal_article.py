"""The comparison of the article on sampling for the cross-entropy method: times and speed-ups over dimensions and samples.

Calls from Python are timed by the clock, launch included: many in a row, until the GPU is done with the last. A call is
timed between CUDA events around it too, the median of many; the L2 cache is emptied before each, which hides a part of
Python's time. So is the replay of a CUDA graph of that call, where Python's time does not count at all. Kernels are warm,
and torch.compile is compiled for each shape before it is timed. "shared" has one z a sample for all dimensions, as the
article's kernel has.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cuops._bench import report
from cuops._bench.case import Case

from .comparison import Records, Timer

SAMPLES, DIMENSIONS = 1024, range(10, 5000, 100)
OF_ONE_DIMENSION, NUMBERS = 110, [1 << k for k in range(6, 21, 2)]
WAYS = {"call_us": "calls from Python", "event_us": "calls between events", "kernel_us": "kernel time"}
OURS = "cuops, independent"


def article(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """1024 samples of 10, 110, ... 4910 dimensions: calls from Python, launch included, and kernel time beside it"""
    records = _measured([(SAMPLES, d) for d in _few(DIMENSIONS, options, 5)], options, functions, timer)
    records = sorted(records + _other_parts(records, options), key=lambda record: record["dimension"])
    base = _conclude(records, options, "dimension")
    for way in reversed(WAYS):
        speedup = statistics.geometric_mean(record[way][base] / record[way][OURS] for record in records)
        print(f"average speed-up (geometric mean) of {OURS} noise over {base} noise, {WAYS[way]}: {speedup:.2f}")
    return records


def samples(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """64 to 1,048,576 samples of 110 dimensions, likewise"""
    shapes = [(n, OF_ONE_DIMENSION) for n in _few(NUMBERS, options, 3)]
    records = _measured(shapes, options, functions, timer)
    _conclude(records, options, "samples")
    return records


def _few(points: Sequence[int], options: argparse.Namespace, step: int) -> Sequence[int]:
    """All points, fewer in a quick run, or every k-th for a part of k."""
    part, parts = options.part or (1, step if options.quick else 1)
    return points[:2] if options.device == "cpu" else points[part - 1 :: parts]


def _other_parts(records: Records, options: argparse.Namespace) -> Records:
    """Of a run in parts, the dimensions that the others have measured."""
    measured = {record["dimension"] for record in records}
    earlier = options.earlier.get("article", []) if options.part else []
    return [record for record in earlier if record["dimension"] not in measured]


def _measured(
    shapes: Sequence[tuple[int, int]], options: argparse.Namespace, functions: dict[str, Any], timer: Timer
) -> Records:
    records: Records = []
    for n, d in shapes:
        record: dict[str, Any] = {"samples": n, "dimension": d, **{way: {} for way in WAYS}}
        torch.compiler.reset()
        for name, function in functions.items():
            for kind in ("independent", "shared"):
                case = Case("sample_normal", kind, (n, d), torch.float32)
                arguments = case.module.inputs(case, options.device)
                make = lambda c=case, f=function, a=arguments: c.module.call(c, f, a)  # noqa: E731
                times = timer.in_a_row(make), timer.direct(make), timer.kernel(make)
                for way, time in zip(WAYS, times, strict=True):
                    record[way][f"{name}, {kind}"] = time
        records.append(record)
    return records


def _conclude(records: Records, options: argparse.Namespace, axis: str) -> str:
    """Prints the means and writes the plot; what the speed-ups are over."""
    names = records[0]["call_us"]
    wanted = ("torch.compile, independent", "torch, independent", OURS)
    base = next(name for name in wanted if name in names)
    rows = []
    for name in names:
        times = [statistics.fmean(record[way][name] for record in records) for way in WAYS]
        speedups = [statistics.geometric_mean(r[way][base] / r[way][name] for r in records) for way in WAYS]
        rows.append([name, *(f"{time:.1f}" for time in times), *(f"{speedup:.2f}" for speedup in speedups)])
    print(f"means over {len(records)}, and geometric means of the speed-up over {base}")
    print(report.table(["", "calls, µs", "events", "kernels", "speed-up of calls", "events", "kernels"], rows))
    path = options.output / f"sample_normal_{'article' if axis == 'dimension' else 'samples'}.png"
    _plot(path, records, base, axis)
    options.written.append(path)
    return base


def _plot(path: Path, records: Records, base: str, axis: str) -> None:
    """Time and speed-up over the axis, for calls and for kernels."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(18, 8), layout="constrained", sharex=True)
    places = [record[axis] for record in records]
    fixed = f"{records[0]['samples']:,} samples" if axis == "dimension" else f"{records[0]['dimension']} dimensions"
    for column, (way, what) in enumerate(WAYS.items()):
        for i, name in enumerate(records[0][way]):
            times = [record[way][name] for record in records]
            style: dict[str, Any] = {"label": name, "linestyle": "--" if "shared" in name else "-"}
            style["color"] = "#76b900" if name.startswith("cuops") else plt.get_cmap("Greys")(0.4 + 0.12 * (i % 4))
            axes[0][column].plot(places, times, **style)
            axes[1][column].plot(places, [r[way][base] / t for r, t in zip(records, times, strict=True)], **style)
        axes[0][column].set(title=f"{what}, {fixed}", ylabel="µs")
        if axis == "samples":
            axes[0][column].set(xscale="log", yscale="log")
        else:
            axes[0][column].set_ylim(0)
        axes[1][column].set(xlabel=axis, ylabel=f"speed-up over {base}", ylim=(0, None))
    axes[0][0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
