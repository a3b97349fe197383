"""Compare every implementation of an operator with the float64 reference: norms and errors, forward and gradients.

Exit code 1 says that cuops is further away than the dtype allows.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .._bench import OPERATORS
from .._torch import torch
from ..errors import CuopsError

if TYPE_CHECKING:
    from .._bench.case import Case


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `cuops check`; profile and bench have them too."""
    parser.add_argument("operator", choices=OPERATORS)
    parser.add_argument("shape", nargs="+", type=int, help="rms_norm: rows and hidden size")
    parser.add_argument(
        "--dtype", choices=("f", "d", "h", "b"), default="f", help="float32, float64, float16, bfloat16"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="by default cuda where there is a GPU")
    parser.add_argument("--without", action="append", default=[], metavar="NAME", help="leave an implementation out")


def cases(options: argparse.Namespace) -> list[Case]:
    """What the options ask for, a case a kind of the operator; sets the device. Raises where PyTorch is missing."""
    if torch is None:
        raise CuopsError(f"cuops {options.command} needs PyTorch", "pip install torch")
    from .._bench.case import DTYPES, Case

    if len(options.shape) < 2 or min(options.shape) < 1:
        raise ValueError(f"shape: expected at least two sizes of at least 1, got {options.shape}")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    *leading, n = options.shape
    rows = 1
    for size in leading:
        rows *= size
    kinds = Case(options.operator, "", (), DTYPES["f"]).module.KINDS
    return [Case(options.operator, kind, (rows, n), DTYPES[options.dtype]) for kind in kinds]


def main(options: argparse.Namespace) -> int:
    """Prints a table a kind."""
    chosen = cases(options)
    from .._bench.case import TOLERANCE, available
    from .._bench.report import table

    functions = available(options.operator, options.device, options.without)
    wrong = False
    for case in chosen:
        arguments = case.module.inputs(case, options.device)
        exact = case.module.reference_norms(case, arguments)
        rows: list[list[Any]] = [["reference", name, f"{norm:.9g}", "", ""] for name, norm in exact.items()]
        for name, function in functions.items():
            try:
                computed = case.module.results(case, function, arguments)
                errors = case.module.errors(case, computed, arguments)
            except Exception as error:  # a peer may fail in any way, and the others are still to be compared
                rows.append([name, type(error).__name__, "", "", "fails"])
                wrong |= name == "cuops"
                continue
            for result, largest in errors.items():
                agrees = largest <= TOLERANCE[case.dtype]
                wrong |= name == "cuops" and not agrees
                norm = torch.linalg.vector_norm(computed[result].double()).item()
                rows.append([name, result, f"{norm:.9g}", f"{largest:.2e}", "agrees" if agrees else "DIFFERS"])
        print(f"{case.kind} {case.title} on {options.device}, at most {TOLERANCE[case.dtype]:.1e} from the reference")
        print(table(["implementation", "result", "norm", "error", ""], rows), end="\n\n")
    return int(wrong)
