"""What can be wrong with an installation. Every error carries the command that fixes it, as text and as `command`."""

from __future__ import annotations


class CuopsError(RuntimeError):
    """Base of the errors of an installation, a driver and a GPU; `command` is what fixes it."""

    command = "cuops doctor"

    def __init__(self, message: str, command: str | None = None) -> None:
        if command is not None:
            self.command = command
        self._message = message
        super().__init__(f"{message}\nTo fix it, run: {self.command}")

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        """Copies and pickles are made as this one was."""
        return type(self), (self._message, self.command)


class BackendNotFoundError(CuopsError):
    """No package cuops-cuXXX is installed."""

    command = "pip install cuops-cu121"


class ForcedBackendNotFoundError(BackendNotFoundError):
    """CUOPS_BACKEND names a backend that is not installed."""


class VersionMismatchError(CuopsError):
    """cuops and its backend are of two versions."""

    command = "pip install --upgrade cuops cuops-cu121"


class DriverNotFoundError(CuopsError):
    """There is no NVIDIA driver (libcuda.so.1), or no GPU that it sees."""

    command = "nvidia-smi  # which says why; without one: https://www.nvidia.com/drivers, or docker run --gpus all"


class DriverTooOldError(CuopsError):
    """The NVIDIA driver is too old for every backend that is installed."""

    command = "nvidia-smi  # which says its version; a newer one: https://www.nvidia.com/drivers"


class UnsupportedArchitectureError(CuopsError):
    """The backend has no code, and no PTX, that runs on the GPU's compute capability."""

    command = "pip install cuops-cu118  # or what cuops doctor names: another backend has code for other GPUs"


class DamagedBackendError(CuopsError):
    """A backend, the core's metadata or apache-tvm-ffi is not as it was installed; the command repairs it."""

    command = "pip install --force-reinstall cuops-cu121"


class CudaError(CuopsError):
    """A call of the CUDA driver failed; the message has the driver's own name for it."""
