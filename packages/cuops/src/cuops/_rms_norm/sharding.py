"""RMSNorm of a `DTensor`, as under `SequenceParallel`: each process has some of the rows, and the parameters."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch


def learn() -> None:
    """Tells PyTorch, where `torch.distributed.tensor` is imported, which takes long."""
    if "torch.distributed.tensor" in sys.modules:
        _tell()


learn._dynamo_marked_constant = True  # type: ignore[attr-defined]  # assume_constant_result, without its import of the compiler


@functools.cache
def _tell() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def beside(array: Any, placement: Any) -> Any:
        return None if array is None else placement

    def ways(x: Any, pattern: Callable[[Any, Any], Any]) -> list[Any]:
        """`pattern` with what rows and their sums become: undivided, or divided along any dimension but the last."""
        divided = [pattern(Shard(dim), Partial()) for dim in range(len(x.shape) - 1)]
        return [pattern(Replicate(), Replicate()), *divided]

    @register_sharding(torch.ops.cuops.rms_norm_fwd.default)
    def fwd(x: Any, residual: Any, weight: Any, bias: Any, *others: Any) -> Any:
        def pattern(rows: Any, _: Any) -> Any:
            return (
                [rows, rows if residual is not None else Replicate(), rows],
                [rows, beside(residual, rows), *(beside(a, Replicate()) for a in (weight, bias)), *[None] * len(others)],
            )

        return ways(x, pattern)

    @register_sharding(torch.ops.cuops.rms_norm_bwd.default)
    def bwd(dy: Any, dh: Any, h: Any, weight: Any, bias_dtype: Any, needs_dweight: bool, *others: Any) -> Any:
        def pattern(rows: Any, sums: Any) -> Any:
            return (
                [rows, sums if needs_dweight else Replicate(), sums if bias_dtype is not None else Replicate()],
                [rows, beside(dh, rows), rows, beside(weight, Replicate()), None, None, *[None] * len(others)],
            )

        return ways(h, pattern)
