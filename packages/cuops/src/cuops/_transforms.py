"""Whether PyTorch transforms the call that is running: vmap, grad and their like, forward-mode differentiation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

PLAIN = (Tensor, torch.nn.Parameter)  # types whose operations nothing overrides
_peek, _Interpreter = torch._C._functorch.peek_interpreter_stack, torch._C._functorch.CInterpreter
_is_compiling = torch.compiler.is_compiling
_is_wrapped, _is_legacy_batched = (
    torch._C._functorch.is_functorch_wrapped_tensor,
    torch._C._functorch.is_legacy_batchedtensor,
)


def is_transformed() -> bool:
    """Whether a transform of torch.func, or forward-mode differentiation, is at work."""
    # Under torch.compile, the interpreter that is not there is not None.
    return isinstance(_peek(), _Interpreter) or forward_ad._current_level >= 0


def is_batched(gradient: Tensor) -> bool:
    """Whether this stands for several gradients: in a vmap of torch.func, or in that of is_grads_batched."""
    # torch.compile does not follow the question.
    return not _is_compiling() and (_is_legacy_batched(gradient) or _is_wrapped(gradient))


def takes_formula(*gradients: Tensor | None) -> bool:
    """Whether what follows has to be PyTorch's own operations: under transforms, and for batches of gradients."""
    return is_transformed() or any(g is not None and is_batched(g) for g in gradients)
