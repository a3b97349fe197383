"""The commands of this repository: `nox -l` lists them, `nox -s NAME` runs one."""

from __future__ import annotations

import sys
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent))
import wheelhouse

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "tests"]
nox.options.reuse_venv = "yes"

DIST = Path("dist")
TESTED_ROW = "cu121"  # of cuda.toml, where one backend is enough


def group(name: str) -> tuple[str, ...]:
    """The requirements of a dependency group."""
    return nox.project.dependency_groups(nox.project.load_toml(), name)


def install_wheels(session: nox.Session, wheels: list[Path]) -> None:
    """Installs wheels as they are now, even where an earlier build of the same version is installed."""
    session.install(*map(str, wheels))
    session.install("--force-reinstall", "--no-deps", *map(str, wheels))


@nox.session(reuse_venv=False)
def quickstart(session: nox.Session) -> None:
    """Build cuops for this machine's driver (cu121 where there is none), install it, run it on photographs."""
    script = "from cuops import _backend; print(_backend.suggested())"
    package = session.run("python", "-c", script, env={"PYTHONPATH": "packages/cuops/src"}, silent=True, log=False)
    built = wheelhouse.build(session, [package.strip().removeprefix("cuops-")], Path(session.create_tmp(), "dist"))
    session.install(*map(str, built), *group("quickstart"))
    session.run("cuops", "doctor", "--allow-no-gpu")
    session.run("python", "examples/photographs.py")


@nox.session
def lint(session: nox.Session) -> None:
    """Check formatting, types, spelling, workflows and derived files (pre-commit's hooks)."""
    session.install(*group("lint"))
    session.run("pre-commit", "run", "--all-files", "--show-diff-on-failure", *session.posargs)


@nox.session
def regenerate(session: nox.Session) -> None:
    """Write every file that derives from cuda.toml."""
    session.install(*nox.project.load_toml("packages/cuops/pyproject.toml")["build-system"]["requires"])
    session.run("python", "-m", "cuops_build.regenerate", *session.posargs, env={"PYTHONPATH": "build_backend"})


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests that need no GPU, on the core and one backend built from this tree."""
    folder = Path(session.create_tmp(), "dist")
    install_wheels(session, wheelhouse.build(session, [TESTED_ROW], folder))
    session.install(*group("test"))
    toolchain = wheelhouse.toolchain(session, TESTED_ROW)
    session.run("pytest", "-m", "not gpu", f"--wheels={folder}", f"--toolchain={toolchain}", *session.posargs)


@nox.session
def wheels(session: nox.Session) -> None:
    """Build the core and all backends, or those named (-- cu118 cu121), into dist/, and check them."""
    built = wheelhouse.build(session, session.posargs or list(wheelhouse.CUDA), DIST)
    session.install("-q", *group("contract"))
    session.run("pytest", "tests/test_wheels.py", f"--wheels={DIST}")
    for wheel in built:
        session.log(f"{wheel}: {wheel.stat().st_size / 1e6:.2f} MB")


@nox.session
def gpu_tests(session: nox.Session) -> None:
    """Run the tests on this machine's GPU, with the wheels of dist/ (with --no-venv: with what is importable)."""
    if session.venv_backend != "none":
        install_wheels(session, sorted(DIST.glob("*.whl")) or session.error("dist/ is empty: run nox -s wheels first"))
        session.install(*group("test"))
    session.run("python", "-m", "pytest", "-m", "gpu", "--ignore=tests/test_wheels.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure operators beside their peers on this machine's GPU, into benchmarks/results/."""
    if session.venv_backend != "none":
        install_wheels(session, sorted(DIST.glob("*.whl")) or session.error("dist/ is empty: run nox -s wheels first"))
        session.install(*group("test"), *group("bench"))
    session.run("python", "-m", "benchmarks", *(session.posargs or ["rms_norm"]))


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into site/; a warning is an error."""
    session.install("-e", "./packages/cuops", *group("docs"))
    session.run("sphinx-build", "-W", "--keep-going", "-b", "html", "docs", "site", *session.posargs)
