"""The wheels of one release: what is in a set, and whether it is whole."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

from cuops_build import host, table
from packaging.metadata import ExceptionGroup, Metadata
from packaging.tags import Tag
from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

from . import ReleaseError, arguments

SUMS = "SHA256SUMS"
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Wheel:
    """A wheel and what an index says about it."""

    path: Path
    name: str
    version: str
    machine: str
    requires: tuple[str, ...]
    requires_python: str
    sha256: str
    metadata: bytes


def sha256(path: Path) -> str:
    """The digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def named(path: Path) -> tuple[str, Version, frozenset[Tag]]:
    """The name, version and tags in the file name of a wheel, or of a source distribution, which has no tags."""
    try:
        if path.suffix == ".gz":
            return *parse_sdist_filename(path.name), frozenset()
        name, version, _, tags = parse_wheel_filename(path.name)
    except (InvalidWheelFilename, InvalidSdistFilename) as error:
        raise ReleaseError(f"{path}: no wheel has such a name: {error}") from None
    return name, version, tags


def read(path: Path) -> Wheel:
    """A wheel, after a check that its name, metadata and bill of materials go together."""
    name, version, tags = named(path)
    try:
        with zipfile.ZipFile(path) as archive:
            info = f"{path.name.split('-')[0]}-{version}.dist-info"
            raw = archive.read(f"{info}/METADATA")
            bills = [entry for entry in archive.namelist() if entry.startswith(f"{info}/sboms/")]
    except (zipfile.BadZipFile, KeyError) as error:
        raise ReleaseError(f"{path}: not a whole wheel: {error}") from None
    try:
        metadata = Metadata.from_email(raw)
    except ExceptionGroup as group:
        raise ReleaseError(f"{path}: its metadata is wrong: {'; '.join(map(str, group.exceptions))}") from None
    if metadata.version != version or not bills:
        raise ReleaseError(
            f"{path.name}: its metadata says version {metadata.version}, and it has {len(bills)} bills of materials"
        )
    tag = ".".join(sorted(map(str, tags)))
    machine = tag.removeprefix("py3-none-").removeprefix(host.platform_tag(""))
    requires = tuple(str(requirement) for requirement in metadata.requires_dist or ())
    return Wheel(path, name, str(version), machine, requires, str(metadata.requires_python or ""), sha256(path), raw)


def files(folder: Path) -> list[Path]:
    """The wheels and source distributions in a folder, which may have other files."""
    return sorted((*folder.glob("*.whl"), *folder.glob("*.tar.gz")))


def one_version(folder: Path) -> str:
    """The version of all wheels and source distributions in a folder."""
    versions = {str(named(path)[1]) for path in files(folder)}
    if len(versions) != 1:
        raise ReleaseError(
            f"{folder}: expected the wheels of one version, found {', '.join(sorted(versions)) or 'none'}"
        )
    return versions.pop()


def read_set(folder: Path, rows: list[str] | None = None) -> list[Wheel]:
    """The wheels of one release, the core first: all rows for all machines, or `rows` for the same ones."""
    version = one_version(folder)
    wheels = sorted((read(path) for path in folder.glob("*.whl")), key=lambda wheel: (wheel.name, wheel.machine))
    found = {(wheel.name, wheel.machine) for wheel in wheels}
    machines = {machine for _, machine in found} & {*arguments.MACHINES} if rows else set()
    expected = {("cuops", "any")} | {
        (f"cuops-{row}", machine)
        for row in rows or table.read(ROOT / "cuda.toml")
        for machine in machines or arguments.MACHINES
    }
    if found != expected:
        difference = ", ".join(f"{name} for {machine}" for name, machine in sorted(found ^ expected))
        raise ReleaseError(f"{folder}: not the wheels of one whole release: {difference}")
    for wheel in wheels:
        if wheel.name != "cuops" and f"cuops=={version}" not in wheel.requires:
            raise ReleaseError(f"{wheel.path.name}: does not require cuops=={version}")
    return wheels


def check_sums(folder: Path) -> None:
    """Raises where a file is not the one that SHA256SUMS was written for."""
    if not (folder / SUMS).exists():
        raise ReleaseError(f"{folder / SUMS} is missing: nox -s wheels writes it")
    lines = [line.split() for line in (folder / SUMS).read_text().splitlines() if line]
    if any(len(words) != 2 for words in lines):
        raise ReleaseError(f"{folder / SUMS}: expected a digest and a name in each line")
    said = {name: digest for digest, name in lines}
    found = {path.name: sha256(path) for path in files(folder)}
    wrong = sorted(name for name in said.keys() | found.keys() if said.get(name) != found.get(name))
    if wrong:
        raise ReleaseError(
            f"not the files that {folder / SUMS} was written for, so nothing is published: {', '.join(wrong)}"
        )
