"""Cuts a release: the version from the commits, the changelog, a commit with it, and the tag; all or nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from cuops_build.version import TAG, History, VersionError, git, read

from . import ReleaseError, arguments, output

CHANGELOG = "CHANGELOG.md"


def cliff(*words: str) -> str:
    """What git-cliff prints."""
    done = subprocess.run(["git-cliff", "--offline", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"git-cliff failed: {done.stderr.strip()}")
    return done.stdout


def cut(root: Path, version: str, remote: str | None) -> str:
    """Makes and tags the release commit, and pushes both at once where a remote is given; returns the tag."""
    history = read(root)
    if history.dirty:
        raise ReleaseError(
            "the working tree has changes that are not committed: commit them, or put them aside with git stash"
        )
    if not history.messages:
        raise ReleaseError("there is nothing to release: this commit is tagged already")
    tag = f"v{version}" if version else "v{}.{}.{}".format(*history.next)
    if not TAG.fullmatch(tag):
        raise ReleaseError(f"--version: expected X.Y.Z, such as 1.0.0, got {version}")
    expect_to_follow(tag, history)
    if remote:
        expect_default_branch(root, remote)
    here = set(git(root, "tag", "--list").split())
    there = tags_of(root, remote) if remote else {}
    if tag in here or tag in there:
        raise ReleaseError(f"the tag {tag} exists and is never moved: give a higher version with --version")
    if remote and git(root, "ls-remote", remote, f"refs/heads/{tag}"):
        raise ReleaseError(f"{remote} has a branch {tag}, which would be taken for the tag: delete or rename it")
    if missing := [name for name in there if name not in here and TAG.fullmatch(name)]:
        raise ReleaseError(
            f"{remote} has releases that this clone does not know of, such as {missing[-1]}: git fetch --tags {remote}"
        )
    before = git(root, "rev-parse", "HEAD").strip()
    try:
        cliff("--tag", tag, "--output", CHANGELOG)
        git(root, "add", CHANGELOG)
        git(root, "commit", "--no-verify", "-m", f"chore(release): {tag}")
        git(root, "tag", "-a", tag, "-m", f"cuops {tag[1:]}")
        if remote:
            git(root, "push", "--atomic", remote, "HEAD", f"refs/tags/{tag}")
    except BaseException as error:  # a key that is pressed, too
        if remote and is_pushed(root, remote, tag):  # nothing is to be undone
            if isinstance(error, VersionError):  # only the answer was lost
                return tag
            raise
        if git(root, "tag", "--list", tag):
            git(root, "tag", "-d", tag)
        git(root, "reset", "--hard", before)  # the tree was clean: only this release's changes go
        raise
    return tag


def expect_to_follow(tag: str, history: History) -> None:
    """A release is as high as its commits ask for, or higher."""
    if tuple(map(int, tag[1:].split("."))) < history.next:
        raise ReleaseError(
            f"{tag} does not follow from the commits, which lead to v{'.'.join(map(str, history.next))} or higher"
        )


def expect_default_branch(root: Path, remote: str) -> None:
    """The branch that is checked out is the one that the remote's users get; an empty remote has none yet."""
    here = git(root, "rev-parse", "--abbrev-ref", "HEAD").strip()
    there = re.match(r"ref: refs/heads/(\S+)\s", git(root, "ls-remote", "--symref", remote, "HEAD"))
    if there and here != there[1]:
        got = "no branch" if here == "HEAD" else f"the branch {here}"
        raise ReleaseError(f"releases are made on {remote}'s branch {there[1]}, and {got} is checked out")


def check(root: Path, tag: str, branch: str = "origin/main") -> None:
    """A tag that somebody pushed can be released: version, changelog and branch are as `cut` leaves them."""
    version = read(root).version
    if tag != f"v{version}" or not TAG.fullmatch(tag):
        raise ReleaseError(f"{tag} is not the version of this commit, {version}")
    expect_to_follow(tag, read(root, before=True))
    changelog = root / CHANGELOG
    notes(changelog.read_text() if changelog.exists() else "", version)
    if git(root, "rev-list", "--count", f"{branch}..{tag}").strip() != "0":
        raise ReleaseError(f"{tag} has commits that {branch} has not")


def tags_of(root: Path, remote: str) -> dict[str, str]:
    """The tags of a remote, with what they point to."""
    listed = (line.split() for line in git(root, "ls-remote", "--tags", "--refs", remote).splitlines())
    return {name.removeprefix("refs/tags/"): commit for commit, name in listed}


def is_pushed(root: Path, remote: str, tag: str) -> bool:
    """Whether the remote has this very tag; not where it does not answer."""
    try:
        return tags_of(root, remote).get(tag) == git(root, "rev-parse", f"refs/tags/{tag}").strip()
    except VersionError:
        return False


def notes(changelog: str, version: str) -> str:
    """The part of the changelog about one version."""
    found = re.search(rf"^## {re.escape(version)} .*?(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if not found:
        raise ReleaseError(f"{CHANGELOG} has no section {version}")
    return found[0]


def main() -> None:
    """The command line of `nox -s release`."""
    options = arguments.release().parse_args()
    try:
        if options.check:
            check(Path.cwd(), options.check)
            print(f"{options.check} can be released")
            return
        tag = cut(Path.cwd(), options.version, options.push)
    except (ReleaseError, VersionError) as error:
        sys.exit(f"release: {error}")
    output(tag=tag)
    print(
        f"{tag} is pushed"
        if options.push
        else f"{tag} is made here; to publish it: git push --atomic origin HEAD {tag}"
    )


if __name__ == "__main__":
    main()
