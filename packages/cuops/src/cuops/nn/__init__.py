"""PyTorch modules: RMSNorm, the exchange of a model's RMSNorm modules for it, Kronecker-factored linear layers."""

from __future__ import annotations

from .. import _torch

if _torch.torch is None:
    why = "does not serve: " + _torch.failure if _torch.failure else "is not installed; run: pip install torch"
    raise ImportError(f"cuops.nn needs PyTorch, which {why}")

from ._known_rms_norms import Formula
from ._replace_rms_norm import Replacement, replace_rms_norm
from .kron_linear import KronLinear
from .rms_norm import RMSNorm

__all__ = ["Formula", "KronLinear", "RMSNorm", "Replacement", "replace_rms_norm"]
for public in (Formula, KronLinear, RMSNorm, Replacement, replace_rms_norm):
    public.__module__ = __name__
del public
