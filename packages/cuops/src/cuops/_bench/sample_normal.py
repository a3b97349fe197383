"""sample_normal for measuring: its inputs, its implementations, and how far a result is from what was asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .. import reference
from .._sample_normal.noise import Draw
from .case import Case, compiled, largest_error

KINDS = ("independent", "shared", "backward")
ROOF = "fill"
SEED = 20
CHUNK = 1 << 24  # elements that the float64 reference works on at once

Function = Callable[..., torch.Tensor]


def shape(sizes: Sequence[int]) -> tuple[int, ...]:
    """The case's shape: the number of samples, and the dimension."""
    return math.prod(sizes[:-1]), sizes[-1]


def traffic(case: Case) -> int:
    """The bytes that memory must move: the samples, or their gradients."""
    return math.prod(case.shape) * case.dtype.itemsize


def facts(case: Case) -> str:
    """How much is drawn."""
    return f"{math.prod(case.shape):,} numbers, {traffic(case) / 1e6:.4g} MB"


def inputs(case: Case, device: str) -> dict[str, torch.Tensor]:
    """Fresh random arguments, by name; `grad` is that of the samples."""
    n, d = case.shape
    mu = torch.randn(d, dtype=case.dtype, device=device)
    drawn = {"mu": mu, "sigma": torch.rand(d, dtype=case.dtype, device=device) + 0.5}
    return drawn | ({"grad": torch.randn(n, d, dtype=case.dtype, device=device)} if case.kind == "backward" else {})


def _torch() -> Function:
    def sample(mu: torch.Tensor, sigma: torch.Tensor, n: int, shared: bool, seed: int | None) -> torch.Tensor:
        return mu + sigma * torch.randn(n, 1 if shared else len(mu), dtype=mu.dtype, device=mu.device)

    return sample


def _cuops() -> Function:
    import cuops

    return lambda mu, sigma, n, shared, seed: cuops.sample_normal(mu, sigma, n, shared_noise=shared, seed=seed)


# Each loads on demand, and raises ImportError where its package is not installed.
IMPLEMENTATIONS: dict[str, Callable[[], Function]] = {
    "cuops": _cuops,
    "torch": _torch,
    "torch.compile": lambda: compiled(_torch()),
}
ON_CPU = tuple(IMPLEMENTATIONS)
ALIASES: dict[str, str] = {}


def _sample(case: Case, function: Function, arguments: dict[str, torch.Tensor], seed: int | None) -> torch.Tensor:
    return function(arguments["mu"], arguments["sigma"], case.shape[0], case.kind == "shared", seed)


def _is_cuops(computed: torch.Tensor, case: Case, arguments: dict[str, torch.Tensor]) -> bool:
    """Whether the samples are of the contract's numbers: others draw their own."""
    some = min(case.shape[0], 16)  # with shared noise a sample alone is alike by chance now and then
    first = reference.sample_normal_torch(
        arguments["mu"].double(), arguments["sigma"].double(), None, None, _draw(case, 0, some), torch.float32
    )
    return largest_error(computed[:some], first.double()) < 0.1


def results(case: Case, function: Function, arguments: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `function` computes for the case, by name; "own" are samples of other numbers than the contract's."""
    if case.kind == "backward":
        mu, sigma = (arguments[name].detach().requires_grad_() for name in ("mu", "sigma"))
        x = _sample(case, function, {"mu": mu, "sigma": sigma}, SEED)
        dmu, dsigma = torch.autograd.grad(x, (mu, sigma), arguments["grad"])
        return {"dmu": dmu} | ({"dsigma": dsigma} if _is_cuops(x.detach(), case, arguments) else {})
    x = _sample(case, function, arguments, SEED)
    return {"x" if _is_cuops(x, case, arguments) else "own": x}


def call(case: Case, function: Function, arguments: dict[str, torch.Tensor]) -> Callable[[], Any]:
    """The call that is timed, which advances the generator."""
    if case.kind != "backward":
        return lambda: _sample(case, function, arguments, None)
    mu, sigma = (arguments[name].detach().requires_grad_() for name in ("mu", "sigma"))
    x = _sample(case, function, {"mu": mu, "sigma": sigma}, SEED)
    return lambda: torch.autograd.grad(x, (mu, sigma), arguments["grad"], retain_graph=True)


def _draw(case: Case, start: int, count: int) -> Draw:
    return Draw(SEED, 0, count, start, shared_noise=case.kind == "shared")


def _references(case: Case, arguments: dict[str, torch.Tensor]) -> Iterator[tuple[slice, dict[str, torch.Tensor]]]:
    """Float64 results for some samples at a time; gradients are those of these samples alone."""
    n, d = case.shape
    mu, sigma = arguments["mu"].double(), arguments["sigma"].double()
    step = max(1, CHUNK // d)
    kind = torch.float64 if case.dtype == torch.float64 else torch.float32  # whose numbers are drawn
    for start in range(0, n, step):
        part = slice(start, min(start + step, n))
        z = reference.sample_normal_torch(
            torch.zeros_like(mu), torch.ones_like(mu), None, None, _draw(case, start, part.stop - start), kind
        )
        if case.kind == "backward":
            grad = arguments["grad"][part].double()
            yield part, {"dmu": grad.sum(0), "dsigma": (grad * z).sum(0)}
        else:
            yield part, {"x": mu + sigma * z.double()}


def reference_norms(case: Case, arguments: dict[str, torch.Tensor]) -> dict[str, float]:
    """The norm of each exact result."""
    squares: dict[str, Any] = {}
    for _, exact in _references(case, arguments):
        for name, part in exact.items():
            squares[name] = squares.get(name, 0) + (part if name != "x" else part.square().sum())
    return {name: (s if name == "x" else s.square().sum()).sqrt().item() for name, s in squares.items()}


def errors(case: Case, computed: dict[str, torch.Tensor], arguments: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest error of each result, relative to the largest magnitude in it.

    Own numbers have none where their mean and standard deviation are within six of their deviations.
    """
    if "own" in computed:
        mu, sigma = arguments["mu"].double(), arguments["sigma"].double()
        z = torch.stack(
            [(column.double() - m) / s for column, m, s in zip(computed["own"].T[:64], mu, sigma, strict=False)]
        )
        n = len(z[0]) * (1 if case.kind == "shared" else len(z))
        off = max(abs(z.mean().item()), abs(z.square().mean().item() - 1) / math.sqrt(2)) * math.sqrt(n)
        return {"own": 0.0 if off < 6 else math.inf}
    found: dict[str, float] = {}
    sums: dict[str, torch.Tensor] = {}
    for part, exact in _references(case, arguments):
        for name, value in exact.items():
            if name == "x":
                found[name] = max(found.get(name, 0.0), largest_error(computed[name][part], value))
            else:
                sums[name] = value if name not in sums else sums[name] + value
    return found | {name: largest_error(computed[name], exact) for name, exact in sums.items() if name in computed}
