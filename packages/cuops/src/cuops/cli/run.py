"""Run an operator on files: .npy and .safetensors, of any size.

Files are mapped into memory and go through the GPU, or the CPU where there is none, in chunks of rows. OUT appears when
all is done, and takes the place of a file of that name, also of IN. It may not be another file that is read, nor a
.safetensors file of several tensors. A tensor of one with several is named as FILE.safetensors:NAME.
"""

from __future__ import annotations

import argparse
import inspect
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import cuops

from .. import _arguments
from .._bench import SHORT_NAMES
from .._torch import torch
from . import operands, run_sample_normal

if TYPE_CHECKING:
    import numpy as np

    from .files import FileArray

NONE = inspect.Parameter.empty  # what a parameter without a default has


@dataclass(frozen=True)
class RowOperator:
    """An operator that treats each row of x alike: its parameters are whole files, its numbers are options.

    Attributes:
        function: the public function.
        parameters: arguments that are one array, each a file.
        lists: arguments that are a list of arrays, by the option that is given once for each file.
        numbers: arguments that are a number, and what the help says of them.
        numbers_of: of these, the ones that do nothing without a parameter, and which.
        one_dtype: whether all of them have that of x.
    """

    function: Callable[..., Any]
    parameters: tuple[str, ...] = ()
    lists: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    numbers_of: Mapping[str, str] = field(default_factory=dict)
    one_dtype: bool = False

    def default(self, parameter: str) -> Any:
        """The function's default for an argument; NONE where it has none."""
        return inspect.signature(self.function).parameters[parameter].default


OPERATORS: dict[str, RowOperator | ModuleType] = {
    "rms_norm": RowOperator(
        cuops.rms_norm,
        parameters=("weight", "bias"),
        numbers={
            "eps": "added to the mean of squares",
            "weight_offset": "added to the weight; a negative number as --weight-offset=-1e-3",
        },
        numbers_of={"weight_offset": "weight"},
    ),
    "kron_linear": RowOperator(cuops.kron_linear, parameters=("bias",), lists={"factor": "factors"}, one_dtype=True),
    "sample_normal": run_sample_normal,
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `cuops run`, a subcommand an operator."""
    commands = parser.add_subparsers(dest="operator", required=True, metavar="OPERATOR")
    for name, operator in OPERATORS.items():
        function = getattr(cuops, name)
        short = [alias for alias, of in SHORT_NAMES.items() if of == name]
        command = commands.add_parser(
            name, aliases=short, help=(function.__doc__ or "").partition("\n")[0], allow_abbrev=False
        )
        command.set_defaults(parser=command)
        command.add_argument("input", metavar="IN", help="FILE.npy, FILE.safetensors or FILE.safetensors:NAME")
        command.add_argument("output", metavar="OUT", type=Path, help="FILE.npy or FILE.safetensors")
        if not isinstance(operator, RowOperator):
            operator.arguments(command)
            continue
        for parameter in operator.parameters:
            needed = operator.default(parameter) is NONE
            text = "a file as IN is" if needed else "a file as IN is; without it, none"
            command.add_argument(f"--{parameter}", metavar="FILE", required=needed, help=text)
        for option in operator.lists:
            text = "a file as IN is; once for each, the first one first"
            command.add_argument(f"--{option}", metavar="FILE", action="append", required=True, help=text)
        for number, text in operator.numbers.items():
            default = operator.default(number)
            given = {"required": True} if default is NONE else {"default": default}
            text += "" if default is NONE else f", by default {default}"
            command.add_argument(f"--{number.replace('_', '-')}", dest=number, type=float, help=text, **given)


def main(options: argparse.Namespace) -> int:
    """Runs the operator; says what ran where."""
    import tqdm  # noqa: F401  before the clock starts

    from .files import read, spare, writing

    options.operator = SHORT_NAMES.get(options.operator, options.operator)
    operator = OPERATORS[options.operator]
    if not isinstance(operator, RowOperator):
        return int(operator.main(options))
    x = operands.read_rows(options.input)

    def parameter(location: str) -> Any:
        array = read(location)
        if operator.one_dtype and array.dtype != x.dtype:
            raise TypeError(f"{location}: expected the dtype of {options.input}, {x.dtype}, got {array.dtype}")
        return operands.parameter(array, x)

    given = {name: location for name in operator.parameters if (location := getattr(options, name)) is not None}
    for number, of in operator.numbers_of.items():
        if getattr(options, number) and of not in given:
            raise ValueError(f"--{number.replace('_', '-')}: expected --{of} as well, without which it does nothing")
    keywords = {name: parameter(location) for name, location in given.items()}
    for name, values in keywords.items():
        _arguments.array(name, values)
        if values.ndim != 1:  # one for each column of a row
            raise ValueError(f"{name}: expected an array of 1 dimension, got {values.ndim}")
    lists = [location for option in operator.lists for location in getattr(options, option)]
    for option, name in operator.lists.items():
        keywords[name] = [parameter(location) for location in getattr(options, option)]
    spare(options.output, [*given.values(), *lists])
    keywords |= {name: getattr(options, name) for name in operator.numbers}
    device, where = operands.place(x.dtype)
    if x.dtype == "bfloat16":
        keywords = {name: operands.tensors(value, device) for name, value in keywords.items()}
    *leading, n = x.values.shape
    # No rows tell the size of y's, and arguments are checked before there is any output.
    out_shape = (*leading, operator.function(_chunk(x.values[:0].reshape(0, n), x.dtype, device), **keywords).shape[-1])
    start = time.perf_counter()
    with writing(options.output, out_shape, x.dtype, x.name) as out:
        _run(operator.function, x, out, keywords, device)
    seconds = time.perf_counter() - start
    moved = x.values.nbytes + math.prod(out_shape) * x.values.itemsize
    operands.report(options.operator, x.values.shape, x.dtype, where, seconds, moved, options.output)
    return 0


def _chunk(rows: np.ndarray, dtype: str, device: str) -> Any:
    """Rows of a file as operators take them: bfloat16 as a tensor on the device."""
    return torch.from_numpy(rows.copy()).view(torch.bfloat16).to(device) if dtype == "bfloat16" else rows


def _run(function: Callable[..., Any], x: FileArray, out: np.ndarray, keywords: dict[str, Any], device: str) -> None:
    from tqdm import tqdm

    count, n = math.prod(x.values.shape[:-1]), x.values.shape[-1]
    rows, out_rows = x.values.reshape(count, n), out.reshape(count, out.shape[-1])
    step = max(1, operands.CHUNK_BYTES // (max(n, out.shape[-1], 1) * x.values.itemsize))
    with tqdm(total=x.values.nbytes, unit="B", unit_scale=True, delay=1, leave=False) as bar:
        for start in range(0, count, step):
            part = rows[start : start + step]
            y = function(_chunk(part, x.dtype, device), **keywords)
            out_rows[start : start + step] = operands.stored(y, x.dtype)
            bar.update(part.nbytes)
