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
except Exception as error:  # as its files may be in any state
    failure = repr(error)
else:
    if not hasattr(torch, "__version__"):  # a folder of that name, as a removal leaves it behind
        failure = None if torch.__file__ is None else f"{torch.__file__} has no __version__"
        torch = None
    elif torch.__version__ < OLDEST:  # a TorchVersion, which compares with tuples
        failure = f"cuops needs PyTorch {OLDEST[0]}.{OLDEST[1]} or newer, found {torch.__version__}"
        torch = None


def cuda_tensors() -> bool:
    """Whether PyTorch is there and reaches the GPUs."""
    return torch is not None and torch.cuda.is_available()
