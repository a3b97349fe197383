"""PyTorch where it is installed; elsewhere `torch` is None. `failure` says why an installed one does not serve."""

from __future__ import annotations

from typing import Any

OLDEST = (2, 7)  # that is tested

torch: Any = None
failure: str | None = None
try:
    import torch  # type: ignore[no-redef]
except ModuleNotFoundError as error:
    if error.name != "torch":
        failure = repr(error)
except (ImportError, OSError) as error:
    failure = repr(error)
else:
    if torch.__version__ < OLDEST:  # a TorchVersion, which compares with tuples
        failure = f"cuops needs PyTorch {OLDEST[0]}.{OLDEST[1]} or newer, found {torch.__version__}"
        torch = None


def cuda_tensors() -> bool:
    """Whether PyTorch is there and reaches the GPUs."""
    return torch is not None and torch.cuda.is_available()
