"""RMSNorm: which cases its benchmark runs."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import cuops
import numpy as np
import torch
from cuops._bench import report
from cuops._bench.case import Case
from cuops._bench.rms_norm import EPS
from cuops._bench.rms_norm import OPTIONS as OPTION_KINDS

from .comparison import Records, Shapes, Timer, calls_on_the_host, cases_of, comparison
from .rms_norm_grid import at_random, grid

FORWARD = {
    "b": [
        (32768, 256),
        (32768, 1024),
        (32768, 4096),
        (16384, 8192),
        (4096, 32768),
        (1024, 131072),
        (512, 262144),
        (16384, 4097),
    ],
    "f": [(32768, 1024), (32768, 4096), (2048, 65536)],
    "h": [(32768, 4096)],
    "d": [(32768, 1024), (8192, 8192)],
}
RESIDUAL = {"b": [(32768, 1024), (32768, 4096), (16384, 8192)], "f": [(32768, 1024)]}
BACKWARD = {
    "b": [(32768, 512), (32768, 1024), (32768, 4096), (8192, 16384), (2048, 65536), (1024, 131072), (32768, 1000)],
    "f": [(32768, 1024), (16384, 8192), (1024, 131072)],
}
OPTION_SHAPES = {"b": [(64, 1024), (16384, 4096), (8192, 8192), (16384, 4097)], "f": [(16384, 4096)]}
SMALL = [(rows, n) for rows in (1, 64) for n in (256, 1024, 4096, 16384)]
HOST_ARRAYS = [("float32", 1024, 1024), ("float32", 8192, 4096), ("float32", 16384, 16384), ("float64", 16384, 16384)]


def _cases(kind: str, standard: Shapes, options: argparse.Namespace) -> list[Case]:
    return cases_of("rms_norm", kind, standard, options, other="b")


def forward(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """kernel time, L2 emptied before each call, against a copy of x and y"""
    return comparison(_cases("forward", FORWARD, options), options, functions, timer)


def residual(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """h = x + residual fused, against a copy of x, residual, y and h"""
    return comparison(_cases("residual", RESIDUAL, options), options, functions, timer)


def backward(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """dx and dweight by torch.autograd.grad, against a copy of x, dy and dx"""
    return comparison(_cases("backward", BACKWARD, options), options, functions, timer)


def options(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """no weight, one of float32 or frozen, gradients with a residual, one of float32, against a copy of what memory must move"""
    return [
        r for kind in OPTION_KINDS for r in comparison(_cases(kind, OPTION_SHAPES, options), options, functions, timer)
    ]


def small(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """small batches, 50 calls in one CUDA graph, the L2 cache warm"""
    return comparison(_cases("forward", {"b": SMALL}, options), options, functions, timer, calls=50)


def host(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """time of a call on the host, 8x1024 bfloat16"""
    x, weight = (torch.randn(shape, dtype=torch.bfloat16, device=options.device) for shape in ((8, 1024), (1024,)))
    leaves = [a.clone().requires_grad_() for a in (x, weight)]
    return calls_on_the_host(functions, timer, (x, weight), leaves)


def _numpy_rms_norm_(x: np.ndarray) -> None:
    x /= np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + EPS)


def _torch_round_trip(x: np.ndarray) -> None:
    on_gpu = torch.from_numpy(x).cuda()
    x[...] = torch.nn.functional.rms_norm(on_gpu, on_gpu.shape[-1:], None, EPS).cpu().numpy()


def _milliseconds(function: Callable[[np.ndarray], Any], fresh: np.ndarray, x: np.ndarray, repeats: int) -> float:
    """The median time of function(x), each time on the values of `fresh`; the first run does not count."""
    times = []
    for _ in range(repeats + 1):
        x[...] = fresh
        start = time.perf_counter()
        function(x)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * 1e3


def _both_ways(pinned: np.ndarray) -> float:
    """Milliseconds of an upload and a download of `pinned` at once: the limit of PCIe."""
    source, target = torch.from_numpy(pinned), torch.from_numpy(pinned)
    up, down = torch.cuda.Stream(), torch.cuda.Stream()
    first, second = (torch.empty(source.shape, dtype=source.dtype, device="cuda") for _ in range(2))
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.cuda.stream(up):
            first.copy_(source, non_blocking=True)
        with torch.cuda.stream(down):
            target.copy_(second, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * 1e3


def host_arrays(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """cuops.rms_norm_ in place on NumPy arrays, in milliseconds"""
    records: Records = []
    on_gpu = options.device == "cuda"
    for dtype, rows, n in (
        [("float32", 256, 512)] if options.device == "cpu" else HOST_ARRAYS[:2] if options.quick else HOST_ARRAYS
    ):
        block = np.random.default_rng().standard_normal((1 << 18,)).astype(dtype)
        fresh = np.resize(block, (rows, n))
        x = fresh.copy()
        cuops.rms_norm_(x, eps=EPS)
        exact = fresh[:64].astype(np.float64)
        _numpy_rms_norm_(exact)
        error = float(np.abs(x[:64] - exact).max() / np.abs(exact).max())
        repeats = 2 if fresh.nbytes > 1 << 29 else 7
        record: dict[str, Any] = {"dtype": dtype, "shape": (rows, n), "error": error}
        record["numpy_ms"] = _milliseconds(_numpy_rms_norm_, fresh, x, 1 if fresh.nbytes > 1 << 29 else 3)
        if on_gpu and "torch" in functions:
            record["torch_round_trip_ms"] = _milliseconds(_torch_round_trip, fresh, x, 1 if repeats == 2 else 3)
        record["cuops_ms"] = _milliseconds(lambda a: cuops.rms_norm_(a, eps=EPS), fresh, x, repeats)
        if on_gpu:
            del x
            pinned = torch.empty(fresh.shape, dtype=getattr(torch, dtype), pin_memory=True).numpy()
            record["cuops_pinned_ms"] = _milliseconds(lambda a: cuops.rms_norm_(a, eps=EPS), fresh, pinned, repeats)
            record["pcie_both_ways_ms"] = _both_ways(pinned)
            del pinned
        records.append(record)
        timer.release()
    keys = list(dict.fromkeys(key for record in records for key in record if key.endswith("_ms")))
    rows_ = [[f"{r['dtype']} {'x'.join(map(str, r['shape']))}", *(f"{r[key]:.2f}" for key in keys)] for r in records]
    print(report.table(["ms", *(key.removesuffix("_ms").replace("_", " ") for key in keys)], rows_))
    return records


FIRST_CALL = """
import json, sys, time
device = sys.argv[1]
import numpy, cuops
marks = {}
if device == "cuda":
    import torch
    start = time.perf_counter()
    x = torch.ones(8, 1024, device=device)
    torch.cuda.synchronize()
    marks["cuda_initialisation_ms"] = 1e3 * (time.perf_counter() - start)
else:
    x = numpy.ones((8, 1024), dtype=numpy.float32)
for name in ("first_call_ms", "second_call_ms"):
    start = time.perf_counter()
    cuops.rms_norm(x)
    if device == "cuda":
        torch.cuda.synchronize()
    marks[name] = 1e3 * (time.perf_counter() - start)
print(json.dumps(marks))
"""


def first_call(options: argparse.Namespace, functions: dict[str, Any], timer: Timer) -> Records:
    """the first call in a fresh process, in milliseconds beyond CUDA's own initialisation"""
    runs = []
    # The bytecode of what it imports, which pip leaves beside it, is there from the first process on, which does not count.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", FIRST_CALL, options.device]
    for _ in range(2 if options.quick else 4):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    del runs[0]
    record = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    print(
        report.table(
            [key.removesuffix("_ms").replace("_", " ") for key in record],
            [[f"{value:.1f}" for value in record.values()]],
        )
    )
    return [record]


SECTIONS = {
    f.__name__: f for f in (forward, residual, backward, options, small, host, host_arrays, first_call, grid, at_random)
}
PLOTTED = ("forward", "backward")
ON_REQUEST, PARTED, NEED_CUOPS = ("options", "grid", "at_random"), ("grid",), ()
