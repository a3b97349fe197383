"""RMSNorm, from the public functions down to the library's `rms_norm_fwd` (csrc/rms_norm.cc)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from . import _arguments, _backend, _dlpack, errors, reference
from ._torch import torch

if torch is not None:
    from ._rms_norm.eager import direct, direct_in_place, is_direct
    from ._rms_norm.operators import forward_torch
    from ._transforms import PLAIN
else:

    def is_direct(x: Any, residual: Any, weight: Any, bias: Any) -> bool:
        """Without PyTorch there is no dispatcher to avoid."""
        return False


if TYPE_CHECKING:
    from ._arguments import Array


@overload
def rms_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-6,
    *,
    residual: None = None,
    weight_offset: float = 0.0,
    normalized_shape: int | Sequence[int] | None = None,
    out_dtype: Any = None,
    return_rstd: Literal[False] = False,
) -> Array: ...


@overload
def rms_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-6,
    *,
    residual: Array,
    weight_offset: float = 0.0,
    normalized_shape: int | Sequence[int] | None = None,
    out_dtype: Any = None,
    return_rstd: Literal[False] = False,
) -> tuple[Array, Array]: ...


@overload
def rms_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-6,
    *,
    residual: Any = None,
    weight_offset: float = 0.0,
    normalized_shape: int | Sequence[int] | None = None,
    out_dtype: Any = None,
    return_rstd: bool = False,
    out: Any = None,
) -> Any: ...


def rms_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-6,
    *,
    residual: Any = None,
    weight_offset: float = 0.0,
    normalized_shape: int | Sequence[int] | None = None,
    out_dtype: Any = None,
    return_rstd: bool = False,
    out: Any = None,
) -> Any:
    """Root mean square layer normalisation of the last dimensions of x.

        h = x + residual                                          (h = x without a residual)
        y = h / sqrt(mean(h^2) + eps) * (weight + weight_offset) + bias

    Sums run in float32, in float64 for float64 and on the CPU, and any finite x gives the right y: rows whose squares
    overflow or underflow are scaled first. A row of zeros gives zeros, also with eps = 0, where its rstd is 0. NaN and
    infinity propagate as in PyTorch.

    Args:
        x: ``(..., *normalized_shape)``, float64, float32, float16 or bfloat16: a torch tensor on CUDA or CPU, a NumPy
            array (computed on the GPU where there is one; with a residual, and in bfloat16, that of ml_dtypes, on the
            CPU), or an array on CUDA of CuPy, JAX, or a library like them that speaks DLPack. Strides may be any. On
            CUDA, x is read where it is if its last dimension is contiguous and its rows need at most two strides (for
            gradients: one); else it is copied first.
        weight: ``(*normalized_shape)``, on x's device, of any of these dtypes; None is all ones.
        bias: like weight; None is all zeros.
        eps: added to the mean of squares; finite and at least 0.
        residual: of x's shape, of any of these dtypes.
        weight_offset: added to the weight: 1 for models, like Gemma, that store weight - 1. No effect without a weight.
        normalized_shape: the last dimensions to normalise; by default weight's shape, or the last dimension.
        out_dtype: y's dtype, one of these four, as PyTorch or NumPy has it or by name; x's by default.
        return_rstd: whether to return 1 / sqrt(mean(h^2) + eps) too.
        out: for NumPy, an array of x's shape and y's dtype that y is written into, and that is returned as y. It may
            overlap the inputs and have any strides that step over all that lies within, so that its elements share no
            memory. `cuops.pinned_empty` makes one that the GPU writes at full speed.

    Returns:
        y, of x's shape, in x's kind of array, on x's device; (y, h) with a residual, h in the dtype of a sum of the two
        (float32 for a float32 residual stream and a bfloat16 x). With return_rstd, rstd of x's leading dimensions comes
        last, in float32 (float64 for a float64 h).

    Raises:
        TypeError: an argument is of a kind or dtype that is not listed here, or out has another dtype than y.
        ValueError: shapes or devices do not go together, eps or weight_offset is not finite, eps is negative, out is
            read-only or shares memory between its elements, or an array on a GPU has more than 2147483647 rows.
        cuops.errors.CuopsError: the installation or the GPU fails; the message has the command that fixes it.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, https://arxiv.org/abs/1910.07467.
    """
    if (
        normalized_shape is None
        and out_dtype is None
        and return_rstd is False
        and out is None
        and is_direct(x, residual, weight, bias)
    ):
        try:
            return direct(x, residual, weight, bias, eps, weight_offset)
        except errors.CuopsError:
            raise
        except (TypeError, ValueError, RuntimeError, BufferError):
            pass  # the library refuses an argument, which below is converted or gets its error

    dims = _check(x, weight, bias, residual, eps, weight_offset, normalized_shape, out_dtype)
    return_rstd = _arguments.flag("return_rstd", return_rstd)
    arrays = [None if a is None else _flat(a, dims) for a in (x, residual, weight, bias)]
    if out is not None:
        _check_out(out, x, out_dtype)
    in_place = out is not None and _may_be_written_early(out, x, residual, weight, bias)
    forward: Any = forward_torch if _arguments.is_tensor(x) else functools.partial(_fwd_dlpack, with_rstd=return_rstd)
    if _arguments.is_ndarray(x):
        forward = functools.partial(_fwd_numpy, out=_flat(out, dims) if in_place else None, with_rstd=return_rstd)
        out_dtype = None if out_dtype is None else _arguments.numpy_dtype("out_dtype", out_dtype)
    y, h, rstd = forward(*arrays, float(eps), float(weight_offset), out_dtype)
    if out is not None and not in_place:
        out[...] = y.reshape(x.shape)
    if dims > 1:
        y, h = y.reshape(x.shape), h if residual is None else h.reshape(x.shape)
    results = (y if out is None else out, *(() if residual is None else (h,)), *((rstd,) if return_rstd else ()))
    return results[0] if len(results) == 1 else results


def rms_norm_(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    normalized_shape: int | Sequence[int] | None = None,
) -> Any:
    """`rms_norm` in place: writes y into x, which has at least two dimensions, and returns x.

    Where gradients are wanted, they go through copies.

    Args:
        x: a torch tensor or a NumPy array.
        weight, bias, eps, weight_offset, normalized_shape: as those of `rms_norm`.

    Returns:
        x itself.

    Raises:
        TypeError: x is neither; or as `rms_norm` raises it.
        RuntimeError: x is a leaf that requires a gradient, as PyTorch raises it.
        ValueError: x is read-only, has fewer than two dimensions, has a stride that does not step over all that lies
            within, so that elements share memory, or is an inference tensor outside of inference mode; or as
            `rms_norm` raises it.
        cuops.errors.CuopsError: the installation or the GPU fails; the message has the command that fixes it. Where the
            GPU fails during the call, some rows of a NumPy array may have been written.
    """
    dims = _check(x, weight, bias, None, eps, weight_offset, normalized_shape, None)
    if len(x.shape) < 2:
        raise ValueError(f"x: expected at least 2 dimensions, got shape {tuple(x.shape)}")
    if _arguments.is_ndarray(x) and not x.flags.writeable:
        raise ValueError("x: expected a writable array, got a read-only one")
    if _arguments.is_tensor(x):
        if not torch.compiler.is_compiling():
            _arguments.writable_here("x", x)
        records = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
        plain = not records and dims == 1 and x.is_contiguous() and is_direct(x, None, weight, bias)
        if plain and _arguments.are_apart(x, weight, bias) and direct_in_place(x, weight, bias, eps, weight_offset):
            return x
        if type(x) in PLAIN and not torch.compiler.is_compiling():
            _arguments.apart("x", x)
        before = x
        if records:  # what the gradients need is not to be what is written
            before, weight, bias = (None if t is None else t.clone() for t in (x, weight, bias))
        y = rms_norm(before, weight, bias, eps, weight_offset=weight_offset, normalized_shape=normalized_shape)
        return x.copy_(y)
    if _arguments.is_ndarray(x):
        _arguments.apart("x", x)
        in_place = x.flags.c_contiguous
        flat, weight, bias = (None if a is None else _flat(a, dims) for a in (x, weight, bias))
        out = flat if in_place else None
        y = _fwd_numpy(flat, None, weight, bias, float(eps), float(weight_offset), None, out=out)[0]
        if not in_place:
            x[...] = y.reshape(x.shape)
        return x
    raise TypeError(f"x: expected a torch.Tensor or a numpy.ndarray, got {type(x).__qualname__}")


def _check(
    x: Any, weight: Any, bias: Any, residual: Any, eps: Any, weight_offset: Any, normalized_shape: Any, out_dtype: Any
) -> int:
    """Raises what the documentation of `rms_norm` says; returns how many dimensions are normalised."""
    _arguments.array("x", x)
    if len(x.shape) == 0:
        raise ValueError("x: expected at least 1 dimension, got 0")
    if eps is None:
        raise TypeError(
            "eps: expected a number, got None; PyTorch's None is torch.finfo(x.dtype).eps, at most float32's"
        )
    _arguments.number("eps", eps, least=0)
    _arguments.number("weight_offset", weight_offset)
    if out_dtype is not None and _arguments.dtype_name(out_dtype) not in _arguments.DTYPES:
        raise TypeError(f"out_dtype: expected float64, float32, float16 or bfloat16, got {out_dtype!r}")
    if residual is not None:
        _arguments.array("residual", residual, x)
        if residual.shape != x.shape:
            raise ValueError(f"residual: expected x's shape {tuple(x.shape)}, got {tuple(residual.shape)}")
    is_sizes = isinstance(weight, int) or (isinstance(weight, (tuple, list)) and _arguments.are_integers(weight))
    if is_sizes:  # which torch.nn.functional.rms_norm has in its place
        raise TypeError(f"weight: expected an array, got sizes; for these: normalized_shape={weight!r}")
    shape = None if normalized_shape is None else _arguments.sizes("normalized_shape", normalized_shape)
    if shape is not None:
        _arguments.trailing_shape("normalized_shape", shape, x)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        _arguments.array(name, parameter, x)
        shape = shape or tuple(parameter.shape)
        if tuple(parameter.shape) != shape:
            raise ValueError(f"{name}: expected the normalized shape {shape}, got {tuple(parameter.shape)}")
        _arguments.trailing_shape(name, shape, x)
    return len(shape) if shape else 1


def _check_out(out: Any, x: Any, out_dtype: Any) -> None:
    """Raises what the documentation of `rms_norm` says of `out`."""
    if not _arguments.is_ndarray(out) or not _arguments.is_ndarray(x):
        got = f"{type(out).__qualname__} with a {type(x).__qualname__}"
        raise TypeError(f"out: expected a numpy.ndarray, with x a numpy.ndarray, got a {got}")
    _arguments.out(out, x.shape, out_dtype or x.dtype, x)
    _arguments.apart("out", out)


def _may_be_written_early(out: Any, x: Any, *others: Any) -> bool:
    """Whether rows of `out` may be written before the last ones of the inputs are read."""
    import numpy as np

    is_x = out.ctypes.data == x.ctypes.data and out.strides == x.strides and out.dtype == x.dtype
    inputs = [a for a in (None if is_x else x, *others) if a is not None]
    return bool(out.flags.c_contiguous) and not any(np.may_share_memory(out, a) for a in inputs)


def _flat(a: Any, dims: int) -> Any:
    """The last `dims` dimensions of an array as one."""
    leading = a.shape[: len(a.shape) - dims]
    return a if dims == 1 else a.reshape(*leading, math.prod(a.shape[len(leading) :]))


def _fwd_numpy(x, residual, weight, bias, eps, weight_offset, out_dtype, out=None, with_rstd=False):  # type: ignore[no-untyped-def]
    import numpy as np

    device = _backend.gpu_for_host_arrays()
    bfloat16 = "bfloat16" in (x.dtype.name, (out_dtype or x.dtype).name)  # which NumPy's DLPack does not know
    if device is None or residual is not None or bfloat16 or x.size == 0:
        return reference.rms_norm_numpy(x, residual, weight, bias, eps, weight_offset, out_dtype, out)
    wide = _arguments.accumulator(x.dtype.name)
    weight, bias = (
        None if p is None else _dlpack.host_view(p, p.dtype if p.dtype == x.dtype else wide) for p in (weight, bias)
    )
    y = np.empty(x.shape, out_dtype or x.dtype) if out is None else out
    wanted = np.empty(x.shape[:-1], wide) if with_rstd else None
    _backend.library().rms_norm_fwd_host(y, wanted, _dlpack.host_view(x), weight, bias, eps, weight_offset, device)
    return y, x, wanted


def _fwd_dlpack(x, residual, weight, bias, eps, weight_offset, out_dtype, with_rstd):  # type: ignore[no-untyped-def]
    dtype = _arguments.dtype_name(x.dtype)
    h_dtype = dtype
    if residual is not None:
        h_dtype = _arguments.promoted(dtype, other := _arguments.dtype_name(residual.dtype))
        x = x if h_dtype in (dtype, other) else x.astype(h_dtype)
    views = [None if a is None else _dlpack.view(a) for a in (x, residual, weight, bias)]
    y = _dlpack.empty(x.shape, _arguments.dtype_name(out_dtype or dtype), x)
    h = None if residual is None else _dlpack.empty(x.shape, h_dtype, x)
    wide, no_elements = _arguments.accumulator(h_dtype), x.shape[-1] == 0
    rstd = _dlpack.empty(x.shape[:-1], wide, x) if with_rstd and not no_elements else None
    _backend.library().rms_norm_fwd(y, h, rstd, *views, eps, weight_offset)
    y, h, rstd = (None if result is None else _dlpack.give_back(result, x) for result in (y, h, rstd))
    if with_rstd and no_elements:  # of rows, of whose mean of squares the library knows nothing
        rstd = _dlpack.full(x.shape[:-1], eps**-0.5 if eps > 0 else 0.0, wide, x)
    return y, h, rstd
