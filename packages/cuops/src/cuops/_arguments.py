"""Checks of arguments, and dtypes by name, as operators share them. Every error names the argument and what it got."""

from __future__ import annotations

import importlib
import math
import numbers
import sys
from collections.abc import Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any, TypeVar

from . import _dlpack
from ._torch import failure, torch

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    Array = TypeVar("Array", np.ndarray, Tensor)  # of all arguments and results of a call

DTYPES = ("float64", "float32", "float16", "bfloat16")  # as csrc/dtype.h numbers them
SHORT = {"f8": "float64", "f4": "float32", "f2": "float16", "double": "float64", "single": "float32", "half": "float16"}
TORCH_DTYPES = tuple(getattr(torch, name) for name in DTYPES) if torch else ()
INTEGERS = (int, numbers.Integral, *((torch.SymInt,) if torch else ()))  # exported programs have sizes without a number


def is_tensor(value: Any) -> bool:
    """Whether `value` is a torch tensor, torch being optional."""
    return torch is not None and isinstance(value, torch.Tensor)


def is_ndarray(value: Any) -> bool:
    """Whether `value` is a NumPy array. NumPy is not imported for the question: that takes longer than all of cuops."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def dtype_name(dtype: Any) -> str:
    """float32 for torch.float32, numpy.float32, "f4" and the like; float64 for Python's float, as both have it."""
    if torch is not None and isinstance(dtype, torch.dtype):
        name = str(dtype).removeprefix("torch.")  # a dict with dtypes as keys stops nested_compile_region
        return name if name in DTYPES else str(dtype)
    if dtype is float:
        return "float64"
    name = dtype.__name__ if isinstance(dtype, type) else str(dtype)
    return SHORT.get(name, name)


def numpy_dtype(name: str, dtype: Any) -> Any:
    """What NumPy calls a dtype of any library."""
    import numpy as np

    if torch is not None and isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype_name(dtype) == "bfloat16":
        try:
            importlib.import_module("ml_dtypes")  # from which on NumPy knows the name
        except ImportError as error:
            raise TypeError(f"{name}: NumPy has bfloat16 from ml_dtypes: pip install ml_dtypes") from error
    try:
        return np.dtype(dtype)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a dtype of NumPy, got {dtype!r}") from None


def accumulator(dtype_name: str) -> str:
    """The dtype of the sums: float32, and float64 for float64."""
    return "float64" if dtype_name == "float64" else "float32"


def sums_dtype(dtype: Any) -> Any:
    """`accumulator` for a dtype of PyTorch's."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def promoted(*dtype_names: str) -> str:
    """The dtype of a sum, as PyTorch has it."""
    return dtype_names[0] if len({*dtype_names}) == 1 else accumulator(min(dtype_names, key=DTYPES.index))


def plain(name: str, value: Any) -> None:
    """A NumPy array is no matrix, has no mask, and no arithmetic of its own, as that of units."""
    numpy, ma = sys.modules["numpy"], sys.modules.get("numpy.ma")
    if type(value) is numpy.ndarray:
        return
    is_masked = ma is not None and isinstance(value, ma.MaskedArray)
    has_own = type(value).__array_ufunc__ is not numpy.ndarray.__array_ufunc__
    if is_masked or has_own or isinstance(value, numpy.matrix):
        raise TypeError(f"{name}: expected a plain numpy.ndarray, got a {type(value).__qualname__}")


def no_refused_tensor(name: str, value: Any) -> None:
    """Says why PyTorch does not serve where `value` is a tensor of it, which would pass for another library's array."""
    if failure and any((c.__module__, c.__qualname__) == ("torch", "Tensor") for c in type(value).__mro__):
        raise TypeError(f"{name}: got a torch.Tensor, and PyTorch does not serve: {failure}")


def _described(value: Any, like: Any) -> str:
    """The kind of what is no array, and how it becomes one like `like`."""
    how = ""
    if isinstance(value, (list, tuple)) or hasattr(type(value), "__array__"):
        if is_tensor(like):
            how = "; torch.as_tensor makes one"
        elif like is None or is_ndarray(like):
            how = "; numpy.asarray makes one on the CPU"
    return type(value).__qualname__ + how


def array(name: str, value: Any, like: Any = None, like_name: str = "x") -> None:
    """`value` is an array that kernels take, of the kind and on the device of `like`."""
    if is_tensor(value):
        # In a backward, torch.compile may not ask for a layout; it takes no other one.
        is_traced = torch.compiler.is_compiling()
        if value.is_nested or (not is_traced and value.layout is not torch.strided):
            got = "a nested one" if value.is_nested else f"layout {value.layout}"
            raise TypeError(f"{name}: expected a dense tensor, got {got}")
        if isinstance(value, torch.nn.parameter.UninitializedTensorMixin):
            raise ValueError(f"{name}: expected a tensor with values, got a {type(value).__qualname__}")
    elif is_ndarray(value):
        plain(name, value)
    else:
        no_refused_tensor(name, value)
        try:
            is_on_cuda = not isinstance(value, type) and hasattr(value, "__dlpack_device__") and _dlpack.on_cuda(value)
        except BufferError as error:  # as JAX says it of an array that several devices share
            raise ValueError(f"{name}: {error}") from error
        if not is_on_cuda:
            wanted = "a torch.Tensor, a numpy.ndarray or a CUDA array with __dlpack__"
            raise TypeError(f"{name}: expected {wanted}, got {_described(value, like)}")
    if is_ndarray(value) and not value.dtype.isnative:
        raise TypeError(f"{name}: expected this machine's byte order, got {value.dtype.str}")
    if dtype_name(value.dtype) not in DTYPES:
        raise TypeError(f"{name}: expected float64, float32, float16 or bfloat16, got {value.dtype}")
    if like is None:
        return
    if is_tensor(value) != is_tensor(like) or is_ndarray(value) != is_ndarray(like):
        raise TypeError(f"{name}: expected {type(like).__qualname__} like {like_name}, got {type(value).__qualname__}")
    if is_tensor(value) and value.device != like.device:
        raise ValueError(f"{name}: expected a tensor on {like_name}'s device, {like.device}, got one on {value.device}")


def out(given: Any, shape: tuple[int, ...], dtype: Any, like: Any, like_name: str = "x") -> None:
    """What the result is written into has its shape and dtype."""
    array("out", given, like, like_name)
    wanted, got = dtype_name(dtype), dtype_name(given.dtype)
    if wanted != got:
        raise TypeError(f"out: expected dtype {wanted}, got {got}")
    if tuple(given.shape) != tuple(shape):
        raise ValueError(f"out: expected shape {tuple(shape)}, got {tuple(given.shape)}")
    if is_ndarray(given) and not given.flags.writeable:
        raise ValueError("out: expected a writable array, got a read-only one")


def apart(name: str, value: Any) -> None:
    """No two elements of what is written into share memory, told by each stride stepping over all that lies within."""
    strides, span = (value.stride(), 1) if is_tensor(value) else (value.strides, value.itemsize)
    steps = sorted((abs(stride), size) for stride, size in zip(strides, value.shape, strict=True) if size > 1)
    for stride, size in steps if 0 not in value.shape else []:
        if stride < span:
            raise ValueError(f"{name}: expected elements with memory of their own, got strides {tuple(strides)}")
        span += stride * (size - 1)


def writable_here(name: str, tensor: Any) -> None:
    """What is written into is no tensor that inference mode made, unless this is inference mode."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{name}: expected no inference tensor outside of inference mode")


def are_apart(written: Any, *read: Any) -> bool:
    """Whether no tensor (or None) that is read lies within one that is contiguous, and is written meanwhile."""
    begin, end = written.data_ptr(), written.data_ptr() + written.nbytes
    for a in read:
        if a is not None and a.numel() > 0:
            extent = 1 + sum((size - 1) * step for size, step in zip(a.shape, a.stride(), strict=True))
            if a.data_ptr() < end and begin < a.data_ptr() + extent * a.element_size():
                return False
    return True


def computable(name: str, value: Any, devices: tuple[str, ...] = ("cpu", "cuda")) -> None:
    """`value` is an array that kernels take, and on a device that has them: torch's meta device has not."""
    array(name, value)
    if is_tensor(value) and value.device.type not in devices:
        raise ValueError(f"{name}: expected a tensor on CUDA or the CPU, got one on {value.device}")


def integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """`value` is an integer within the limits."""
    if isinstance(value, bool) or not isinstance(value, INTEGERS):
        raise TypeError(f"{name}: expected an integer, got {type(value).__qualname__}")
    value = int(value) if isinstance(value, numbers.Integral) else value
    if value < least or (most is not None and value > most):
        within = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name}: expected an integer {within}, got {short(value)}")
    return value


def flag(name: str, value: Any) -> bool:
    """`value` is True or False, here as Python has them."""
    if isinstance(value, bool):
        return value
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.bool_):
        raise TypeError(f"{name}: expected True or False, got {type(value).__qualname__}")
    return bool(value)


def short(number: Any) -> str:
    """A real number for a message, for which it may be too long."""
    if isinstance(number, int) and abs(number) >= 1 << 128:
        power = f"2^{number.bit_length() - 1}"
        return f"{power} or more" if number > 0 else f"-{power} or less"
    try:
        return str(number)
    except ValueError:  # a fraction of integers that Python does not print
        return f"a {type(number).__qualname__}"


def broadcast(shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that arrays of these shapes, by name, broadcast to."""
    if len(shapes) == 1:  # of sizes that may be unknown
        return tuple(*shapes.values())
    result: tuple[int, ...] = ()
    for name, shape in shapes.items():
        ndim = max(len(shape), len(result))
        padded = [(1,) * (ndim - len(s)) + tuple(s) for s in (result, shape)]
        if any(a != b and 1 not in (a, b) for a, b in zip(*padded, strict=True)):
            raise ValueError(f"{name}: expected a shape that broadcasts with {result}, got {tuple(shape)}")
        result = tuple(b if a == 1 else a for a, b in zip(*padded, strict=True))
    return result


def real(name: str, value: Any) -> float:
    """`value` is a real number, here as a float: an integer beyond all of them is infinite."""
    compiles = torch is not None and torch.compiler.is_compiling()
    if compiles and is_ndarray(value) and value.ndim == 0 and value.itemsize == 8:
        value = float(value)  # a numpy.float64, which Dynamo takes for an array; of a numpy.float32 it knows no value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__qualname__}")
    try:
        return float(value)
    except OverflowError:
        return -math.inf if value < 0.0 else math.inf


def number(name: str, value: Any, least: float = -math.inf) -> None:
    """`value` is a finite real number, and at least `least`."""
    wide = real(name, value)
    if not (-math.inf < wide < math.inf and wide >= least):  # NaN is neither
        floor = "" if least == -math.inf else f" of at least {least}"
        raise ValueError(f"{name}: expected a finite number{floor}, got {short(value)}")


def sizes(name: str, value: Any) -> tuple[int, ...]:
    """An integer, or those of a sequence."""
    many = is_ordered(value) and not is_tensor(value) and getattr(value, "ndim", 1) > 0
    given = tuple(value) if many else (value,)
    if not are_integers(given):
        raise TypeError(f"{name}: expected an integer or a sequence of integers, got {value!r}")
    # Symbols stay; NumPy's numbers do not compile.
    return tuple(int(n) if isinstance(n, numbers.Integral) else n for n in given)


def is_ordered(value: Any) -> bool:
    """Whether it has elements in an order that it was given, as sets and the keys of dicts have not."""
    if isinstance(value, (tuple, list)):  # before PyTorch 2.13, what follows does not compile of a torch.Size
        return True
    is_dict = isinstance(value, Mapping) or hasattr(type(value), "popitem")  # PyTorch's is no Mapping
    return isinstance(value, Iterable) and not isinstance(value, Set) and not is_dict


def are_integers(values: Iterable[Any]) -> bool:
    """Whether all of them are."""
    return all(isinstance(value, INTEGERS) and not isinstance(value, bool) for value in values)


def trailing_shape(name: str, shape: tuple[int, ...], x: Any) -> None:
    """`shape` is that of the last dimensions of x."""
    if not shape:
        raise ValueError(f"{name}: expected at least 1 dimension, got 0")
    if len(shape) > len(x.shape) or tuple(x.shape)[len(x.shape) - len(shape) :] != shape:
        last = tuple(x.shape)[-len(shape) :]
        raise ValueError(f"{name}: expected the last of x's dimensions, {last}, got {shape}")
