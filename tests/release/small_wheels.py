"""Wheels to publish: small ones that are whole in every way that the release train looks at."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from cuops_build import sbom

ROWS = ("cu118", "cu121")


def write_wheel(folder: Path, name: str, version: str, tag: str, requires: str = "", bill: bool = True) -> Path:
    """A wheel that holds metadata and nothing else."""
    stem = f"{name.replace('-', '_')}-{version}"
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {name}",
        f"Version: {version}",
        "Summary: A test",
        "Requires-Python: >=3.10",
    ]
    lines += [f"Requires-Dist: {requires}"] if requires else []
    files = {
        f"{name.replace('-', '_')}/__init__.py": "",
        f"{stem}.dist-info/METADATA": "\n".join(
            [*lines, "Description-Content-Type: text/markdown", "", "# A test", ""]
        ),
        f"{stem}.dist-info/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    if bill:
        files[f"{stem}.dist-info/sboms/{name}.cdx.json"] = sbom.cyclonedx(name, version, "Apache-2.0").decode()
    record = "".join(f"{path},,\n" for path in files) + f"{stem}.dist-info/RECORD,,\n"
    with zipfile.ZipFile(folder / f"{stem}-{tag}.whl", "w") as archive:
        for path, text in {**files, f"{stem}.dist-info/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(path), text)
    return folder / f"{stem}-{tag}.whl"


def write_sums(folder: Path) -> None:
    """SHA256SUMS of the wheels and source distributions in a folder."""
    files = sorted((*folder.glob("*.whl"), *folder.glob("*.tar.gz")))
    sums = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (folder / "SHA256SUMS").write_text("".join(sums))
