"""What `cuops run` computes with: arrays of files as operators take them, where, and what it says of that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _arguments, _backend, _driver
from .._torch import cuda_tensors, torch

if TYPE_CHECKING:
    import numpy as np

    from .files import FileArray

CHUNK_BYTES = 256 << 20  # of files, at a time


def read_rows(location: str) -> FileArray:
    """An array that has rows, and of a dtype that can be computed on here."""
    from .files import read

    x = read(location)
    if x.values.ndim == 0:
        raise ValueError(f"{location}: expected at least 1 dimension, got 0")
    if x.dtype not in _arguments.DTYPES:
        raise TypeError(f"{location}: expected float64, float32, float16 or bfloat16, got {x.dtype}")
    if not x.values.dtype.isnative:
        raise TypeError(f"{location}: expected this machine's byte order, got {x.values.dtype.str}")
    if x.dtype == "bfloat16" and torch is None:
        raise ValueError(f"{location}: bfloat16 needs PyTorch: pip install torch")
    return x


def place(dtype: str) -> tuple[str, str]:
    """cuda or cpu, and in words which: for bfloat16 of PyTorch's tensors, for all else of NumPy's arrays."""
    gpu = _backend.gpu_for_host_arrays()
    if gpu is None:
        return "cpu", "the CPU"
    if dtype == "bfloat16" and not cuda_tensors():
        return "cpu", "the CPU (PyTorch reaches no GPU)"
    return "cuda", f"{_driver.gpus()[gpu].name} (cuops-{_backend.choose().name})"


def parameter(given: FileArray, x: FileArray) -> Any:
    """What operators take beside x: a NumPy array, with bfloat16 as float32, or with x of bfloat16 a torch tensor."""
    if given.dtype != "bfloat16":
        return given.values
    if x.dtype == "bfloat16":
        return torch.from_numpy(given.values.copy()).view(torch.bfloat16)
    wide = given.values.astype("uint32")
    wide <<= 16
    return wide.view("float32")


def tensors(value: Any, device: str) -> Any:
    """Arrays, also those in a list, as tensors on the device; numbers as they are."""
    if isinstance(value, list):
        return [tensors(each, device) for each in value]
    if not hasattr(value, "shape"):
        return value
    return (value if isinstance(value, torch.Tensor) else torch.from_numpy(value.copy())).to(device)


def stored(y: Any, dtype: str) -> np.ndarray:
    """An operator's result as files have it: bfloat16 as 16 bits."""
    return y.cpu().view(torch.uint16).numpy() if dtype == "bfloat16" else y


def report(operator: str, shape: Sequence[int], dtype: str, where: str, seconds: float, moved: int, out: Path) -> None:
    """Prints what ran where, and how many bytes of files that were a second."""
    time = f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
    speed = f"{time}, {moved / seconds / 1e6:.3g} MB/s of files"
    print(f"{operator} of {'x'.join(map(str, shape))} {dtype} on {where}: {speed}, wrote {out}")
