"""A step of the Cross-Entropy Method (ask, a cheap score, tell) beside plain PyTorch, torch.compile and EvoTorch.

python -m benchmarks cem [--quick --output FOLDER | --output FOLDER]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from cuops._bench import report
from cuops._bench.case import why
from cuops._bench.timing import timer
from cuops.cem import CrossEntropyMethod
from cuops.cli import cases
from cuops.errors import CuopsError

from .comparison import RESULTS, output

# (problems, population, dimensions): a planner's, what lies between, a large one, and many planners at once
CASES = [(1, 300, 30), (1, 1024, 100), (1, 4096, 512), (256, 300, 30)]
FRACTION = 0.1
Step = Callable[[], None]


def norm(x: torch.Tensor) -> torch.Tensor:
    """The score: one kernel, as cheap as one can be that looks at all of a sample."""
    return torch.linalg.vector_norm(x, dim=-1)


def refit(mu: torch.Tensor, sigma: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A step in plain PyTorch: scores that are not finite come last, elites are gathered, moments are smoothed."""
    x = mu[:, None] + sigma[:, None] * torch.randn(len(mu), n, mu.shape[1], device=mu.device)
    scores = norm(x)
    scores = torch.where(scores.isfinite(), scores, torch.inf)
    indices = scores.topk(int(FRACTION * n), largest=False).indices
    elites = torch.take_along_dim(x, indices[..., None], 1)
    deviation, mean = torch.std_mean(elites, 1, correction=0)
    return mean, 0.6 * deviation + 0.4 * sigma


def advance(mu: torch.Tensor, sigma: torch.Tensor, n: int) -> None:
    """The step in place, so that a graph's replays go on from one another."""
    mean, deviation = refit(mu, sigma, n)
    mu.copy_(mean)
    sigma.copy_(deviation)


def plain(problems: int, n: int, d: int, device: str, function: Callable[..., None] = advance) -> Step:
    """Plain PyTorch."""
    mu, sigma = torch.zeros(problems, d, device=device), torch.ones(problems, d, device=device)
    return lambda: function(mu, sigma, n)


def compiled(problems: int, n: int, d: int, device: str) -> Step:
    """The plain step through torch.compile, all of it."""
    torch.compiler.reset()
    return plain(problems, n, d, device, torch.compile(advance, dynamic=False))


def ours(problems: int, n: int, d: int, device: str) -> Step:
    """cuops.cem."""
    mu = torch.zeros(problems, d, device=device)
    method = CrossEntropyMethod(mu, 1.0, n, elites=FRACTION, smoothing=(1.0, 0.6), seed=0)
    return lambda: method.tell(norm(method.ask()))


def evotorch(problems: int, n: int, d: int, device: str) -> Step:
    """EvoTorch's CEM, of one problem."""
    from evotorch import Problem
    from evotorch.algorithms import CEM

    if problems > 1:
        raise NotImplementedError("one problem at a time")
    problem = Problem("min", norm, solution_length=d, initial_bounds=(-1, 1), vectorized=True, device=device)
    searcher = CEM(problem, popsize=n, parenthood_ratio=FRACTION, stdev_init=1.0)
    return searcher.step


IMPLEMENTATIONS = {"cuops": ours, "torch": plain, "torch.compile": compiled, "EvoTorch": evotorch}


def measure(case: tuple[int, int, int], clock: Any, device: str) -> dict[str, Any]:
    """Microseconds of a step by CUDA graph replay, and as called from Python, of all that are installed."""
    results: dict[str, Any] = {}
    for name, make in IMPLEMENTATIONS.items():
        try:
            results[name] = {"call_us": clock.host(lambda make=make: make(*case, device), 100)}
            results[name]["us"] = clock.kernel(lambda make=make: make(*case, device), 20)
        except Exception as error:  # a peer may lack a case, or refuse to be captured
            results.setdefault(name, {})["failure"] = why(error)
    return {"kind": "step", "shape": case, "dtype": "float32", "results": results}


def table(records: list[dict[str, Any]]) -> str:
    """Times, and how many times as long as cuops each takes."""
    rows, notes = [], []
    for record in records:
        mine, shape = record["results"]["cuops"], "x".join(map(str, record["shape"]))
        for name, result in record["results"].items():
            cells = []
            for key in ("us", "call_us"):
                cells.append(f"{result[key]:.1f}" if key in result else "-")
                cells.append(f"{result[key] / mine[key]:.1f}x" if key in result and key in mine else "")
            rows.append([shape, name, *cells])
            notes += [f"{name} at {shape}: {result['failure']}"] if "failure" in result else []
    heads = ["problems x population x d", "implementation", "replay, µs", "", "call, µs", ""]
    return "\n".join([report.table(heads, rows), *notes])


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints, and writes cem.json."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks cem", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--output", type=cases.path, metavar="FOLDER", help=f"with a GPU by default {RESULTS}")
    parser.add_argument("--quick", action="store_true", help="shorter measurements")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="by default cuda where there is a GPU")
    options = parser.parse_args(arguments)
    try:
        options.device = cases.device(options.device)
        if options.quick and options.output is None:
            raise ValueError(f"--output: expected another folder than {RESULTS} with --quick")
        options.output = output(options.output, options.device)
    except (CuopsError, ValueError) as error:
        parser.error(str(error).partition("\n")[0])
    clock = timer(options.device, options.quick)
    records = [measure(case, clock, options.device) for case in CASES]
    print(table(records))
    facts = report.provenance(options.device, options.quick)
    report.write_json(
        options.output / "cem.json", {"operator": "cem", "provenance": facts, "sections": {"step": records}}
    )
    return int(any("failure" in record["results"]["cuops"] for record in records))
