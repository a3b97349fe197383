"""A release is built from the files that requirements/ names by hash, and from nothing that the network could give."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from release import lock

ROOT = Path(__file__).parents[2]
NO_NETWORK = ["unshare", "--map-root-user", "--net"]


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def pins(*names: str) -> list[str]:
    return [word for name in names for word in ("-r", f"requirements/{name}.txt")]


@pytest.fixture(scope="module")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pinned files of a backend's build, fetched with their hashes checked."""
    folder = tmp_path_factory.mktemp("wheelhouse")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    subprocess.run([*command, "-d", folder, *pins("build", "cuops-cu121")], cwd=ROOT, check=True)
    return folder


def test_two_packages_build_with_the_pinned_files_alone(wheelhouse: Path, tmp_path: Path):
    if shutil.which("unshare") is None or subprocess.run([*NO_NETWORK, "true"], check=False).returncode:
        pytest.skip("this machine does not let us leave the network")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheelhouse), "PIP_CONFIG_FILE": "/dev/null"}
    run(
        *NO_NETWORK,
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "--require-hashes",
        "--no-deps",
        *pins("build", "cuops-cu121"),
        **offline,
    )
    for package in ("cuops", "cuops-cu121"):
        run(
            *NO_NETWORK,
            python,
            "-m",
            "build",
            "--no-isolation",
            "-o",
            tmp_path / "dist",
            f"packages/{package}",
            **offline,
        )
    assert len(list((tmp_path / "dist").glob("*.whl"))) == 2
    assert len(list((tmp_path / "dist").glob("*.tar.gz"))) == 2


def test_a_pinned_file_with_other_bytes_is_refused(wheelhouse: Path, tmp_path: Path):
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    (original,) = wheelhouse.glob("pathspec-*.whl")
    (folder / original.name).write_bytes(original.read_bytes() + b"\0")
    line = next(
        text
        for text in (ROOT / "requirements/build.txt").read_text().replace("\\\n", " ").splitlines()
        if text.startswith("pathspec==")
    )
    (tmp_path / "pathspec.txt").write_text(line)
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--isolated",
        "--no-index",
        "--find-links",
        folder,
        "--target",
        tmp_path / "t",
    ]
    done = subprocess.run(
        [*command, "--require-hashes", "-r", tmp_path / "pathspec.txt"], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr


def test_the_pins_are_those_that_pyproject_and_cuda_toml_ask_for():
    assert lock.stale() == []


def test_what_some_pythons_need_is_pinned_too():
    lines = (ROOT / "requirements/rehearse.txt").read_text().splitlines()
    assert [line for line in lines if line.startswith("legacy-cgi==") and "python_full_version >= '3.13'" in line]
    assert len(lock.pins(ROOT / "requirements/contract.txt")["pytest-randomly"]) == 2


def test_every_pin_has_hashes():
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        entries = [
            text for text in path.read_text().replace("\\\n", " ").splitlines() if text and not text.startswith("#")
        ]
        assert entries, path
        assert [text for text in entries if "==" not in text or "--hash=sha256:" not in text] == [], path
