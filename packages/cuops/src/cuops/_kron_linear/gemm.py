"""Kronecker-factored layers by the vendor's GEMM: the path of factors that no fused kernel takes in less time."""

from __future__ import annotations

import math
from collections.abc import Callable, MutableSequence, Sequence

import torch
from torch import Tensor

from .copies import swapped
from .sizes import elements_between
from .sums import LAUNCH, is_sum_in_batch, sum_of_products, tiles

# For a factor's gradient, and that of what it is applied to where the factor is given; None where it is slower.
Kernel = Callable[[Tensor, Tensor, "Tensor | None"], "tuple[Tensor | None, Tensor] | None"]
Held = MutableSequence[Tensor]  # of one tensor: whoever takes it out decides when its memory is free

# What a batch of products takes beside one GEMM, and copies beside a batch, as bytes that are moved, fitted to 1300
# problems a dtype on an H100. By an element's bytes: for each tile of results; for a product of columns that
# are missing to a multiple of STRIP; for a byte of 16-bit operands whose rows are no whole vectors.
OF_TILE, STRIP, MISSING, UNALIGNED = {2: 300, 4: 800, 8: 1900}, 32, 0.07, 0.45
# Up to which a batch of small products, of a factor without columns beyond it, is faster than one GEMM: products, by an
# element's bytes; elements, and rows.
FEW_PRODUCTS, FEW_ELEMENTS, FEW_ROWS = {2: 1 << 20, 4: 3 << 20, 8: 3 << 19}, 1 << 15, 1024
# Of two factors, products of the first one's rows, up to which two batches are faster; rows of the second one, from how
# many on else nothing is rearranged between these: after a larger one, and else.
MOST_BATCHES, ACROSS, LEAST_ACROSS = 1 << 21, 26, 18
MOST_TURNED = 60  # factors, whose sizes are dimensions of a tensor, of which PyTorch takes 64


def out_shape(x: Tensor, factors: Sequence[Tensor]) -> tuple[int, ...]:
    """y's shape."""
    return (*x.shape[:-1], math.prod(w.shape[0] for w in factors))


def _is_small(state: Tensor, w: Tensor) -> bool:
    """Whether the library's GEMM is slower than a batch of a product a row, of a factor without columns beyond it."""
    few = state.shape[0] <= FEW_ROWS and state.numel() < FEW_ELEMENTS
    odd = w.element_size() > 2 or w.shape[0] % 8 != 0 or w.shape[1] % 8 != 0
    return few and odd and state.shape[0] * w.numel() <= FEW_PRODUCTS[w.element_size()]


def _is_in_batch(rows: int, w: Tensor, rest: int, copied: int, launches: int = 2) -> bool:
    """Whether a batch of products, of `rest` columns each, is faster than one GEMM and copies of so many elements."""
    (o, i), width = w.shape, w.element_size()
    cost = OF_TILE[width] * tiles(o, rest) + MISSING * (-rest % STRIP) * max(o, STRIP) * i
    cost += UNALIGNED * width * rest * (o + i) if width == 2 and rest % 8 else 0.0
    return rows * cost <= copied * width + launches * LAUNCH


def _product(held: Held, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """w times each matrix of what is held, (rows, i, inner), plus (o, inner): (rows, o, inner).

    As a batch of products, or as one GEMM of copies: of its result, and of these matrices unless they lie across.
    """
    state = held.pop()
    (o, i), (rows, _, inner) = w.shape, state.shape
    if inner == 1:
        in_batch = _is_small(state, w)
        if not in_batch:
            return torch.nn.functional.linear(
                state.squeeze(-1), w, None if bias is None else bias.reshape(o)
            ).unsqueeze(-1)
    elif state.mT.is_contiguous():
        in_batch = _is_in_batch(rows, w, inner, rows * inner * o)
    else:
        in_batch = _is_in_batch(rows, w, inner, rows * inner * (o + i), launches=3)
    if in_batch:
        matrices = w.expand(rows, o, i), state
        return torch.bmm(*matrices) if bias is None else torch.baddbmm(bias.reshape(o, inner), *matrices)
    flat = swapped(state).reshape(rows * inner, i)
    del state
    flat = flat @ w.mT
    y = swapped(flat.reshape(rows, inner, o))
    del flat
    return y if bias is None else y + bias.reshape(o, inner)


def _apply_factor(held: Held, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """One factor on the last dimension inside what is held, (rows, ... i), which becomes the first: (rows, o ...)."""
    rows = held[0].shape[0]
    held.append(held.pop().reshape(rows, -1, w.shape[1]).mT)
    return _product(held, w, bias).reshape(rows, -1)


def apply_along(held: Held, w: Tensor, inner: int, bias: Tensor | None = None) -> Tensor:
    """One factor on the first dimension inside what is held, (rows, i inner), where it stays: (rows, o inner).

    A bias, which `inner` is 1 for, is of as many of these rows as make a sample.
    """
    (o, i), rows = w.shape, held[0].shape[0]
    held.append(held.pop().reshape(rows, i, inner))
    if bias is None or bias.shape[0] == o:
        return _product(held, w, bias).reshape(rows, o * inner)
    return _product(held, w).reshape(-1, bias.shape[0]) + bias


def turns(factors: Sequence[Tensor]) -> bool:
    """Whether to begin with the first factor is worth copies of x and y: where it leaves far less in between."""
    if not 1 < len(factors) <= MOST_TURNED:
        return False
    sizes = [w.shape for w in factors]
    return any(o != i for o, i in sizes) and 2 * sum(elements_between(sizes)) < sum(elements_between(sizes[::-1]))


def _turned(t: Tensor, sizes: Sequence[int]) -> Tensor:
    """t with the dimensions that the last one is made of, of these sizes, in reverse order."""
    return t.reshape(-1, *sizes).permute(0, *range(len(sizes), 0, -1)).reshape(t.shape)


def elements_of_chain(factors: Sequence[Tensor]) -> list[int]:
    """Of a row: elements of x, of what `chain_of_matmuls` has between the factors, and of y."""
    return elements_between([w.shape for w in (factors if turns(factors) else factors[::-1])])


def most_between(factors: Sequence[Tensor]) -> int:
    """The most elements of a row that `chain_of_matmuls` has at a time."""
    return max(elements_of_chain(factors))


def _are_two(state: Tensor, factors: Sequence[Tensor]) -> bool:
    """Whether `_apply_two` takes the factors, and `_backward_of_two`."""
    if len(factors) != 2 or state.shape[0] == 1:
        return False
    first, second = factors
    least = LEAST_ACROSS if max(first.shape) <= second.shape[0] else ACROSS
    return second.shape[0] >= least and state.shape[0] * first.shape[1] * second.numel() > MOST_BATCHES


def _apply_two(
    state: Tensor, first: Tensor, second: Tensor, bias: Tensor | None, states: MutableSequence[Tensor] | None
) -> Tensor:
    """Two factors, as W1 (X W2^T), where X is a row of `state` as a matrix."""
    held = [(state.reshape(-1, second.shape[1]) @ second.mT).reshape(-1, first.shape[1], second.shape[0])]
    if states is not None:
        states.append(held[0])
    return _product(held, first, bias)


def chain_of_matmuls(
    x: Tensor, factors: Sequence[Tensor], bias: Tensor | None, states: MutableSequence[Tensor] | None = None
) -> Tensor:
    """y by a GEMM a factor, the last factor first. Nothing is empty. `states`: where what lies between them goes."""
    if turns(factors):
        outs, ins = zip(*(w.shape for w in factors), strict=True)
        turned = None if bias is None else _turned(bias, outs)
        return _turned(chain_of_matmuls(_turned(x, ins), factors[::-1], turned, states), outs[::-1])
    held = [x.reshape(-1, x.shape[-1])]
    if _are_two(held[0], factors):
        return _apply_two(held[0], factors[0], factors[1], bias, states).reshape(out_shape(x, factors))
    for w in reversed(factors[1:]):
        held.append(_apply_factor(held, w))
        if states is not None:
            states.append(held[0])
    return _apply_factor(held, factors[0], bias).reshape(out_shape(x, factors))


def _gradient(g: Tensor, x: Tensor, kernel: Kernel | None) -> Tensor:
    found = None if kernel is None else kernel(g, x, None)
    return sum_of_products(g, x) if found is None else found[1]


def _by_batch(grads: Tensor, w: Tensor, is_across: bool) -> Tensor:
    """The transpose of w times each matrix of grads, as a batch of products."""
    matrices = w.expand(len(grads), *w.shape)
    return torch.bmm(grads.mT, matrices).mT if is_across else torch.bmm(matrices.mT, grads)


def _back_through_product(
    held: Held, w: Tensor, own: Held, is_across: bool, needs_state: bool, kernel: Kernel | None
) -> tuple[Tensor | None, Tensor | None]:
    """Back through `_product` of a state, (rows, i, inner), which lies across or along, and which `own` has.

    Its gradient, which lies likewise, where that is needed, and w's, unless `own` is empty; both share a copy.
    """
    grads, state = held.pop(), own.pop() if own else None
    (o, i), (rows, _, inner) = w.shape, grads.shape
    copied = 0 if is_across else rows * inner * i
    dw = None
    if state is not None and not is_across and kernel is not None:
        if needs_state and (both := kernel(grads, state, w)):
            return both
        if alone := kernel(grads, state, None):
            dw, state = alone[1], None
    sums_in_batch = state is None or (inner > 1 and is_sum_in_batch(grads, state))
    launches = 2 if is_across else 3
    in_batch = inner > 1 and _is_in_batch(rows, w.mT, inner, rows * inner * o + copied, launches)
    is_flat = not sums_in_batch or (needs_state and not in_batch)
    if state is not None and not (is_flat and (is_across or not sums_in_batch)):
        dw, state = _gradient(grads, state, kernel if is_across else None), None
    if not is_flat:
        return _by_batch(grads, w, is_across) if needs_state else None, dw
    flat = swapped(grads).reshape(rows * inner, o)
    in_batch = _is_small(flat, w) if inner == 1 else _is_in_batch(rows, w.mT, inner, copied)
    if needs_state and in_batch:
        held.append(grads)
    del grads
    if state is not None:
        dw, state = _gradient(flat.unsqueeze(-1), swapped(state).reshape(rows * inner, i, 1), kernel), None
    if not needs_state:
        return None, dw
    if in_batch:
        return _by_batch(held.pop(), w, is_across), dw
    flat = (flat @ w).reshape(rows, inner, i)
    return flat.mT if is_across else swapped(flat), dw


def _backward_of_two(
    held: Held,
    x: Tensor,
    first: Tensor,
    second: Tensor,
    needs_x: bool,
    needs_factors: Sequence[bool],
    kernel: Kernel | None,
    kept: Sequence[Tensor],
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Back through `_apply_two`: gradients for x and both factors."""
    (o, i), (p, j) = first.shape, second.shape
    states, dx, dsecond = x.reshape(-1, j), None, None
    after: Held = []
    if needs_factors[0]:
        after.append(kept[0] if kept else (states @ second.mT).reshape(-1, i, p))
    needs_state = needs_x or needs_factors[1]
    held.append(held.pop().reshape(-1, o, p))
    before, dfirst = _back_through_product(held, first, after, False, needs_state, kernel)
    if before is not None:
        grads = before.reshape(-1, p)
        del before
        dsecond = _gradient(grads.unsqueeze(-1), states.unsqueeze(-1), kernel) if needs_factors[1] else None
        dx = (grads @ second).reshape(x.shape) if needs_x else None
    return dx, [dfirst, dsecond]


def chain_of_matmuls_backward(
    dy: Tensor, x: Tensor, factors: Sequence[Tensor], needs_x: bool, needs_factors: Sequence[bool]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """`back_through_chain` of what somebody else holds, too, whose states were not kept."""
    return back_through_chain([dy], x, factors, needs_x, needs_factors)


def back_through_chain(
    held: Held,
    x: Tensor,
    factors: Sequence[Tensor],
    needs_x: bool,
    needs_factors: Sequence[bool],
    kernel: Kernel | None = None,
    kept: Sequence[Tensor] = (),
    stays: bool = False,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients for x and the factors, None where not needed: `chain_of_matmuls` again, then back through it.

    `held`: y's. `kernel`: what finds a factor's gradient where it is faster than `sum_of_products`. `kept`: the last
    states of `chain_of_matmuls`. `stays`: whether nothing is to be rearranged between two factors, whose state is not
    kept.
    """
    if not (needs_x or any(needs_factors)):
        return None, [None] * len(factors)
    if turns(factors):
        outs, ins = zip(*(w.shape for w in factors), strict=True)
        held.append(_turned(held.pop(), outs))
        turned = _turned(x, ins) if any(needs_factors) else x
        dx, dfactors = back_through_chain(held, turned, factors[::-1], needs_x, needs_factors[::-1], kernel, kept)
        return None if dx is None else _turned(dx, ins[::-1]), dfactors[::-1]
    state, states = x.reshape(-1, x.shape[-1]), {}
    if stays or _are_two(state, factors):
        return _backward_of_two(held, x, factors[0], factors[1], needs_x, needs_factors, kernel, kept)
    for k in reversed(range(len(factors))):
        if needs_factors[k]:
            states[k] = state
        if not any(needs_factors[:k]):
            break
        state = kept[-k] if k <= len(kept) else _apply_factor([state], factors[k])
    rows = state.shape[0]
    del state
    dfactors = [None] * len(factors)
    for k, w in enumerate(factors):
        needs_state, own = needs_x or any(needs_factors[k + 1 :]), []
        if k in states:
            own.append(states.pop(k).reshape(rows, -1, w.shape[1]).mT)
        held.append(held.pop().reshape(rows, w.shape[0], -1))
        before, dfactors[k] = _back_through_product(held, w, own, True, needs_state, kernel)
        if before is None:
            return None, dfactors
        held.append(before.mT.reshape(rows, -1))
        del before
    return held.pop().reshape(x.shape), dfactors
