"""Versions from commit messages: what the Conventional Commits since the last tag add up to."""

from __future__ import annotations

import re
import subprocess
from typing import Any

HEADER = re.compile(r"(?P<type>[A-Za-z ]+?)(\((?P<scope>[^)]*)\))?(?P<breaking>!)?: \S")
BREAKING = re.compile(r"^BREAKING[ -]CHANGE: |^Breaking changes?: ", re.MULTILINE)
MAJOR, MINOR, PATCH = 0, 1, 2


def level(message: str) -> int:
    """What a commit with this message changes: MAJOR, MINOR or PATCH."""
    header = HEADER.match(message)
    kind = header["type"].lower() if header else ""
    if (header and header["breaking"]) or BREAKING.search(message) or kind.startswith("breaking change"):
        return MAJOR
    return MINOR if kind in ("feat", "feature") else PATCH


def bump(release: tuple[int, int, int], messages: list[str]) -> tuple[int, int, int]:
    """The release after `release` that contains these commits. While it is 0.x, a breaking change is a minor one."""
    step = min((level(message) for message in messages), default=PATCH)
    if release[0] == 0:
        step = max(step, MINOR)
    return (*release[:step], release[step] + 1, *(0,) * (2 - step))  # type: ignore[return-value]


def scheme(version: Any) -> str:
    """setuptools-scm's version scheme: the tag itself, or X.Y.Z.devN with the release that N commits lead to."""
    if version.exact:
        return str(version.tag)
    tag = str(version.tag) if version.node and version.tag else "0.0.0"
    described = subprocess.run(
        ["git", "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*"],
        cwd=version.config.absolute_root,
        capture_output=True,
        text=True,
        check=False,
    )
    since = f"{described.stdout.strip()}..HEAD" if described.returncode == 0 else "HEAD"
    log = subprocess.run(
        ["git", "log", "--format=%B%x00", since],
        cwd=version.config.absolute_root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    messages = [message.strip() for message in log.split("\0") if message.strip()]
    release = tuple(int(part) for part in tag.split(".")[:3])
    return "{}.{}.{}.dev{}".format(*bump(release, messages), len(messages))  # type: ignore[arg-type]
