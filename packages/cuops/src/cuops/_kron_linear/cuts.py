"""Where to cut a chain of factors whose gradients are found in less time so, and which neighbours to multiply out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .fibers_bwd import MANY, are_small, in_fours, plan_of_fibers
from .gemm import most_between
from .sizes import elements_between
from .squares_bwd import two_of_a_size

NARROW = 16  # the largest factors that are faster one by one than as a part of two of a size
# The largest factors worth cutting a chain of GEMMs for, by an element's bytes.
CUT = {2: 8, 4: 12, 8: 12}
# Of two factors, from FROM_TWO elements on, and of fewer than FEW unless in float64. Of three with kept states, from
# FROM_THREE on where the least factor is no larger than LEAST_OF_THREE, and of fewer than FEW.
CUT_OF_TWO, FROM_TWO, LEAST_OF_THREE, FROM_THREE, FEW = 5, 1 << 18, {2: 3, 4: 5, 8: 5}, 1 << 19, 1 << 14
# How much more than with the chain, at most, what lies between the factors may then be.
MORE_BETWEEN = 1.3
# From MANY elements on, products of neighbours of up to MERGED are faster as one; in bfloat16, of factors of more than
# 8 and up to NARROW, products of up to MERGED_NARROW, from more elements on where all are 16.
MERGED, LEAST_MERGED = 64, 8
MERGED_NARROW, FROM_16 = 256, 1 << 24


def cut_of(x: Tensor, factors: Sequence[Tensor], keeps: bool = False) -> int:
    """How many factors to find the gradients of apart from those of the others: 0 where a chain of GEMMs is better.

    As where the last factors make much less of x, and only a chain begins with them.
    """
    cut = cut_before_squares(x, factors) or _cut_of_narrow(x, factors) or _cut_of_sizes(x, factors, keeps)
    if cut == 0 or others_come_first(factors[:cut], factors[cut:]):
        return cut
    return 0 if is_larger_from_first(factors) else cut


def is_larger_from_first(factors: Sequence[Tensor]) -> bool:
    """Whether to begin with the first factor leaves far more in between than to begin with the last one."""
    sizes = [w.shape for w in factors]
    return sum(elements_between(sizes)) > MORE_BETWEEN * sum(elements_between(sizes[::-1]))


def cut_before_squares(x: Tensor, factors: Sequence[Tensor]) -> int:
    """How many factors come before two of a size: 0 where there are none, 2 or more if these are two of a size as well.

    Which takes less time only in float32 and beyond 16, as measured on an H200: x and its gradient are rearranged.
    """
    cuts = [k for k in range(1, len(factors) - 1) if two_of_a_size(x, factors[k:])]
    if x.dtype == torch.float32 and min(min(w.shape) for w in factors) > NARROW:
        return next((k for k in cuts if k > 1 and two_of_a_size(x, factors[:k])), 1 if cuts else 0)
    return 1 if cuts else 0


def _cut_of_narrow(x: Tensor, factors: Sequence[Tensor]) -> int:
    """1 before small float16 factors that have kernels for groups, and are faster without; 0 before others."""
    narrow = x.dtype == torch.float16 and len(factors) > 2 and max(max(w.shape) for w in factors) <= NARROW
    return int(narrow and bool(plan_of_fibers(x, factors, 1)))


def _largest_to_cut(x: Tensor, largest: Sequence[int], keeps: bool) -> int:
    """The largest factors that are worth cutting a chain of GEMMs for, of factors with so many rows or columns."""
    n, width = x.numel(), x.element_size()
    if len(largest) == 2:
        return CUT_OF_TWO if n >= FROM_TWO or (n < FEW and width < 8) else 0
    if len(largest) == 3 and keeps and n >= FEW:
        return CUT[width] if n >= FROM_THREE and min(largest) <= LEAST_OF_THREE[width] else 0
    return CUT[width]


def _cut_of_sizes(x: Tensor, factors: Sequence[Tensor], keeps: bool) -> int:
    """How many factors come before the first large one, where they are small, or before the first small one.

    0 where the chain of GEMMs is better: without kernels for small factors, for several large ones before these, and
    where what lies between the parts would be more than the chain has there.
    """
    largest = [max(w.shape) for w in factors]
    most = _largest_to_cut(x, largest, keeps)
    small = [size <= most for size in largest]
    cut = next((k for k in range(1, len(factors)) if small[k] != small[0]), 0)
    if cut == 0 or not plan_of_fibers(x, [factors[small.index(True)]], 1):
        return 0
    first, others = factors[:cut], factors[cut:]
    if not small[0] and cut > 1 and not two_of_a_size(x, first):
        return 0
    i, o = (math.prod(w.shape[d] for w in first) for d in (1, 0))
    j, p = (math.prod(w.shape[d] for w in others) for d in (1, 0))
    return cut if (i * p if others_come_first(first, others) else o * j) <= most_between(factors) else 0


def others_come_first(first: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether to apply the others before the first's gradients are found: small ones, which takes less time."""
    return are_small(others) and not are_small(first)


def neighbours_to_merge(x: Tensor, factors: Sequence[Tensor]) -> list[slice]:
    """The groups of neighbours whose products are factors that take less time; none where single ones do.

    Of float16, the gradients of products may leave its range.
    """
    sizes, least = [max(w.shape) for w in factors], min(min(w.shape) for w in factors)
    if x.element_size() == 2 and least > 8 and max(sizes) <= NARROW and in_fours(factors):
        most, start = MERGED_NARROW, FROM_16 if least == 16 else MANY[2]
    else:
        most, start = MERGED, MANY[x.element_size()]
    if x.dtype == torch.float16 or least < LEAST_MERGED or x.numel() < start:
        return []
    groups: list[slice] = []
    end = len(factors)
    while end > 0:
        first = end - 1
        while first > 0 and math.prod(sizes[first - 1 : end]) <= most:
            first -= 1
        groups.insert(0, slice(first, end))
        end = first
    return groups if len(groups) < len(factors) else []
