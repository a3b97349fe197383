"""RMSNorm for measuring: its inputs, its implementations, and how far a result is from the float64 reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import reference
from .case import Case, compiled, largest_errors

KINDS = ("forward", "residual", "backward")
CHECKED = (*KINDS, "backward with a residual", "backward with a bias")
STREAM = "backward with a float32 residual"
OPTIONS = (
    "no weight", "float32 weight", "float32 residual",
    "backward without a weight", "backward with a float32 weight", "backward with a frozen weight",
    "backward with a residual", "backward with a frozen weight and a residual", STREAM,
)  # fmt: skip
ROOF = "copy"
EPS = 1e-6
CHUNK = 1 << 22  # elements that the float64 reference works on at once

Function = Callable[..., Any]


def shape(sizes: Sequence[int]) -> tuple[int, ...]:
    """The case's shape: rows, of all leading sizes, and the hidden size."""
    *leading, n = sizes
    return math.prod(leading), n


def facts(case: Case) -> str:
    """What memory must move."""
    return f"{traffic(case) / 1e6:.4g} MB to read and write"


def traffic(case: Case) -> int:
    """The bytes that memory must move: x and y, residual and h if there is one; or h and its gradient, dy, all dx."""
    rows, n = case.shape
    if "float32 residual" in case.kind:
        wide = 3 if case.kind == STREAM else 2
        narrow = 1 if case.kind == STREAM and _wide(case) == case.dtype else 2  # there one dx is for both
        return rows * n * (narrow * case.dtype.itemsize + wide * _wide(case).itemsize)
    arrays = 4 if "residual" in case.kind else 3 if "backward" in case.kind else 2
    return arrays * rows * n * case.dtype.itemsize


def _wide(case: Case) -> torch.dtype:
    return torch.promote_types(case.dtype, torch.float32)


def inputs(case: Case, device: str) -> dict[str, Tensor]:
    """Fresh random arguments, by name; `grad` is that of y, `h_grad` that of h."""
    rows, n = case.shape

    def draw(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    drawn = {"x": draw(rows, n)}
    if not case.kind.endswith(("no weight", "without a weight")):
        drawn["weight"] = draw(n, dtype=_wide(case) if case.kind.endswith("float32 weight") else case.dtype)
    if case.kind.endswith("residual"):
        drawn["residual"] = draw(rows, n, dtype=_wide(case) if "float32" in case.kind else case.dtype)
    if case.kind.endswith("bias"):
        drawn["bias"] = draw(n)
    if case.kind.startswith("backward"):
        drawn["grad"] = draw(rows, n)
        if "residual" in drawn:
            drawn["h_grad"] = draw(rows, n, dtype=drawn["residual"].dtype)
    return drawn


def _torch() -> Function:
    def rms_norm(
        x: Tensor, weight: Tensor | None = None, residual: Tensor | None = None, bias: Tensor | None = None
    ) -> Any:
        h = x if residual is None else x + residual
        y = torch.nn.functional.rms_norm(h, x.shape[-1:], weight, EPS).to(x.dtype)
        y = y if bias is None else y + bias
        return y if residual is None else (y, h)

    return rms_norm


def _cuops() -> Function:
    import cuops

    return lambda x, weight=None, residual=None, bias=None: cuops.rms_norm(x, weight, bias, eps=EPS, residual=residual)


def _quack() -> Function:
    from quack import rmsnorm

    return lambda x, weight=None, residual=None, bias=None: rmsnorm(
        x, weight, bias, residual=residual, eps=EPS, prenorm=residual is not None
    )


def _liger() -> Function:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def rms_norm(
        x: Tensor, weight: Tensor | None = None, residual: Tensor | None = None, bias: Tensor | None = None
    ) -> Any:
        if bias is not None:
            raise NotImplementedError("no bias")
        if residual is None:
            return LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)
        if residual.dtype != x.dtype:
            raise NotImplementedError("no h of the residual's dtype")
        return LigerFusedAddRMSNormFunction.apply(x, residual, weight, EPS, 0.0, "llama", False)

    return rms_norm


def _cudnn() -> Function:
    from cudnn.ops.norm import rms_norm

    def of_x(
        x: Tensor, weight: Tensor | None = None, residual: Tensor | None = None, bias: Tensor | None = None
    ) -> Any:
        if residual is not None or bias is not None or weight is None:
            raise NotImplementedError("no residual, no bias, and always a weight")
        return rms_norm(x, weight, eps=EPS)

    return of_x


# Each loads on demand; PACKAGES names those that need not be installed.
IMPLEMENTATIONS: dict[str, Callable[[], Function]] = {
    "cuops": _cuops,
    "torch": _torch,
    "torch.compile": lambda: compiled(_torch()),
    "Liger": _liger,
    "cuDNN": _cudnn,
    "quack": _quack,
}
ON_CPU = ("cuops", "torch", "torch.compile")
ALIASES: dict[str, str] = {}
PACKAGES = {"Liger": "liger_kernel", "cuDNN": "cudnn", "quack": "quack"}


def results(case: Case, function: Function, arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `function` computes for the case, by name."""
    if "grad" not in arguments:
        computed = function(**arguments)
        return dict(zip(("y", "h"), computed if isinstance(computed, tuple) else (computed,), strict=False))
    names = [f"d{name}" for name in _leaves(case) if name in arguments]
    return dict(zip(names, backward(case, function, arguments)(), strict=True))


def _leaves(case: Case) -> tuple[str, ...]:
    """Of which arguments gradients are wanted, if they are there; that of the residual is that of x before rounding."""
    return ("x",) if "frozen" in case.kind else ("x", "weight", "bias", "residual")


def backward(case: Case, function: Function, arguments: dict[str, Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """Runs the forward; the call that it returns is the backward alone."""
    wanted = _leaves(case)
    given = {n: a.detach().requires_grad_(n in wanted) for n, a in arguments.items() if not n.endswith("grad")}
    computed, leaves = function(**given), [given[name] for name in wanted if name in given]
    grads = [arguments[name] for name in ("grad", "h_grad") if name in arguments]
    return lambda: torch.autograd.grad(computed, leaves, grads, retain_graph=True)


def call(case: Case, function: Function, arguments: dict[str, Tensor]) -> Callable[[], Any]:
    """The call that is timed."""
    return backward(case, function, arguments) if "grad" in arguments else lambda: function(**arguments)


def references(case: Case, arguments: dict[str, Tensor]) -> Iterator[tuple[slice, dict[str, Tensor]]]:
    """Float64 results for some rows at a time; dweight is that of these rows alone."""
    rows, n = case.shape
    step = max(1, CHUNK // n)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        wide = {name: (a if name in ("weight", "bias") else a[part]).double() for name, a in arguments.items()}
        h = _h(wide, arguments)
        leaves = [
            h.requires_grad_(),
            *(wide[n].requires_grad_() for n in ("weight",) if n in wide and n in _leaves(case)),
        ]
        y = reference.rms_norm_torch(h, None, wide.get("weight"), None, EPS, 0.0, None)[0]
        if "grad" in wide:
            dh, *dweight = torch.autograd.grad(y, leaves, wide["grad"])
            dh = dh + wide.get("h_grad", 0)
            exact = dict(zip(("dx", "dweight"), (dh, *dweight), strict=False))
            exact |= {"dresidual": dh} if "residual" in wide and "residual" in _leaves(case) else {}
            yield part, exact | ({"dbias": wide["grad"].sum(0)} if "bias" in wide else {})
        else:
            yield part, {"y": y.detach()} | ({"h": h.detach()} if "residual" in wide else {})


def _h(wide: dict[str, Tensor], arguments: dict[str, Tensor]) -> Tensor:
    """Which rows are normalised: kernels round the sum of x and residual first."""
    if "residual" not in wide:
        return wide["x"]
    return (
        (wide["x"] + wide["residual"])
        .to(torch.promote_types(*(arguments[n].dtype for n in ("x", "residual"))))
        .double()
    )


def _largest_term(arguments: dict[str, Tensor], part: slice) -> float:
    """The largest of dy * weight * rstd, from which dx's other term takes nearly all where rows are short."""
    wide = {name: (a if name in ("weight", "bias") else a[part]).detach().double() for name, a in arguments.items()}
    rstd = reference.rms_norm_torch(_h(wide, arguments), None, None, None, EPS, 0.0, None)[2]
    return float(((wide["grad"] * wide.get("weight", 1)).abs().amax(-1) * rstd).amax())


def errors(case: Case, computed: dict[str, Tensor], arguments: dict[str, Tensor]) -> dict[str, float]:
    """The largest error of each result, relative to the largest magnitude in it, or in the terms that cancel in dx."""

    def terms(name: str, part: slice) -> float:
        return _largest_term(arguments, part) if name in ("dx", "dresidual") else 1e-300

    return largest_errors(computed, references(case, arguments), terms)
