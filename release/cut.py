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
    """Makes and tags the release commit, and pushes both at once where a remote is given; returns the tag.

    A release that an earlier call without a remote made is pushed as it is.
    """
    history = read(root)
    if history.dirty:
        changed = ", ".join(line[3:] for line in git(root, "status", "--porcelain").splitlines()[:3])
        raise ReleaseError(
            f"the working tree has changes that are not committed ({changed}): commit them, or put them aside with "
            "git stash -u"
        )
    branch, made = git(root, "rev-parse", "--abbrev-ref", "HEAD").strip(), release_of_head(root)
    if remote:
        expect_default_branch(root, remote, branch)
        expect_the_same_releases(root, remote, branch, made)
    elif branch == "HEAD":
        raise ReleaseError("releases are made on a branch, and no branch is checked out: git checkout main")
    if not history.messages:
        if made and version in ("", made[1:]) and remote and made not in tags_of(root, remote):
            push(root, remote, branch, made)
            return made
        raise ReleaseError(f"there is nothing to release: this commit is {history.version} already")
    tag = f"v{version}" if version else "v{}.{}.{}".format(*history.next)
    if not TAG.fullmatch(tag):
        raise ReleaseError(f"--version: expected X.Y.Z, such as 1.0.0, got {version}")
    expect_to_follow(tag, history)
    if git(root, "tag", "--list", tag):
        raise ReleaseError(f"the tag {tag} exists and is never moved: give a higher version with --version")
    before = git(root, "rev-parse", "HEAD").strip()
    try:
        cliff("--tag", tag, "--output", CHANGELOG)
        git(root, "add", CHANGELOG)
        git(root, "commit", "--no-verify", "-m", f"chore(release): {tag}")
        git(root, "tag", "-a", tag, "-m", f"cuops {tag[1:]}")
        if remote:
            push(root, remote, branch, tag)
    except BaseException:  # a key that is pressed, too
        if remote and is_pushed(root, remote, tag):  # only the answer was lost
            return tag
        if git(root, "tag", "--list", tag):
            git(root, "tag", "-d", tag)
        git(root, "reset", "--hard", before)  # the tree was clean: only this release's changes go
        raise
    return tag


def push(root: Path, remote: str, branch: str, tag: str) -> None:
    """The branch and the tag, both or none."""
    if git(root, "ls-remote", remote, f"refs/heads/{tag}"):
        raise ReleaseError(f"{remote} has a branch {tag}, which would be taken for the tag: delete or rename it")
    git(root, "push", "--atomic", remote, f"HEAD:refs/heads/{branch}", f"refs/tags/{tag}")


def release_of_head(root: Path) -> str:
    """The tag of the release that the commit was made for, or none."""
    tag = git(root, "log", "-1", "--format=%s").strip().removeprefix("chore(release): ")
    return tag if TAG.fullmatch(tag) and tag in git(root, "tag", "--points-at", "HEAD").split() else ""


def expect_to_follow(tag: str, history: History) -> None:
    """A release is as high as its commits ask for, or higher."""
    if tuple(map(int, tag[1:].split("."))) < history.next:
        raise ReleaseError(
            f"{tag} does not follow from the commits, which lead to v{'.'.join(map(str, history.next))} or higher"
        )


def expect_default_branch(root: Path, remote: str, branch: str) -> None:
    """The branch that is checked out is the one that the remote's users get; an empty remote has none yet."""
    there = re.match(r"ref: refs/heads/(\S+)\s", git(root, "ls-remote", "--symref", remote, "HEAD"))
    if branch == "HEAD" or (there and branch != there[1]):
        got = "no branch" if branch == "HEAD" else f"the branch {branch}"
        of = f"{remote}'s branch {there[1]}" if there else "a branch"
        raise ReleaseError(f"releases are made on {of}, and {got} is checked out")


def expect_the_same_releases(root: Path, remote: str, branch: str, made: str) -> None:
    """The clone and the remote have the same releases, but for the one to push: versions and changelog go by them."""
    there = tags_of(root, remote)
    listed = git(root, "for-each-ref", "--format=%(refname:strip=2) %(objectname)", "refs/tags").splitlines()
    here = dict(line.split() for line in listed)
    if missing := [name for name in there if name not in here and TAG.fullmatch(name)]:
        raise ReleaseError(
            f"{remote} has releases that this clone does not know of, such as {missing[-1]}: "
            f"git pull --tags {remote} {branch}"
        )
    if own := [name for name in here if TAG.fullmatch(name) and name != made and there.get(name) != here[name]]:
        where = "elsewhere" if own[-1] in there else "not"
        raise ReleaseError(
            f"this clone has a tag {own[-1]} that {remote} has {where}, and versions follow from tags: "
            f"git tag -d {own[-1]}"
        )


def check(root: Path, tag: str, branch: str = "origin/main") -> None:
    """A tag that somebody pushed can be released: version, changelog and branch are as `cut` leaves them."""
    version = read(root).version
    if tag != f"v{version}" or not TAG.fullmatch(tag):
        raise ReleaseError(
            f"{tag} is not the version of this commit, {version}: git checkout {tag}, without changes of your own"
        )
    expect_to_follow(tag, read(root, before=True))
    changelog = root / CHANGELOG
    try:
        notes(changelog.read_text() if changelog.exists() else "", version)
    except ReleaseError as error:
        raise ReleaseError(f"{error}: {tag} was not made by nox -s release, which makes a higher one") from None
    if git(root, "rev-list", "--count", f"{branch}..{tag}").strip() != "0":
        raise ReleaseError(f"{tag} has commits that {branch} has not, as far as this clone knows: git fetch")


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
    except KeyboardInterrupt:
        sys.exit("release: interrupted, and undone")
    output(tag=tag)
    undo = f"git tag -d {tag} && git reset --hard HEAD~"
    print(
        f"{tag} is pushed"
        if options.push
        else f"{tag} is made here. To publish it: nox -s release -- --push origin. To undo it: {undo}"
    )


if __name__ == "__main__":
    main()
