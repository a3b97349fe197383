"""CUDA operators for PyTorch and NumPy: RMSNorm at the speed of memory."""

from . import errors
from .rms_norm import rms_norm, rms_norm_

__all__ = ["errors", "rms_norm", "rms_norm_"]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("cuops")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
