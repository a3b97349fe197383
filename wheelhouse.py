"""Builds the wheels and source distributions of packages/ for nox; the toolchain of each backend is unpacked once."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

CUDA = nox.project.load_toml("cuda.toml")
TOOLCHAINS = Path(".cache/toolchains")


def toolchain(session: nox.Session, row: str) -> Path:
    """The folder with the toolchain's wheels of a row of cuda.toml, unpacked."""
    pins = Path("requirements", f"cuops-{row}.txt")
    folder = (TOOLCHAINS / hashlib.sha256(pins.read_bytes()).hexdigest()[:16]).resolve()
    if not folder.exists():
        shutil.rmtree(partial := folder.with_suffix(".partial"), ignore_errors=True)
        pip = ("python", "-m", "pip", "install", "-q", "--no-deps", "--require-hashes")
        session.run(*pip, "--target", str(partial), "-r", str(pins))
        partial.rename(folder)
    return folder


def expect_rows(session: nox.Session, rows: list[str]) -> None:
    """Ends the session where a row is not in cuda.toml."""
    if unknown := set(rows) - set(CUDA):
        session.error(f"not in cuda.toml: {', '.join(sorted(unknown))}; its rows are {', '.join(CUDA)}")


def build(session: nox.Session, rows: list[str], folder: Path, machines: list[str] | None = None) -> list[Path]:
    """Fills `folder` with the core and the backends of `rows`, and with nothing else; returns the wheels."""
    expect_rows(session, rows)
    session.install("-q", "--require-hashes", "-r", "requirements/build.txt")
    shutil.rmtree(folder, ignore_errors=True)
    command = ("python", "-m", "build", "--no-isolation", "-o", str(folder))

    def build_core() -> None:
        session.run(*command, "packages/cuops", silent=True)

    def build_backend(row: str) -> None:
        for i, machine in enumerate(machines or [platform.machine()]):
            environment = {"CUOPS_BUILD_MACHINE": machine, "CUOPS_BUILD_JOBS": jobs}
            environment["PYTHONPATH"] = str(toolchain(session, row))
            kinds = ("--wheel",) if i else ()  # one source distribution serves all machines
            session.run(*command, *kinds, f"packages/cuops-{row}", env=environment, silent=True)

    jobs = str(max(1, len(os.sched_getaffinity(0)) // 2))  # more compilers than cores take a fifth longer
    with ThreadPoolExecutor(2) as pool:  # one links and packs while the other compiles
        core = pool.submit(build_core)
        list(pool.map(build_backend, rows))
        core.result()
    return sealed(folder)


def build_in_manylinux(session: nox.Session, rows: list[str], folder: Path, machines: list[str] | None) -> list[Path]:
    """As `build`, but the backends are compiled in the stock manylinux image, by cibuildwheel."""
    expect_rows(session, rows)
    if not shutil.which(engine := os.environ.get("CIBW_CONTAINER_ENGINE", "docker").partition(";")[0].strip()):
        session.error(
            f"cibuildwheel needs {engine}, which is not here; CIBW_CONTAINER_ENGINE=podman takes the other one"
        )
    build(session, [], folder)
    session.install("-q", "--require-hashes", "-r", "requirements/cibuildwheel.txt")
    command = ("cibuildwheel", "--only", "cp312-manylinux_x86_64", "--config-file", "pyproject.toml")
    for row in rows:
        for machine in machines or [platform.machine()]:
            environment = {"CUOPS_BUILD_MACHINE": machine}
            session.run(*command, "--output-dir", str(folder), f"packages/cuops-{row}", env=environment)
    return sealed(folder)


def found(session: nox.Session, folder: Path) -> list[Path]:
    """The wheels in a folder; ends the session where there are none."""
    return sorted(folder.glob("*.whl")) or session.error(f"{folder}/ has no wheels: run nox -s wheels first")


def complete(session: nox.Session, folder: Path) -> list[Path]:
    """The wheels in a folder, sealed; ends the session where there is no core, or no backend."""
    kinds = {path.name.partition("-")[0] == "cuops" for path in found(session, folder)}
    if kinds != {True, False}:
        session.error(f"{folder}/ has no {'backend' if True in kinds else 'core'}: run nox -s wheels first")
    return sealed(folder)


def for_this_machine(wheels: list[Path]) -> list[Path]:
    """Those that can be installed here."""
    supported = frozenset(sys_tags())
    return [wheel for wheel in wheels if supported & parse_wheel_filename(wheel.name)[-1]]


def sealed(folder: Path) -> list[Path]:
    """Writes SHA256SUMS of the files in a folder; returns the wheels."""
    files = sorted((*folder.glob("*.whl"), *folder.glob("*.tar.gz")))
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(sums))
    return sorted(folder.glob("*.whl"))
