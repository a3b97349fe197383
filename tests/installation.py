"""Environments with chosen packages, made of links to this one's and of unpacked wheels, for tests of what is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from pathlib import Path

import pytest

DRIVER_SOURCE = Path(__file__).parent / "driver" / "libcuda.cc"
NO_DRIVER = "/nowhere"


class Installation:
    """A folder that stands in for site-packages, and a Python that sees nothing else."""

    def __init__(self, folder: Path, without: tuple[str, ...] = ()) -> None:
        self.folder = folder / "site-packages"
        self.folder.mkdir()
        self.environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        for path in Path(sysconfig.get_path("platlib")).iterdir():
            if not path.name.startswith(("cuops", "__pycache__", *without)):
                (self.folder / path.name).symlink_to(path)

    def add(self, wheel: Path) -> None:
        """Unpacks a wheel."""
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(self.folder)

    def add_copy(self, wheel: Path, name: str, **facts: object) -> None:
        """Unpacks a backend under another name, with other facts."""
        old = wheel.name.split("-")[0]
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                content, path = archive.read(member), self.folder / member.replace(old, f"cuops_{name}")
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.suffix == ".py":
                    content += f"\nFACTS.update({ {'name': name, **facts} })\n".encode()
                elif not path.name.endswith(".so"):
                    content = content.replace(old.removeprefix("cuops_").encode(), name.encode())
                path.write_bytes(content)

    def edit(self, pattern: str, old: bytes, new: bytes) -> None:
        """Replaces bytes of the one file that matches."""
        (path,) = self.folder.glob(pattern)
        content = path.read_bytes()
        assert old in content
        path.write_bytes(content.replace(old, new))

    def run(self, code: str, *options: str, **environment: object) -> subprocess.CompletedProcess[str]:
        """Runs Python code; LIBRARIES is where it looks for libcuda.so.1."""
        settings = {name: str(value) for name, value in environment.items()}
        settings["LD_LIBRARY_PATH"] = settings.pop("LIBRARIES", NO_DRIVER)
        return subprocess.run(
            [sys.executable, "-S", "-W", "error::SyntaxWarning", *options, "-c", textwrap.dedent(code)],
            env={**self.environment, **settings, "PYTHONPATH": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def output(self, code: str, **environment: object) -> str:
        """What code that ends well prints."""
        done = self.run(code, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def compile_driver(folder: Path, *options: str) -> Path:
    """The folder with the stand-in for the CUDA driver."""
    folder.mkdir()
    csrc = DRIVER_SOURCE.parents[2] / "csrc"
    command = [sys.executable, "-m", "ziglang", "cc", "-x", "c++", "-std=c++17", "-O1", "-fPIC", "-shared", *options]
    command += [f"-I{csrc}", "-fvisibility=hidden", str(DRIVER_SOURCE), "-lm", "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A driver of CUDA 12.8."""
    return compile_driver(tmp_path_factory.mktemp("driver") / "lib")


@pytest.fixture(scope="session")
def old_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A driver from before CUDA 12, which knows modules but no libraries."""
    return compile_driver(tmp_path_factory.mktemp("old_driver") / "lib", "-DBEFORE_CUDA_12")


@pytest.fixture(scope="session")
def core_wheel(pytestconfig: pytest.Config) -> Path:
    (wheel,) = pytestconfig.getoption("--wheels").glob("cuops-*.whl")
    return wheel


@pytest.fixture(scope="session")
def backend_wheel(pytestconfig: pytest.Config) -> Path:
    """That of cu121, or of the row that `nox -s tests` builds where there is no cu121."""
    folder = pytestconfig.getoption("--wheels")
    found = [wheel for row in ("cu121", "cu128") for wheel in folder.glob(f"cuops_{row}-*.whl")]
    assert found, f"{folder} has no wheel of cu121: nox -s wheels -- cu121"
    return found[0]


@pytest.fixture
def core(tmp_path: Path, core_wheel: Path) -> Installation:
    """The core alone, without PyTorch, which takes long to import."""
    installation = Installation(tmp_path, ("torch",))
    installation.add(core_wheel)
    return installation


@pytest.fixture
def installation(core: Installation, backend_wheel: Path) -> Installation:
    """The core and one backend, which is called cu121."""
    core.add_copy(backend_wheel, "cu121")
    return core


@pytest.fixture
def cu121(installation: Installation, backend_wheel: Path) -> Installation:
    """The core and the backend of cu121, for what depends on the GPUs that its images are for."""
    if not backend_wheel.name.startswith("cuops_cu121-"):
        pytest.skip("asks for the images of cu121, whose compiler is not there for this machine")
    return installation
