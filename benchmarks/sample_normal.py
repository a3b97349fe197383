"""Normal samples: which cases the benchmark runs, and the comparison of the article on sampling for the cross-entropy method."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from cuops._bench import report
from cuops._bench.case import DTYPES, Case, measure_all
from cuops._bench.timing import CpuTimer, CudaTimer

Records = list[dict[str, Any]]
Timer = CudaTimer | CpuTimer

LARGE = {
    "f": [(65536, 4096), (65536, 4097), (1 << 20, 64)],
    "b": [(65536, 4096)],
    "h": [(65536, 4096)],
    "d": [(65536, 2048)],
}
SMALL = [(1024, 10), (1024, 110), (1024, 1010), (1024, 4910), (300, 30), (4096, 512)]
ARTICLE_SAMPLES = 1024
ARTICLE_DIMENSIONS = range(10, 5000, 100)


def _measure(kind: str, options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    standard = {"f": [(256, 64)]} if options.device == "cpu" else LARGE
    chosen = {letter: standard.get(letter, standard["f"]) for letter in options.dtypes} if options.dtypes else standard
    cases = [
        Case("sample_normal", kind, shape, DTYPES[letter])
        for letter, shapes in chosen.items()
        for shape in options.shapes or (shapes[:1] if options.quick else shapes)
    ]
    records = measure_all(cases, functions, timer, options.device)
    print(report.comparison(records))
    return records


def independent(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """kernel time of independent noise, against a fill of the samples"""
    return _measure("independent", options, functions, timer)


def shared(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """kernel time of one z a sample, against a fill of the samples"""
    return _measure("shared", options, functions, timer)


def backward(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """gradients for mu and sigma by torch.autograd.grad, against a fill of as many bytes as they read"""
    return _measure("backward", options, functions, timer)


def small(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """small draws, 50 calls in one CUDA graph"""
    shapes = options.shapes or (SMALL[:1] if options.quick else SMALL)
    cases = [Case("sample_normal", "independent", shape, torch.float32) for shape in shapes]
    records = measure_all(cases, functions, timer, options.device, calls=50)
    print(report.comparison(records))
    return records


def article(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """N = 1024 samples of 10, 110, ... 4910 dimensions: calls from Python, launch included, and kernel time beside it

    A call is timed between CUDA events around it, the L2 cache emptied before each, the median of many; so is the replay of
    a CUDA graph of that call, where Python's time does not count. Kernels are warm, and torch.compile is compiled for
    each dimension before it is timed. "shared z" has one z a sample for all dimensions, as the article's kernel has.
    """
    lines = {
        f"{name}, {kind}": (function, kind)
        for name, function in functions.items()
        for kind in ("independent", "shared")
    }
    records: Records = []
    dimensions = ARTICLE_DIMENSIONS[:2] if options.device == "cpu" else ARTICLE_DIMENSIONS[:: 5 if options.quick else 1]
    for d in dimensions:
        record: dict[str, Any] = {"dimension": d, "samples": ARTICLE_SAMPLES, "call_us": {}, "kernel_us": {}}
        torch.compiler.reset()
        for name, (function, kind) in lines.items():
            case = Case("sample_normal", kind, (ARTICLE_SAMPLES, d), torch.float32)
            arguments = case.module.inputs(case, options.device)
            make = lambda c=case, f=function, a=arguments: c.module.call(c, f, a)  # noqa: E731
            record["call_us"][name] = timer.direct(make)
            record["kernel_us"][name] = timer.kernel(make)
        records.append(record)
    base = "torch.compile, independent" if "torch.compile" in functions else "torch, independent"
    rows = []
    for name in lines:
        speedups = {
            way: statistics.fmean(record[way][base] / record[way][name] for record in records)
            for way in ("call_us", "kernel_us")
        }
        times = [statistics.fmean(record[way][name] for record in records) for way in ("call_us", "kernel_us")]
        rows.append([name, *(f"{time:.1f}" for time in times), *(f"{speedup:.2f}" for speedup in speedups.values())])
    print(
        report.table(["mean over the dimensions", "call, µs", "kernel, µs", f"calls against {base}", "kernels"], rows)
    )
    _plot(options.output / "sample_normal_article.png", records, base)
    ours = "cuops, independent"
    for way, what in (("kernel_us", "kernel time"), ("call_us", "calls from Python")):
        speedup = statistics.fmean(record[way][base] / record[way][ours] for record in records)
        print(f"average speed-up of {ours} noise over {base} noise, {what}: {speedup:.2f}")
    return records


def _plot(path: Path, records: Records, base: str) -> None:
    """Time and speed-up over the dimension, for calls and for kernels."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(13, 8), layout="constrained", sharex=True)
    dimensions = [record["dimension"] for record in records]
    for column, (way, what) in enumerate((("call_us", "call from Python"), ("kernel_us", "kernel time"))):
        for i, name in enumerate(records[0][way]):
            times = [record[way][name] for record in records]
            style: dict[str, Any] = {"label": name, "linestyle": "--" if "shared" in name else "-"}
            style["color"] = "#76b900" if name.startswith("cuops") else plt.get_cmap("Greys")(0.4 + 0.12 * (i % 4))
            axes[0][column].plot(dimensions, times, **style)
            axes[1][column].plot(dimensions, [r[way][base] / t for r, t in zip(records, times, strict=True)], **style)
        axes[0][column].set(title=f"{what}, {ARTICLE_SAMPLES} samples", ylabel="µs", ylim=(0, None))
        axes[1][column].set(xlabel="dimension", ylabel=f"speed-up over {base}", ylim=(0, None))
    axes[0][0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


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


SECTIONS = {f.__name__: f for f in (independent, shared, backward, small, host, article)}
PLOTTED = ("independent", "shared", "backward")
