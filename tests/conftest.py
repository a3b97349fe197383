"""What tests share: the wheels they check, the devices and arrays they run on, and which GEMMs a chain takes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest_plugins = ["installation"]

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX has most of the GPU's memory to itself

if TYPE_CHECKING:
    import torch  # the wheels are checked where there is none


def _part(text: str) -> tuple[int, int]:
    part, parts = (int(number) for number in text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError
    return part, parts


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wheels", type=Path, default=Path("dist"), help="the folder with the wheels to check")
    parser.addoption(
        "--toolchain", default="", help="the folder with the backend's toolchain, where it is not installed"
    )
    parser.addoption("--part", type=_part, metavar="2/8", help="some of the tests that are chosen, as neighbours")
    parser.addoption("--nothing-cached", action="store_true", help="compile all for the wheel that is built again")


def pytest_configure(config: pytest.Config) -> None:
    """Says at once that there is no GPU, rather than in a thousand tests."""
    if str(config.option.markexpr).partition(" ")[0] == "gpu":
        import torch

        if not torch.cuda.is_available():
            raise pytest.UsageError("PyTorch sees no GPU here, which these tests need")


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of one part: a sanitizer takes hours for all, and less where tests have kernels in common."""
    if config.option.part:
        part, parts = config.option.part
        first, end = (len(items) * k // parts for k in (part - 1, part))
        config.hook.pytest_deselected(items=[*items[:first], *items[end:]])
        items[:] = items[first:end]


def pytest_runtest_logfinish() -> None:
    """Leaves the memory of a large test to those that run beside it; PyTorch would keep it."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 1 << 32:
        torch.cuda.empty_cache()


@pytest.fixture(
    scope="session", params=[pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device in turn; CUDA in the tests marked gpu."""
    import torch

    return torch.device(request.param)


@pytest.fixture(params=["numpy", "torch", pytest.param("cuda", marks=pytest.mark.gpu)])
def array(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Makes arrays of NumPy, of PyTorch on the CPU and of PyTorch on CUDA in turn."""
    import numpy as np
    import torch

    def make(values: Any, dtype: str = "float64") -> Any:
        if request.param == "numpy":
            return np.array(values, dtype)
        return torch.tensor(values, dtype=getattr(torch, dtype), device=request.param.replace("torch", "cpu"))

    return make


@pytest.fixture
def run_python() -> Callable[[str], str]:
    """Runs code in a process of its own and returns what it prints."""

    def run(code: str) -> str:
        command = [sys.executable, "-c", textwrap.dedent(code)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


@pytest.fixture(
    params=[None, (False, False), (True, True), (True, False), (False, True)],
    ids=["as is fastest", "copies", "batches", "products in a batch", "sums in a batch"],
)
def _either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which GEMMs a chain takes for products with columns beyond them, and for sums."""
    from cuops._kron_linear import gemm
    from cuops._kron_linear import sums as _sums

    if request.param is not None:
        products, sums = request.param
        monkeypatch.setattr(gemm, "_is_in_batch", lambda *_, **__: products)
        for module in (gemm, _sums):
            monkeypatch.setattr(module, "is_sum_in_batch", lambda *_: sums)
