"""Finds the backends that are installed, chooses one for this driver, and loads its library on first use."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import _driver, errors
from ._known_backends import CODE, LEAST_DRIVER

LEAST_FFI = "0.1.9"  # as the backends' requirements have it
NIGHTLIES = "https://cuops.github.io/cuops/simple"  # an index, of versions with .dev
REINSTALL_FFI = f"pip install --force-reinstall 'apache-tvm-ffi>={LEAST_FFI},<0.2'"
# Classes that the library raises by their names; tvm-ffi knows Python's, but for NotImplementedError.
RAISED = (
    errors.DriverNotFoundError,
    errors.DriverTooOldError,
    errors.UnsupportedArchitectureError,
    errors.DamagedBackendError,
    errors.CudaError,
)


@dataclass(frozen=True)
class Backend:
    """A package cuops-cuXXX; the fields are those of its row of cuda.toml."""

    name: str
    version: str
    cuda: str
    toolchain: tuple[str, ...]
    architectures: tuple[int, ...]
    ptx: int
    driver: str
    driver_cuda: str
    library: Path

    @property
    def least_driver(self) -> tuple[int, int]:
        """The CUDA version that a driver must know to run this backend."""
        major, minor = self.driver_cuda.split(".")
        return int(major), int(minor)


def entry_points() -> list[Any]:
    """Those of the backends that this core knows, else of any: to ask all distributions takes long where many are."""
    from importlib import metadata  # takes longer than the rest of cuops

    found: list[Any] = []
    for name in LEAST_DRIVER:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found += metadata.distribution(f"cuops-{name}").entry_points.select(group="cuops.backends")
    return found or list(metadata.entry_points(group="cuops.backends"))


def installed(damaged: list[errors.DamagedBackendError] | None = None) -> list[Backend]:
    """The backends in this environment, from the oldest to the newest CUDA version.

    What is wrong with others goes into `damaged`. Without it, that is raised where no backend is left to take.
    """
    found, wrong = [], {}
    for point in entry_points():
        try:
            module = point.load()
            facts: dict[str, Any] = {**module.FACTS, "library": module.LIBRARY}
            facts = {name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()}
            found.append(Backend(**facts))
        except Exception as error:  # as its files may be in any state
            wrong[point.name] = errors.DamagedBackendError(
                f"cuops-{point.name} does not import: {error}", reinstall(point.name)
            )
    if damaged is not None:
        damaged += wrong.values()
    elif wrong and (not found or os.environ.get("CUOPS_BACKEND") in wrong):
        raise wrong.get(os.environ.get("CUOPS_BACKEND", ""), next(iter(wrong.values())))
    return sorted(found, key=lambda backend: [int(part) for part in backend.cuda.split(".")])


def suggested() -> str:
    """The backend to install for the driver and the GPUs of this machine; cu121 without a driver."""
    try:
        driver = _driver.cuda_version()
    except errors.CuopsError:
        return "cu121"
    fitting = [name for name, least in LEAST_DRIVER.items() if least <= driver] or list(LEAST_DRIVER)[:1]
    return str(_newest_with_code({name: CODE[name] for name in fitting}))


def _install_missing() -> str:
    """The command where no backend is found: for one that pip knows, and so has lost a file, or for a new one."""
    from importlib import metadata

    for name in LEAST_DRIVER:
        with contextlib.suppress(metadata.PackageNotFoundError):
            metadata.version(f"cuops-{name}")
            return reinstall(name)
    return install(suggested())


def choose() -> Backend:
    """The newest backend for the driver that has code for the GPUs, or the one that CUOPS_BACKEND names."""
    backends, forced = installed(), os.environ.get("CUOPS_BACKEND")
    if forced:
        backends = _forced(forced, backends)
    if not backends:
        raise errors.BackendNotFoundError("no backend of cuops is installed", _install_missing())
    driver = _driver.cuda_version()
    fitting = [backend for backend in backends if backend.least_driver <= driver]
    if not fitting:
        oldest = backends[0]
        usable = suggested() if driver >= min(LEAST_DRIVER.values()) and not forced else None
        raise errors.DriverTooOldError(
            f"the NVIDIA driver knows CUDA {driver[0]}.{driver[1]}; "
            f"cuops-{oldest.name} needs CUDA {oldest.driver_cuda} (driver {oldest.driver} or newer)",
            install(usable) if usable else None,
        )
    chosen = _newest_with_code({backend: (backend.architectures, backend.ptx) for backend in fitting})
    check_version(chosen)
    return chosen


def _newest_with_code(candidates: dict[Any, tuple[tuple[int, ...], int]]) -> Any:
    """The last candidate that has code for every GPU, or just the last one; of each its architectures and its PTX."""
    if len(candidates) > 1:
        try:
            gpus = _driver.gpus()
        except errors.CuopsError:  # which the library will raise, if it is still so
            gpus = []
        for candidate, (architectures, ptx) in reversed(candidates.items()):
            if all(_code(architectures, ptx, gpu.capability) for gpu in gpus):
                return candidate
    return [*candidates][-1]


def _forced(name: str, backends: list[Backend]) -> list[Backend]:
    """The one that CUOPS_BACKEND names. Raises ForcedBackendNotFoundError where there is none."""
    if found := [backend for backend in backends if backend.name == name]:
        return found
    if name not in LEAST_DRIVER:
        raise errors.ForcedBackendNotFoundError(
            f"CUOPS_BACKEND is {name!r}; expected one of {', '.join(LEAST_DRIVER)}", "unset CUOPS_BACKEND"
        )
    raise errors.ForcedBackendNotFoundError(
        f"CUOPS_BACKEND is {name!r}, and cuops-{name} is not installed", install(name)
    )


def core_version() -> str:
    """The version of the distribution cuops. Raises DamagedBackendError where it has none."""
    from importlib import metadata

    with contextlib.suppress(metadata.PackageNotFoundError):
        if version := metadata.version("cuops"):  # or None, of metadata that are damaged
            return version
    raise errors.DamagedBackendError("cuops has no metadata of its version", "pip install --force-reinstall cuops")


def install(name: str, options: str = "") -> str:
    """The command for a backend of the core's version, which leaves the core and other backends as they are."""
    try:
        core = core_version()
    except errors.DamagedBackendError:  # the core is not installed, but imported from its sources
        return f"pip install {options}cuops-{name}"
    return f"pip install {options}cuops-{name}=={core}{_index(core)}"


def _index(core: str) -> str:
    """The option for where nightly versions are, of such a version."""
    return f" --extra-index-url {NIGHTLIES}" if ".dev" in core else ""


def reinstall(name: str) -> str:
    """The command that repairs a backend."""
    return install(name, "--force-reinstall --no-deps ")


def reinstall_core() -> str:
    """The command that repairs the core, and leaves what else is installed as it is."""
    try:
        core = core_version()
    except errors.DamagedBackendError as error:
        return str(error.command)
    return f"pip install --force-reinstall --no-deps cuops=={core}{_index(core)}"


def check_version(backend: Backend) -> None:
    """Raises VersionMismatchError unless the backend is of the core's version."""
    core = core_version()
    if backend.version != core:
        raise errors.VersionMismatchError(
            f"cuops is {core} and cuops-{backend.name} is {backend.version}; they must be of one version",
            reinstall(backend.name),
        )


def check_library(backend: Backend, reads: bool = False) -> None:
    """Raises DamagedBackendError where the library is not its wheel's: the dynamic linker would crash.

    It is as long, that is; and with `reads` has the same bytes.
    """
    import base64
    import hashlib
    from importlib import metadata

    try:
        files = metadata.files(f"cuops-{backend.name}") or []
    except metadata.PackageNotFoundError:
        return
    for file in files:
        if file.size is None or Path(str(file.locate())) != backend.library:
            continue
        size = backend.library.stat().st_size if backend.library.exists() else None
        found = None
        if size != file.size:
            found = "is missing" if size is None else f"has {size} bytes, and {file.size} in its wheel"
        elif reads and file.hash is not None and file.hash.mode == "sha256":
            digest = base64.urlsafe_b64encode(hashlib.sha256(backend.library.read_bytes()).digest())
            found = (
                None
                if digest.decode().rstrip("=") == file.hash.value.rstrip("=")
                else "has other bytes than in its wheel"
            )
        if found:
            raise errors.DamagedBackendError(f"{backend.library} {found}", reinstall(backend.name))


def code_for(backend: Backend, capability: tuple[int, int]) -> str:
    """Which of its code the backend runs on a GPU, as csrc/host/image.cc chooses it."""
    if code := _code(backend.architectures, backend.ptx, capability):
        return code
    other = suggested()
    raise errors.UnsupportedArchitectureError(
        f"cuops-{backend.name} has no code for compute capability {capability[0]}.{capability[1]}",
        install(other) if other in CODE and _code(*CODE[other], capability) else None,
    )


def _code(architectures: tuple[int, ...], ptx: int, capability: tuple[int, int]) -> str | None:
    gpu = capability[0] * 10 + capability[1]
    fitting = [image for image in architectures if image // 10 == capability[0] and image <= gpu]
    if fitting:
        return f"machine code for {max(fitting) // 10}.{max(fitting) % 10}"
    return f"PTX for {ptx // 10}.{ptx % 10}, which the driver compiles on first use" if ptx <= gpu else None


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """For imports, whose objects stay: to search all of PyTorch's for garbage meanwhile takes longer than they do."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@functools.cache
@_no_collection()
def library() -> Any:
    """The FFI functions of the chosen backend. Raises one of cuops.errors."""
    backend = choose()
    errors.DamagedBackendError.command = reinstall(backend.name)  # for what its library raises
    return load(backend)


def _check_ffi() -> None:
    """Raises DamagedBackendError where apache-tvm-ffi is older than backends need: it would crash."""
    from importlib import metadata

    with contextlib.suppress(metadata.PackageNotFoundError):
        version = metadata.version("apache-tvm-ffi")
        found, least = ([int(part) for part in re.findall(r"\d+", str(v))[:3]] for v in (version, LEAST_FFI))
        if found < least:
            raise errors.DamagedBackendError(
                f"apache-tvm-ffi is {version}; cuops needs {LEAST_FFI} or newer", REINSTALL_FFI
            )


def load(backend: Backend) -> Any:
    """The FFI functions of a backend. This needs no driver."""
    torch: Any = sys.modules.get("torch")
    is_usable = hasattr(torch, "Tensor")
    if is_usable and not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")  # or tvm_ffi would run a C++ compiler here
    check_library(backend)
    _check_ffi()
    is_hidden = "torch" in sys.modules and torch is None  # by who wants none
    if not is_usable:  # tvm_ffi would import one that is damaged, and fail of it
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import tvm_ffi
    except Exception as error:  # as its files may be in any state
        raise errors.DamagedBackendError(f"apache-tvm-ffi does not import: {error}", REINSTALL_FFI) from None
    finally:
        if not is_usable and not is_hidden:
            sys.modules.pop("torch", None)  # threads may come here at once

    for cls in RAISED:
        tvm_ffi.register_error(f"cuops.errors.{cls.__name__}", cls)
    tvm_ffi.register_error("NotImplementedError", NotImplementedError)
    try:
        return tvm_ffi.load_module(str(backend.library))
    except (OSError, RuntimeError) as error:  # the dynamic linker's words are in it
        raise errors.DamagedBackendError(f"{backend.library} does not load: {error}", reinstall(backend.name)) from None


@functools.cache
@_no_collection()
def gpu_for_host_arrays() -> int | None:
    """The GPU that computes on NumPy arrays, or None where there is none, which leaves them to the CPU."""
    if forced := os.environ.get("CUOPS_BACKEND"):
        _forced(forced, installed())
    try:
        gpus = _driver.gpus()
    except errors.DriverNotFoundError:
        return None
    if not gpus:
        return None
    try:
        code_for(choose(), gpus[0].capability)
        library()
    except errors.CuopsError as error:
        if os.environ.get("CUOPS_BACKEND"):
            raise
        warnings.warn(f"NumPy arrays are computed on the CPU: {error}", RuntimeWarning, stacklevel=5)
        return None
    return 0
