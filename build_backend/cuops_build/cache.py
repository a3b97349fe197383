"""Build products by content: what was made once from the same inputs is not made again."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path


def directory() -> Path:
    """Where products are kept: CUOPS_BUILD_CACHE, or a folder of the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("CUOPS_BUILD_CACHE") or Path(base) / "cuops-build")


def key(*parts: str, files: Iterable[Path] = (), root: Path | None = None) -> str:
    """A name for the product of `parts` and of the contents of `files`, wherever `root` is."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    for file in sorted(files):
        digest.update(str(file.relative_to(root) if root else file).encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def made_directory() -> Path:
    """`directory`, which exists from now on."""
    try:
        directory().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"no build products can be kept: {error}; set CUOPS_BUILD_CACHE to a folder of yours") from None
    return directory()


def load(name: str) -> bytes | None:
    """The product of that name, or None."""
    path = directory() / name
    try:
        product = path.read_bytes()
    except FileNotFoundError:
        return None
    with contextlib.suppress(FileNotFoundError, PermissionError):  # gone since, or of a cache that is another user's
        os.utime(path)  # which `prune` looks at
    return product


def store(name: str, product: bytes) -> None:
    """Keeps a product; readers see it whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=made_directory(), delete=False) as file:
        file.write(product)
    Path(file.name).replace(directory() / name)


def prune(days: float = 30) -> None:
    """Removes the products that no build has asked for in so many days."""
    oldest = time.time() - days * 86400
    for path in directory().iterdir():
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if path.is_file() and path.suffix != ".lock" and path.stat().st_mtime < oldest:
                path.unlink()


@contextlib.contextmanager
def one_builder(what: str) -> Iterator[None]:
    """Lets one process at a time make `what`; those that waited find it among the products."""
    with (made_directory() / f"{what}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
