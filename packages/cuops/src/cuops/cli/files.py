"""Arrays in .npy and .safetensors files, mapped into memory, so that their size does not matter."""

from __future__ import annotations

import difflib
import errno
import itertools
import json
import math
import os
import tempfile
import tokenize
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# The dtypes of the safetensors format, https://github.com/huggingface/safetensors#format. NumPy holds BF16 as 16 bits.
SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
NPY = b"\x93NUMPY"  # what such files begin with
MOST_NAMED, MOST_COMPARED = 8, 4096  # tensors, in a message; with a name that is none's


@dataclass(frozen=True)
class FileArray:
    """An array of a file; `values` has uint16 for bfloat16."""

    values: np.ndarray
    dtype: str
    name: str  # in a safetensors file


def _storage(dtype: str) -> np.dtype[Any]:
    return np.dtype("<u2" if dtype == "bfloat16" else dtype)


def _parts(location: str) -> tuple[Path, str | None]:
    """The file of a location, and the name in it."""
    path, separator, name = location.rpartition(".safetensors:")
    return (Path(f"{path}.safetensors"), name) if separator else (Path(location), None)


def read(location: str) -> FileArray:
    """The array at PATH.npy, PATH.safetensors (of one tensor), or PATH.safetensors:NAME."""
    path, name = _parts(location)
    if path.is_fifo():
        raise ValueError(f"{location}: expected a file that can be read from anywhere, got a pipe")
    if path.suffix == ".safetensors":
        return _read_safetensors(path, name)
    try:
        values = np.lib.format.open_memmap(location, mode="r")
    except (ValueError, TypeError, OverflowError, SyntaxError, tokenize.TokenError) as error:
        with path.open("rb") as file:
            is_npy = file.read(len(NPY)) == NPY
        what = "; this .npy is cut short, damaged, or of Python's objects" if is_npy else ""
        raise ValueError(f"{location}: expected one array, as numpy.save writes it{what}") from error
    if values.dtype == np.dtype("V2"):
        raise TypeError(f"{location}: .npy has no bfloat16, if these 16 bits are such; take a .safetensors file")
    return FileArray(values, values.dtype.name, "x")


def _some(names: Collection[str]) -> str:
    """The first of these names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(map(repr, itertools.islice(names, MOST_NAMED))) + more


def _read_safetensors(path: Path, name: str | None) -> FileArray:
    header, start = _safetensors_header(path)
    if name is None and len(header) == 1:
        name = next(iter(header))
    if name is None:
        raise ValueError(f"{path}: has {len(header)} tensors; name one as {path}:NAME, of {_some(header)}")
    if name not in header:
        near = difflib.get_close_matches(name, itertools.islice(header, MOST_COMPARED), 5)
        raise ValueError(f"{path}: has no tensor {name!r}, but {_some(near) if near else _some(header)}")
    entry = header[name]
    try:
        letters, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not isinstance(letters, str) or not all(type(size) is int and size >= 0 for size in (*shape, begin, end)):
            raise ValueError("a size is negative, or none")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}:{name}: expected dtype, shape and data_offsets in its header, got {entry}") from error
    if letters not in SAFETENSORS:
        raise TypeError(f"{path}:{name}: expected {', '.join(SAFETENSORS)}, got {letters}")
    dtype = SAFETENSORS[letters]
    storage = _storage(dtype)
    if end - begin != math.prod(shape) * storage.itemsize or start + end > path.stat().st_size:
        raise ValueError(f"{path}:{name}: its data, bytes {begin} to {end}, are not those of {letters} {list(shape)}")
    try:
        values = np.empty(shape, storage) if 0 in shape else np.memmap(path, storage, "r", start + begin, shape)
    except ValueError as error:  # more dimensions, or larger ones, than NumPy has
        raise ValueError(f"{path}:{name}: {error}") from error
    return FileArray(values, dtype, name)


def _safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """The entries of the file's tensors, and where its data start."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        text = file.read(size) if 0 < size <= path.stat().st_size - 8 else b""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path}: expected a safetensors file") from None
    if not header:
        raise ValueError(f"{path}: has no tensors")
    return header, 8 + size


def _resolved(path: Path) -> Path:
    """What links lead to, where they lead anywhere."""
    return Path(os.path.realpath(path))


def spare(output: Path, others: Iterable[str]) -> None:
    """Raises where `output` would take the place of an input beside x, or of a file with several tensors."""
    if _resolved(output) in [_resolved(_parts(location)[0]) for location in others]:
        raise ValueError(f"{output}: is read here, too; name another file")
    if output.suffix == ".safetensors" and output.is_file() and (count := _tensors_in(output)) > 1:
        raise ValueError(f"{output}: holds {count} tensors, of which one would be left; name another file")


def _tensors_in(path: Path) -> int:
    try:
        return len(_safetensors_header(path)[0])
    except ValueError:  # whatever it is, it has none
        return 0


@contextmanager
def writing(path: Path, shape: tuple[int, ...], dtype: str, name: str) -> Iterator[np.ndarray]:
    """A mapped array that becomes the file `path` when all went well; else nothing stays behind."""
    if path.suffix not in (".npy", ".safetensors"):
        raise ValueError(f"{path}: expected a name that ends in .npy or .safetensors")
    if path.suffix == ".npy" and dtype == "bfloat16":
        raise ValueError(f"{path}: .npy has no bfloat16; write a .safetensors file")
    with replacing(path) as scratch:
        try:
            values = _create(scratch, path.suffix, shape, dtype, name)
            _reserve(scratch)
        except OSError as error:
            raise OSError(f"{path}: no file of {dtype} {list(shape)} there: {error.strerror}") from error
        yield values
        if isinstance(values, np.memmap):
            values.flush()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file in `path`'s folder that takes its place when all went well; else nothing stays behind."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: expected the name of a file")
    path = _resolved(path)  # what a link names, rather than the link
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(f"{path}: is write-protected")
    try:
        handle, name = tempfile.mkstemp(prefix=".cuops.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise OSError(f"{path}: no file can be made there: {error.strerror}") from error
    os.close(handle)
    scratch = Path(name)
    try:
        yield scratch
        mask = os.umask(0)
        os.umask(mask)
        scratch.chmod(path.stat().st_mode if path.exists() else 0o666 & ~mask)  # mkstemp's file is for its owner alone
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
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


def _reserve(path: Path) -> None:
    """Has the disk hold all of the file: writing to mapped memory that it cannot hold would end the process."""
    with path.open("r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:  # a file system that cannot tell
                raise
