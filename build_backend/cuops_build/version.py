"""Versions from commit messages: what the Conventional Commits since the last release add up to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Release = tuple[int, int, int]

TAG = re.compile(r"v(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)")
HEADER = re.compile(r"(?P<type>breaking changes?|\w+)(?P<scope>\([^()\n]+\))?(?P<breaking>!)?: *\S", re.IGNORECASE)
BREAKING = re.compile(r"^(BREAKING[ -]CHANGES?|Breaking changes?)(\([^()\n]+\))?!?(:\s*| #)\S", re.MULTILINE)
MAJOR, MINOR, PATCH = 0, 1, 2
SOURCES = ("build_backend", "csrc", "packages")  # what wheels are made from: all that is there goes in
FIRST: Release = (0, 1, 0)
REPOSITORY_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")  # a git hook sets them for its own repository


class VersionError(RuntimeError):
    """The history does not tell the version; the message says how to fix it."""


def level(message: str) -> int:
    """What a commit with this message changes: MAJOR, MINOR or PATCH."""
    header = HEADER.match(message)
    kind = header["type"].lower() if header else ""
    marked = header and (header["breaking"] or kind.startswith("breaking"))
    if marked or BREAKING.search(message.partition("\n")[2]):
        return MAJOR
    return MINOR if kind in ("feat", "feature") else PATCH


def bump(last: Release | None, messages: list[str]) -> Release:
    """The release that follows `last` with these commits. While it is 0.x, a breaking change is a minor one."""
    if last is None:
        return FIRST
    step = min((level(message) for message in messages), default=PATCH)
    if last[0] == 0:
        step = max(step, MINOR)
    major, minor, patch = last
    return {MAJOR: (major + 1, 0, 0), MINOR: (major, minor + 1, 0), PATCH: (major, minor, patch + 1)}[step]


def git(root: Path, *arguments: str) -> str:
    """What git prints, in the repository at `root`."""
    command = [
        "git",
        "-C",
        str(root),
        "-c",
        "log.showSignature=false",
        "-c",
        "i18n.logOutputEncoding=utf-8",
        *arguments,
    ]
    environment = {name: value for name, value in os.environ.items() if name not in REPOSITORY_VARIABLES}
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", env=environment, check=False
    )
    if done.returncode:
        raise VersionError(f"git {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True)
class History:
    """What happened since the last release: the highest tag vX.Y.Z that this commit contains."""

    last: Release | None
    messages: list[str]
    changed: list[str]  # files that are not as they are committed

    @property
    def next(self) -> Release:
        """The release that these commits lead to."""
        return bump(self.last, self.messages)

    @property
    def version(self) -> str:
        """X.Y.Z of a tagged commit, else X.Y.Z.devN, N commits after the last release, of the release to come."""
        if self.last and not self.messages and not self.changed:
            return "{}.{}.{}".format(*self.last)
        return "{}.{}.{}.dev{}".format(*self.next, len(self.messages))


def read(root: Path, before: bool = False) -> History:
    """The history of the commit that is checked out at `root`; with `before`, as before this commit was tagged."""
    others = ("--no-contains", "HEAD") if before else ()
    tags = (TAG.fullmatch(name) for name in git(root, "tag", "--merged", "HEAD", *others).split())
    releases = [(int(tag[1]), int(tag[2]), int(tag[3])) for tag in tags if tag]
    last = max(releases, default=None)
    since = "v{}.{}.{}..HEAD".format(*last) if last else "HEAD"
    messages = [message.strip() for message in git(root, "log", "--format=%B%x00", since).split("\0")[:-1]]
    if messages and git(root, "rev-parse", "--is-shallow-repository").strip() == "true":
        raise VersionError(
            "this clone is shallow, and versions need all commits since the last release: git fetch --unshallow --tags"
        )
    changed = [line[3:] for line in git(root, "status", "--porcelain", "--untracked-files=no").splitlines()]
    added = git(root, "ls-files", "--others", "--exclude-standard", "--", *SOURCES).splitlines()
    return History(last, messages, changed + added)


def scheme(version: Any) -> str:
    """setuptools-scm's version scheme. It has git describe no tag: it would parse those that are no versions, too."""
    return read(Path(version.config.absolute_root)).version


if __name__ == "__main__":
    try:
        history = read(Path.cwd())
    except VersionError as error:
        sys.exit(str(error))
    print("{}.{}.{}".format(*history.next) if "--next" in sys.argv[1:] else history.version)
