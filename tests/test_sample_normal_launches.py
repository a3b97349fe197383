"""Which kernels sample_normal launches on GPUs of every kind: the stand-in for the driver keeps a log."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from installation import Installation
from on_cuda import ON_CUDA, clusters


def test_distributions_of_few_samples_are_drawn_together(installation: Installation, driver: Path, tmp_path: Path):
    code = "import cuops, numpy; cuops.sample_normal(numpy.zeros((20_000, 3)), numpy.ones((20_000, 3)), 2)"
    installation.output(code, LIBRARIES=driver, STAND_IN_LOG=tmp_path / "log")
    launches = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("launch")]
    assert 0 < len(launches) <= 3 * 12  # of each of a few chunks the first distribution, whole ones, the last


@pytest.mark.parametrize("capability", [75, 80, 90, 120])
def test_gradients_of_few_samples_take_one_launch(
    installation: Installation, driver: Path, tmp_path: Path, capability: int
):
    code = """
        library = _backend.library()
        for few, shapes in (True, [(1024, 10), (300, 30), (1, 1), (9, 3, 7), (4096, 1, 20)]), (False, [(100_000, 9)]):
            for shape in shapes:
                for dtype in "float32", "float16", "bfloat16":
                    grad = on_cuda(shape, dtype)
                    chunks = library.sample_normal_bwd_chunks(grad, None, 0, 0, False)
                    assert (chunks == 0) == few, (shape, dtype)
                    sizes = (*shape[:-2], shape[-1])
                    partial = on_cuda((chunks, 2, numpy.prod(sizes)), "float32")
                    gradients = on_cuda(sizes, "float64"), on_cuda(sizes, dtype)
                    library.sample_normal_bwd(*gradients, partial, grad, None, 1, 0, 0, 0, False, False)
        partial = on_cuda((0, *partial.shape[1:]), "float32")
        try:
            library.sample_normal_bwd(*gradients, partial, grad, None, 1, 0, 0, 0, False, False)
        except ValueError as error:
            print(error)
    """
    settings = {"STAND_IN_CAPABILITY": capability, "STAND_IN_LOG": tmp_path / "log"}
    said = installation.output(ON_CUDA + textwrap.dedent(code), LIBRARIES=driver, **settings)
    assert said.strip() == "partial: expected as many chunks as sample_normal_bwd_chunks says"
    assert len(clusters(tmp_path / "log")) == 3 * (5 * 1 + 1 * 2)


@pytest.mark.parametrize("capability", [60, 75, 80, 86, 90, 120])
def test_every_draw_and_its_gradient_have_kernels(cu121: Installation, driver: Path, tmp_path: Path, capability: int):
    code = """
        import itertools
        library, kinds = _backend.library(), itertools.product((0, -1), (False, True), (False, True), (False, True))
        for (sample_dim, shared, antithetic, on_device), dim, n in itertools.product(kinds, (8, 6, 7), (1, 37, 50_000)):
            state = on_cuda((1,), "int64") if on_device else None
            for dtype in "float64", "float32", "float16", "bfloat16":
                x = on_cuda((n, dim) if sample_dim == 0 else (dim, n), dtype)
                mu, sigma, dmu, dsigma = (on_cuda((dim,), dtype) for _ in range(4))
                layout = 1, 0, 0, sample_dim, shared, antithetic
                library.sample_normal_fwd(x, mu, sigma, 0.0, None, None, state, 0, *layout)
                chunks = library.sample_normal_bwd_chunks(x, state, 0, sample_dim, antithetic)
                partial = on_cuda((chunks, 2, dim), "float64" if dtype == "float64" else "float32")
                library.sample_normal_bwd(dmu, dsigma, partial, x, state, *layout)
    """
    settings = {"STAND_IN_CAPABILITY": capability, "STAND_IN_LOG": tmp_path / "log"}
    cu121.output(ON_CUDA + textwrap.dedent(code), LIBRARIES=driver, **settings)
    assert len(clusters(tmp_path / "log")) > 2 * 16 * 9 * 4
