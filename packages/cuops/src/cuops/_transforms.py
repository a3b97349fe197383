"""Whether PyTorch transforms the call that is running: vmap, grad and their like, forward-mode differentiation."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

_peek, _Interpreter = torch._C._functorch.peek_interpreter_stack, torch._C._functorch.CInterpreter


def is_transformed() -> bool:
    """Whether a transform of torch.func, or forward-mode differentiation, is at work."""
    # Under torch.compile, the interpreter that is not there is not None.
    return isinstance(_peek(), _Interpreter) or forward_ad._current_level >= 0
