"""kron_linear for measuring: its inputs, its implementations, and how far a result is from the float64 reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any

import torch

from .. import reference
from .case import Case, compiled, largest_errors

KINDS = ("forward", "backward")
CHECKED = (*KINDS, "bias")  # which is not measured
ROOF = "copy"
CHUNK = 1 << 24  # elements that the float64 reference works on at once

Function = Callable[..., torch.Tensor]  # of x, the factors and, where there is one, a bias


def shape(sizes: Sequence[int]) -> tuple[int, ...]:
    """The case's shape: the batch size, and the size of each factor."""
    return tuple(sizes)


def _sizes(case: Case) -> tuple[int, int, list[int]]:
    """Rows, elements of a row, and the sizes of the factors."""
    rows, *factors = case.shape
    return rows, math.prod(factors), factors


def traffic(case: Case) -> int:
    """The bytes that memory must move: x and y; or x, dy and dx."""
    rows, n, factors = _sizes(case)
    return ({"forward": 2, "backward": 3}[case.kind] * rows * n + sum(f * f for f in factors)) * case.dtype.itemsize


def operations(case: Case) -> int:
    """Multiplications and additions: a product a factor; and for the gradients two, that for dx and that for dW."""
    rows, n, factors = _sizes(case)
    return {"forward": 2, "backward": 4}[case.kind] * rows * n * sum(factors)


def facts(case: Case) -> str:
    """The size of the state, and how many operations there are for each byte that memory must move."""
    rows, n, _ = _sizes(case)
    sample = n * case.dtype.itemsize
    return (
        f"state {n} elements, {sample / 1024:.4g} KiB a sample, {rows * sample / 1e6:.4g} MB in all; "
        f"{operations(case) / 1e9:.4g} GFLOP, arithmetic intensity {operations(case) / traffic(case):.1f} FLOP/byte"
    )


def inputs(case: Case, device: str) -> dict[str, torch.Tensor]:
    """Fresh random arguments, by name: x, the factors w1, w2, ..., bias, and grad, that of y. y has x's magnitude."""
    rows, n, factors = _sizes(case)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=case.dtype, device=device)

    def factor(size: int) -> torch.Tensor:
        w = draw(size, size)
        return w * (size**0.5 / torch.linalg.vector_norm(w, dtype=torch.float64))

    drawn = {"x": draw(rows, n)} | {f"w{k}": factor(size) for k, size in enumerate(factors, 1)}
    if case.kind == "bias":
        drawn["bias"] = draw(n)
    return drawn if case.kind == "forward" else drawn | {"grad": draw(rows, n)}


def _factors(arguments: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [a for name, a in arguments.items() if name.startswith("w")]


def _loop() -> Function:
    def kron_linear(x: torch.Tensor, factors: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> torch.Tensor:
        state = x.reshape(len(x), *(w.shape[1] for w in factors))
        for w in reversed(factors):
            state = (state @ w.mT).movedim(-1, 1)
        y = state.reshape(len(x), -1)
        return y if bias is None else y + bias

    return kron_linear


def _transposed() -> Function:
    def kron_linear(x: torch.Tensor, factors: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> torch.Tensor:
        state = x
        for w in reversed(factors):
            state = torch.bmm(w.expand(len(x), *w.shape), state.reshape(len(x), -1, w.shape[1]).mT)
        y = state.reshape(len(x), -1)
        return y if bias is None else y + bias

    return kron_linear


def _compiled() -> Function:
    """Compiled, of both definitions the one that takes less time: `transposed` forward, mostly `loop` for gradients."""
    forward, differentiated = compiled(_transposed()), compiled(_loop())

    def kron_linear(x: torch.Tensor, factors: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> torch.Tensor:
        arguments = (x, *factors, *(() if bias is None else (bias,)))
        return (differentiated if any(a.requires_grad for a in arguments) else forward)(x, factors, bias)

    return kron_linear


def _cuops() -> Function:
    import cuops

    return cuops.kron_linear


def _fastkron() -> Function:
    from pyfastkron import fastkrontorch

    is_1_1 = metadata.version("pyfastkron").startswith("1.1.")

    def kron_linear(x: torch.Tensor, factors: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> torch.Tensor:
        is_wide = is_1_1 and x.is_cuda and x.dtype.itemsize >= 4
        if is_wide and torch.cuda.get_device_capability(x.device) >= (9, 0):
            raise RuntimeError("FastKron 1.1 has no kernel of float32 and float64 for compute capability 9.0 and above")
        y = fastkrontorch.gemkm(x, [w.mT for w in factors])
        return y if bias is None else y + bias

    return kron_linear


# Each loads on demand; PACKAGES names those that need not be installed.
IMPLEMENTATIONS: dict[str, Callable[[], Function]] = {
    "cuops": _cuops,
    "loop": _loop,
    "transposed": _transposed,
    "torch.compile": _compiled,
    "FastKron": _fastkron,
}
ON_CPU = tuple(IMPLEMENTATIONS)
ALIASES = {"v1": "loop", "v2": "transposed", "v3": "cuops"}
PACKAGES = {"FastKron": "pyfastkron"}


def results(case: Case, function: Function, arguments: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `function` computes for the case, by name."""
    if case.kind == "forward":
        return {"y": function(arguments["x"], _factors(arguments))}
    if case.kind == "bias":
        bias = arguments["bias"].detach().requires_grad_()
        y = function(arguments["x"], _factors(arguments), bias)
        return {"y": y.detach(), "dbias": torch.autograd.grad(y, bias, arguments["grad"])[0]}
    dx, *dfactors = backward(function, arguments)()
    return {"dx": dx} | {f"dw{k}": dw for k, dw in enumerate(dfactors, 1)}


def backward(function: Function, arguments: dict[str, torch.Tensor]) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Runs the forward; the call that it returns is the backward alone."""
    x, *factors = (a.detach().requires_grad_() for a in (arguments["x"], *_factors(arguments)))
    y = function(x, factors)
    return lambda: torch.autograd.grad(y, (x, *factors), arguments["grad"], retain_graph=True)


def call(case: Case, function: Function, arguments: dict[str, torch.Tensor]) -> Callable[[], Any]:
    """The call that is timed."""
    if case.kind == "backward":
        return backward(function, arguments)
    x, factors = arguments["x"], _factors(arguments)
    return lambda: function(x, factors)


def references(case: Case, arguments: dict[str, torch.Tensor]) -> Iterator[tuple[slice, dict[str, torch.Tensor]]]:
    """Float64 results for some rows at a time; the factors' gradients are those of these rows alone."""
    rows, n, _ = _sizes(case)
    step = max(1, CHUNK // n)
    factors = [w.double() for w in _factors(arguments)]
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        x = arguments["x"][part].double()
        if case.kind == "forward":
            yield part, {"y": reference.kron_linear_torch(x, factors, None)}
            continue
        if case.kind == "bias":
            y = reference.kron_linear_torch(x, factors, arguments["bias"].double())
            yield part, {"y": y, "dbias": arguments["grad"][part].double().sum(0)}
            continue
        leaves = [a.requires_grad_() for a in (x, *factors)]
        y = reference.kron_linear_torch(x, factors, None)
        dx, *dfactors = torch.autograd.grad(y, leaves, arguments["grad"][part].double())
        yield part, {"dx": dx} | {f"dw{k}": dw for k, dw in enumerate(dfactors, 1)}


def errors(case: Case, computed: dict[str, torch.Tensor], arguments: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest error of each result, relative to the largest magnitude in it, or to what terms of a dW add up to."""
    x, grad = (arguments[name] for name in ("x", "grad" if "grad" in arguments else "x"))
    # As factors keep magnitudes, and signs are random: of a few sums, all may nearly cancel.
    each = torch.linalg.vector_norm(x, dtype=torch.float64) * torch.linalg.vector_norm(grad, dtype=torch.float64)

    def terms(name: str, part: slice) -> float:
        size = len(arguments[name[1:]]) if name.startswith("dw") else 0
        return float(each / (size * x.numel()) ** 0.5) if size else 1e-300

    return largest_errors(computed, references(case, arguments), terms)
