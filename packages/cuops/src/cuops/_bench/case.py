"""One measurement: an operator's kind of work at a shape and a dtype, by every implementation there is."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from tqdm import tqdm

from . import LETTERS
from .timing import CpuTimer, CudaTimer

DTYPES = {letter: getattr(torch, name) for name, letter in LETTERS.items()}
# Relative to the largest magnitude of a result: room for a second rounding, and for sums of long rows in float32.
TOLERANCE = {torch.float16: 3 * 2.0**-10, torch.bfloat16: 3 * 2.0**-7, torch.float32: 3e-5, torch.float64: 1e-11}


class Operator(Protocol):
    """What a module of this package has, one for each operator.

    `OWN_NUMBERS`, where it is there, are implementations whose random numbers are their own, and `CHECKED` is what
    `check` takes instead of `KINDS`. Results whose names begin with d, but for dx and dresidual, are sums over rows.
    """

    KINDS: tuple[str, ...]  # of work, the first one by default
    ROOF: str  # what of the device's memory is the limit: copy or fill, a method of the timers
    IMPLEMENTATIONS: dict[str, Callable[[], Callable[..., Any]]]  # by name, each made when it is asked for
    ON_CPU: tuple[str, ...]  # those that run there
    ALIASES: dict[str, str]  # other names of them, for --without
    PACKAGES: dict[str, str]  # what an implementation imports, whose absence is no failure

    def shape(self, sizes: Sequence[int], /) -> tuple[int, ...]:
        """A case's shape, of at least two sizes."""

    def facts(self, case: Case, /) -> str:
        """What the case moves or computes, for people."""

    def traffic(self, case: Case, /) -> int:
        """The bytes that memory must move."""

    def inputs(self, case: Case, device: str, /) -> dict[str, torch.Tensor]:
        """Fresh random arguments, by name."""

    def call(
        self, case: Case, function: Callable[..., Any], arguments: dict[str, torch.Tensor], /
    ) -> Callable[[], Any]:
        """The call that is timed."""

    def results(
        self, case: Case, function: Callable[..., Any], arguments: dict[str, torch.Tensor], /
    ) -> dict[str, torch.Tensor]:
        """What an implementation computes, by name."""

    def references(
        self, case: Case, arguments: dict[str, torch.Tensor], /
    ) -> Iterable[tuple[slice, dict[str, torch.Tensor]]]:
        """The exact results of some rows, in float64, then those of the next ones."""

    def errors(
        self, case: Case, computed: dict[str, torch.Tensor], arguments: dict[str, torch.Tensor], /
    ) -> dict[str, float]:
        """The largest error of each result, relative to the largest magnitude in it."""


def module_of(operator: str) -> Operator:
    """The operator's module of this package."""
    return cast("Operator", importlib.import_module(f".{operator}", __package__))


@dataclass(frozen=True)
class Case:
    """What is measured; `kind` is one of the operator's KINDS."""

    operator: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def module(self) -> Operator:
        """The operator's module of this package."""
        return module_of(self.operator)

    @property
    def title(self) -> str:
        """bfloat16 32768x4096, say."""
        return f"{str(self.dtype).removeprefix('torch.')} {'x'.join(str(size) for size in self.shape)}"

    @property
    def tolerance(self) -> float:
        """The error that rounding explains, relative to the largest magnitude; TF32 has the digits of float16."""
        tf32 = self.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
        return TOLERANCE[torch.float16 if tf32 else self.dtype]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function by torch.compile."""
    import torch._functorch.config as config

    if hasattr(config, "donated_buffer"):
        config.donated_buffer = False  # a backward that runs many times keeps what its forward saved
    return torch.compile(function, dynamic=False)


def largest_error(computed: torch.Tensor, exact: torch.Tensor, terms: float = 1e-300) -> float:
    """The largest difference over the largest magnitude, or over that of `terms`; infinity where one is not finite."""
    error = ((computed.double() - exact).abs().amax() / exact.abs().amax().clamp(min=terms)).item()
    return error if math.isfinite(error) else math.inf


def is_sum(name: str) -> bool:
    """Whether the result of that name is a sum over all rows: a gradient of an argument that rows share."""
    return name.startswith("d") and name not in ("dx", "dresidual")


def reference_norms(case: Case, arguments: dict[str, torch.Tensor]) -> dict[str, float]:
    """The norm of each exact result."""
    squares: dict[str, Any] = {}
    for _, exact in case.module.references(case, arguments):
        for name, part in exact.items():
            squares[name] = squares.get(name, 0) + (part if is_sum(name) else part.square().sum())
    return {name: (s.square().sum() if is_sum(name) else s).sqrt().item() for name, s in squares.items()}


def largest_errors(
    computed: dict[str, torch.Tensor],
    references: Iterable[tuple[slice, dict[str, torch.Tensor]]],
    terms: Callable[[str, slice], float] = lambda name, part: 1e-300,
) -> dict[str, float]:
    """`largest_error` of each result; `terms`: of some rows of one, or of all that a sum adds up."""
    found: dict[str, float] = {}
    sums: dict[str, torch.Tensor] = {}
    for part, exact in references:
        for name, value in exact.items():
            if is_sum(name):
                sums[name] = value if name not in sums else sums[name] + value
            else:
                error = largest_error(computed[name][part], value, terms(name, part))
                found[name] = max(found.get(name, 0.0), error)
    whole = slice(None)
    return found | {name: largest_error(computed[name], exact, terms(name, whole)) for name, exact in sums.items()}


def available(operator: str, device: str, leave_out: Sequence[str] = ()) -> dict[str, Any]:
    """The implementations that are installed and run on `device`, by name, each ready to be called; at least one."""
    module = module_of(operator)
    names = [*module.IMPLEMENTATIONS, *module.ALIASES]
    if unknown := [name for name in leave_out if name not in names]:
        raise ValueError(f"--without: expected one of {', '.join(names)}, got {', '.join(unknown)}")
    leave_out = [module.ALIASES.get(name, name) for name in leave_out]
    found = {}
    for name, load in module.IMPLEMENTATIONS.items():
        if name in leave_out or (device == "cpu" and name not in module.ON_CPU):
            continue
        try:
            found[name] = load()
        except Exception as error:  # a peer that is installed may fail in any way, and the others are still measured
            if not (isinstance(error, ModuleNotFoundError) and error.name == module.PACKAGES.get(name, "")):
                print(f"{name} does not load: {why(error)}", file=sys.stderr)
    if not found:
        raise ValueError("--without: expected an implementation to be left")
    return found


def why(error: Exception) -> str:
    """What an implementation failed of, in a line."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" …")


def compared(
    case: Case, name: str, function: Callable[..., Any], arguments: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """What the implementation of that name computes, and how far each result is off; "own" are samples of its own."""
    computed = case.module.results(case, function, arguments)
    if name in getattr(case.module, "OWN_NUMBERS", ()):
        computed["own"] = computed.pop("x")
    return computed, case.module.errors(case, computed, arguments)


def measure_all(
    cases: Sequence[Case], functions: dict[str, Any], timer: CudaTimer | CpuTimer, device: str, calls: int = 1
) -> list[dict[str, Any]]:
    """`measure` for each case, with a progress bar."""
    records = []
    with tqdm(cases, unit="case", leave=False, dynamic_ncols=True, disable=None) as bar:
        for case in bar:
            bar.set_description(f"{case.kind} {case.title}")
            records.append(measure(case, functions, timer, device, calls))
    return records


def measure(
    case: Case, functions: dict[str, Any], timer: CudaTimer | CpuTimer, device: str, calls: int = 1
) -> dict[str, Any]:
    """Checks each implementation against the reference and times it: a JSON-ready record."""
    module = case.module
    torch.compiler.reset()  # or the hundredth shape would meet the limit on recompilations
    results: dict[str, dict[str, Any]] = {name: {} for name in functions}
    roofs: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(timer.rounds):
        if turn == 1 and not _are_close(roofs[0], [first for first, *_ in times.values()]):
            break
        arguments = module.inputs(case, device)  # elsewhere than the last ones, which are still there
        roofs.append(getattr(timer, module.ROOF)(module.traffic(case), calls))
        for name in list(times):
            try:
                if turn == 0:
                    results[name]["errors"] = errors = compared(case, name, functions[name], arguments)[1]
                    if max(errors.values()) > case.tolerance:
                        results[name]["failure"] = "wrong result"
                        del times[name]
                        continue
                times[name].append(
                    timer.kernel(functools.partial(module.call, case, functions[name], arguments), calls)
                )
            except Exception as error:  # a peer may fail in any way, and the others are still to be measured
                results[name] = {"failure": why(error)}
                del times[name]
    timer.release()
    roof = statistics.median(roofs)
    medians = {name: statistics.median(found) for name, found in times.items()}
    for name, microseconds in medians.items():
        results[name] |= {"us": microseconds, "of_roof": roof / microseconds}
    record: dict[str, Any] = {
        "kind": case.kind,
        "shape": case.shape,
        "dtype": str(case.dtype).removeprefix("torch."),
        "roof_us": roof,
        "results": results,
    }
    peers = {name: microseconds for name, microseconds in medians.items() if name != "cuops"}
    if peers and "cuops" in medians:
        best = min(peers, key=peers.__getitem__)
        record["best_peer"], record["to_best_peer"] = best, medians["cuops"] / peers[best]
    return record


def _are_close(roof: float, times: list[float]) -> bool:
    """Whether one round does not tell the two fastest from one another, or the fastest from the roof.

    Where data lies, and what ran before, moves short kernels by up to 12 %.
    """
    return any(b < 1.2 * a for a, b in itertools.pairwise(sorted([roof, *sorted(times)[:2]])))
