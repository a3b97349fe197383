"""CUDA operators for PyTorch and NumPy: RMSNorm, Kronecker-factored linear layers, normal samples.

`cuops.nn` has the first two as modules, `cuops.cem` the Cross-Entropy Method on top of the samples.
"""

from typing import TYPE_CHECKING

from . import _torch, errors
from .kron_linear import kron_linear
from .kron_plan import KronGroup, KronPlan, kron_plan
from .pinned import pinned_empty
from .rms_norm import rms_norm, rms_norm_
from .sample_normal import sample_normal

__all__ = [
    "KronGroup",
    "KronPlan",
    "errors",
    "kron_linear",
    "kron_plan",
    "pinned_empty",
    "rms_norm",
    "rms_norm_",
    "sample_normal",
]
SUBPACKAGES = ("cem", "nn")  # imported when they are asked for


if TYPE_CHECKING:
    from . import cem as cem
    from . import nn as nn

    __version__: str
else:

    def __getattr__(name: str) -> object:
        try:
            if name == "__version__":
                from ._backend import core_version

                return core_version()
            if name in SUBPACKAGES:
                import importlib

                return importlib.import_module(f".{name}", __name__)
        except (ImportError, errors.CuopsError) as error:  # without PyTorch, or without metadata of the version
            raise AttributeError(f"module {__name__!r} has no attribute {name!r} here: {error}") from error
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *(name for name in SUBPACKAGES if name != "nn" or _torch.torch is not None), "__version__"]
