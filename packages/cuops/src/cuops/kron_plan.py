"""Which factors of a Kronecker product run in which kernel, and what that is expected to cost."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from . import _backend
from ._arguments import DTYPES, dtype_name, flag, integer, is_ordered, short
from ._torch import torch

MOST = (1 << 40) - 1  # elements of an array, more than any GPU holds
GEMM = "GEMM"  # as the library calls the vendor's matrix product among its kernels
KERNEL = 24  # characters of a kernel's name in a table


@dataclass(frozen=True)
class KronGroup:
    """Neighbouring factors that one kernel applies: one of the library's, or the vendor's GEMM."""

    first: int  #: the number of the first of these factors, from 0 (tables count from 1)
    count: int  #: how many there are
    kernel: str  #: its name; GEMM is PyTorch's matrix product
    samples: int  #: rows of a tile
    slices: int  #: blocks that share a tile, each with its part of the outputs
    columns: int  #: of a tile, beyond the group's own; 0 where these are all
    shared_bytes: int  #: shared memory of a block
    blocks: int  #: of the launch
    nanoseconds: int  #: the predicted time
    bytes: int  #: read and written in device memory
    operations: int  #: additions and multiplications

    @property
    def microseconds(self) -> float:
        """The predicted time."""
        return self.nanoseconds / 1e3

    @property
    def fused(self) -> bool:
        """Whether a kernel of the library takes all of them."""
        return self.kernel != GEMM


@dataclass(frozen=True)
class KronPlan:
    """The groups in the order in which they run; what lies between them is in device memory."""

    groups: tuple[KronGroup, ...]  #: first what runs first

    @property
    def microseconds(self) -> float:
        """The predicted time of the kernels, on data that is not in the cache."""
        return sum(group.microseconds for group in self.groups)

    @property
    def bytes(self) -> int:
        """Bytes that the kernels read and write."""
        return sum(group.bytes for group in self.groups)

    @property
    def operations(self) -> int:
        """Additions and multiplications."""
        return sum(group.operations for group in self.groups)

    def __str__(self) -> str:
        heads = {"factors": 9, "kernel": KERNEL, "tile": 16, "shared": 8, "blocks": 7, "us": 9, "MB": 9, "Gop": 8}
        lines = [" ".join(f"{name:>{width}}" for name, width in heads.items())]
        for g in self.groups:
            factors = f"{g.first + 1}" if g.count == 1 else f"{g.first + 1} to {g.first + g.count}"
            tile = f"{g.samples} x {g.columns or 'all'} / {g.slices}" if g.fused else ""
            lines.append(
                f"{factors:>9} {g.kernel:>{KERNEL}} {tile:>16} {g.shared_bytes:8} {g.blocks:7} "
                f"{g.microseconds:9.1f} {g.bytes / 1e6:9.1f} {g.operations / 1e9:8.2f}"
            )
        lines.append(
            f"{'all':>9} {self.microseconds:{KERNEL + 44}.1f} {self.bytes / 1e6:9.1f} {self.operations / 1e9:8.2f}"
        )
        return "\n".join(lines)


def kron_plan(
    rows: int,
    shapes: Iterable[Iterable[int]],
    dtype: object = "float32",
    *,
    allow_tf32: bool = False,
    device: Any = 0,
) -> KronPlan:
    """How `cuops.kron_linear` would compute `rows` rows on a GPU: the groups of factors, their kernels and their cost.

    Args:
        rows: the product of x's leading dimensions, at least 1.
        shapes: that of every factor, ``(ok, ik)``, at least one, each size at least 1.
        dtype: float64, float32, float16 or bfloat16, by name or as PyTorch's or NumPy's.
        allow_tf32: whether float32 may be rounded as TF32 does.
        device: the GPU, by its index or as PyTorch's device, ``"cuda:1"``.

    Returns:
        A plan, which prints as a table. Times are predicted in microseconds.

    Raises:
        TypeError: an argument is of a kind that is not listed here, or the dtype is none of these.
        ValueError: a size or `rows` is less than 1, a shape has not two sizes, there is no factor, x, y or a factor
            has 2^40 elements or more, or the device is no GPU.
        cuops.errors.CuopsError: the installation or the GPU fails; the message has the command that fixes it.
    """
    name = dtype_name(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TypeError(f"dtype: expected {', '.join(DTYPES)}, got {dtype}")
    rows = integer("rows", rows, 1, MOST)
    allow_tf32 = flag("allow_tf32", allow_tf32)
    flat = _flat(shapes)
    of_factors = (o * i for o, i in zip(flat[::2], flat[1::2], strict=True))
    if (elements := max(math.prod(flat[::2]) * rows, math.prod(flat[1::2]) * rows, *of_factors)) > MOST:
        raise ValueError(f"shapes: expected x, y and factors of less than 2^40 elements, got {short(elements)}")
    numbers = rows, flat, 1, allow_tf32, _index(device)
    found = _backend.library().kron_linear_plan(DTYPES.index(name), *numbers)
    groups = [(first, count, str(kernel), *map(int, facts)) for first, count, kernel, *facts in found]
    return KronPlan(tuple(KronGroup(*group) for group in groups))


def _flat(shapes: Any) -> list[int]:
    """The sizes of all factors in a row."""
    if not is_ordered(shapes):
        raise TypeError(f"shapes: expected a list of pairs of integers, got {type(shapes).__qualname__}")
    shapes = [tuple(shape) if is_ordered(shape) else shape for shape in shapes]
    if not shapes:
        raise ValueError("shapes: expected at least one pair of integers, got none")
    for k, shape in enumerate(shapes):
        if not isinstance(shape, tuple):
            raise TypeError(f"shapes[{k}]: expected a pair of integers, got {type(shape).__qualname__}")
        if len(shape) != 2:
            raise ValueError(f"shapes[{k}]: expected two integers, got {shape}")
        for size in shape:
            integer(f"shapes[{k}]", size, 1, MOST)
    return [int(size) for shape in shapes for size in shape]


def _index(device: Any) -> int:
    """The index of the GPU; that of PyTorch's current one for cuda without an index."""
    if torch is None or not isinstance(device, (str, torch.device)):
        integer("device", device, 0, (1 << 31) - 1)
        return int(device)
    try:
        given = torch.device(device)
    except RuntimeError:
        given = None
    if given is None or given.type != "cuda" or str(given) != str(device):  # which has 8 bits for an index
        raise ValueError(f"device: expected the index of a GPU or a device such as cuda:1, got {device}")
    if given.index is None:
        return int(torch.cuda.current_device()) if torch.cuda.is_available() else 0
    return int(given.index)
