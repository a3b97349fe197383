"""What the forward of a Kronecker-factored layer keeps for the gradients: what lies between factors."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .bwd import NOTHING, Kept, at_once, by_chain, way
from .cuts import MERGED, cut_before_squares, is_larger_from_first, neighbours_to_merge
from .fibers_bwd import are_small
from .fused import apply, are_gemms, fused_chain, in_place, plan_of, tf32_allowed
from .gemm import chain_of_matmuls, elements_of_chain, turns
from .sizes import elements_between
from .squares_bwd import two_of_a_size

Parts: TypeAlias = "list[tuple[int, bool]]"  # as in Kept
Forward: TypeAlias = "Callable[[Tensor, Sequence[Tensor], Tensor | None, Parts], tuple[Tensor, Sequence[Tensor]]]"

# By an element's bytes, the smallest factors whose states are worth products of their own, and how many at least; the
# most rows that several such states are kept of.
KEPT, KEPT_ROWS = {4: (48, 4), 8: (24, 2)}, 16
KEPT_OF_MANY = 16  # of more rows, the smallest of three float64 factors that one state is worth it for
LEAST_OF_HALF = 8  # float16 factors that all are larger have their gradients faster one by one
MOST_COPIED = 128  # rows or columns of a product of float64 factors that are faster from a state
BYTES = 1 << 28  # of a state of many rows; of two states and more, where the forward makes them anyway
# float64 factors beyond which the last two are faster one by one, of so many elements; of fewer, a single row by GEMMs.
WIDE, FROM_WIDE = 48, 1 << 23


class Choice(NamedTuple):
    """A forward that keeps states, how many, and from one to the next what `Kept` has."""

    forward: Forward
    states: int
    parts: Parts


_known: dict[object, Choice | None] = {}


def forward_and_states(
    x: Tensor, factors: Sequence[Tensor], bias: Tensor | None, needs_factors: Sequence[bool]
) -> tuple[Tensor, Kept]:
    """y, and what is kept for the gradients: nothing where none that are needed are of a state."""
    if choice := how(x, factors):
        if choice.parts:
            served = needs_factors[choice.parts[0][0] :]
        else:
            served = (needs_factors[::-1] if turns(factors) else needs_factors)[: choice.states]
        if any(served):
            y, states = choice.forward(x, factors, bias, choice.parts)
            return y, Kept(states, choice.parts)
    return fused_chain(x, factors, bias), NOTHING


def how(x: Tensor, factors: Sequence[Tensor]) -> Choice | None:
    """What to keep, and by which forward: found once for each problem."""
    sizes = tuple([size for w in factors for size in w.shape])
    key = x.dtype, x.numel(), sizes, tf32_allowed(x), x.device.index
    try:
        return _known[key]
    except KeyError:
        if len(_known) >= 4096:
            _known.clear()
        choice = _known[key] = _choose(x, factors)
        return choice


def _choose(x: Tensor, factors: Sequence[Tensor]) -> Choice | None:
    if len(factors) < 2 or at_once(x, factors):  # whose gradients want no states
        return None
    if neighbours_to_merge(x, factors) and not _has_large_product(x, factors):
        return None
    if count := _count_of_first(x, factors):
        if _is_chain_for_one(x, factors):
            return _chain(len(factors) - 1)
        return Choice(_by_parts, count, [(1, False)] * count + [(len(factors) - count, False)])
    if choice := _of_groups(x, factors):
        return choice
    if count := _count_of_gemms(x, factors):
        return _chain(count)
    return None


def _has_large_product(x: Tensor, factors: Sequence[Tensor]) -> bool:
    """Whether a GEMM has a product of neighbours forward, unless all have small ones, which are fast without states."""
    groups = plan_of(x, factors, 1)
    products = [is_product for _, is_product in _parts(groups)]
    sizes = [math.prod(max(w.shape) for w in factors[first : first + count]) for first, count, _ in groups]
    return any(products) and not (all(products) and max(sizes) <= MERGED)


def _chain(count: int) -> Choice:
    return Choice(functools.partial(_by_gemms, count), count, [])


def _how_many(x: Tensor, between: Sequence[int]) -> int:
    """How many of the last states are worth keeping, of so many elements of a row each: one always."""
    most = BYTES // (x.numel() // x.shape[-1] * x.element_size())
    return next((n for n in range(len(between), 1, -1) if sum(between[-n:]) <= most), 1)


def _of_groups(x: Tensor, factors: Sequence[Tensor]) -> Choice | None:
    """States between the groups of a forward of several launches; None where these are no use.

    As of a last group in float64 that a chain of GEMMs has the gradients of in less time from the start. Of two
    factors, each has its gradients in less time from a state of its own, where there is room for all.
    """
    groups = plan_of(x, factors, 1)
    if len(groups) < 2 or are_gemms(groups):
        return None
    is_chain = way(x, factors, keeps=True) is by_chain
    without = [part for part in _fused_groups(factors, groups[:-1]) if not _have_groups(x, part)]
    if without and not _are_worth_copies(x, factors, without, is_chain, groups[-1][1] == 1):
        return None
    *before, (first, count, is_fused) = groups
    last, between = factors[first:], elements_between([w.shape for w in factors])
    kept = [between[first] for first, *_ in groups[1:]]
    at_last = count == 1 or not is_fused or are_small(last) or two_of_a_size(x, last)
    if x.dtype == torch.float64 and not at_last:
        if count == 2 and _is_room(x, [*kept, between[-2]]):
            return Choice(_by_parts, len(groups), [*_parts(before), (1, False), (1, False)])
        if count > 2 and is_chain:
            return None
    return Choice(_by_groups, len(kept), _parts(groups)) if _is_room(x, kept) else None


def _is_room(x: Tensor, between: Sequence[int]) -> bool:
    return _how_many(x, between) == len(between)


def _parts(groups: Sequence[tuple[int, int, bool]]) -> Parts:
    return [(count, count > 1 and not is_fused) for _, count, is_fused in groups]


def _fused_groups(factors: Sequence[Tensor], groups: Sequence[tuple[int, int, bool]]) -> list[Sequence[Tensor]]:
    return [factors[first : first + count] for first, count, is_fused in groups if is_fused and count > 1]


def _have_groups(x: Tensor, factors: Sequence[Tensor]) -> bool:
    """Whether the gradients of factors with columns beyond them are found by a kernel for groups of them."""
    return are_small(factors) and (x.dtype != torch.float16 or min(min(w.shape) for w in factors) <= LEAST_OF_HALF)


def _are_worth_copies(
    x: Tensor, factors: Sequence[Tensor], groups: Sequence[Sequence[Tensor]], is_chain: bool, is_last_single: bool
) -> bool:
    """Whether to keep states for the gradients of such groups without a kernel, which copies are made for.

    `is_chain`: whether a chain of GEMMs would find all gradients else, whose copies are more in 16 bits.
    """
    if x.element_size() == 2 and is_chain:
        return True
    if not is_last_single or cut_before_squares(x, factors):
        return False
    return x.element_size() < 8 or all(math.prod(max(w.shape) for w in part) <= MOST_COPIED for part in groups)


def _by_groups(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None, parts: Parts) -> tuple[Tensor, list[Tensor]]:
    states: list[Tensor] = []
    return fused_chain(x, factors, bias, states), states


def _count_of_gemms(x: Tensor, factors: Sequence[Tensor]) -> int:
    """How many of the last states to keep where a chain of GEMMs goes back, which would find each by a product again.

    Some of them only where GEMMs go forward, too; any in 16 bits and TF32 only where a chain of them does, as else y
    would depend on whether it has a gradient.
    """
    if way(x, factors, keeps=True) is not by_chain:
        return 0
    between = elements_of_chain(factors)[1:-1]
    count = _how_many(x, between)
    groups = plan_of(x, factors, 1)
    if x.element_size() == 2 or tf32_allowed(x):
        return count if are_gemms(groups) else 0
    return 0 if count < len(between) and any(is_fused for *_, is_fused in groups) else count


def _by_gemms(
    count: int, x: Tensor, factors: Sequence[Tensor], bias: Tensor | None, parts: Parts
) -> tuple[Tensor, Sequence[Tensor]]:
    states: deque[Tensor] = deque(maxlen=count)
    return chain_of_matmuls(x, factors, bias, states), states


def _count_of_first(x: Tensor, factors: Sequence[Tensor]) -> int:
    """Of how many first factors to keep what each makes of x, by products of their own.

    All but those whose gradients are found together; 0 but where the backward would find these states again in a
    quarter of its time or more: one of two factors, or those of few rows. Not in 16 bits, where they would round once
    more, nor with TF32, in which fused kernels make up for more.
    """
    if x.element_size() == 2 or tf32_allowed(x):
        return 0
    n, least, rows = len(factors), min(min(w.shape) for w in factors), x.numel() // x.shape[-1]
    if turns(factors) or is_larger_from_first(factors):
        return 0
    one_by_one = x.element_size() == 8 and max(max(w.shape) for w in factors[-2:]) > WIDE and x.numel() >= FROM_WIDE
    together = n > 2 and not one_by_one and two_of_a_size(x, factors[-2:])
    if n > 2 and rows > KEPT_ROWS:
        kept_bytes = rows * elements_between([w.shape for w in factors])[1] * x.element_size()
        is_worth_it = n == 3 and x.element_size() == 8 and least >= KEPT_OF_MANY and kept_bytes <= BYTES
        return 1 if is_worth_it and together else 0
    smallest, fewest = KEPT[x.element_size()]
    if n < fewest or least < smallest:
        return 0
    return n - 2 if together else n - 1


def _is_chain_for_one(x: Tensor, factors: Sequence[Tensor]) -> bool:
    """Whether a chain of GEMMs, which rearranges nothing of a single row, is faster than other products a factor."""
    is_one = x.dtype == torch.float64 and x.shape[-1] == x.numel() < FROM_WIDE
    return is_one and way(x, factors, keeps=True) is by_chain


def _by_parts(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None, parts: Parts) -> tuple[Tensor, list[Tensor]]:
    states: list[Tensor] = []
    state, inner, first = in_place(x.contiguous()), x.shape[-1], 0
    for count, _ in parts[:-1]:
        part = factors[first : first + count]
        columns = inner
        inner //= math.prod(w.shape[1] for w in part)
        state = apply(state.reshape(-1, columns), part, inner)
        states.append(state)
        first += count
    y = fused_chain(state.reshape(-1, inner), factors[first:], None).reshape(*x.shape[:-1], -1)
    return y if bias is None else y + bias, states
