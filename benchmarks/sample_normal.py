"""Normal samples: which cases the benchmark runs."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from cuops._bench import report
from cuops._bench.case import Case

from .comparison import Records, Shapes, Timer, cases_of, comparison
from .sample_normal_article import article, samples

LARGE: Shapes = {
    "f": [(65536, 4096), (65536, 4097), (1 << 20, 64)],
    "b": [(65536, 4096)],
    "h": [(65536, 4096)],
    "d": [(65536, 2048)],
}
SMALL = [(1024, 10), (1024, 110), (1024, 1010), (1024, 4910), (300, 30), (4096, 512)]


def _compare(kind: str, options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    standard: Shapes = {"f": [(256, 64)]} if options.device == "cpu" else LARGE
    return comparison(cases_of("sample_normal", kind, standard, options, other="f"), options, functions, timer)


def independent(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """kernel time of independent noise, against a fill of the samples"""
    return _compare("independent", options, functions, timer)


def shared(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """kernel time of one z a sample, against a fill of the samples"""
    return _compare("shared", options, functions, timer)


def backward(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """gradients for mu and sigma by torch.autograd.grad, against a fill of as many bytes as they read"""
    return _compare("backward", options, functions, timer)


def small(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """small draws, 50 calls in one CUDA graph"""
    shapes = options.shapes or (SMALL[:1] if options.quick else SMALL)
    cases = [Case("sample_normal", "independent", shape, torch.float32) for shape in shapes]
    return comparison(cases, options, functions, timer, calls=50)


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


SECTIONS = {f.__name__: f for f in (independent, shared, backward, small, host, samples, article)}
PLOTTED = ("independent", "shared", "backward")
