"""The same source gives the same bytes, wherever it is built."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from cuops_build import cache


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def keep_most(folder: Path) -> None:
    """Makes `folder` a copy of what the build has compiled, but for a twentieth at random, which each run has to make again."""
    folder.mkdir()
    for product in cache.directory().iterdir():
        if product.suffix != ".lock" and random.random() >= 0.05:
            (folder / product.name).symlink_to(product)


@pytest.mark.parametrize("which", ["core_wheel", "backend_wheel"])
def test_source_distribution_builds_the_same_wheel_elsewhere(
    which: str, request: pytest.FixtureRequest, pytestconfig: pytest.Config, tmp_path: Path
):
    """Outside git, in another folder, and, with --nothing-cached, without what was compiled before."""
    wheel = request.getfixturevalue(which)
    (source,) = wheel.parent.glob(f"{wheel.name.partition('-')[0]}-*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path / "a folder of another name", filter="data")
    (unpacked,) = (tmp_path / "a folder of another name").iterdir()
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(unpacked)]
    if not pytestconfig.getoption("--nothing-cached"):
        keep_most(tmp_path / "cache")
    fresh = {"PYTHONPATH": pytestconfig.getoption("--toolchain"), "CUOPS_BUILD_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, env={**os.environ, **fresh}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sha256(tmp_path / wheel.name) == sha256(wheel)
