"""The faults of a rehearsal: each must end with a clear message, a non-zero exit, and nothing half-published."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from cuops_build.version import git, read

from . import ReleaseError, publish, servers

if TYPE_CHECKING:
    from .rehearse import Rehearsal

ONLY = ("--only", "cu118", "cu121")


def _expect(said: str, words: str) -> str:
    line = next((line for line in reversed(said.splitlines()) if words in line), None)
    if line is None:
        raise ReleaseError(f"expected a message with {words!r}, got:\n{said}")
    return line


def _state(r: Rehearsal) -> tuple[str, ...]:
    """All that a release may change: the tags and the branch, here and at the origin, and the files."""
    return (*(git(where, "for-each-ref") for where in (r.clone, r.origin)), git(r.clone, "status", "--porcelain"))


def of_release(r: Rehearsal) -> None:
    """Commits and a tag of this clone alone; a dirty tree; an origin that refuses the push."""
    with r.station("fault: commits that the origin has not") as seen:
        state = _state(r)
        seen.append(_expect(r.tool("cut", "--push", "origin", fails=True), "has not all commits"))
        if _state(r) != state:
            raise ReleaseError("a release was begun of commits that the origin has not")
        git(r.clone, "push", "--quiet", "origin", "HEAD:main")
    with r.station("fault: a dirty tree") as seen:
        before = (r.clone / "cuda.toml").read_text()
        (r.clone / "cuda.toml").write_text(before + "\n")
        state = _state(r)
        seen.append(_expect(r.tool("cut", "--push", "origin", fails=True), "not committed"))
        if _state(r) != state:
            raise ReleaseError("a release was begun in a dirty tree")
        (r.clone / "cuda.toml").write_text(before)
    tag = "v{}.{}.{}".format(*read(r.clone).next)
    with r.station("fault: a tag that the origin has not") as seen:
        elsewhere = r.run("git", "commit-tree", "HEAD^{tree}", "-m", "chore: elsewhere")
        git(r.clone, "tag", tag, elsewhere)
        state = _state(r)
        seen.append(_expect(r.tool("cut", "--push", "origin", fails=True), "that origin has not"))
        if _state(r) != state:
            raise ReleaseError("a release was begun beside a tag that the origin has not")
        git(r.clone, "tag", "-d", tag)
    with r.station("fault: an origin that refuses the push") as seen:
        hook = r.origin / "hooks/pre-receive"
        hook.parent.mkdir(exist_ok=True)
        hook.write_text("#!/bin/sh\necho main is protected\nexit 1\n")
        hook.chmod(0o755)
        state = _state(r)
        seen.append(_expect(r.tool("cut", "--push", "origin", fails=True), "main is protected").strip())
        if _state(r) != state:
            raise ReleaseError("a commit or a tag stayed behind after a push that was refused")
        hook.unlink()


def of_publish(r: Rehearsal, version: str, url: str) -> None:
    """A wheel whose bytes changed; an index that is down; an upload that breaks off; other bytes under a name."""
    dist, simple = r.clone / "dist", f"{url}/simple/"
    names = {"cuops", "cuops-cu118", "cuops-cu121"}
    victim = f"cuops-{version}-py3-none-any.whl"

    def copy(name: str, sums: bool) -> Path:
        """The wheels with one more byte in the core's, and with or without that in SHA256SUMS."""
        folder = Path(shutil.copytree(dist, r.scratch / name))
        before = hashlib.sha256((folder / victim).read_bytes()).hexdigest()
        content = (folder / victim).read_bytes()
        (folder / victim).write_bytes(content[:-2] + b"\x01\x00!")  # a comment at the end of the archive
        if sums:
            text = (folder / "SHA256SUMS").read_text()
            after = hashlib.sha256((folder / victim).read_bytes()).hexdigest()
            (folder / "SHA256SUMS").write_text(text.replace(before, after))
        return folder

    with r.station("fault: a wheel whose bytes changed") as seen:
        changed = copy("changed", sums=False)
        said = r.tool("publish", "--dist", changed, "--index", url, "--simple", simple, *ONLY, fails=True)
        seen.append(_expect(said, "nothing is published").replace(str(r.scratch), "…"))
    with r.station("fault: an index that is down") as seen:
        down = f"http://127.0.0.1:{servers.free_port()}"
        said = r.tool("publish", "--index", down, "--simple", f"{down}/simple/", *ONLY, fails=True)
        seen.append(_expect(said, "does not answer")[:100] + " …")
    if publish.published(simple, names):
        raise ReleaseError("a fault before the first upload left files on the index")
    with r.station("fault: an upload that breaks in the middle") as seen, servers.jamming_door(url, uploads=1) as door:
        said = r.tool("publish", "--index", door, "--simple", simple, *ONLY, fails=True)
        seen.append(_expect(said, "the upload stopped at"))
        if set(publish.published(simple, names)) != {victim}:
            raise ReleaseError("an upload that broke after the core left something else on the index")
        seen.append("on the index: the core alone, which no backend misses")
    with r.station("fault: other bytes under a name that is taken") as seen:
        other = copy("other", sums=True)
        said = r.tool("publish", "--dist", other, "--index", url, "--simple", simple, *ONLY, fails=True)
        seen.append(_expect(said, "with other bytes"))
        if set(publish.published(simple, names)) != {victim}:
            raise ReleaseError("a wheel with other bytes was uploaded, or drew others with it")


def of_images(r: Rehearsal) -> None:
    """A registry that is down."""
    with r.station("fault: a registry that is down") as seen:
        registry = f"127.0.0.1:{servers.free_port()}"
        said = r.tool("images", "--cuda", "cu121", "--push", "--registry", registry, fails=True)
        seen.append(_expect(said, "does not answer")[:100] + " …")
