"""PyTorch where it is installed; elsewhere `torch` is None. `failure` says why an installed one does not import."""

from __future__ import annotations

from typing import Any

torch: Any = None
failure: str | None = None
try:
    import torch  # type: ignore[no-redef]  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        failure = repr(error)
except (ImportError, OSError) as error:
    failure = repr(error)
