"""Architectures that share their PTX share their code."""

from __future__ import annotations

import operator
import re
from pathlib import Path

import pytest
from cuops_build import nvrtc, table

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("row", table.read(ROOT / "cuda.toml").values(), ids=lambda row: row.name)
def test_sources_ask_nothing_that_architectures_of_the_same_ptx_answer_differently(row: table.Cuda):
    # But for tuned.cuh, which is for the first of them alone.
    sources = [path for path in (ROOT / "csrc").rglob("*.cu*") if path.name != "tuned.cuh"]
    asked = {pair for path in sources for pair in re.findall(r"__CUDA_ARCH__ ([<>=]=?|!=) (\d+)", path.read_text())}
    assert asked, "the way of asking has changed"
    compare = {">=": operator.ge, ">": operator.gt, "<": operator.lt, "<=": operator.le, "==": operator.eq}
    for family in nvrtc.families(row, ""):
        for how, number in asked:
            answers = {compare[how](10 * architecture, int(number)) for architecture, _ in family.targets}
            assert len(answers) == 1, f"__CUDA_ARCH__ {how} {number} in {family}"


def test_sources_for_what_9_0_alone_has_are_compiled_for_it_alone():
    rows = table.read(ROOT / "cuda.toml")
    source = "#if defined(__CUDA_ARCH_FEAT_SM90_ALL)"
    alone = [family for family in nvrtc.families(rows["cu121"], source) if family.architecture == "90a"]
    assert alone == [("90a", [(90, False)])]
    assert ("90", [(90, True)]) in nvrtc.families(rows["cu121"], source)
    assert ("100", [(100, False)]) in nvrtc.families(rows["cu128"], source)
    assert nvrtc.families(rows["cu118"], source) == nvrtc.families(rows["cu118"], "")  # no 9.0a before CUDA 12
