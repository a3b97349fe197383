"""Arrays in .npy and .safetensors files, mapped into memory, so that their size does not matter."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# The dtypes of the safetensors format, https://github.com/huggingface/safetensors#format. NumPy holds BF16 as 16 bits.
SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class FileArray:
    """An array of a file; `values` has uint16 for bfloat16."""

    values: np.ndarray
    dtype: str
    name: str  # in a safetensors file


def _storage(dtype: str) -> np.dtype[Any]:
    return np.dtype("<u2" if dtype == "bfloat16" else dtype)


def read(location: str) -> FileArray:
    """The array at PATH.npy, PATH.safetensors (of one tensor), or PATH.safetensors:NAME."""
    path, separator, name = location.rpartition(".safetensors:")
    if separator or location.endswith(".safetensors"):
        return _read_safetensors(Path(path + ".safetensors" if separator else location), name if separator else None)
    try:
        values = np.load(location, mmap_mode="r", allow_pickle=False)
    except ValueError:  # NumPy's own speaks of pickled objects
        values = None
    if not isinstance(values, np.ndarray):
        raise ValueError(f"{location}: expected one array, as numpy.save writes it")
    return FileArray(values, values.dtype.name, "x")


def _read_safetensors(path: Path, name: str | None) -> FileArray:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > path.stat().st_size:
            raise ValueError(f"{path}: expected a safetensors file, its header is too long")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    if name is None and len(header) != 1:
        raise ValueError(f"{path}: has {len(header)} tensors; name one: {path}:{next(iter(header), 'NAME')}")
    name = name or next(iter(header))
    if name not in header:
        raise ValueError(f"{path}: has no tensor {name}, only {', '.join(header)}")
    entry = header[name]
    if entry["dtype"] not in SAFETENSORS:
        raise TypeError(f"{path}:{name}: expected {', '.join(SAFETENSORS)}, got {entry['dtype']}")
    dtype = SAFETENSORS[entry["dtype"]]
    shape = tuple(entry["shape"])
    if 0 in shape:
        return FileArray(np.empty(shape, _storage(dtype)), dtype, name)
    offset = 8 + size + entry["data_offsets"][0]
    return FileArray(np.memmap(path, _storage(dtype), "r", offset, shape), dtype, name)


@contextmanager
def writing(path: Path, shape: tuple[int, ...], dtype: str, name: str) -> Iterator[np.ndarray]:
    """A mapped array that becomes the file `path` when all went well; else nothing stays behind."""
    if path.suffix not in (".npy", ".safetensors"):
        raise ValueError(f"{path}: expected a name that ends in .npy or .safetensors")
    if path.suffix == ".npy" and dtype == "bfloat16":
        raise ValueError(f"{path}: .npy has no bfloat16; write a .safetensors file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}")
    handle, scratch = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    try:
        values = _create(Path(scratch), path.suffix, shape, dtype, name)
        yield values
        if isinstance(values, np.memmap):
            values.flush()
        mask = os.umask(0)
        os.umask(mask)
        Path(scratch).chmod(0o666 & ~mask)  # mkstemp's file is for its owner alone
        Path(scratch).replace(path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


def _create(path: Path, suffix: str, shape: tuple[int, ...], dtype: str, name: str) -> np.ndarray:
    storage = _storage(dtype)
    size = int(np.prod(shape, dtype=object)) * storage.itemsize
    if suffix == ".npy":
        if size == 0:
            with path.open("wb") as file:
                np.save(file, np.empty(shape, storage))
            return np.empty(shape, storage)
        return np.lib.format.open_memmap(path, "w+", storage, shape)
    letters = next(letters for letters, known in SAFETENSORS.items() if known == dtype)
    header = json.dumps({name: {"dtype": letters, "shape": shape, "data_offsets": [0, size]}}).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    return np.memmap(path, storage, "r+", 8 + len(header), shape) if size else np.empty(shape, storage)
