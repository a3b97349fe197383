"""Uploads the wheels of one release to a package index: all verified before the first, never other bytes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import requests
from packaging.version import Version
from pypi_simple import PYPI_SIMPLE_ENDPOINT, NoSuchProjectError, PyPISimple

from . import ReleaseError, arguments, wheels


def published(simple: str, names: set[str]) -> dict[str, str | None]:
    """The files of these projects on the index by name, with their SHA-256 where the index tells."""
    files: dict[str, str | None] = {}
    with PyPISimple(simple) as index:
        for name in names:
            try:
                page = index.get_project_page(name, timeout=30)
            except NoSuchProjectError:
                continue
            files.update({package.filename: package.digests.get("sha256") for package in page.packages})
    return files


def twine(*words: str) -> None:
    """Runs twine, which reads credentials from its own variables and files."""
    done = subprocess.run([sys.executable, "-m", "twine", *words], check=False)
    if done.returncode:
        raise ReleaseError(f"twine {words[0]} failed")


def publish(
    folder: Path, index: list[str], simple: str, attest: bool = False, rows: list[str] | None = None
) -> list[str]:
    """Uploads what the index lacks, the core before the backends that need it; returns the names of the files."""
    wheels.check_sums(folder)
    release = wheels.read_set(folder, rows)
    if Version(release[0].version).is_prerelease:
        raise ReleaseError(
            f"{release[0].version} is no release: nox -s release makes one, whose wheels are to be built"
        )
    twine("check", "--strict", *(str(wheel.path) for wheel in release))
    try:
        there = published(simple, {wheel.name for wheel in release})
    except requests.RequestException as error:
        raise ReleaseError(f"the index does not answer, so nothing is published: {error}") from error
    for wheel in release:
        said = there.get(wheel.path.name, wheel.sha256)
        if said is None:
            raise ReleaseError(
                f"{wheel.path.name} is on the index without a SHA-256 to compare, so nothing is published"
            )
        if said != wheel.sha256:
            raise ReleaseError(
                f"{wheel.path.name} is on the index with other bytes, so nothing is published: make a new version"
            )
    missing = [wheel for wheel in release if wheel.path.name not in there]
    if attest and missing:
        for wheel in missing:  # those of a run that broke
            Path(f"{wheel.path}.publish.attestation").unlink(missing_ok=True)
        signed = subprocess.run(
            [sys.executable, "-m", "pypi_attestations", "sign", *(str(w.path) for w in missing)], check=False
        )
        if signed.returncode:
            raise ReleaseError("signing failed, so nothing is published")
    for wheel in missing:
        attestations = [f"{wheel.path}.publish.attestation"] if attest else []
        try:
            twine(
                "upload",
                "--non-interactive",
                *index,
                *(["--attestations"] if attest else []),
                str(wheel.path),
                *attestations,
            )
        except ReleaseError as error:
            raise ReleaseError(
                f"the upload stopped at {wheel.path.name}; run the same command again to finish it"
            ) from error
    return [wheel.path.name for wheel in missing]


def await_all(folder: Path, simple: str, rows: list[str] | None = None, seconds: float = 120) -> None:
    """Raises unless the index shows every file with the bytes that are in the folder."""
    release = wheels.read_set(folder, rows)
    deadline = time.monotonic() + seconds
    while True:
        reason = ""
        try:
            there = published(simple, {wheel.name for wheel in release})
        except requests.RequestException as error:
            there, reason = {}, f": {error}"
        wrong = [wheel.path.name for wheel in release if there.get(wheel.path.name) != wheel.sha256]
        if not wrong:
            return
        if time.monotonic() > deadline:
            raise ReleaseError(
                f"all is uploaded, but the index does not show {', '.join(wrong)} with these bytes{reason}"
            )
        time.sleep(2)


def main() -> None:
    """The command line of `nox -s publish`."""
    options = arguments.publish().parse_args()
    if options.index != "pypi" and not options.simple:
        sys.exit("publish: --index needs --simple URL, where pip reads that index, to see what is there already")
    simple = options.simple or PYPI_SIMPLE_ENDPOINT
    index = ["--repository-url" if "://" in options.index else "--repository", options.index]
    try:
        done = publish(options.dist, index, simple, options.attest, options.only)
        await_all(options.dist, simple, options.only)
    except ReleaseError as error:
        sys.exit(f"publish: {error}")
    print(f"published {', '.join(done)}" if done else "everything was published already")


if __name__ == "__main__":
    main()
