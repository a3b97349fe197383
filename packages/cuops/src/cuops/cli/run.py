"""Run an operator on files: .npy and .safetensors, of any size.

Files are mapped into memory and go through the GPU, or the CPU where there is none, in chunks of rows. OUT appears when
all is done. A tensor of a .safetensors file with several is named as FILE.safetensors:NAME.
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cuops

from .. import _backend, _driver, errors
from .._torch import torch

if TYPE_CHECKING:
    import numpy as np

    from .files import FileArray

CHUNK = 256 << 20  # bytes of a chunk of rows


@dataclass(frozen=True)
class RowOperator:
    """An operator that treats each row of x alike: its parameters are whole files, its numbers are options."""

    function: Callable[..., Any]
    parameters: tuple[str, ...]

    @property
    def numbers(self) -> dict[str, float]:
        """The names and defaults of the options, from the function's signature."""
        signature = inspect.signature(self.function)
        return {name: p.default for name, p in signature.parameters.items() if isinstance(p.default, float)}


OPERATORS = {"rms_norm": RowOperator(cuops.rms_norm, parameters=("weight", "bias"))}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `cuops run`, a subcommand an operator."""
    commands = parser.add_subparsers(dest="operator", required=True, metavar="OPERATOR")
    for name, operator in OPERATORS.items():
        command = commands.add_parser(name, help=(operator.function.__doc__ or "").partition("\n")[0])
        command.add_argument("input", metavar="IN")
        command.add_argument("output", metavar="OUT", type=Path)
        for parameter in operator.parameters:
            command.add_argument(f"--{parameter}", metavar="FILE")
        for number, default in operator.numbers.items():
            command.add_argument(
                f"--{number.replace('_', '-')}", dest=number, type=float, default=default, help=f"by default {default}"
            )


def main(options: argparse.Namespace) -> int:
    """Runs the operator; says what ran where."""
    from .files import read, writing

    operator = OPERATORS[options.operator]
    x = read(options.input)
    if x.values.ndim == 0:
        raise ValueError(f"{options.input}: expected at least 1 dimension, got 0")
    given = {name: getattr(options, name) for name in operator.parameters}
    keywords = {name: _as_array(read(location), location) for name, location in given.items() if location}
    keywords |= {name: getattr(options, name) for name in operator.numbers}
    device, where = _device()
    start = time.perf_counter()
    with writing(options.output, x.values.shape, x.dtype, x.name) as out:
        _run(operator.function, x, out, keywords, device, options.input)
    seconds = time.perf_counter() - start
    shape = "x".join(str(size) for size in x.values.shape)
    speed = f"{seconds:.2f} s, {2 * x.values.nbytes / seconds / 1e9:.2f} GB/s of files"
    print(f"{options.operator} of {shape} {x.dtype} on {where}: {speed}, wrote {options.output}")
    return 0


def _device() -> tuple[str, str]:
    """cuda or cpu, and in words which."""
    try:
        gpus = _driver.gpus()
        if gpus:
            backend = _backend.choose()
            _backend.library()
            return "cuda", f"{gpus[0].name} (cuops-{backend.name})"
        why = "the driver shows no GPU"
    except errors.DriverNotFoundError:
        why = "no NVIDIA driver"
    except errors.BackendNotFoundError as error:
        why = str(error).replace("\n", "; ").lower()
    return "cpu", f"the CPU ({why})"


def _as_array(given: FileArray, location: str) -> Any:
    """What operators take: a NumPy array, or a torch tensor for bfloat16."""
    if given.dtype != "bfloat16":
        return given.values
    if torch is None:
        raise ValueError(f"{location}: bfloat16 needs PyTorch: pip install torch")
    return torch.from_numpy(given.values.copy()).view(torch.bfloat16)


def _run(
    function: Callable[..., Any], x: FileArray, out: np.ndarray, keywords: dict[str, Any], device: str, location: str
) -> None:
    from tqdm import tqdm

    n = x.values.shape[-1]
    if x.values.size == 0:
        function(_as_array(x, location), **keywords)  # arguments are checked on no rows too
        return
    rows, out_rows = x.values.reshape(-1, n), out.reshape(-1, n)
    as_tensors = x.dtype == "bfloat16"
    if as_tensors:
        keywords = {name: _tensor(value).to(device) if _is_array(value) else value for name, value in keywords.items()}
    step = max(1, CHUNK // (n * x.values.itemsize))
    with tqdm(total=x.values.nbytes, unit="B", unit_scale=True, delay=1, leave=False) as bar:
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            if as_tensors:
                chunk = torch.from_numpy(part.copy()).view(torch.bfloat16).to(device)
                out_rows[start : start + step] = function(chunk, **keywords).cpu().view(torch.uint16).numpy()
            else:
                out_rows[start : start + step] = function(part, **keywords)
            bar.update(part.nbytes)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape")


def _tensor(value: Any) -> Any:
    return value if isinstance(value, torch.Tensor) else torch.from_numpy(value.copy())
