"""Which kernels elite_moments launches on GPUs of every kind: the stand-in for the driver keeps a log."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from installation import Installation
from on_cuda import ON_CUDA


@pytest.mark.parametrize("capability", [61, 75, 80, 90, 120])
def test_populations_of_every_dtype_and_alignment_have_kernels(
    cu121: Installation, driver: Path, tmp_path: Path, capability: int
):
    code = """
        def update(dtype, scores, problems, n, d, elites, kept, offset):
            state = "float64" if dtype == "float64" else "float32"
            _backend.library().elite_moments(
                on_cuda((problems, n, d), dtype, offset), on_cuda((problems, n), scores),
                on_cuda((problems, elites), "int32"), on_cuda((problems, kept), "int32"), on_cuda((problems, 3), "int32"),
                on_cuda((problems, 4), "float64"), on_cuda((problems,), "float64"), on_cuda((problems, d), state),
                on_cuda((problems, kept, d), state), on_cuda((problems,), "int32"), on_cuda((problems, d), state),
                on_cuda((problems, d), state), on_cuda((4,), "int64"), False, 1.0, 1.0, 1.0, 0.0, float("inf"), 0.0, 0.0)

        for dtype in ("float64", "float32", "float16", "bfloat16"):
            for scores in ("float64", "float32", "float16", "bfloat16"):
                update(dtype, scores, 2, 300, 16, 30, 0, 0)
            update(dtype, "float32", 1, 5000, 16, 50, 7, 1)
            update(dtype, "float32", 1, 64, 3, 1, 1, 0)
    """
    settings = {"STAND_IN_CAPABILITY": capability, "STAND_IN_LOG": tmp_path / "log"}
    cu121.output(ON_CUDA + textwrap.dedent(code), LIBRARIES=driver, **settings)
    launched = {line.split()[1] for line in (tmp_path / "log").read_text().splitlines() if line.startswith("launch")}
    wanted = {
        f"elite_{kernel}" for kernel in ("select_f64", "select_f32", "moments_f64_unaligned", "moments_f32_unaligned")
    }
    if capability >= 80:  # 12.0 runs the PTX of 9.0
        wanted |= {f"elite_moments_{dtype}_aligned" for dtype in ("f64", "f32", "f16", "bf16")}
    assert launched == wanted
