"""Gradients of Kronecker-factored layers: what finds them, for all factors at once or for some after the others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .._arguments import sums_dtype
from .copies import swapped
from .cuts import NARROW, cut_of, neighbours_to_merge, others_come_first
from .factor_bwd import by_kernel, factor_gradient, in_chain, takes_both_of_first
from .fibers_bwd import are_small, backward_of_fibers, groups_of_fibers, plan_of_fibers, time_of_fibers
from .fused import apply, fused_chain, in_place, plan_of
from .gemm import Held, back_through_chain, turns
from .merge import merged, product_of, unmerge
from .product_bwd import backward_of_products, time_of_products
from .slices_bwd import backward_of_slices, time_of_slices
from .squares_bwd import backward_of_squares, time_of_squares, two_of_a_size

Results: TypeAlias = "tuple[Tensor | None, list[Tensor | None]]"  # for x and the factors
# Of what holds y's gradient, x, the factors, whether x's gradient is needed, and which of the factors'.
Way: TypeAlias = "Callable[[Held, Tensor, Sequence[Tensor], bool, Sequence[bool]], Results]"

# The smallest factors that have both gradients faster by one kernel than by that of groups, by an element's bytes; of
# smaller ones, up to how many columns beyond them for each element of a square of their size.
LEAST_SINGLE, FEW_BEYOND = {2: 3, 4: 8, 8: 8}, {2: 25, 4: 0, 8: 3}
MOST_WIDE = 1 << 16  # elements of a product of bfloat16 whose gradient is found in float32


class Kept(NamedTuple):
    """What a forward keeps beside x and the factors: its states."""

    states: Sequence[Tensor] = ()
    # From one to the next: how many factors, whether a GEMM has their product. None: the last of `chain_of_matmuls`.
    parts: Sequence[tuple[int, bool]] = ()


NOTHING = Kept()


def _backward_of_states(
    held: Held, x: Tensor, factors: Sequence[Tensor], needs_x: bool, needs_factors: Sequence[bool], kept: Kept
) -> Results:
    """Back through one part of the factors after the other, each applied to a state that was kept."""
    dfactors, inner = [None] * len(factors), 1
    cuts = itertools.accumulate((count for count, _ in kept.parts), initial=0)
    parts, are_products = [slice(*ends) for ends in itertools.pairwise(cuts)], [merges for _, merges in kept.parts]
    applied = merged([factors[part] for part in parts], are_products)
    for k, part in reversed(list(enumerate(parts))):
        own, needs, needs_own = applied[k], needs_x or any(needs_factors[: part.start]), needs_factors[part]
        o, i = (inner * math.prod(w.shape[d] for w in own.factors) for d in (0, 1))
        held.append(held.pop().reshape(-1, o))
        state = (kept.states[k - 1] if k else x).reshape(-1, i)
        if are_products[k]:
            grad, dw = _backward_of_product(held, state, own.factors[0], inner, needs, any(needs_own))
            dfactors[part] = [None] * len(needs_own) if dw is None else unmerge(dw, factors[part], needs_own, own.scale)
        else:
            grad, found = _backward_along(held, state, own.factors, inner, needs, needs_own)
            if own.scale is not None and (dw := found[own.at]) is not None:
                dw.mul_(own.scale)
            dfactors[part] = found
        if grad is None:
            return None, dfactors
        held.append(grad)
        del grad
        inner = i
    return held.pop().reshape(x.shape), dfactors


def fused_backward(
    dy: Tensor,
    x: Tensor,
    factors: Sequence[Tensor],
    needs_x: bool,
    needs_factors: Sequence[bool],
    kept: Kept = NOTHING,
) -> Results:
    """Gradients for x and the factors, None where not needed. Nothing is empty.

    A factor's gradient is the product, summed over all that it does not touch, of x and of what dy becomes by the
    transposes of all other factors. `kept`: what the forward kept.
    """
    if kept.parts:
        return _backward_of_states([dy], x, factors, needs_x, needs_factors, kept)
    if kept.states:
        return by_chain([dy], x, factors, needs_x, needs_factors, kept.states)
    return _backward([dy], x, factors, needs_x, needs_factors)


def _backward(
    held: Held, x: Tensor, factors: Sequence[Tensor], needs_x: bool, needs_factors: Sequence[bool]
) -> Results:
    """`fused_backward` of what is held, where nothing was kept."""
    if not any(needs_factors):
        return fused_chain(held.pop(), [w.mT for w in factors], None) if needs_x else None, [None] * len(factors)
    return way(x, factors)(held, x, factors, needs_x, needs_factors)


def by_chain(
    held: Held,
    x: Tensor,
    factors: Sequence[Tensor],
    needs_x: bool,
    needs_factors: Sequence[bool],
    kept: Sequence[Tensor] = (),
) -> Results:
    are_two = len(factors) == 2 and not kept and not turns(factors)
    stays = are_two and needs_factors[0] and takes_both_of_first(x, *factors)
    if stays:
        held.append(held.pop().contiguous())
    return back_through_chain(held, x, factors, needs_x, needs_factors, in_chain, kept, stays)


def way(x: Tensor, factors: Sequence[Tensor], keeps: bool = False) -> Way:
    """What finds all gradients in the least time. `keeps`: whether `by_chain` would have states that were kept."""
    if found := at_once(x, factors):
        return found
    if x.dtype == torch.bfloat16 and plan_of(x, factors, 1) == [(0, 2, False)]:  # one GEMM with the product of both
        return lambda held, x, factors, needs_x, needs_factors: _backward_of_states(
            held, x, factors, needs_x, needs_factors, Kept(parts=[(2, True)])
        )
    if groups := neighbours_to_merge(x, factors):
        return lambda held, x, factors, *needs: _backward_of_merged(held, x, factors, groups, *needs)
    if cut := cut_of(x, factors, keeps):
        return lambda held, x, factors, *needs: _backward_in_two(held, x, factors, cut, *needs)
    return by_chain


def at_once(x: Tensor, factors: Sequence[Tensor]) -> Way | None:
    """What finds all gradients in the least time and has kernels for all factors, or for two products of all."""
    squares = two_of_a_size(x, factors)
    by_products, by_slices = time_of_products(x, factors), time_of_slices(x, factors)
    groups = [] if len(factors) == 1 and by_products < math.inf else groups_of_fibers(x, factors)
    by_fibers, by_squares = time_of_fibers(groups), time_of_squares(x, factors, squares)
    if by_slices < min(by_products, by_fibers, by_squares):
        return backward_of_slices
    if by_products < min(by_fibers, by_squares):
        return backward_of_products
    if groups and by_fibers <= by_squares:
        return lambda held, x, factors, *needs: backward_of_fibers(held, x, factors, groups, 1, *needs)
    if squares:
        return lambda held, x, factors, *needs: backward_of_squares(held, x, factors, squares, *needs)
    return None


def _backward_of_merged(
    held: Held,
    x: Tensor,
    factors: Sequence[Tensor],
    groups: Sequence[slice],
    needs_x: bool,
    needs_factors: Sequence[bool],
) -> Results:
    """`_backward` of the groups' products, whose gradients are then taken apart."""
    if len(groups) > 1 and groups[0].stop == 1 and max(factors[0].shape) <= NARROW:  # on which a GEMM would be slow
        return _backward_in_two(held, x, factors, 1, needs_x, needs_factors)
    products = [product_of(factors[group]) for group in groups]
    dx, found = _backward(held, x, products, needs_x, [any(needs_factors[group]) for group in groups])
    dfactors: list[Tensor | None] = []
    for group, dw in zip(groups, found, strict=True):
        parts = factors[group]
        dfactors += [None] * len(parts) if dw is None else unmerge(dw, parts, needs_factors[group])
    return dx, dfactors


def _backward_in_two(
    held: Held, x: Tensor, factors: Sequence[Tensor], cut: int, needs_x: bool, needs_factors: Sequence[bool]
) -> Results:
    """`_backward` of the first `cut` factors and of the others.

    One part's gradients are of what the other one makes of x; the other one's, of what the first's make of dy.
    """
    first, others, needs_first, needs_others = factors[:cut], factors[cut:], needs_factors[:cut], needs_factors[cut:]
    rows, (p, j) = x.numel() // x.shape[-1], (math.prod(w.shape[d] for w in others) for d in (0, 1))

    def by_first(x: Tensor, inner: int, needs_x: bool) -> Results:
        held.append(held.pop().reshape(rows, -1))
        return _backward_along(held, x.reshape(rows, -1), first, inner, needs_x, needs_first)

    def by_others(x: Tensor, needs_x: bool) -> Results:
        held.append(held.pop().reshape(-1, p))
        return _backward(held, x.reshape(-1, j), others, needs_x, needs_others)

    state, dx, dfirst, dothers = in_place(x.contiguous()), None, [None] * cut, [None] * len(others)
    if others_come_first(first, others):
        after = apply(state.reshape(-1, j), others, 1) if any(needs_first) else state
        before, dfirst = by_first(after, p, needs_x or any(needs_others))
        del after
        if before is not None:
            held.append(before)
            del before
            dx, dothers = by_others(state, needs_x)
    else:
        after = apply(state.reshape(rows, -1), first, j) if any(needs_others) else state
        before, dothers = by_others(after, needs_x or any(needs_first))
        del after
        if before is not None:
            held.append(before)
            del before
            dx, dfirst = by_first(state, j, needs_x)
    return None if dx is None else dx.reshape(x.shape), [*dfirst, *dothers]


def _is_fast_alone(w: Tensor, inner: int) -> bool:
    size, width = max(w.shape), w.element_size()
    return size >= LEAST_SINGLE[width] or inner <= FEW_BEYOND[width] * size * size


def _backward_along(
    held: Held, x: Tensor, factors: Sequence[Tensor], inner: int, needs_x: bool, needs_factors: Sequence[bool]
) -> Results:
    """Back through `apply`: the gradients of factors that have `inner` columns beyond them, and for x, (rows, ...)."""
    if inner == 1:
        return _backward(held, x, factors, needs_x, needs_factors)
    dy, rows, transposed = in_place(held.pop()), len(x), [w.mT for w in factors]
    if not any(needs_factors):
        return apply(dy, transposed, inner).reshape(rows, -1) if needs_x else None, [None] * len(factors)
    grads, states = dy.reshape(rows, -1, inner), x.reshape(rows, -1, inner)
    if (
        len(factors) == 1
        and needs_x
        and _is_fast_alone(factors[0], inner)
        and (both := by_kernel(grads, states, factors[0]))
        and both[0] is not None
    ):
        return both[0].reshape(rows, -1), [both[1]]
    if are_small(factors) and (groups := plan_of_fibers(x, factors, inner)):
        held.append(dy)
        del dy, grads
        return backward_of_fibers(held, x, factors, groups, inner, needs_x, needs_factors)
    if len(factors) == 1:
        dw = factor_gradient(grads, states)
        return apply(dy, transposed, inner).reshape(rows, -1) if needs_x else None, [dw]
    # Rearranged, so that nothing is beyond them.
    held.append(swapped(grads).reshape(-1, grads.shape[1]))
    del dy, grads
    dx, dfactors = _backward(held, swapped(states).reshape(-1, states.shape[1]), factors, needs_x, needs_factors)
    return None if dx is None else swapped(dx.reshape(rows, inner, -1)).reshape(rows, -1), dfactors


def _backward_of_product(
    held: Held, x: Tensor, product: Tensor, inner: int, needs_x: bool, needs_product: bool
) -> tuple[Tensor | None, Tensor | None]:
    """`_backward_along` of a product, whose gradient, which is still to be taken apart, comes as the sums that it is.

    But for large ones of bfloat16, for which the vendor's GEMM then takes longer.
    """
    dy, rows, sums = in_place(held.pop()), len(x), sums_dtype(x.dtype)
    grads, states = dy.reshape(rows, -1, inner), x.reshape(rows, -1, inner)
    if needs_x and needs_product and _is_fast_alone(product, inner):
        dx, dw = by_kernel(grads, states, product, sums) or (None, None)
        if dx is not None:
            return dx.reshape(rows, -1), dw
    is_wide = x.dtype == torch.float16 or product.numel() <= MOST_WIDE
    dw = factor_gradient(grads, states, sums if is_wide else None) if needs_product else None
    return apply(dy, [product.mT], inner).reshape(rows, -1) if needs_x else None, dw
