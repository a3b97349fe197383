"""Kronecker-factored linear layers, from the public function down to PyTorch's operators and NumPy."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

from . import _arguments, _backend, _dlpack, reference
from ._torch import torch
from .kron_plan import GEMM

if torch is not None:
    from ._kron_linear.eager import direct, is_direct
    from ._kron_linear.operators import autocast, forward_torch

if TYPE_CHECKING:
    from ._arguments import Array


@overload
def kron_linear(x: Array, factors: Iterable[Array], bias: Array | None = None) -> Array: ...


@overload
def kron_linear(x: Any, factors: Iterable[Any], bias: Any = None) -> Any: ...


def kron_linear(x: Any, factors: Iterable[Any], bias: Any = None) -> Any:
    """Linear layer whose weight is a Kronecker product, which is never formed.

        y = x @ kron(W1, W2, ..., Wn).T + bias

    as ``torch.nn.functional.linear(x, torch.kron(W1, torch.kron(W2, ...)), bias)`` would give, in indices

        y[o1, ..., on] = sum over i1, ..., in of W1[o1, i1] ... Wn[on, in] x[i1, ..., in]

    With the whole weight that would be i1 * ... * in * o1 * ... * on multiplications a row. One factor is applied after
    the other instead: for square factors, i1 * ... * in * (i1 + ... + in) multiplications a row.

    Args:
        x: ``(..., i1 * ... * in)``, float64, float32, float16 or bfloat16: a torch tensor on CUDA or CPU, a NumPy
            array (computed on the GPU where there is one and one kernel takes all factors; bfloat16, that of ml_dtypes,
            on the CPU), or an array on CUDA of CuPy, JAX, or a library like them that speaks DLPack. Leading dimensions
            may be any, and empty.
        factors: W1 to Wn, at least one, each ``(ok, ik)``, of x's kind, dtype and device. A size may be 1.
        bias: ``(o1 * ... * on)``, like the factors; None is none.

    Returns:
        y, ``(..., o1 * ... * on)``, in x's kind of array, dtype and device. Sums run in float32, in float64 for float64
        and on the CPU; float32 on CUDA takes TF32 where ``torch.backends.cuda.matmul`` allows it. Under autocast, the
        arguments are converted as those of ``torch.nn.functional.linear``.

    Raises:
        TypeError: an argument is of a kind or dtype that is not listed here, or dtypes differ.
        ValueError: there is no factor, one is not a matrix, shapes or devices do not go together, or y would have 2**63
            elements or more.
        cuops.errors.CuopsError: the installation or the GPU fails; the message has the command that fixes it.

    Source: Van Loan, The ubiquitous Kronecker product, https://doi.org/10.1016/S0377-0427(00)00393-9.
    """
    matrices = _matrices(factors)
    if torch is not None and is_direct(x, matrices, bias):
        return direct(x, matrices, bias)
    if _arguments.is_tensor(x) and all(a is None or _arguments.is_tensor(a) for a in (*matrices, bias)):
        given = x, *matrices, bias
        x, *matrices, bias = cast = autocast(*given)
        _check(x, matrices, bias, "" if all(a is b for a, b in zip(cast, given, strict=True)) else ", under autocast")
        return forward_torch(x, matrices, bias)
    _check(x, matrices, bias)
    if _arguments.is_ndarray(x):
        return _fwd_numpy(x, matrices, bias)
    return _fwd_dlpack(x, matrices, bias)


def _matrices(factors: Iterable[Any]) -> list[Any]:
    """The factors as a list. One array with more dimensions is refused: what its first dimension is, is a guess."""
    if hasattr(type(factors), "shape") or not _arguments.is_ordered(factors):
        raise TypeError(f"factors: expected a list of matrices, got {type(factors).__qualname__}")
    # Not list(factors), which PyTorch 2.7 does not compile of a ParameterList.
    matrices = [w for w in factors]  # noqa: C416
    if not matrices:
        raise ValueError("factors: expected at least one matrix, got none")
    return matrices


def _check(x: Any, factors: Sequence[Any], bias: Any, condition: str = "") -> None:
    """Raises what the documentation of `kron_linear` says; `condition` is that under which dtypes are what they are."""
    _arguments.array("x", x)
    if len(x.shape) == 0:
        raise ValueError("x: expected at least 1 dimension, got 0")
    named = [(f"factors[{k}]", w) for k, w in enumerate(factors)]
    for name, a in named if bias is None else [*named, ("bias", bias)]:
        _arguments.array(name, a, x)
        if a.dtype != x.dtype:
            raise TypeError(f"{name}: expected x's dtype {x.dtype}, got {a.dtype}{condition}")
    for name, w in named:
        if len(w.shape) != 2:
            raise ValueError(f"{name}: expected a matrix, got shape {tuple(w.shape)}")
    outs, ins = zip(*(w.shape for w in factors), strict=True)
    if math.prod(ins) != x.shape[-1]:
        got = " x ".join(str(size) for size in ins)
        raise ValueError(f"factors: expected columns whose product is x's last dimension {x.shape[-1]}, got {got}")
    is_compiled = torch is not None and torch.compiler.is_compiling()  # where this would bound sizes that are symbols
    for elements in (math.prod(outs), math.prod((*x.shape[:-1], *outs))):
        if not is_compiled and isinstance(elements, int) and elements >= 1 << 63:  # or a symbol, while a call is traced
            raise ValueError(f"factors: expected a result of less than 2^63 elements, got {_arguments.short(elements)}")
    if bias is not None and tuple(bias.shape) != (math.prod(outs),):
        raise ValueError(f"bias: expected shape ({math.prod(outs)},), got {tuple(bias.shape)}")


def _is_fused(x: Any, factors: Sequence[Any], device: int) -> bool:
    """Whether fused kernels take factors in less time than GEMMs, on that GPU."""
    if 0 in x.shape or any(0 in w.shape for w in factors):
        return False
    dtype, rows = _arguments.DTYPES.index(_arguments.dtype_name(x.dtype)), math.prod(x.shape[:-1])
    return _plan_is_fused(dtype, rows, tuple(int(size) for w in factors for size in w.shape), device)


@functools.lru_cache(4096)
def _plan_is_fused(dtype: int, rows: int, sizes: tuple[int, ...], device: int) -> bool:
    plan = _backend.library().kron_linear_plan(dtype, rows, sizes, 1, False, device)
    return any(group[2] != GEMM for group in plan)


def _fwd_numpy(x: Any, factors: Sequence[Any], bias: Any) -> Any:
    """Through the GPU in chunks of rows, where there is one and a fused kernel takes all factors; else by NumPy."""
    import numpy as np

    device = _backend.gpu_for_host_arrays()
    bfloat16 = x.dtype.name == "bfloat16"  # which NumPy's DLPack does not know
    if device is None or bfloat16 or 0 in x.shape or any(0 in w.shape for w in factors):
        return reference.kron_linear_numpy(x, factors, bias)
    y = np.empty((*x.shape[:-1], math.prod(w.shape[0] for w in factors)), x.dtype)
    arrays = [_dlpack.host_view(a) for a in (x, *factors)]
    given = None if bias is None else _dlpack.host_view(bias)
    try:
        _backend.library().kron_linear_fwd_host(y, arrays[0], arrays[1:], given, device)
    except NotImplementedError:  # the factors are too large for one kernel
        return reference.kron_linear_numpy(x, factors, bias)
    return y


def _fwd_dlpack(x: Any, factors: Sequence[Any], bias: Any) -> Any:
    """By the fused kernel, or a product a factor by the library that the arrays are of."""
    shape = (*x.shape[:-1], math.prod(w.shape[0] for w in factors))
    if _is_fused(x, factors, x.__dlpack_device__()[1]):
        y = _dlpack.empty(shape, _arguments.dtype_name(x.dtype), x)
        views = [_dlpack.view(a) for a in (x, *factors)]
        given = None if bias is None else _dlpack.view(bias)
        try:
            _backend.library().kron_linear_fwd(y, views[0], views[1:], 1, given, False)
            return _dlpack.give_back(y, x)
        except NotImplementedError:  # the factors are too large for one kernel
            pass
    namespace = _dlpack.namespace(x)
    exact = {"precision": "highest"} if namespace.__name__ == "jax.numpy" else {}  # or JAX takes TF32
    state = x.reshape(math.prod(x.shape[:-1]), *(w.shape[1] for w in factors))
    for w in factors:
        state = namespace.tensordot(state, w, axes=((1,), (1,)), **exact)
    y = state.reshape(shape)
    return y if bias is None else y + bias
