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

    whole = Replicate()

    def ways(x: Any, way: Callable[[Any, Any], Any]) -> list[Any]:
        """`way` with what rows and their sums become: undivided, or divided along any dimension but the last."""
        return [way(whole, whole), *(way(Shard(dim), Partial()) for dim in range(len(x.shape) - 1))]

    def where(there: Any, placement: Any, otherwise: Any = None) -> Any:
        return otherwise if there is None else placement

    def fwd(x: Any, residual: Any, weight: Any, bias: Any, *others: Any) -> Any:
        def way(rows: Any, _: Any) -> Any:
            inputs = [rows, where(residual, rows), where(weight, whole), where(bias, whole)]
            return [rows, where(residual, rows, whole), rows], [*inputs, *(None for _ in others)]

        return ways(x, way)

    def bwd(dy: Any, dh: Any, h: Any, weight: Any, bias_dtype: Any, needs_dweight: bool, *others: Any) -> Any:
        def way(rows: Any, sums: Any) -> Any:
            inputs = [rows, where(dh, rows), rows, where(weight, whole)]
            outputs = [rows, sums if needs_dweight else whole, where(bias_dtype, sums, whole)]
            return outputs, [*inputs, None, None, *(None for _ in others)]

        return ways(h, way)

    register_sharding(torch.ops.cuops.rms_norm_fwd.default)(fwd)
    register_sharding(torch.ops.cuops.rms_norm_bwd.default)(bwd)
