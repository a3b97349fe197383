"""The command cuops: what is installed, and operators from the shell. Each subcommand is a module of this package."""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import sys
from collections.abc import Sequence

from ..errors import CuopsError
from . import bench, check, doctor, profile, run

COMMANDS = (doctor, run, check, profile, bench)


class _Version(argparse.Action):
    """Prints the version: finding it takes longer than all else here, so only on request."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from .._backend import core_version

        try:
            print(f"cuops {core_version()}")
        except CuopsError as error:
            parser.exit(1, f"{error}\n")
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """The command line of all subcommands."""
    made = argparse.ArgumentParser(
        prog="cuops", description="CUDA operators for PyTorch and NumPy.", allow_abbrev=False
    )
    made.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = made.add_subparsers(dest="command", required=True)
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2]
        summary = (module.__doc__ or "").partition("\n")[0]
        command = commands.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # --with is no --without
        )
        module.arguments(command)
        command.set_defaults(run=module.main, parser=command)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code. A user's mistake and a broken installation are a line each."""
    options, unknown = parser().parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return int(options.run(options))
    except BrokenPipeError:  # is no mistake: see `command`
        raise
    except (CuopsError, TypeError, ValueError, OSError, ImportError) as error:
        print(f"cuops {options.command}: {_said(error)}", file=sys.stderr)
        return 1
    except (MemoryError, RuntimeError) as error:
        said = str(error)  # PyTorch's words where it runs out of memory, or nothing has so much
        if (
            isinstance(error, RuntimeError)
            and "memory" not in said
            and "Storage size calculation overflowed" not in said
        ):
            raise
        asked = re.search(r"allocate (\d[\d.]* \w+)", said)
        what = f"not enough memory for {asked[1]}" if asked else said.partition("\n")[0]
        print(f"cuops {options.command}: {what}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"cuops {options.command}: interrupted", file=sys.stderr)
        return 130


def _said(error: Exception) -> str:
    """The error's message; the file comes first, where Python's own has it last."""
    if isinstance(error, OSError) and error.filename is not None:
        file = error.filename2 or error.filename or "an empty name"
        return f"{file}: {error.strerror or error.args[0]}"
    return str(error)


def command() -> int:
    """`main` as a shell calls it: what ends it removes unfinished files, and nobody need read all that it prints."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")  # a terminal may know no mu
    try:
        try:
            return main()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would try again
        if isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        print(f"cuops: {error}", file=sys.stderr)
        return 1
