"""What the tests of the release train share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from small_wheels import ROWS, write_sums, write_wheel


@pytest.fixture
def release(tmp_path: Path) -> Callable[[str], Path]:
    """Makes the wheels of a release of the core and two backends, for one machine, and their SHA256SUMS."""

    def make(version: str) -> Path:
        folder = tmp_path / f"dist-{version}"
        folder.mkdir()
        write_wheel(folder, "cuops", version, "py3-none-any")
        for row in ROWS:
            write_wheel(folder, f"cuops-{row}", version, "py3-none-manylinux_2_17_x86_64", f"cuops=={version}")
        write_sums(folder)
        return folder

    return make
