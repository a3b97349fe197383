"""What `nox -s sanitize` has its tests run under: compute-sanitizer's tools, one for each process."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import nox

# The tests that are chosen, and their environment. Without PyTorch's cache of memory, an access beyond the end of a
# tensor is one beyond the end of an allocation.
RUNS = {
    "gpu and not cpu and not cached": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    "gpu and cached and not timed": {},
}


def environment(tool: str) -> dict[str, str]:
    """What a tool's tests have in theirs."""
    portable = (
        {"CUOPS_PORTABLE_CLUSTERS": "1"} if tool == "synccheck" else {}
    )  # larger ones have barriers that it breaks
    return {"OMP_NUM_THREADS": "1"} | portable


def workers(session: nox.Session, tool: str, count: int, logs: Path) -> tuple[str, ...]:
    """The words for pytest by which its processes have a sanitizer each, as one alone has all of them wait for it.

    They have tests that are neighbours, which have kernels in common, as each sanitizer has to read those that its use.
    """
    prefixes = sorted({path.stem.split("_")[0] for path in Path("csrc").glob("*.cu")})
    ours = f"--kernel-name=regex=^({'|'.join(prefixes)})_"
    special = {
        "memcheck": (ours, "--report-api-errors=no"),  # NCCL tries what this GPU may not have
        "initcheck": ("--check-api-memory-access=no",),  # has to see who wrote what
    }
    common = ("--max-connections=99", "--require-cuda-init=no")  # where a worker has no test
    sanitized = (_installed(session), f"--tool={tool}", *special.get(tool, (ours,)), *common, f"--log-file={logs}/%p")
    return "-p", "no:randomly", "--dist=worksteal", f"--tx={count}*popen//python={shlex.join((*sanitized, 'python'))}"


def _installed(session: nox.Session) -> str:
    """The compute-sanitizer of the session's environment; with --no-venv, this machine's."""
    if session.venv_backend == "none":
        found, where = shutil.which("compute-sanitizer"), "a CUDA toolkit"
    else:
        packages = Path(session.virtualenv.location).resolve().glob("lib/*/site-packages")
        tools = (tool for path in packages for tool in path.glob("nvidia/*/bin/compute-sanitizer"))
        found, where = next(map(str, tools), None), "nvidia-cuda-sanitizer-api"
    return found or session.error(f"compute-sanitizer, which comes with {where}, is not here")


def shares(tool: str, pytest_options: list[str]) -> list[list[str]]:
    """What runs together, as words for pytest: all tests, but those of a file alone under initcheck.

    It keeps some 70 MB of each test until its process ends.
    """
    chosen = any(option.startswith("tests") for option in pytest_options)
    if tool != "initcheck" or chosen:
        return [[]]
    return [[str(file)] for file in sorted(Path("tests").glob("test_*.py")) if file.name != "test_wheels.py"]


def unclean(logs: Path, count: int) -> list[str]:
    """What is wrong with the logs of sanitizers, one for each process of the tests."""
    said = [log.read_text() for log in logs.iterdir()]
    found = [f"found errors:\n{text}" for text in said if re.search("SUMMARY: [1-9]|Internal Sanitizer Error", text)]
    ended = "SUMMARY: |terminated before first instrumented API call"  # as of a process without a test
    found += [f"did not end:\n{text}" for text in said if not re.search(ended, text)]
    return found + (["did not see all processes of the tests"] if len(said) < count else [])
