"""Builds the wheels and source distributions of packages/ for nox; the toolchain of each backend is unpacked once."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import nox

CUDA = nox.project.load_toml("cuda.toml")
TOOLCHAINS = Path(".cache/toolchains")


def toolchain(session: nox.Session, row: str) -> Path:
    """The folder with the toolchain's wheels of a row of cuda.toml, unpacked."""
    wheels = CUDA[row]["wheels"]
    folder = (TOOLCHAINS / hashlib.sha256("\n".join(wheels).encode()).hexdigest()[:16]).resolve()
    if not folder.exists():
        shutil.rmtree(partial := folder.with_suffix(".partial"), ignore_errors=True)
        session.run("python", "-m", "pip", "install", "-q", "--no-deps", "--target", str(partial), *wheels)
        partial.rename(folder)
    return folder


def build(session: nox.Session, rows: list[str], folder: Path) -> list[Path]:
    """Fills `folder` with the core and the backends of `rows`, and with nothing else; returns the wheels."""
    if unknown := set(rows) - set(CUDA):
        session.error(f"not in cuda.toml: {', '.join(sorted(unknown))}; its rows are {', '.join(CUDA)}")
    packages = {"cuops": None, **{f"cuops-{row}": row for row in rows}}
    requires: set[str] = set()
    for name in packages:
        requires.update(nox.project.load_toml(f"packages/{name}/pyproject.toml")["build-system"]["requires"])
    requires -= {wheel for row in CUDA.values() for wheel in row["wheels"]}
    session.install("-q", *nox.project.dependency_groups(nox.project.load_toml(), "build"), *sorted(requires))
    shutil.rmtree(folder, ignore_errors=True)
    for name, row in packages.items():
        path = {"PYTHONPATH": str(toolchain(session, row))} if row else {}
        session.run(
            "python", "-m", "build", "--no-isolation", "-o", str(folder), f"packages/{name}", env=path, silent=True
        )
    return sorted(folder.glob("*.whl"))
