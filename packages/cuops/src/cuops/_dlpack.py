"""Arrays through DLPack: NumPy's in; CUDA arrays of any library (CuPy, JAX) in as they are, and results out in it."""

from __future__ import annotations

import ctypes
import importlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from . import _backend

CUDA = 2  # kDLCUDA


def host_view(a: Any, dtype: Any = None) -> Any:
    """A NumPy array, contiguous and of `dtype`; of a read-only one a writable view, as tvm_ffi refuses the array."""
    import numpy as np

    with np.errstate(all="ignore"):
        whole = np.ascontiguousarray(a, dtype)
    if whole.flags.writeable:
        return whole
    return array_at(whole.ctypes.data, whole.shape, whole.dtype, whole)


def array_at(address: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> Any:
    """A NumPy array on memory that lives as long as its owner, which the array keeps alive."""
    import numpy as np

    memory: Any = (ctypes.c_char * int(math.prod(shape) * dtype.itemsize)).from_address(address)
    memory.owner = owner
    return np.ndarray(shape, dtype, memory)


def on_cuda(value: Any) -> bool:
    """Whether DLPack says that `value` is in the memory of a CUDA GPU."""
    return bool(value.__dlpack_device__()[0] == CUDA)


def on_device_of(like: Any) -> AbstractContextManager[Any]:
    """New arrays of the library of `like` are on its GPU in this context."""
    device = getattr(like, "device", None)
    if namespace(like).__name__ == "jax.numpy":
        return importlib.import_module("jax").default_device(device)  # type: ignore[no-any-return]
    return device if hasattr(device, "__enter__") else nullcontext()  # type: ignore[return-value]


def view(value: Any) -> Any:
    """The array as the library sees it; a copy where its last dimension has gaps. The default stream waits for it."""
    library = _backend.library()
    import tvm_ffi

    with on_device_of(value):
        seen = tvm_ffi.from_dlpack(value)
        return seen if library.rows_are_readable(seen, 2) else tvm_ffi.from_dlpack(value.copy())


def empty(shape: Sequence[int], dtype: str, like: Any) -> Any:
    """Memory on the GPU of `like` that the result's consumer will free."""
    return _backend.library().empty(list(shape), dtype, like.__dlpack_device__()[1])


def full(shape: Sequence[int], value: float, dtype: str, like: Any) -> Any:
    """An array of one value in the library of `like`."""
    with on_device_of(like):
        return namespace(like).full(tuple(shape), value, dtype)


def namespace(like: Any) -> Any:
    """The functions of the library that `like` is of: cupy, jax.numpy."""
    module = type(like).__module__.partition(".")[0]
    return importlib.import_module({"jaxlib": "jax.numpy", "jax": "jax.numpy"}.get(module, module))


def give_back(result: Any, like: Any) -> Any:
    """A result in the library of `like`, once the GPU has written it."""
    _backend.library().synchronize(like.__dlpack_device__()[1])
    return namespace(like).from_dlpack(result)
