"""kron_linear: which cases its benchmark runs."""

from __future__ import annotations

import argparse
import math
import random
from typing import Any

import torch
from cuops import kron_plan
from cuops._bench import report
from cuops._bench.case import DTYPES, Case, measure_all

from .comparison import Records, Shapes, Timer, calls_on_the_host, cases_of, comparison, summary, sweep

FORWARD = {
    "f": [
        (32, 128, 128),
        (1024, 128, 128),
        (1024, 32, 32, 32),
        (1024, 16, 16, 16, 16),
        (1024, 8, 8, 8, 8, 8),
        (16, 64, 64, 64),
        (1024, *[2] * 10),
    ],
    "b": [(1024, 128, 128), (8192, 64, 64), (1024, 64, 64), (1024, 32, 32, 32)],
    "h": [(1024, 64, 64)],
    "d": [(1024, 32, 32, 32)],
}
TF32 = {"f": [(1024, 128, 128), (1024, 64, 64), (1024, 32, 32, 32)]}
BACKWARD = {
    "f": [(32, 128, 128), (1024, 64, 64), (1024, 128, 128), (1024, 32, 32, 32), (1024, 8, 8, 8, 8, 8)],
    "b": [(1024, 64, 64), (1024, 128, 128)],
    "d": [(1024, 32, 32, 32)],
}

GRID_BATCHES = (1, 16, 128, 1024, 8192)
GRID_SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128)
GRID_COUNTS = range(1, 11)
GRID_MIXED = [(64, 80), (86, 128), (112, 128), (4, 128), (128, 4), (2, 100, 3), (7, 11, 13)]
GRID_ELEMENTS = 1 << 26  # of x: a bound on memory, and on time
# Problems drawn at random: how many, and of what batches, numbers of factors and sizes.
RANDOM, RANDOM_SEED = 90, 1
RANDOM_BATCHES, RANDOM_COUNTS = (1, 2, 5, 16, 33, 64, 100, 256, 500, 1024, 3000, 8192), (1, 2, 2, 2, 3, 3, 4, 5)
RANDOM_SIZES = (*range(2, 21), *range(24, 65, 4), 29, 43, 67, 71, 72, 80, 86, 91, 96, 100, 112, 119, 120, 128)
TINY = 1 << 20  # elements: such cases are replayed in a row, as launching takes longer than they do


def _cases(kind: str, standard: Shapes, options: argparse.Namespace) -> list[Case]:
    return cases_of("kron_linear", kind, standard, options, other="f")


def forward(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """kernel time, L2 emptied before each call, against a copy of x and y"""
    return comparison(_cases("forward", FORWARD, options), options, functions, timer)


def tf32(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """float32 where products may take TF32"""
    torch.set_float32_matmul_precision("high")
    try:
        cases = [case for case in _cases("forward", TF32, options) if case.dtype == torch.float32]
        return comparison(cases, options, functions, timer)
    finally:
        torch.set_float32_matmul_precision("highest")


def backward(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """dx and every dW by torch.autograd.grad, against a copy of x, dy and dx"""
    return comparison(_cases("backward", BACKWARD, options), options, functions, timer)


def host(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """time of a call on the host, 8x16x16 float32"""
    x, w, v = (torch.randn(shape, device=options.device) for shape in ((8, 256), (16, 16), (16, 16)))
    leaf, *leaves = (a.clone().requires_grad_() for a in (x, w, v))
    return calls_on_the_host(functions, timer, (x, [w, v]), (leaf, leaves))


def _grid_shapes(options: argparse.Namespace) -> list[tuple[int, ...]]:
    """Batches by chains of equal factors, and some chains of unequal ones, up to the bound on elements."""
    chains = [(size,) * count for size in GRID_SIZES for count in GRID_COUNTS] + GRID_MIXED
    chains = chains[::9] if options.quick and options.device == "cpu" else chains
    bound = 1 << 12 if options.device == "cpu" else GRID_ELEMENTS
    return [(rows, *chain) for chain in chains for rows in GRID_BATCHES if rows * math.prod(chain) <= bound]


def _random_shapes(options: argparse.Namespace) -> list[tuple[int, ...]]:
    """Chains of unequal factors, of up to half as many elements as the bound."""
    draw, shapes = random.Random(RANDOM_SEED), []
    bound = 1 << 12 if options.device == "cpu" else GRID_ELEMENTS // 2
    while len(shapes) < (RANDOM // 9 if options.quick else RANDOM):
        shape = draw.choice(RANDOM_BATCHES), *draw.choices(RANDOM_SIZES, k=draw.choice(RANDOM_COUNTS))
        if math.prod(shape) <= bound:
            shapes.append(shape)
    return shapes


def grid(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """forward and backward at all sizes: the geometric mean to the best peer, and the worst ratio last"""
    return _both_ways(options.shapes or _grid_shapes(options), options, functions, timer)


def at_random(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """forward and backward of unequal factors, drawn at random: the mean to the best peer, and the worst ratio last"""
    return _both_ways(options.shapes or _random_shapes(options), options, functions, timer)


def _both_ways(
    shapes: list[tuple[int, ...]], options: argparse.Namespace, functions: dict[str, Any], timer: Timer
) -> Records:
    records: Records = []
    for letter in options.dtypes or DTYPES:
        cases = [
            Case("kron_linear", kind, shape, DTYPES[letter]) for kind in ("forward", "backward") for shape in shapes
        ]
        records += sweep(cases, options, functions, timer, TINY)
    summary(records)
    return records


def plan(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """what plans predict for all sizes beside kernel time, L2 emptied before each call: the farthest apart last"""
    shapes = options.shapes or _grid_shapes(options)
    cases = [Case("kron_linear", "forward", s, DTYPES[letter]) for letter in options.dtypes or DTYPES for s in shapes]
    predictions = [_predicted(case) for case in cases]  # first, as they need a GPU
    records = measure_all(cases, {"cuops": functions["cuops"]}, timer, options.device)
    found = []
    for record, predicted_us in zip(records, predictions, strict=True):
        record["predicted_us"] = predicted_us
        if "us" in record["results"]["cuops"]:
            found.append((record["predicted_us"], record["results"]["cuops"]["us"], record))
    found.sort(key=lambda times: abs(math.log(times[0] / times[1])))
    table = [
        [r["dtype"], "x".join(map(str, r["shape"])), f"{predicted:.1f}", f"{us:.1f}"]
        for predicted, us, r in found[-20:]
    ]
    print(report.table(["dtype", "batch x factors", "predicted µs", "µs"], table))
    near = sum(2 / 3 < predicted / us < 3 / 2 for predicted, us, _ in found)
    print(f"\n{near} of {len(found)} predictions are within 1.5 times the time")
    return records


def _predicted(case: Case) -> float:
    """The microseconds of the case's plan."""
    rows, *sizes = case.shape
    return kron_plan(rows, [(size, size) for size in sizes], case.dtype).microseconds


SECTIONS = {f.__name__: f for f in (forward, tf32, backward, host, grid, at_random, plan)}
PLOTTED = ("forward", "tf32", "backward")
ON_REQUEST, PARTED, NEED_CUOPS = ("grid", "at_random", "plan"), (), ("plan",)
