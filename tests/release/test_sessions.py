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
    for name in ("noxfile.py", "sanitizers.py", "wheelhouse.py", "release", "build_backend", "packages", "requirements", "docs/cuda-versions.md", "cuda.toml", "pyproject.toml", "LICENSE"):  # fmt: skip
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
    monkeypatch.setenv("CIBW_CONTAINER_ENGINE", "nosuch ; create_args: --gpus all")
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


def test_pins_of_a_requirement_that_was_removed_are_stale_until_they_are_locked_again(tree, monkeypatch, capsys):
    def uv(command, **options):
        Path(command[command.index("-o") + 1]).write_text("nox==2026.10.20\n")

    wanted = lock.inputs()
    monkeypatch.setattr(lock, "FOLDER", tree / "requirements")
    assert lock.stale() == []
    monkeypatch.setattr(
        lock, "inputs", lambda: {**wanted, "build": (*wanted["nox"],), "release": wanted["release"][1:]}
    )
    assert lock.stale() == ["build", "release"]
    assert "requirements/release.txt is made for git-cliff, too: nox -s lock -- release" in capsys.readouterr().out
    monkeypatch.setattr(lock.subprocess, "run", uv)
    lock.main(["build"])
    assert lock.stale() == ["release"]


def test_only_pins_that_there_are_can_be_locked():
    with pytest.raises(SystemExit, match="there is no nosuch; there are nox, build"):
        lock.main(["nosuch"])


@pytest.mark.parametrize(
    ("parse", "words"),
    [(arguments.release().parse_args, ["--pus", "origin"]), (lock.main, ["--upgrad", "numpy"])],
    ids=["release", "lock"],
)
def test_the_beginning_of_an_option_is_none(parse, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(words)
    assert stopped.value.code == 2
    assert f"unrecognized arguments: {words[0]}" in capsys.readouterr().err


def test_wheels_for_another_machine_are_not_installed():
    names = ("py3-none-any", *(f"py3-none-manylinux_2_17_{machine}" for machine in (platform.machine(), OTHER)))
    wheels = [Path(f"dist/cuops-1.0.0-{tags}.whl") for tags in names]
    assert wheelhouse.for_this_machine(wheels) == wheels[:2]


@pytest.mark.parametrize("venv", ["there", "missing"])
def test_what_must_pass_runs_with_the_nox_that_is_pinned(tmp_path, monkeypatch, venv):
    stub = f"""#!/bin/sh
echo "$@" >> {tmp_path}/log
case "$2-{venv}" in
  venv-missing) exit 1 ;;
  venv-there | virtualenv-*) mkdir -p .nox/.ci/bin; cp "$0" .nox/.ci/bin/python; cp "$0" .nox/.ci/bin/nox ;;
esac
"""
    for name, text in ((".ci/run", (ROOT / ".ci/run").read_text()), ("bin/python3", stub)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    subprocess.run([tmp_path / ".ci/run"], check=True)
    installed = [line for line in (tmp_path / "log").read_text().splitlines() if "pip install" in line]
    assert len(installed) == (1 if venv == "there" else 2)
    assert all("--require-hashes -r requirements/nox.txt" in line for line in installed)


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


@pytest.fixture
def sanitized(tree, tmp_path_factory, monkeypatch):
    """Runs the session with a sanitizer that says what it is told to, on a test that is told whether to pass."""
    tools = tmp_path_factory.mktemp("tools")
    (tools / "compute-sanitizer").write_text(SANITIZER)
    (tools / "compute-sanitizer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")

    def run(said: str, *words: str, passes: bool = True) -> tuple[int, str]:
        monkeypatch.setenv("SAID", said)
        (tree / "tests").mkdir()
        wanted = "== 'yes'" if passes else "is None"
        test = f"import os, pytest\n@pytest.mark.gpu\ndef test_it():\n    assert os.environ.get('SANITIZED') {wanted}\n"
        (tree / "tests/test_it.py").write_text(test)
        return nox(tree, "sanitize", "--tools", "racecheck", *words)

    return run


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("========= ERROR SUMMARY: 0 errors", None),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", None),
        ("========= Target application terminated before first instrumented API call", None),
        ("========= ERROR SUMMARY: 10 errors", "found errors"),
        ("========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)", "found errors"),
        ("========= Internal Sanitizer Error: not enough memory\n========= ERROR SUMMARY: 0 errors", "found errors"),
        ("========= COMPUTE-SANITIZER", "did not end"),
    ],
)
def test_each_process_of_the_tests_has_a_sanitizer_that_must_end_clean(sanitized, said, wrong):
    code, told = sanitized(said, "--workers", "2")
    assert ("1 passed" in told, code == 0) == (True, wrong is None), told
    assert told.count(f"racecheck {wrong}:\n{said}") == (0 if wrong is None else 4)  # two runs of two processes


def test_what_sanitizers_say_of_tests_that_fail_is_told(sanitized):
    code, told = sanitized("========= ERROR SUMMARY: 10 errors", passes=False)
    assert ("1 failed" in told, code != 0) == (True, True), told
    assert "racecheck: tests failed\nracecheck found errors:\n========= ERROR SUMMARY: 10 errors" in told


def test_processes_without_a_sanitizer_are_missed(sanitized):
    code, told = sanitized("", "-n", "2", passes=False)  # which takes the place of the others
    assert ("1 passed" in told, code != 0) == (True, True), told
    assert "racecheck did not see all processes of the tests" in told


def test_a_missing_sanitizer_is_said_at_once(tree, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    code, told = nox(tree, "sanitize")
    assert (code != 0, "compute-sanitizer, which comes with a CUDA toolkit, is not here" in told) == (True, True), told


def test_parts_of_the_tests_are_all_of_them_in_their_order():
    def collected(*options):
        chosen = ("tests/release/test_version.py", "-q", "--collect-only", "-p", "no:randomly", *options)
        said = subprocess.run([sys.executable, "-m", "pytest", *chosen], cwd=ROOT, capture_output=True, text=True)
        return said.returncode, [line for line in said.stdout.splitlines() if "::" in line]

    parts = [collected("--part", f"{k}/3") for k in (1, 2, 3)]
    assert all(code == 0 and found for code, found in parts)
    assert (0, [name for _, found in parts for name in found]) == collected()
    assert collected("--part", "4/3")[0] == 4  # a usage error
