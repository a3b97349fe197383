"""NumPy arrays in page-locked memory, which the GPU reads and writes without a copy in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _arguments, _backend, _dlpack, _driver, errors


def pinned_empty(shape: int | Sequence[int], dtype: Any = float) -> Any:
    """A NumPy array in page-locked memory, not initialised, as `numpy.empty` makes one in ordinary memory.

    The operators copy such arrays, their inputs and what is given as `out`, to and from the GPU at the full speed of
    PCIe. Locking takes longer than a copy, and takes memory from the rest of the machine: make such an array once and
    use it often. The memory is freed with the last array that views it.

    Args:
        shape: an int or a sequence of ints, each at least 0.
        dtype: any NumPy dtype but objects, or PyTorch's name for one; float64 by default.

    Returns:
        A NumPy array of this shape and dtype, C-contiguous.

    Raises:
        TypeError: shape is not an integer or a sequence of them, or dtype is none that NumPy has.
        ValueError: shape has a size that NumPy's arrays cannot have, or dtype is of objects.
        cuops.errors.DriverNotFoundError: there is no GPU, and so nothing that could lock memory for one.
        cuops.errors.CuopsError: the installation or the driver fails; the message has the command that fixes it.
    """
    import numpy as np

    dtype = _arguments.numpy_dtype("dtype", dtype)
    if dtype.hasobject:
        raise ValueError(f"dtype: expected numbers, got {dtype}")
    sizes = _arguments.sizes("shape", shape)
    try:
        size = np.broadcast_to(np.empty((), f"V{dtype.itemsize}"), sizes).nbytes
    except ValueError as error:  # a negative size, or one beyond NumPy's
        raise ValueError(f"shape: expected sizes of an array, got {shape}: {error}") from None
    if not _driver.gpus():
        raise errors.DriverNotFoundError("page-locked memory needs a GPU, and the driver shows none")
    library = _backend.library()
    if size == 0:
        return np.empty(sizes, dtype)
    memory = library.pinned_empty(size)
    return _dlpack.array_at(memory.data_ptr(), sizes, dtype, memory)
