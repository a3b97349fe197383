"""The cases of `cuops check`, `profile` and `bench`, from their options; `python -m benchmarks` checks its own here."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from .._bench import LETTERS, OPERATORS, SHORT_NAMES
from .._torch import failure, torch
from ..errors import CuopsError, DriverNotFoundError

if TYPE_CHECKING:
    from .._bench.case import Case

MOST_SIZES = 60  # PyTorch's tensors have at most 64 dimensions, of which implementations need some


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Their options."""
    parser.usage = "%(prog)s operator shape [shape ...] [options]"  # --also would take what comes after it
    parser.add_argument(
        "operator",
        choices=OPERATORS,
        type=lambda name: SHORT_NAMES.get(name, name),
        help=f"or for short {', '.join(SHORT_NAMES)}",
    )
    parser.add_argument(
        "shape",
        nargs="+",
        type=sizes,
        help="; ".join(["such as 16 32 32, or 16x32x32", *map(": ".join, OPERATORS.items())]),
    )
    parser.add_argument(
        "--also",
        nargs="+",
        action="extend",
        default=[],
        type=sizes,
        metavar="16x32x32",
        help="more shapes in the same run, each as one word; it takes all words up to the next option, so the operator "
        "and the first shape stand before it, or after --; may be repeated",
    )
    parser.add_argument(
        "--dtype",
        metavar=f"{{{','.join(LETTERS.values())}}}",
        default="f",
        type=dtype,
        help=f"or by name {', '.join(LETTERS)}; f by default",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="by default cuda where there is a GPU")
    parser.add_argument(
        "--without", action="append", default=[], metavar="NAME", help="leave an implementation out; may be repeated"
    )


def dtype(text: str) -> str:
    """The letter of a dtype, which its name has too."""
    if text not in (*LETTERS, *LETTERS.values()):
        raise argparse.ArgumentTypeError(f"expected {', '.join(LETTERS.values())}, or {', '.join(LETTERS)}, got {text}")
    return LETTERS.get(text, text)


def sizes(text: str) -> list[int]:
    """The sizes in 16x32x32."""
    try:
        return [int(size) for size in text.split("x")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected sizes such as 16x32x32, got {text}") from None


def path(text: str) -> Path:
    """The path of that name; pathlib takes none for the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got an empty one")
    return Path(text)


def checked(shape: list[int], name: str = "shape") -> list[int]:
    """The sizes of one shape; raises ValueError where no operator takes them."""
    if not 2 <= len(shape) <= MOST_SIZES or min(shape) < 1:
        raise ValueError(
            f"{name}: expected at least two sizes, rows first, at most {MOST_SIZES}, each at least 1, got {shape}"
        )
    if math.prod(shape) >= 1 << 48:
        raise ValueError(f"{name}: expected sizes of arrays that memory holds, got {shape}")
    return shape


def device(name: str | None) -> str:
    """The device of that name, cuda where there is a GPU if none is named; raises where it is not there."""
    if name == "cuda" and torch.version.cuda is None and torch.version.hip is None:
        raise ValueError(
            f"--device cuda: PyTorch {torch.__version__} is built for CPUs; https://pytorch.org has other builds"
        )
    if name == "cuda" and not torch.cuda.is_available():
        raise DriverNotFoundError("--device cuda: PyTorch sees no GPU")
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def folder(path: Path) -> None:
    """Makes the folder of results, before the time that measuring takes."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{path}: expected a folder: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise ValueError(f"{path}: expected a folder that can be written")


def chosen(options: argparse.Namespace, kinds: str = "KINDS") -> list[Case]:
    """What the options ask for, a case a kind and shape; sets the device. Raises where PyTorch is missing.

    `kinds` names the operator's list of them: KINDS are those that are measured.
    """
    if failure:
        raise CuopsError(f"PyTorch is installed and does not serve: {failure}", "pip install --force-reinstall torch")
    if torch is None:
        raise CuopsError("PyTorch is not installed", "pip install torch")
    from .._bench.case import DTYPES, Case, module_of

    joined = [size for part in options.shape for size in part]  # 16 32 32 is 16x32x32
    shapes = [checked(joined), *(checked(shape, "--also, of shapes such as 32x32") for shape in options.also)]
    options.device = device(options.device)
    module = module_of(options.operator)
    found, dtype = getattr(module, kinds, module.KINDS), DTYPES[options.dtype]
    return [Case(options.operator, kind, module.shape(shape), dtype) for kind in found for shape in shapes]
