"""Holds the workflows to their rules: each step calls a nox session that exists, with arguments that it takes."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from .arguments import PARSERS, PASSED_ON

SET_UP = re.compile(r"python -m pip install --require-hashes -r requirements/\w+\.txt")
PINNED = re.compile(r"(\$/.+|[\w./-]+@[0-9a-f]{40})")
CACHING = re.compile(r"\$/\.github/actions/nox$|actions/cache")
TOKEN = re.compile(r"github\.token|secrets\.")
MORE = re.compile(r"[\n;&|<>`()]")  # what has a shell run another command, quoted or not


def sessions(root: Path) -> set[str]:
    """The names of the nox sessions."""
    command = [sys.executable, "-m", "nox", "--list", "-f", str(root / "noxfile.py")]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"^[*-] ([\w-]+?)(?:-[\d.]+)?(?: ->|$)", listed, re.MULTILINE))


def call(command: str, known: set[str]) -> str | None:
    """What is wrong with the command of a step, or None."""
    if SET_UP.fullmatch(command):
        return None
    words = shlex.split(command)
    if words[:2] != ["nox", "-s"] or MORE.search(command):
        return "neither sets up nor calls one nox session"
    split = words.index("--") if "--" in words else len(words)
    called, arguments = words[2:split], [re.sub(r"\$\w+", "x", word) for word in words[split + 1 :]]
    for name in called:
        if name not in known:
            return f"there is no nox session {name}"
        if name in PARSERS:
            said = io.StringIO()
            try:
                with contextlib.redirect_stderr(said):
                    PARSERS[name]().parse_args(arguments)
            except SystemExit:
                return said.getvalue().splitlines()[-1]
        elif arguments and (name not in PASSED_ON or len(called) > 1):
            return f"nox -s {name} takes no arguments here"
    return None


def problems(path: Path, known: set[str]) -> Iterator[str]:
    """What breaks a rule in a workflow or an action."""
    content: dict[Any, Any] = yaml.safe_load(path.read_text())
    if "jobs" in content and content.get("permissions") != {}:
        yield "the workflow does not begin with no permissions (permissions: {})"
    jobs = content.get("jobs", {path.parent.name: content.get("runs", {})})
    for name, job in jobs.items():
        if "jobs" in content:
            if "permissions" not in job:
                yield f"{name}: has no permissions of its own"
            if "uses" not in job and "timeout-minutes" not in job:
                yield f"{name}: has no timeout"
        if TOKEN.search(f"{content.get('env')} {job.get('env')}"):
            yield f"{name}: a token is there for all steps, not for the one that needs it"
        for step in (job, *job.get("steps", ())):
            uses = step.get("uses", "$/itself")
            if not PINNED.fullmatch(uses):
                yield f"{name}: {uses} is not pinned to a commit"
            if (
                CACHING.match(uses)
                and "write" in str(job.get("permissions"))
                and step.get("with", {}).get("cache") != "false"
            ):
                yield f'{name}: may write, and takes caches that other runs left (with: {{ cache: "false" }})'
            if "run" in step and (wrong := call(step["run"].strip(), known)):
                yield f"{name}: {step['run'].strip()}: {wrong}"


def main(root: Path) -> int:
    """Prints what breaks a rule; returns how much."""
    known, count = sessions(root), 0
    for path in sorted(path for path in (root / ".github").glob("*/**/*") if path.suffix in (".yml", ".yaml")):
        for problem in problems(path, known):
            print(f"{path.relative_to(root)}: {problem}")
            count += 1
    return count


if __name__ == "__main__":
    sys.exit(1 if main(Path.cwd()) else 0)
