"""Writes requirements/*.txt: all that a release is made with, a version of each for every Python, with hashes."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from cuops_build import regenerate, table
from nox.project import dependency_groups
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = regenerate.ROOT / "requirements"


def inputs() -> dict[str, tuple[str, ...]]:
    """What each file pins."""
    project = tomllib.loads((regenerate.ROOT / "pyproject.toml").read_text())
    core = tomllib.loads((regenerate.ROOT / "packages/cuops/pyproject.toml").read_text())["project"]["dependencies"]
    return {
        "nox": dependency_groups(project, "nox"),
        "build": (*dependency_groups(project, "build"), *regenerate.BUILD_REQUIRES, *regenerate.COMPILER_REQUIRES),
        **{name: dependency_groups(project, name) for name in ("cibuildwheel", "contract")},
        **{name: dependency_groups(project, name) for name in ("release", "attest", "rehearse")},
        "runtime": (*core, *regenerate.RUNTIME_REQUIRES),
        "docs": (*dependency_groups(project, "docs"), *core, *regenerate.BUILD_REQUIRES),
        **{row.distribution: row.wheels for row in table.read(regenerate.ROOT / "cuda.toml").values()},
    }


def pins(path: Path) -> dict[str, list[str]]:
    """The versions in a file of pins, by name: one for every Python, or several for some each."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if "==" in line and line[0].isalnum():
            requirement = Requirement(line.rstrip("\\"))
            found.setdefault(requirement.name, []).append(str(requirement.specifier)[2:])
    return found


def header(wanted: tuple[str, ...]) -> str:
    """The first line of a file of pins: what it is made for, as that cannot be told from the pins."""
    return f"# for {' '.join(sorted({canonicalize_name(Requirement(line).name) for line in wanted}))}\n"


def stale() -> list[str]:
    """Prints what is not pinned as it should be, or is pinned for nothing; returns the files."""
    found = []
    for name, wanted in inputs().items():
        path = FOLDER / f"{name}.txt"
        pinned = pins(path) if path.exists() else {}
        made_for = path.read_text().partition("\n")[0].split()[2:] if path.exists() else []
        if gone := set(made_for) - set(header(wanted).split()):
            print(f"requirements/{name}.txt is made for {', '.join(sorted(gone))}, too: nox -s lock -- {name}")
            found.append(name)
        for requirement in map(Requirement, wanted):
            versions = pinned.get(canonicalize_name(requirement.name), ())
            if not any(version in requirement.specifier for version in versions):
                print(f"requirements/{name}.txt does not have {requirement}: nox -s lock -- {name}")
                found.append(name)
    for path in sorted(FOLDER.glob("*.txt")):
        if path.stem not in inputs():
            print(f"nothing asks for requirements/{path.name}: to be deleted by hand")
            found.append(path.stem)
    return list(dict.fromkeys(found))


def main(words: list[str]) -> None:
    """Resolves and writes the files named, or all; what is pinned already stays where it fits, but for --upgrade."""
    parser = argparse.ArgumentParser(prog="nox -s lock --", description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="FILE", help="by its stem; by default all")
    parser.add_argument("--upgrade", nargs="+", default=[], metavar="PACKAGE", help="to its newest version that fits")
    options = parser.parse_args(words)
    names, wanted = options.names, inputs()
    if unknown := [name for name in names if name not in wanted]:
        sys.exit(f"lock: there is no {', '.join(unknown)}; there are {', '.join(wanted)}")
    FOLDER.mkdir(exist_ok=True)
    for name in names or wanted:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, f"{name}.in")
            source.write_text("\n".join(wanted[name]))
            every = ("--universal", "--python-version", "3.10")  # Python from there on
            flags = (*every, "--generate-hashes", "--quiet", "--no-header", "--no-annotate")
            upgraded = (f"--upgrade-package={package}" for package in options.upgrade)
            uv = (sys.executable, "-m", "uv", "pip", "compile", *flags, *upgraded)
            path = FOLDER / f"{name}.txt"
            subprocess.run([*uv, "-o", str(path), str(source)], check=True)
        path.write_text(header(wanted[name]) + path.read_text())
        print(f"requirements/{name}.txt: {len(pins(path))} pins")


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(1 if stale() else 0)
    elif sys.argv[1:] == ["--toolchains"]:  # which are the same for every Python
        for toolchain in [name for name in stale() if name.startswith("cuops-") and name in inputs()]:
            main([toolchain])
    else:
        main(sys.argv[1:])
