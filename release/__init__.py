"""The release train, from merged commits to wheels on an index and images in a registry; nox sessions call it."""

from __future__ import annotations

import os
from pathlib import Path


class ReleaseError(Exception):
    """The train stops before it does harm; the message says why and what to do."""


def output(**values: str) -> None:
    """Outputs of the workflow's step, where GitHub runs it."""
    if path := os.environ.get("GITHUB_OUTPUT"):
        with Path(path).open("a") as file:
            file.writelines(f"{name}={value}\n" for name, value in values.items())
