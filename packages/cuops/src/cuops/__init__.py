"""CUDA operators for PyTorch and NumPy: RMSNorm at the speed of memory, Kronecker-factored linear layers."""

from . import errors
from .kron_linear import kron_linear
from .pinned import pinned_empty
from .rms_norm import rms_norm, rms_norm_

__all__ = ["errors", "kron_linear", "pinned_empty", "rms_norm", "rms_norm_"]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("cuops")
    if name == "nn":  # PyTorch's modules, imported when they are asked for
        import importlib

        return importlib.import_module(".nn", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
