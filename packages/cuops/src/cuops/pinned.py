"""NumPy arrays in page-locked memory, which the GPU reads and writes without a copy in between."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

from . import _backend, _driver, errors


def pinned_empty(shape: int | Sequence[int], dtype: Any = float) -> Any:
    """A NumPy array in page-locked memory, not initialised, as `numpy.empty` makes one in ordinary memory.

    `cuops.rms_norm` and `cuops.rms_norm_` copy such arrays to and from the GPU at the full speed of PCIe. Locking takes
    longer than a copy, and takes memory from the rest of the machine: make such an array once and use it often. The
    memory is freed with the last array that views it.

    Args:
        shape: an int or a sequence of ints, each at least 0.
        dtype: any NumPy dtype but objects; float64 by default.

    Raises:
        ValueError: shape has a negative size, or dtype is of objects.
        cuops.errors.DriverNotFoundError: there is no GPU, and so nothing that could lock memory for one.
        cuops.errors.CuopsError: the installation or the driver fails; the message has the command that mends it.
    """
    import numpy as np

    dtype = np.dtype(dtype)
    if dtype.hasobject:
        raise ValueError(f"dtype: expected numbers, got {dtype}")
    sizes: tuple[Any, ...] = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    if not all(isinstance(size, (int, np.integer)) and size >= 0 for size in sizes):
        raise ValueError(f"shape: expected integers of at least 0, got {shape}")
    size = math.prod(sizes) * dtype.itemsize
    if not _driver.gpus():
        raise errors.DriverNotFoundError("page-locked memory needs a GPU, and the driver shows none")
    library = _backend.library()
    if size == 0:
        return np.empty(sizes, dtype)
    memory = library.pinned_empty(size)
    buffer = (ctypes.c_char * size).from_address(memory.data_ptr())
    buffer.memory = memory  # the array keeps the buffer, and so the memory, alive
    return np.ndarray(sizes, dtype, buffer)
