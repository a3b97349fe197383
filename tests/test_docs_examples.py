"""The code in the documentation runs, and what the documentation names is there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "packages/cuops/README.md", *sorted(ROOT.glob("docs/**/*.md"))]
PAGES += [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]


@pytest.mark.parametrize("example", sorted(ROOT.glob("examples/*.py")), ids=lambda path: path.stem)
def test_an_example_runs(example, tmp_path):
    done = subprocess.run([sys.executable, "-W", "error", example], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("example", ["flatquant", "gaussian_process", "llama", "lokr"])
def test_a_gpu_that_is_not_there_is_a_line(example):
    command = [sys.executable, ROOT / f"examples/{example}.py", "--device", "cuda"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr.endswith(f"{example}.py: error: --device: PyTorch sees no GPU\n")


@pytest.mark.parametrize("small", ["5", "0", "-4"])
def test_an_adapter_whose_small_factor_does_not_divide_is_refused(small):
    command = [sys.executable, ROOT / "examples/lokr.py", "--hidden-size", "64", f"--small={small}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.endswith(f"--small: expected a divisor of the hidden size 64, got {small}\n")


@pytest.mark.parametrize("page", PAGES[:2], ids=["README", "the package's README"])
def test_the_code_of_a_readme_is_the_example_that_runs(page):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks == [(ROOT / "examples/quick_start.py").read_text()]


def test_every_example_is_shown_somewhere():
    shown = "".join(page.read_text() for page in PAGES)
    for example in ROOT.glob("examples/*.py"):
        assert f"examples/{example.name}" in shown, example.name


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sessions_that_are_named_exist(page):
    sessions = set(re.findall(r"@nox\.session.*?\ndef (\w+)\(", (ROOT / "noxfile.py").read_text()))
    for command in re.findall(r"nox -s ((?:[a-z_]+ ?)+)", page.read_text()):
        assert set(command.split()) <= sessions, command
