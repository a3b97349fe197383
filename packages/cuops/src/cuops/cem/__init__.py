"""The Cross-Entropy Method on PyTorch tensors and NumPy arrays: `CrossEntropyMethod`, `minimize`, `maximize`."""

from ._history import History
from ._method import CrossEntropyMethod
from ._minimize import EarlyStopping, Result, maximize, minimize

__all__ = ["CrossEntropyMethod", "EarlyStopping", "History", "Result", "maximize", "minimize"]
