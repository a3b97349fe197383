"""Gradients of Kronecker-factored layers: what finds them, for all factors at once or for some after the others."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ._kron_linear_factor_bwd import factor_gradient
from ._kron_linear_fibers_bwd import are_small, backward_of_fibers, groups_of_fibers, plan_of_fibers, time_of_fibers
from ._kron_linear_fused import apply, fused_chain, in_place, tf32_allowed
from ._kron_linear_gemm import chain_of_matmuls, chain_of_matmuls_backward, most_between, turns
from ._kron_linear_product_bwd import backward_of_products, time_of_products
from ._kron_linear_slices_bwd import backward_of_slices, time_of_slices
from ._kron_linear_squares_bwd import backward_of_squares, time_of_squares, two_of_a_size

# By an element's bytes, the smallest factors whose states are worth keeping, and how many at least; the most rows that
# several states are kept of.
KEPT, KEPT_ROWS = {2: (math.inf, 0), 4: (48, 4), 8: (24, 2)}, 16
NARROW = 16  # the largest factors that are faster one by one than as a part of two of a size
CUT = {2: 8, 4: 12, 8: 12}  # by an element's bytes: the largest factors worth cutting a chain of GEMMs for


def keeps_states(x: Tensor, factors: Sequence[Tensor]) -> bool:
    """Whether to keep what a factor after the other is applied to: one state, or those of few rows.

    Where gradients by a factor after the other would find them again in a quarter of their time or more.
    """
    n, (smallest, fewest) = len(factors), KEPT[x.element_size()]
    if n < fewest or min(min(w.shape) for w in factors) < smallest or (n > 2 and x.numel() > KEPT_ROWS * x.shape[-1]):
        return False
    if tf32_allowed(x):  # in which fused kernels make up for more
        return False
    times = time_of_products(x, factors), time_of_slices(x, factors), time_of_squares(x, two_of_a_size(x, factors))
    return min(times) == math.inf and not groups_of_fibers(x, factors) and not turns(factors)


def forward_and_states(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """y, and what the factors but the last one are applied to, where it is kept."""
    states: list[Tensor] = []
    if not keeps_states(x, factors):
        return fused_chain(x, factors, bias), states
    if x.dtype != torch.float32:
        return chain_of_matmuls(x, factors, bias, states), states
    state, inner = in_place(x.contiguous()), 1
    for w in reversed(factors):
        states.append(state)
        state, inner = apply(state.reshape(-1, w.shape[1] * inner), [w], inner), inner * len(w)
    y = state.reshape(*x.shape[:-1], inner)
    return y if bias is None else y + bias, states[1:]


def _backward_of_states(
    dy: Tensor,
    x: Tensor,
    factors: Sequence[Tensor],
    needs_x: bool,
    needs_factors: Sequence[bool],
    kept: Sequence[Tensor],
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Back through `forward_and_states`."""
    if x.dtype != torch.float32:
        return chain_of_matmuls_backward(dy, x, factors, needs_x, needs_factors, factor_gradient, kept)
    rows, inner = x.numel() // x.shape[-1], dy.shape[-1]
    grad, states, dfactors = dy, [*reversed(kept), x], [None] * len(factors)
    for k, w in enumerate(factors):
        if grad is None:
            break
        inner //= len(w)
        grad, state, needs = grad.reshape(rows, -1), states[k].reshape(rows, -1), [needs_factors[k]]
        grad, (dfactors[k],) = _backward_along(grad, state, [w], inner, needs_x or any(needs_factors[k + 1 :]), needs)
        rows *= w.shape[1]
    return None if grad is None else grad.reshape(x.shape), dfactors


def fused_backward(
    dy: Tensor,
    x: Tensor,
    factors: Sequence[Tensor],
    needs_x: bool,
    needs_factors: Sequence[bool],
    kept: Sequence[Tensor] = (),
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients for x and the factors, None where not needed. Nothing is empty.

    A factor's gradient is the product, summed over all that it does not touch, of x and of what dy becomes by the
    transposes of all other factors. `kept`: the states of `forward_and_states`.
    """
    if kept:
        return _backward_of_states(dy, x, factors, needs_x, needs_factors, kept)
    if not any(needs_factors):
        return fused_chain(dy, [w.mT for w in factors], None) if needs_x else None, [None] * len(factors)
    squares = two_of_a_size(x, factors)
    by_products, by_slices = time_of_products(x, factors), time_of_slices(x, factors)
    groups = [] if len(factors) == 1 and by_products < math.inf else groups_of_fibers(x, factors)
    otherwise = time_of_fibers(groups) if groups else time_of_squares(x, squares)
    if by_slices < min(by_products, otherwise):
        return backward_of_slices(dy, x, factors, needs_x, needs_factors)
    if by_products < otherwise:
        return backward_of_products(dy, x, factors, needs_x, needs_factors)
    if groups:
        return backward_of_fibers(dy, x, factors, groups, 1, needs_x, needs_factors)
    if squares:
        return backward_of_squares(dy, x, factors, *squares, needs_x, needs_factors)
    if cut := _cut_before_squares(x, factors) or _cut_of_sizes(x, factors):
        return _backward_in_two(dy, x, factors, cut, needs_x, needs_factors)
    return chain_of_matmuls_backward(dy, x, factors, needs_x, needs_factors, factor_gradient)


def _cut_before_squares(x: Tensor, factors: Sequence[Tensor]) -> int:
    """How many factors come before two of a size: 0 where there are none, 2 or more if these are two of a size as well.

    Which takes less time only in float32 and beyond 16, as measured on an H200: x and its gradient are rearranged.
    """
    cuts = [k for k in range(1, len(factors) - 1) if two_of_a_size(x, factors[k:])]
    if x.dtype == torch.float32 and min(min(w.shape) for w in factors) > NARROW:
        return next((k for k in cuts if k > 1 and two_of_a_size(x, factors[:k])), 1 if cuts else 0)
    return 1 if cuts else 0


def _cut_of_sizes(x: Tensor, factors: Sequence[Tensor]) -> int:
    """How many factors come before the first large one, where they are small, or before the first small one.

    0 where the chain of GEMMs is better: without kernels for small factors, for several large ones before these, and
    where what lies between the parts would be more than the chain has there.
    """
    small = [max(w.shape) <= CUT[w.element_size()] for w in factors]
    cut = next((k for k in range(1, len(factors)) if small[k] != small[0]), 0)
    if cut == 0 or not plan_of_fibers(x, [factors[small.index(True)]], 1):
        return 0
    first, others = factors[:cut], factors[cut:]
    if not small[0] and cut > 1 and not two_of_a_size(x, first):
        return 0
    i, o = (math.prod(w.shape[d] for w in first) for d in (1, 0))
    j, p = (math.prod(w.shape[d] for w in others) for d in (1, 0))
    return cut if (i * p if _others_come_first(first, others) else o * j) <= most_between(factors) else 0


def _others_come_first(first: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether to apply the others before the first's gradients are found: small ones, which takes less time."""
    return are_small(others) and not are_small(first)


def _backward_in_two(
    dy: Tensor, x: Tensor, factors: Sequence[Tensor], cut: int, needs_x: bool, needs_factors: Sequence[bool]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """`fused_backward` of the first `cut` factors and of the others.

    One part's gradients are of what the other one makes of x; the other one's, of what the first's make of dy.
    """
    first, others, needs_first, needs_others = factors[:cut], factors[cut:], needs_factors[:cut], needs_factors[cut:]
    rows, (p, j) = x.numel() // x.shape[-1], (math.prod(w.shape[d] for w in others) for d in (0, 1))

    def by_first(dy: Tensor, x: Tensor, inner: int, needs_x: bool) -> tuple[Tensor | None, list[Tensor | None]]:
        return _backward_along(dy.reshape(rows, -1), x.reshape(rows, -1), first, inner, needs_x, needs_first)

    def by_others(dy: Tensor, x: Tensor, needs_x: bool) -> tuple[Tensor | None, list[Tensor | None]]:
        return fused_backward(dy.reshape(-1, p), x.reshape(-1, j), others, needs_x, needs_others)

    state, dx, dfirst, dothers = in_place(x.contiguous()), None, [None] * cut, [None] * len(others)
    if _others_come_first(first, others):
        after = apply(state.reshape(-1, j), others, 1) if any(needs_first) else state
        before, dfirst = by_first(dy, after, p, needs_x or any(needs_others))
        if before is not None:
            dx, dothers = by_others(before, state, needs_x)
    else:
        after = apply(state.reshape(rows, -1), first, j) if any(needs_others) else state
        before, dothers = by_others(dy, after, needs_x or any(needs_first))
        if before is not None:
            dx, dfirst = by_first(before, state, j, needs_x)
    return None if dx is None else dx.reshape(x.shape), [*dfirst, *dothers]


def _backward_along(
    dy: Tensor, x: Tensor, factors: Sequence[Tensor], inner: int, needs_x: bool, needs_factors: Sequence[bool]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Back through `apply`: the gradients of factors that have `inner` columns beyond them, and for x, (rows, ...)."""
    dy, rows, transposed = in_place(dy), len(x), [w.mT for w in factors]
    if not any(needs_factors):
        return apply(dy, transposed, inner).reshape(rows, -1) if needs_x else None, [None] * len(factors)
    if are_small(factors) and (groups := plan_of_fibers(x, factors, inner)):
        return backward_of_fibers(dy, x, factors, groups, inner, needs_x, needs_factors)
    grads, states = dy.reshape(rows, -1, inner), x.reshape(rows, -1, inner)
    if len(factors) == 1:
        dx = apply(dy, transposed, inner).reshape(rows, -1) if needs_x else None
        return dx, [factor_gradient(grads, states)]
    # Rearranged, so that nothing is beyond them.
    flat = grads.mT.reshape(-1, grads.shape[1]), states.mT.reshape(-1, states.shape[1])
    dx, dfactors = fused_backward(*flat, factors, needs_x, needs_factors)
    return None if dx is None else dx.reshape(rows, inner, -1).mT.reshape(rows, -1), dfactors
