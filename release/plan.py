"""What CI has to do for a change: which CUDA versions there are, and whether anything but documentation changed."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

from cuops_build import table
from cuops_build.version import VersionError, git

from . import arguments, output

PROSE = {".md", ".svg", ".png"}
# The tests run what these show, and follow their links.
TESTED = ("packages/", "tests/", "docs/", "benchmarks/", "README.md", "CONTRIBUTING.md", "SECURITY.md")


def only_prose(paths: list[str]) -> bool:
    """Whether these are files that neither the wheels nor the tests are made from."""
    return bool(paths) and all(PurePosixPath(path).suffix in PROSE and not path.startswith(TESTED) for path in paths)


def plan(root: Path, base: str) -> dict[str, str]:
    """The outputs of the planning job. Where the base is not known everything is done."""
    names = "diff", "--name-only", "--no-renames"  # or a renamed file has its new name alone
    try:
        changed = git(root, *names, f"{base}...HEAD").splitlines() if base.strip("0") else []
        gone = git(root, *names, "--diff-filter=D", f"{base}...HEAD") if changed else ""  # with links to it left
    except VersionError:
        changed, gone = [], ""
    rows = list(table.read(root / "cuda.toml"))
    return {"rows": json.dumps(rows), "code": json.dumps(bool(gone) or not only_prose(changed))}


if __name__ == "__main__":
    planned = plan(Path.cwd(), arguments.plan().parse_args().base)
    print("".join(f"{name}={value}\n" for name, value in planned.items()), end="")
    output(**planned)
