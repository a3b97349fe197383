"""Architectures that share their PTX share their code."""

from __future__ import annotations

import operator
import re
from pathlib import Path

import pytest
from cuops_build import nvrtc, table

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("row", table.read(ROOT / "cuda.toml").values(), ids=lambda row: row.name)
def test_sources_ask_nothing_that_architectures_of_the_same_ptx_answer_differently(row: table.Cuda):
    # But for tuned.cuh, which is for the first of them alone.
    sources = [path for path in (ROOT / "csrc").rglob("*.cu*") if path.name != "tuned.cuh"]
    asked = {pair for path in sources for pair in re.findall(r"__CUDA_ARCH__ ([<>=]=?|!=) (\d+)", path.read_text())}
    assert asked, "the way of asking has changed"
    assert {int(number) / 10 for _, number in asked} <= {float(step) for step in nvrtc.STEPS}
    compare = {">=": operator.ge, ">": operator.gt, "<": operator.lt, "<=": operator.le, "==": operator.eq}
    for family in nvrtc.families(row, ""):
        for how, number in asked:
            answers = {compare[how](10 * architecture, int(number)) for architecture, _ in family.targets}
            assert len(answers) == 1, f"__CUDA_ARCH__ {how} {number} in {family}"


def compiled(row: str, source: str) -> list[tuple[str, list[tuple[int, bool]]]]:
    """What a source is compiled for, and the targets that this serves."""
    families = nvrtc.families(table.read(ROOT / "cuda.toml")[row], source)
    return [(family.architecture, family.targets) for family in families if family.has_code]


@pytest.mark.parametrize(
    ("only", "row", "expected"),
    [
        ("90", "cu121", [("90", [(90, False), (90, True)])]),
        ("90", "cu128", [("90", [(90, False), (100, False)])]),
        ("80, 90", "cu128", [("80", [(80, False)]), ("90", [(90, False), (100, False)])]),
        ("90, CUDA 12.0", "cu118", []),
        ("90, CUDA 12.1", "cu121", [("90", [(90, False), (90, True)])]),
        ("90a", "cu121", [("90a", [(90, False)])]),
        ("90a", "cu128", [("90a", [(90, False)])]),
        ("90a, CUDA 12.8", "cu121", []),
        ("90a, CUDA 12.8", "cu130", [("90a", [(90, False)])]),
    ],
)
def test_sources_are_compiled_only_for_what_they_say(only: str, row: str, expected: list):
    assert compiled(row, f"// A kernel.\n\nCUOPS_ONLY_FOR({only})\n") == expected


def test_sources_that_say_nothing_are_compiled_for_all():
    row = table.read(ROOT / "cuda.toml")["cu128"]
    targets = [target for _, targets in compiled("cu128", "// A kernel.\n") for target in targets]
    assert targets == [(architecture, False) for architecture in row.architectures] + [(row.ptx, True)]


@pytest.mark.parametrize("source", sorted((ROOT / "csrc").rglob("*.cu")), ids=lambda source: source.stem)
def test_what_sources_say_is_understood(source: Path):
    said = "CUOPS_ONLY_FOR" in source.read_text()
    assert said == (nvrtc.ONLY.search(source.read_text()) is not None)
