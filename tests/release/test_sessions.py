"""What sessions say before they begin, where they cannot do what they are asked for."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cuops_build.version import git

import wheelhouse
from release import arguments, lock

ROOT = Path(__file__).parents[2]
OTHER = next(machine for machine in arguments.MACHINES if machine != platform.machine())


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The sessions and what they read, without wheels."""
    for name in ("noxfile.py", "wheelhouse.py", "release", "build_backend", "packages", "requirements", "docs/cuda-versions.md", "cuda.toml", "pyproject.toml", "LICENSE"):  # fmt: skip
        source, target = ROOT / name, tmp_path / name
        target.parent.mkdir(exist_ok=True)
        shutil.copytree(source, target, symlinks=True) if source.is_dir() else shutil.copy(source, target)
    return tmp_path


def nox(tree: Path, session: str, *words: str) -> tuple[int, str]:
    """How a session ends, and what it says; it has what is installed here."""
    command = [sys.executable, "-m", "nox", "--no-venv", "--no-install", "-f", tree / "noxfile.py", "-s", session]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*command, "--", *words], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("session", "words", "message"),
    [
        ("wheels", ["--built"], "dist/ has no wheels: run nox -s wheels first"),
        ("nightly", ["--machine", OTHER], f"{platform.machine()} has to be among them"),
        ("regenerate", ["--chek"], "unrecognized arguments: --chek"),
        ("commits", ["nosuch..HEAD"], "nosuch..HEAD"),
    ],
)
def test_what_cannot_be_done_is_said(tree, session, words, message):
    (tree / "packages/cuops/LICENSE").write_text("other")
    git(tree, "init", "--quiet")
    code, said = nox(tree, session, *words)
    assert code
    assert message in said
    assert "Traceback" not in said
    assert (tree / "packages/cuops/LICENSE").read_text() == "other"


@pytest.mark.parametrize(("there", "missing"), [("cuops", "backend"), ("cuops_cu121", "core")])
def test_wheels_that_are_no_whole_are_not_checked(tree, there, missing):
    (tree / "dist").mkdir()
    (tree / f"dist/{there}-1.0.0-py3-none-any.whl").write_bytes(b"")
    code, said = nox(tree, "wheels", "--built")
    assert (code != 0, f"dist/ has no {missing}: run nox -s wheels first" in said) == (True, True), said


def test_wheels_stay_where_the_engine_for_new_ones_is_missing(tree, monkeypatch):
    (tree / "dist").mkdir()
    (tree / "dist/cuops-1.0.0-py3-none-any.whl").write_bytes(b"")
    monkeypatch.setenv("CIBW_CONTAINER_ENGINE", "nosuch; create_args: --gpus all")
    code, said = nox(tree, "wheels", "--cibuildwheel")
    assert (code != 0, "cibuildwheel needs nosuch, which is not here" in said) == (True, True), said
    assert list((tree / "dist").iterdir())


def test_no_commits_are_conventional(tree):
    git(tree, "init", "--quiet")
    git(tree, "-c", "user.name=x", "-c", "user.email=x", "commit", "--quiet", "--allow-empty", "-m", "no convention")
    assert nox(tree, "commits", "HEAD..HEAD")[0] == 0
    git(tree, "-c", "user.name=x", "-c", "user.email=x", "commit", "--quiet", "--allow-empty", "-m", "none, too")
    assert nox(tree, "commits", "HEAD~..HEAD")[0] == 1


def test_pins_that_nothing_asks_for_are_stale(tree, monkeypatch, capsys):
    assert nox(tree, "regenerate", "--check")[0] == 0
    (tree / "requirements/cuops-cu999.txt").write_text("")
    code, said = nox(tree, "regenerate", "--check")
    assert code
    assert "not in cuda.toml, to be deleted by hand: requirements/cuops-cu999.txt" in said
    monkeypatch.setattr(lock, "FOLDER", tree / "requirements")
    assert lock.stale() == ["cuops-cu999"]
    assert "requirements/cuops-cu999.txt" in capsys.readouterr().out


def test_only_pins_that_there_are_can_be_locked():
    with pytest.raises(SystemExit, match="there is no nosuch; there are nox, build"):
        lock.main(["nosuch"])


def test_wheels_for_another_machine_are_not_installed():
    names = ("py3-none-any", *(f"py3-none-manylinux_2_17_{machine}" for machine in (platform.machine(), OTHER)))
    wheels = [Path(f"dist/cuops-1.0.0-{tags}.whl") for tags in names]
    assert wheelhouse.for_this_machine(wheels) == wheels[:2]


SANITIZER = """#!/bin/sh
# What compute-sanitizer does with a log and what it runs, without a GPU.
for word; do
  shift
  case $word in
    --log-file=*) log=$(echo "${word#--log-file=}" | sed "s/%p/$$/") ;;
    python) printf '%s\\n' "$SAID" > "$log"; SANITIZED=yes exec python "$@" ;;
  esac
done
"""


@pytest.mark.parametrize(
    ("said", "clean"),
    [
        ("========= ERROR SUMMARY: 0 errors", True),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", True),
        ("========= Target application terminated before first instrumented API call", True),
        ("========= ERROR SUMMARY: 10 errors", False),
        ("========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)", False),
        ("========= Internal Sanitizer Error: not enough memory\n========= ERROR SUMMARY: 0 errors", False),
        ("========= COMPUTE-SANITIZER", False),
    ],
)
def test_each_process_of_the_tests_has_a_sanitizer_that_must_end_clean(
    tree, tmp_path_factory, monkeypatch, said, clean
):
    tools = tmp_path_factory.mktemp("tools")
    (tools / "compute-sanitizer").write_text(SANITIZER)
    (tools / "compute-sanitizer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SAID", said)
    (tree / "tests").mkdir()
    body = "import os, pytest\n@pytest.mark.gpu\ndef test_it():\n    assert os.environ['SANITIZED'] == 'yes'\n"
    (tree / "tests/test_it.py").write_text(body)
    code, told = nox(tree, "sanitize", "--tools", "racecheck", "--workers", "2")
    assert ("1 passed" in told, code == 0) == (True, clean), told
    assert ("racecheck found errors" in told and said.split("\n")[0] in told) == (not clean)
