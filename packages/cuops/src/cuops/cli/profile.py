"""Profile an operator: the kernels that run, as a table and as a Chrome trace."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import cases

if TYPE_CHECKING:
    from .._bench.case import Case


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `cuops profile`."""
    cases.add_arguments(parser)
    parser.add_argument(
        "--implementation",
        default="cuops",
        help="by default cuops; or torch, torch.compile, …; for kron also v1, v2, v3: loop, transposed, cuops",
    )
    parser.add_argument("--calls", type=int, default=10, help="by default 10")
    parser.add_argument("--output", type=cases.path, metavar="FILE", help="the trace; by default OPERATOR.trace.json")


def main(options: argparse.Namespace) -> int:
    """Writes the trace, for chrome://tracing or https://ui.perfetto.dev, and prints the table."""
    chosen = cases.chosen(options)
    from .._bench.case import available
    from .files import replacing

    if options.calls < 1:
        raise ValueError(f"--calls: expected at least 1, got {options.calls}")
    output = options.output or Path(f"{options.operator}.trace.json")
    if output.suffix != ".json":
        raise ValueError(f"--output: expected a name that ends in .json, got {output}")
    functions = available(options.operator, options.device, options.without)
    aliases = chosen[0].module.ALIASES
    name = aliases.get(options.implementation, options.implementation)
    if name not in functions:
        names = ", ".join([*functions, *(alias for alias, of in aliases.items() if of in functions)])
        raise ValueError(f"--implementation: expected one of {names}, got {options.implementation}")
    with replacing(output) as scratch:
        profiler = _profiled(chosen, functions[name], options)
        profiler.export_chrome_trace(str(scratch))
        if scratch.stat().st_size == 0:  # PyTorch raises nothing where the disk is full, and leaves a file behind
            scratch.with_name(scratch.name + ".tmp").unlink(missing_ok=True)
            raise OSError(f"{output}: the trace could not be written")
    print(
        profiler.key_averages().table(
            sort_by=f"self_{options.device}_time_total", row_limit=20, max_name_column_width=60
        )
    )
    print(f"wrote {output}")
    return 0


def _profiled(chosen: list[Case], function: Any, options: argparse.Namespace) -> Any:
    """The profiler, once it has seen the calls of each case."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    calls = {}
    for case in chosen:
        arguments = case.module.inputs(case, options.device)
        key = f"{options.operator} {case.kind}" + (f" {case.title}" if options.also else "")
        calls[key] = case.module.call(case, function, arguments)
        for _ in range(3):
            calls[key]()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if options.device == "cuda" else [])]
    with profile(activities=activities, acc_events=True) as profiler:  # PyTorch 2.11 warns without
        for key, call in calls.items():
            with record_function(key):
                for _ in range(options.calls):
                    call()
                if options.device == "cuda":
                    torch.cuda.synchronize()
    return profiler
