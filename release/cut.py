"""Cuts a release: the version from the commits, the changelog, a commit with it, and the tag; all or nothing."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from cuops_build.version import TAG, History, VersionError, git, read

from . import ReleaseError, arguments, output

CHANGELOG = "CHANGELOG.md"


def cliff(root: Path, *words: str) -> str:
    """What git-cliff prints, in the repository at `root`."""
    done = subprocess.run(["git-cliff", "--offline", *words], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"git-cliff failed: {done.stderr.strip()}")
    return done.stdout


def cut(root: Path, version: str, remote: str | None) -> str:
    """Makes and tags the release commit, and pushes both at once where a remote is given; returns the tag.

    A release that an earlier call without a remote made is pushed as it is.
    """
    history = read(root)
    if history.changed:
        raise ReleaseError(
            f"the working tree has changes that are not committed ({', '.join(history.changed[:3])}): commit them, or "
            "put them aside with git stash -u"
        )
    branch, made = git(root, "branch", "--show-current").strip(), release_of_head(root)
    if remote:
        expect_default_branch(root, remote, branch)
        expect_the_same_releases(root, remote, branch, made)
        expect_nothing_to_come_along(root, remote, branch, made)
    elif not branch:
        raise ReleaseError("releases are made on a branch, and no branch is checked out: git checkout main")
    if made and remote and made not in tags_of(root, remote):
        if version not in ("", made[1:]):
            raise ReleaseError(f"{made} was made here and is not pushed yet. To undo it: {undoing(made)}")
        expect_release(root, made)
        push(root, remote, branch, made)
        return made
    if not history.messages:
        more = "; to finish it, run the workflow release on its tag" if remote else ""
        raise ReleaseError(f"there is nothing to release: this commit is {history.version} already{more}")
    tag = f"v{version}" if version else "v{}.{}.{}".format(*history.next)
    if not TAG.fullmatch(tag):
        raise ReleaseError(f"--version: expected X.Y.Z, such as 1.0.0, got {version}")
    expect_to_follow(tag, history)
    if git(root, "tag", "--list", tag):
        made_of, head = git(root, "log", "-1", "--format=%P", tag), git(root, "rev-parse", "HEAD")
        if remote and tag in tags_of(root, remote) and made_of == head:
            return tag  # by a run that is run again
        raise ReleaseError(f"the tag {tag} exists and is never moved: give a higher version with --version")
    before = git(root, "rev-parse", "HEAD").strip()
    try:
        cliff(root, "--tag", tag, "--output", CHANGELOG)
        git(root, "add", CHANGELOG)
        # Without hooks, of which --no-verify leaves some; empty after a release that was undone.
        git(root, "-c", "core.hooksPath=/dev/null", "commit", "--allow-empty", "-m", f"chore(release): {tag}")
        git(root, "tag", "-a", tag, "-m", f"cuops {tag[1:]}")
        if remote:
            push(root, remote, branch, tag)
    except BaseException:  # a key that is pressed, too
        with undisturbed():
            if git(root, "tag", "--list", tag):
                git(root, "tag", "-d", tag)
            git(root, "reset", "--hard", before)  # the tree was clean: only this release's changes go
        raise
    return tag


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Does what has to be done although a key is pressed again, here and in the processes that begin here."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def push(root: Path, remote: str, branch: str, tag: str) -> None:
    """The branch and the tag, both or none; an answer that is lost, or not waited for, is asked for again."""
    if git(root, "ls-remote", remote, f"refs/heads/{tag}"):
        raise ReleaseError(f"{remote} has a branch {tag}, which would be taken for the tag: delete or rename it")
    try:
        git(root, "push", "--atomic", remote, f"HEAD:refs/heads/{branch}", f"refs/tags/{tag}")
    except BaseException:
        with undisturbed():
            arrived = is_pushed(root, remote, tag)
        if not arrived:
            raise


def release_of_head(root: Path) -> str:
    """The tag of the release that the commit was made for, or none."""
    tag = git(root, "log", "-1", "--format=%s").strip().removeprefix("chore(release): ")
    return tag if TAG.fullmatch(tag) and tag in git(root, "tag", "--points-at", "HEAD").split() else ""


def undoing(tag: str) -> str:
    """The command that undoes a release that is not pushed; commits after it stay."""
    return f"git rebase --onto {tag}~ {tag} && git tag -d {tag}"


def expect_to_follow(tag: str, history: History) -> None:
    """A release is as high as its commits ask for, or higher."""
    if tuple(map(int, tag[1:].split("."))) < history.next:
        raise ReleaseError(
            f"{tag} does not follow from the commits, which lead to v{'.'.join(map(str, history.next))} or higher"
        )


def expect_default_branch(root: Path, remote: str, branch: str) -> None:
    """The branch that is checked out is the one that the remote's users get; an empty remote has none yet."""
    there = re.match(r"ref: refs/heads/(\S+)\s", git(root, "ls-remote", "--symref", remote, "HEAD"))
    if not branch or (there and branch != there[1]):
        got = f"the branch {branch}" if branch else "no branch"
        of = f"{remote}'s branch {there[1]}" if there else "a branch"
        raise ReleaseError(f"releases are made on {of}, and {got} is checked out")


def expect_the_same_releases(root: Path, remote: str, branch: str, made: str) -> None:
    """The clone and the remote have the same releases, but for the one to push: versions and changelog go by them."""
    there = tags_of(root, remote)
    listed = git(root, "for-each-ref", "--format=%(refname:strip=2) %(objectname)", "refs/tags").splitlines()
    here = dict(line.split() for line in listed)
    first = f"{undoing(made)} && " if made and made not in there else ""
    if missing := [name for name in there if name not in here and TAG.fullmatch(name)]:
        raise ReleaseError(
            f"{remote} has releases that this clone does not know of, such as {missing[-1]}: "
            f"{first}git pull --tags {remote} {branch}"
        )
    for name in here:
        if TAG.fullmatch(name) and name in there and there[name] != here[name]:
            undo = undoing(name) if name == made else f"git tag -d {name}"
            raise ReleaseError(f"{remote} has {name} elsewhere: {undo} && git pull --tags {remote} {branch}")
        if TAG.fullmatch(name) and name not in there and name != made:
            raise ReleaseError(
                f"this clone has a tag {name} that {remote} has not, and versions follow from tags: git tag -d {name}, "
                f"or, if that was released, git push {remote} refs/tags/{name}"
            )


def expect_nothing_to_come_along(root: Path, remote: str, branch: str, made: str) -> None:
    """The remote's branch has every commit but that of the release: what is released was there to be looked at."""
    there = git(root, "ls-remote", remote, f"refs/heads/{branch}")
    if there:
        git(root, "fetch", "--quiet", "--no-tags", "--refmap=", remote, f"refs/heads/{branch}")
    known = ("--not", "FETCH_HEAD") if there else ()
    if more := git(root, "log", "-1", "--format=%s", f"{made}~" if made else "HEAD", *known).strip():
        raise ReleaseError(
            f"{remote}'s branch {branch} has not all commits of this clone, and a release takes none along: bring them "
            f"there first, up to “{more}”"
        )


def check(root: Path, tag: str, branch: str = "origin/main") -> None:
    """A tag that somebody pushed can be released: version, changelog and branch are as `cut` leaves them."""
    expect_release(root, tag)
    if git(root, "rev-list", "--count", f"{branch}..{tag}").strip() != "0":
        raise ReleaseError(f"{tag} has commits that {branch} has not, as far as this clone knows: git fetch")


def expect_release(root: Path, tag: str) -> None:
    """The commit that is checked out is this release: it has the commits' version, or a higher one, and a changelog."""
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
        sys.exit("release: interrupted; nothing is pushed")
    output(tag=tag)
    print(
        f"{tag} is pushed"
        if options.push
        else f"{tag} is made here. To publish it: nox -s release -- --push origin. To undo it: {undoing(tag)}"
    )


if __name__ == "__main__":
    main()
