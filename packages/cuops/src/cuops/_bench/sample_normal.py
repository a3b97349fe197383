"""sample_normal for measuring: its inputs, its implementations, and how far a result is from what was asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .. import reference
from .._arguments import sums_dtype
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


# Each loads on demand; PACKAGES names those that need not be installed.
IMPLEMENTATIONS: dict[str, Callable[[], Function]] = {
    "cuops": _cuops,
    "torch": _torch,
    "torch.compile": lambda: compiled(_torch()),
}
ON_CPU = tuple(IMPLEMENTATIONS)
OWN_NUMBERS = ("torch", "torch.compile")  # all others have to have those of the seed
ALIASES: dict[str, str] = {}
PACKAGES: dict[str, str] = {}


def _sample(case: Case, function: Function, arguments: dict[str, torch.Tensor], seed: int | None) -> torch.Tensor:
    return function(arguments["mu"], arguments["sigma"], case.shape[0], case.kind == "shared", seed)


def results(case: Case, function: Function, arguments: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `function` computes for the case, by name."""
    if case.kind == "backward":
        mu, sigma = (arguments[name].detach().requires_grad_() for name in ("mu", "sigma"))
        x = _sample(case, function, {"mu": mu, "sigma": sigma}, SEED)
        dmu, dsigma = torch.autograd.grad(x, (mu, sigma), arguments["grad"])
        return {"x": x.detach(), "dmu": dmu, "dsigma": dsigma}
    return {"x": _sample(case, function, arguments, SEED)}


def call(case: Case, function: Function, arguments: dict[str, torch.Tensor]) -> Callable[[], Any]:
    """The call that is timed, which advances the generator."""
    if case.kind != "backward":
        return lambda: _sample(case, function, arguments, None)
    mu, sigma = (arguments[name].detach().requires_grad_() for name in ("mu", "sigma"))
    x = _sample(case, function, {"mu": mu, "sigma": sigma}, SEED)
    return lambda: torch.autograd.grad(x, (mu, sigma), arguments["grad"], retain_graph=True)


def _noise(case: Case, arguments: dict[str, torch.Tensor], part: slice) -> torch.Tensor:
    """Z of the seed, for some samples."""
    zeros = torch.zeros_like(arguments["mu"], dtype=torch.float64)
    kind = sums_dtype(case.dtype)  # whose numbers are drawn
    draw = Draw(SEED, 0, part.stop - part.start, part.start, shared_noise=case.kind == "shared")
    return reference.sample_normal_torch(zeros, zeros + 1, None, None, draw, kind).double()


def references(
    case: Case, arguments: dict[str, torch.Tensor], own: torch.Tensor | None = None
) -> Iterator[tuple[slice, dict[str, torch.Tensor]]]:
    """Float64 results for some samples at a time; gradients are those of these samples alone.

    Of samples that are `own`, z is what they say, and "terms" are the squares of what dsigma adds up, rounding and all.
    """
    n, d = case.shape
    mu, sigma = arguments["mu"].double(), arguments["sigma"].double()
    step = max(1, CHUNK // d)
    for start in range(0, n, step):
        part = slice(start, min(start + step, n))
        z = _noise(case, arguments, part) if own is None else (own[part].double() - mu) / sigma
        exact = {} if own is not None else {"x": mu + sigma * z}
        if case.kind == "backward":
            grad = arguments["grad"][part].double()
            exact |= {"dmu": grad.sum(0), "dsigma": (grad * z).sum(0)}
            if own is not None:
                exact["terms"] = (grad * (own[part].double().abs() + mu.abs()) / sigma).square().sum(0)
        yield part, exact


def _own_error(case: Case, own: torch.Tensor, arguments: dict[str, torch.Tensor]) -> float:
    """Zero where the mean and the variance of own numbers are within six of their deviations, or infinity.

    The cube root of the variance is nearly normal (E. B. Wilson and M. M. Hilferty, The distribution of chi-square).
    """
    mu, sigma = (arguments[name][:64].double() for name in ("mu", "sigma"))
    z = (own[:, :64].double() - mu) / sigma
    count = len(z) if case.kind == "shared" else z.numel()
    of_variance = 2 / (9 * count)
    variance = abs(z.square().mean().item() ** (1 / 3) - (1 - of_variance)) / math.sqrt(of_variance)
    return 0.0 if max(abs(z.mean().item()) * math.sqrt(count), variance) < 6 else math.inf


def errors(case: Case, computed: dict[str, torch.Tensor], arguments: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest error of each result, relative to the largest magnitude in it; "own" are samples of OWN_NUMBERS."""
    own = computed.get("own")
    found = {} if own is None else {"own": _own_error(case, own, arguments)}
    sums: dict[str, torch.Tensor] = {}
    for part, exact in references(case, arguments, own):
        for name, value in exact.items():
            if name == "x":
                found[name] = max(found.get(name, 0.0), largest_error(computed[name][part], value))
            else:
                sums[name] = value if name not in sums else sums[name] + value
    # Own numbers are known as far as rounded samples tell: one near its mean has few digits.
    least = {"dsigma": {"terms": sums.pop("terms").sqrt().max().item()}} if "terms" in sums else {}
    return found | {name: largest_error(computed[name], exact, **least.get(name, {})) for name, exact in sums.items()}
