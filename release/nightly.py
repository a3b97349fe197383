"""The nightly decision, the trial of what was built, and the index that it goes to."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cuops_build import table
from cuops_build.version import VersionError, read

from . import ReleaseError, arguments, index, output, wheels

KEEP = 14  # nightlies
CHECK = "import cuops, numpy; assert cuops.rms_norm(numpy.ones((2, 8), 'f')).shape == (2, 8); print(cuops.__version__)"


def decide(root: Path, pages: Mapping[str, list[dict[str, Any]]], rows: Sequence[str]) -> str | None:
    """The version to build tonight, or None where the index has this commit's rows already, or it is a release."""
    version = read(root).version
    there = (
        any(file["filename"].split("-")[1] == version for file in pages.get(name, ()))
        for name in ("cuops", *(f"cuops-{row}" for row in rows))
    )
    return version if "dev" in version and not all(there) else None


def try_out(folder: Path, rows: list[str]) -> None:
    """Installs each backend from the wheels in `folder` into an environment of its own, and computes with it."""
    (version,) = {wheel.version for wheel in wheels.read_set(folder, rows)}
    for row in rows:
        with tempfile.TemporaryDirectory() as scratch:
            venv.create(scratch, with_pip=True)
            python = Path(scratch, "bin", "python")
            install = (python, "-m", "pip", "install", "-q")
            try:
                subprocess.run([*install, "--require-hashes", "-r", "requirements/runtime.txt"], check=True)
                # Of this folder and no other: pip would take an index's file of the same version before it.
                subprocess.run([*install, "--no-index", "--find-links", folder, f"cuops-{row}=={version}"], check=True)
                # Without a driver operators never load a backend's library, but the doctor does.
                subprocess.run([python, "-m", "cuops", "doctor", "--allow-no-gpu"], cwd=scratch, check=True)
                computed = subprocess.run(
                    [python, "-c", CHECK], cwd=scratch, check=True, stdout=subprocess.PIPE, text=True
                )
            except subprocess.CalledProcessError:
                raise ReleaseError(f"cuops-{row} {version} does not install, load or compute") from None
            said = computed.stdout.strip()
        if said != version:
            raise ReleaseError(f"cuops-{row} {version} says that it is {said}")
        print(f"cuops-{row} {version} installs, loads and computes in a clean environment")


def main() -> None:
    """The command line of the steps of `nox -s nightly`."""
    parser = arguments.nightly()
    parser.add_argument("step", choices=["decide", "try", "add"])
    parser.add_argument("--dist", type=Path, default=Path("dist"))
    options = parser.parse_args()
    try:
        if options.step == "decide":
            here = index.projects(options.index)
            pages = index.published(options.mirror) if options.mirror and not here else here
            rows = options.rows or list(table.read(Path.cwd() / "cuda.toml"))
            version = decide(Path.cwd(), pages, rows)
            is_release = "dev" not in read(Path.cwd()).version  # whose documentation is due, though its wheels are not
            if pages is not here and (version or is_release):
                index.mirror(options.mirror, options.index, pages)
            date = f"{datetime.now(timezone.utc):%Y%m%d}"  # of all images, which other machines make
            output(version=version or "", site="true" if version or is_release else "", date=date)
            print(version or "")
            return
        try_out(options.dist, options.rows)
        if options.step == "try":
            return
        release = wheels.read_set(options.dist, options.rows)
        index.add(options.index, release)
        gone = index.prune(options.index, KEEP)
        print(f"{options.index} has {release[0].version}; removed: {', '.join(gone) or 'nothing'}")
    except (ReleaseError, VersionError) as error:
        sys.exit(f"nightly: {error}")


if __name__ == "__main__":
    main()
