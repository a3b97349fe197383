"""Writes everything that derives from cuda.toml. `--check` writes nothing and fails where something is stale."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from . import table
from .table import Cuda

ROOT = Path(__file__).resolve().parents[2]
SHARED = ("build_backend", "csrc")

BUILD_REQUIRES = table.build_requires(ROOT / "packages/cuops/pyproject.toml")
COMPILER_REQUIRES = ("apache-tvm-ffi==0.1.15.post2", "ziglang==0.17.0")
RUNTIME_REQUIRES = ("apache-tvm-ffi>=0.1.9,<0.2",)  # of wheels

PYPROJECT = """\
# Derived from cuda.toml; change that, then run `nox -s regenerate`.
[build-system]
requires = [
{requires}
]
build-backend = "cuops_build"
backend-path = ["build_backend"]

[project]
name = "{c.distribution}"
dynamic = ["version", "dependencies"]
description = "CUDA {c.cuda} backend of cuops"
readme = "README.md"
license = "Apache-2.0 AND MIT"
license-files = ["LICENSE", "csrc/host/lzma.zig.LICENSE"]
requires-python = ">=3.10"
classifiers = ["Environment :: GPU :: NVIDIA CUDA", "Operating System :: POSIX :: Linux", "Programming Language :: Python :: 3"]
entry-points."cuops.backends".{c.name} = "{c.package}"
urls.Documentation = "https://cuops.github.io/cuops/"
urls.Source = "https://github.com/cuops/cuops"

[tool.hatch]
version = {{ source = "vcs", raw-options = {{ root = "../..", version_scheme = "cuops_build.version:scheme", local_scheme = "no-local-version", scm = {{ git = {{ pre_parse = "fail_on_shallow", describe_command = "git describe --exclude=*" }} }} }} }}
metadata.hooks.custom = {{ path = "build_backend/hatch_build.py", dependencies = {runtime} }}
build.hooks.custom.path = "build_backend/hatch_build.py"
build.targets.wheel.bypass-selection = true
build.targets.wheel.core-metadata-version = "2.4"  # which installers and indexes know
build.targets.sdist.core-metadata-version = "2.4"

[tool.cuops]
{row}
"""

KNOWN_BACKENDS = '''\
"""Derived from cuda.toml; change that, then run `nox -s regenerate`."""

# The CUDA version that a driver must know to run a backend, from the oldest to the newest backend.
LEAST_DRIVER = {{
{rows}
}}

# The compute capabilities that it has machine code for (75 is 7.5), and that of its PTX.
CODE = {{
{code}
}}
'''

README = """\
# {c.distribution}

The CUDA {c.cuda} backend of [cuops](https://pypi.org/project/cuops/): `pip install {c.distribution}`, then `import cuops`.
It needs an NVIDIA driver of version {c.driver} or newer, and runs on GPUs of compute capability {capabilities}.
"""


def capability(architecture: int) -> str:
    """75 as 7.5."""
    return f"{architecture // 10}.{architecture % 10}"


def capabilities(c: Cuda) -> str:
    """What runs it: from its first machine code on, but for major versions that have none and are older than its PTX."""
    majors = {architecture // 10 for architecture in c.architectures}
    missing = [f"{major}.x" for major in range(min(majors), c.ptx // 10) if major not in majors]
    return f"{capability(c.architectures[0])} and newer" + (f", except {', '.join(missing)}" if missing else "")


def docs_table(rows: dict[str, Cuda]) -> str:
    """The table of CUDA versions in docs/cuda-versions.md."""
    lines = ["| Package | CUDA | Driver | Compute capabilities | Newer GPUs |", "|---|---|---|---|---|"]
    for c in rows.values():
        compiled = ", ".join(capability(a) for a in c.architectures)
        lines.append(
            f"| `{c.distribution}` | {c.cuda} | {c.driver} or newer | {compiled} | PTX of {capability(c.ptx)} |"
        )
    return "\n".join(lines) + "\n"


def derived(rows: dict[str, Cuda]) -> dict[Path, str]:
    """Every derived file, and what must be in it."""
    license_text = (ROOT / "LICENSE").read_text()
    least = "\n".join(f'    "{c.name}": ({c.driver_cuda.replace(".", ", ")}),' for c in rows.values())
    code = "\n".join(f'    "{c.name}": ({c.architectures}, {c.ptx}),' for c in rows.values())
    files = {
        Path("packages/cuops/src/cuops/_known_backends.py"): KNOWN_BACKENDS.format(rows=least, code=code),
        Path("docs/cuda-versions.md"): docs_table(rows),
        Path("packages/cuops/LICENSE"): license_text,
    }
    for c in rows.values():
        folder = Path("packages") / c.distribution
        row = "\n".join(f"{name} = {json.dumps(value)}" for name, value in asdict(c).items() if name != "name")
        requires = "\n".join(f'  "{requirement}",' for requirement in (*BUILD_REQUIRES, *COMPILER_REQUIRES, *c.wheels))
        files[folder / "pyproject.toml"] = PYPROJECT.format(
            c=c, requires=requires, runtime=json.dumps(RUNTIME_REQUIRES), row=row
        )
        files[folder / "LICENSE"] = license_text
        files[folder / "README.md"] = README.format(c=c, capabilities=capabilities(c))
    return files


def links(rows: dict[str, Cuda]) -> dict[Path, str]:
    """The links to the folders that packages share, which a source distribution holds as folders."""
    found = {Path("packages/cuops/build_backend"): "../../build_backend"}
    found.update({Path("packages") / c.distribution / name: f"../../{name}" for c in rows.values() for name in SHARED})
    return found


def main(check: bool) -> int:
    """Returns how many files are, or were, stale."""
    rows = table.read(ROOT / "cuda.toml")
    stale = 0
    for path, text in derived(rows).items():
        if (ROOT / path).exists() and (ROOT / path).read_text() == text:
            continue
        stale += 1
        print(f"{'stale' if check else 'wrote'}: {path}")
        if not check:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(text)
    for path, target in links(rows).items():
        if (ROOT / path).is_symlink() and (ROOT / path).readlink() == Path(target):
            continue
        stale += 1
        print(f"{'stale' if check else 'linked'}: {path}")
        if not check:
            (ROOT / path).unlink(missing_ok=True)
            (ROOT / path).symlink_to(target)
    expected = {"cuops", *(c.distribution for c in rows.values())}
    folders = (path for path in (ROOT / "packages").iterdir() if path.is_dir())
    for path in sorted((*folders, *(ROOT / "requirements").glob("cuops-*.txt"))):
        if path.stem not in expected:
            stale += 1
            print(f"not in cuda.toml, to be deleted by hand: {path.relative_to(ROOT)}")
    return stale


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="nox -s regenerate --", description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    sys.exit(1 if main(check) and check else 0)
