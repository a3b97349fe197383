"""The same source gives the same bytes, wherever it is built, and the same code to all architectures that share their PTX."""

from __future__ import annotations

import hashlib
import operator
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from cuops_build import nvrtc, table

ROOT = Path(__file__).parents[1]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("package", ["cuops", "cuops_cu121"])
def test_source_distribution_builds_the_same_wheel_elsewhere(package: str, pytestconfig: pytest.Config, tmp_path: Path):
    """Outside git, in another folder, and with nothing cached of what was compiled before."""
    dist = pytestconfig.getoption("--wheels")
    (source,) = dist.glob(f"{package}-*.tar.gz")
    (wheel,) = dist.glob(f"{package}-*.whl")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path / "a folder of another name", filter="data")
    (unpacked,) = (tmp_path / "a folder of another name").iterdir()
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(unpacked)]
    fresh = {"PYTHONPATH": pytestconfig.getoption("--toolchain"), "CUOPS_BUILD_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, env={**os.environ, **fresh}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sha256(tmp_path / wheel.name) == sha256(wheel)


@pytest.mark.parametrize("row", table.read(ROOT / "cuda.toml").values(), ids=lambda row: row.name)
def test_sources_ask_nothing_that_architectures_of_the_same_ptx_answer_differently(row: table.Cuda):
    # But for tuned.cuh, which is for the first of them alone.
    sources = [path for path in (ROOT / "csrc").rglob("*.cu*") if path.name != "tuned.cuh"]
    asked = {pair for path in sources for pair in re.findall(r"__CUDA_ARCH__ ([<>=]=?|!=) (\d+)", path.read_text())}
    assert asked, "the way of asking has changed"
    compare = {">=": operator.ge, ">": operator.gt, "<": operator.lt, "<=": operator.le, "==": operator.eq}
    for family in nvrtc.families(row):
        for how, number in asked:
            answers = {compare[how](10 * architecture, int(number)) for architecture in family}
            assert len(answers) == 1, f"__CUDA_ARCH__ {how} {number} in {family}"
