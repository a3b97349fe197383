"""cuda.toml, the table of CUDA versions that everything else derives from."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Cuda:
    """A row of cuda.toml; its comments say what the fields mean."""

    name: str
    cuda: str
    wheels: tuple[str, ...]
    architectures: tuple[int, ...]
    ptx: int
    driver: str
    driver_cuda: str

    @property
    def distribution(self) -> str:
        """What pip calls the backend."""
        return f"cuops-{self.name}"

    @property
    def package(self) -> str:
        """What Python imports."""
        return f"cuops_{self.name}"


def row(name: str, fields: dict[str, Any]) -> Cuda:
    """A row from its fields as TOML has them."""
    return Cuda(name, **{**fields, "wheels": tuple(fields["wheels"]), "architectures": tuple(fields["architectures"])})


def read(path: Path) -> dict[str, Cuda]:
    """The rows of the table at `path` by name, from the oldest to the newest CUDA version."""
    return {name: row(name, fields) for name, fields in tomllib.loads(path.read_text()).items()}


def build_requires(pyproject: Path) -> list[str]:
    """What pip installs for a build by this pyproject.toml."""
    return list(tomllib.loads(pyproject.read_text())["build-system"]["requires"])
