"""Compare every implementation of an operator with the float64 reference: norms and errors, forward and gradients.

Exit code 1 says that cuops is further away than the dtype allows.
"""

from __future__ import annotations

import argparse
from typing import Any

from .._torch import torch
from . import cases

OWN = "own: other random numbers, of which mean and deviation are compared"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `cuops check`."""
    cases.add_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs; 0 by default")


def main(options: argparse.Namespace) -> int:
    """Prints a table a case."""
    chosen = cases.chosen(options, "CHECKED")
    from .._bench.case import available, compared, reference_norms, why
    from .._bench.report import table

    functions = available(options.operator, options.device, options.without)
    if "cuops" not in functions:
        raise ValueError("--without: expected another implementation than the one that is checked, got cuops")
    wrong = False
    for case in chosen:
        torch.manual_seed(options.seed % 2**64)  # whatever those before have drawn
        torch.compiler.reset()  # or after the limit on recompilations torch.compile would stand for eager calls
        arguments = case.module.inputs(case, options.device)
        exact = reference_norms(case, arguments)
        rows: list[list[Any]] = [["reference", name, f"{norm:.9g}", "", ""] for name, norm in exact.items()]
        notes = []
        for name, function in functions.items():
            try:
                computed, errors = compared(case, name, function, arguments)
            except Exception as failed:  # a peer may fail in any way, and the others are still to be compared
                rows.append([name, type(failed).__name__, "", "", "fails"])
                notes.append(f"{name} fails: {why(failed)}")
                wrong |= name == "cuops"
                continue
            for result, largest in errors.items():
                agrees = largest <= case.tolerance
                wrong |= name == "cuops" and not agrees
                norm = torch.linalg.vector_norm(computed[result].double()).item()
                error = "" if result == "own" else f"{largest:.2e}"
                rows.append([name, result, f"{norm:.9g}", error, "agrees" if agrees else "DIFFERS"])
        print(f"{case.kind} {case.title} on {options.device}, at most {case.tolerance:.1e} from the reference")
        if any(row[1] == "own" for row in rows):
            notes.insert(0, OWN)
        print("\n".join([table(["implementation", "result", "norm", "error", ""], rows), *notes]), end="\n\n")
    return int(wrong)
