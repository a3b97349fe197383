"""The commands of this repository: `nox -l` lists them, `nox -s NAME` runs one."""

from __future__ import annotations

import itertools
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import nox
import nox.command

sys.path.insert(0, str(Path(__file__).parent))
import sanitizers
import wheelhouse
from release import arguments

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "tests"]
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True

DIST = Path("dist")
TESTED_ROW = "cu121" if platform.machine() == "x86_64" else "cu128"  # of cuda.toml, where one backend is enough
TRAIN = {"PYTHONPATH": "build_backend"}
WORKERS = ("-n", str(len(os.sched_getaffinity(0))))  # of pytest


def locked(session: nox.Session, name: str) -> None:
    """Installs what a step of the release train needs, at the versions and with the hashes of requirements/."""
    session.install("-q", "--require-hashes", "-r", f"requirements/{name}.txt")


def train(session: nox.Session, *command: str, **options: Any) -> Any:
    """Runs a step of the release train; one that is interrupted has time to undo what it began."""
    return session.run("python", "-m", *command, env=TRAIN, interrupt_timeout=120, terminate_timeout=60, **options)


def group(name: str) -> tuple[str, ...]:
    """The requirements of a dependency group."""
    return nox.project.dependency_groups(nox.project.load_toml(), name)


def install_wheels(session: nox.Session, wheels: list[Path]) -> None:
    """Installs wheels as they are now, even where an earlier build of the same version is installed."""
    session.install(*map(str, wheels))
    session.install("--force-reinstall", "--no-deps", *map(str, wheels))


@nox.session(reuse_venv=False)
def quickstart(session: nox.Session) -> None:
    """Build cuops for this machine's driver (or without one), install it, run it on photographs."""
    script = "from cuops import _backend; print(_backend.suggested())"
    row = session.run("python", "-c", script, env={"PYTHONPATH": "packages/cuops/src"}, silent=True, log=False).strip()
    row = TESTED_ROW if row == "cu121" else row  # which not every machine can build
    built = wheelhouse.build(session, [row], Path(session.create_tmp(), "dist"))
    session.install(*map(str, built), *group("quickstart"))
    session.run("cuops", "doctor", "--allow-no-gpu")
    session.run("python", "examples/photographs.py")
    session.log(f"installed as {Path(session.bin, 'cuops')}, from the wheels in {built[0].parent}")


@nox.session
def lint(session: nox.Session) -> None:
    """Check formatting, types, spelling, workflows and derived files (pre-commit's hooks)."""
    session.install(*group("lint"))
    session.run("pre-commit", "run", "--all-files", "--show-diff-on-failure", *session.posargs)


@nox.session
def regenerate(session: nox.Session) -> None:
    """Write every file that derives from cuda.toml."""
    session.install(*nox.project.load_toml("packages/cuops/pyproject.toml")["build-system"]["requires"])
    session.run("python", "-m", "cuops_build.regenerate", *session.posargs, env=TRAIN)
    if "--check" not in session.posargs:
        session.install("-q", *group("lock"))
        session.run("python", "-m", "release.lock", "--toolchains", env=TRAIN)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests that need no GPU, on the core and one backend built from this tree."""
    folder = Path(session.create_tmp(), "dist")
    install_wheels(session, wheelhouse.build(session, [TESTED_ROW], folder))
    session.install(*group("test"))
    if torch := os.environ.get("TORCH"):  # an older one that is still supported
        session.install(f"torch=={torch}")
    toolchain = wheelhouse.toolchain(session, TESTED_ROW)
    paths = (f"--wheels={folder}", f"--toolchain={toolchain}")
    session.run("pytest", *WORKERS, "-m", "not gpu", *paths, *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def wheels(session: nox.Session) -> None:
    """Build the core and all backends, or those named (-- cu118 --machine x86_64 aarch64), into dist/; check them."""
    options = arguments.wheels().parse_args(session.posargs)
    if options.built:
        built = wheelhouse.complete(session, DIST)
    else:
        build = wheelhouse.build_in_manylinux if options.cibuildwheel else wheelhouse.build
        built = build(session, options.rows or list(wheelhouse.CUDA), DIST, options.machine)
    locked(session, "contract")
    session.run("pytest", *WORKERS, "tests/test_wheels.py", f"--wheels={DIST}")
    if options.built:  # which may go up next, for good
        locked(session, "release")
        rows = [row for row in wheelhouse.CUDA if any(DIST.glob(f"cuops_{row}-*.whl"))]
        train(session, "release.nightly", "try", f"--dist={DIST}", "--rows", *rows)
    for wheel in built:
        session.log(f"{wheel}: {wheel.stat().st_size / 1e6:.2f} MB")


def install_built(session: nox.Session, *groups: str) -> None:
    """Installs the wheels of dist/ for this machine and groups of tools; with --no-venv, what is importable serves."""
    if session.venv_backend != "none":
        install_wheels(session, wheelhouse.for_this_machine(wheelhouse.found(session, DIST)))
        session.install(*(requirement for name in groups for requirement in group(name)))


GPU_TESTS = ("python", "-m", "pytest", "-m", "gpu", "--ignore=tests/test_wheels.py", "--ignore=tests/release")


@nox.session
def gpu_tests(session: nox.Session) -> None:
    """Run the tests on this machine's GPU, with the wheels of dist/ (with --no-venv: with what is importable)."""
    install_built(session, "test")
    has_workers = any(word.startswith(("-n", "--numprocesses")) for word in session.posargs)
    one = {"OMP_NUM_THREADS": "1"} if has_workers else {}  # or they wait for each other's threads
    session.run(*GPU_TESTS, *session.posargs, env=one)


@nox.session
def sanitize(session: nox.Session) -> None:
    """Run the GPU tests under compute-sanitizer's tools (-- --tools memcheck --workers 4 -k rms_norm)."""
    install_built(session, "test", "sanitize")
    options, pytest_options = arguments.sanitize().parse_known_args(session.posargs)
    wrong = []
    parts = [(tool, share) for tool in options.tools for share in sanitizers.shares(tool, pytest_options)]
    for (tool, share), (marked, settings) in itertools.product(parts, sanitizers.RUNS.items()):
        logs = Path(tempfile.mkdtemp(dir=session.create_tmp()))
        workers = sanitizers.workers(session, tool, options.workers, logs)
        chosen = (*GPU_TESTS, "-m", marked, *workers, *pytest_options, *share)
        try:
            session.run(*chosen, env=sanitizers.environment(tool) | settings, success_codes=[0, 5])  # 5: none of them
        except nox.command.CommandFailed:
            wrong.append(f"{tool}: tests failed")
        wrong += [f"{tool} {fault}" for fault in sanitizers.unclean(logs, options.workers)]
    if wrong:
        session.error("\n".join(wrong))


@nox.session
def bench(session: nox.Session) -> None:
    """Measure operators beside their peers on this machine's GPU, into benchmarks/results/."""
    install_built(session, "test", "bench", "peers")
    session.run("python", "-m", "benchmarks", *(session.posargs or ["rms_norm"]))


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into site/, or into another folder (-- FOLDER); a warning is an error."""
    folder = arguments.docs().parse_args(session.posargs).folder
    locked(session, "docs")
    session.install("-q", "--no-deps", "--no-build-isolation", "-e", "./packages/cuops")
    kept = Path(session.create_tmp(), "doctrees")  # what the site has no use for
    session.run("sphinx-build", "-W", "--keep-going", "-b", "html", "-d", str(kept), "docs", folder)


@nox.session
def lock(session: nox.Session) -> None:
    """Write requirements/*.txt, or those named: everything that a release is made with, pinned with hashes."""
    session.install("-q", *group("lock"))
    session.run("python", "-m", "release.lock", *session.posargs, env=TRAIN)


@nox.session
def audit(session: nox.Session) -> None:
    """Look for known vulnerabilities in everything that requirements/ pins."""
    session.install("-q", *group("audit"))
    command = ("pip-audit", "--strict", "--require-hashes", "--disable-pip", *session.posargs)
    failed = []
    for pins in sorted(Path("requirements").glob("*.txt")):
        try:
            session.run(*command, "-r", str(pins))
        except nox.command.CommandFailed:
            failed.append(pins.name)
    if failed:
        stems = " ".join(name.removesuffix(".txt") for name in failed)
        raised = f"to raise a pin: nox -s lock -- {stems} --upgrade PACKAGE"
        session.error(f"vulnerable, or not to be told: {', '.join(failed)}; {raised}")


@nox.session
def commits(session: nox.Session) -> None:
    """Check that the messages of commits are conventional (-- A..B; by default those that main has not)."""
    session.install("-q", *group("commits"))
    span = arguments.commits().parse_args(session.posargs).range
    count = session.run("git", "rev-list", "--count", span, external=True, silent=True)
    if str(count).strip() == "0":  # which cz takes for a mistake
        session.skip(f"{span} has no commits")
    session.run("cz", "check", "--rev-range", span)


@nox.session
def plan(session: nox.Session) -> None:
    """Say what CI has to do for a change (-- BASE): the rows of cuda.toml, and whether only prose changed."""
    locked(session, "release")
    session.run("python", "-m", "release.plan", *session.posargs, env=TRAIN)


@nox.session
def release(session: nox.Session) -> None:
    """Cut a release: version and changelog from the commits, the commit and its tag (-- --push origin)."""
    locked(session, "release")
    train(session, "release.cut", *session.posargs)


@nox.session
def publish(session: nox.Session) -> None:
    """Upload the wheels in dist/ to a package index (-- --index NAME --simple URL), all verified before the first."""
    locked(session, "attest" if "--attest" in session.posargs else "release")
    train(session, "release.publish", *session.posargs)


@nox.session
def docker(session: nox.Session) -> None:
    """Build images with docker, podman or buildah, and try them (-- --cuda cu121 --push --registry HOST)."""
    locked(session, "release")
    train(session, "release.images", *session.posargs)


@nox.session
def nightly(session: nox.Session) -> None:
    """Where there are new commits: build, try and index the wheels, then the images (-- --mirror URL --images)."""
    options = arguments.nightly().parse_args(session.posargs)
    rows = options.rows or list(wheelhouse.CUDA)
    wheelhouse.expect_rows(session, rows)
    if options.machine and platform.machine() not in options.machine:
        session.error(f"--machine: what is built is tried here, so {platform.machine()} has to be among them")
    locked(session, "release")
    step = ("release.nightly", "--index", str(options.index))
    mirror = ("--mirror", options.mirror) if options.mirror else ()
    decided = train(session, *step, "decide", *mirror, "--rows", *rows, silent=True, stderr=None)
    if not str(decided or "").strip():
        session.skip("nothing is new since the last nightly, or the commit is a release")
    wheelhouse.build(session, rows, DIST, options.machine)
    train(session, *step, "add", f"--dist={DIST}", "--rows", *rows)
    if options.images:
        session.notify("docker", ["--cuda", *rows])


@nox.session
def github(session: nox.Session) -> None:
    """Say on GitHub what was done (-- release TAG FOLDER, or -- comment PULL_REQUEST FOLDER)."""
    locked(session, "release")
    train(session, "release.github", *session.posargs)


@nox.session
def rehearse(session: nox.Session) -> None:
    """Run the whole release train in a scratch clone, against an index and a registry on loopback, faults included."""
    locked(session, "rehearse")
    train(session, "release.rehearse", *session.posargs)
