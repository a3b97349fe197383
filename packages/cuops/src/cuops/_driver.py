"""The NVIDIA driver as far as Python needs it: which version there is, and which GPUs."""

from __future__ import annotations

import ctypes
import functools
import re
from dataclasses import dataclass
from pathlib import Path

from .errors import CudaError, DriverNotFoundError

NOT_INITIALIZED = 3  # a CUresult
COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use."""

    index: int
    name: str
    capability: tuple[int, int]
    memory: int


def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverNotFoundError(f"there is no NVIDIA driver: {error}") from None


def _call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    try:
        function = getattr(library, name)
    except AttributeError:
        raise DriverNotFoundError(f"libcuda.so.1 has no symbol {name}, and so is no driver's") from None
    result = function(*arguments)
    if result:
        text = ctypes.c_char_p()
        library.cuGetErrorName(result, ctypes.byref(text))
        what = (text.value or f"error {result}".encode()).decode()
        error = DriverNotFoundError if what in ("CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_STUB_LIBRARY") else CudaError
        if name == "cuInit" and result == NOT_INITIALIZED:
            what += (
                ", as it does in a process that was forked after CUDA was initialised; "
                'start workers with multiprocessing\'s "spawn" method'
            )
        raise error(f"{name} failed with {what}")


@functools.cache
def cuda_version() -> tuple[int, int]:
    """The newest CUDA version that the driver knows, as (major, minor)."""
    version = ctypes.c_int()
    _call(_library(), "cuDriverGetVersion", ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10


def release() -> str | None:
    """The driver's own version, 580.65.06 say, where the kernel tells it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found and found.group()


def gpus() -> list[Gpu]:
    """The GPUs that the driver shows this process, CUDA_VISIBLE_DEVICES respected."""
    library = _library()
    count = ctypes.c_int()
    _call(library, "cuInit", 0)
    _call(library, "cuDeviceGetCount", ctypes.byref(count))
    return [_gpu(library, index) for index in range(count.value)]


def _gpu(library: ctypes.CDLL, index: int) -> Gpu:
    device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call(library, "cuDeviceGet", ctypes.byref(device), index)
    _call(library, "cuDeviceGetName", name, 256, device)
    _call(library, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    _call(library, "cuDeviceGetAttribute", ctypes.byref(major), COMPUTE_CAPABILITY_MAJOR, device)
    _call(library, "cuDeviceGetAttribute", ctypes.byref(minor), COMPUTE_CAPABILITY_MINOR, device)
    return Gpu(index, name.value.decode(), (major.value, minor.value), memory.value)
