"""Kronecker-factored layers by the vendor's GEMM: the path of factors that no fused kernel takes in less time."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, MutableSequence, Sequence

import torch
from torch import Tensor

from ._transforms import is_batched
from .reference import elements_between

Gradient = Callable[[Tensor, Tensor], Tensor]

# Columns, for fewer than which a batched GEMM may be slower than one GEMM and a rearranging copy: forward, and back.
FEW, FEW_BACK = 32, 24
# Up to which a batch of small products is faster than one GEMM: products, those of a factor without columns beyond it,
# by an element's bytes; elements, and rows.
FEW_PRODUCTS, FEW_ALONE, FEW_ELEMENTS, FEW_ROWS = 3 << 19, {2: 1 << 20, 4: 3 << 20, 8: 3 << 19}, 1 << 15, 1024
# With fewer columns than FEW, too: up to which products of a column of all rows, of a factor of at least TILE rows and
# columns, as one of fewer takes as long; and up to how many terms of a sum, which a batch does not divide. Of two
# factors, so many products of the second one are faster as a batch as well.
FEW_OF_COLUMN, TILE, FEW_TERMS = 1 << 21, 48, 512
# Parts of gradients, of so many rows and columns each, from how many on a batched GEMM of them is faster than one GEMM
# and a rearranging copy; of fewer, up to which terms of a sum, by an element's bytes.
PART, MANY_PARTS, SHORT = 64, {2: 24, 4: 64, 8: 8}, {2: 1536, 4: 256, 8: 512}
# But of gradients of one part, one GEMM is, as it divides long sums: from how many terms of a row's sum on, more than
# SHORT, up to how many rows.
LONG, ROWS_OF_LONG = {2: 1537, 4: 512, 8: 2500}, {2: 70, 4: 150, 8: 400}
# Rows or columns of a gradient, of more than which a batched GEMM always is. Then of few rows with long sums, each is
# added by a GEMM of its own: of up to how many, and for each of them from how many terms of a row's sum on.
LARGE, ROWS_ADDED, TERMS_ADDED = 128, {2: 2, 4: 8, 8: 4}, {2: 8192, 4: 1250, 8: 2500}
# Rows or columns of a gradient, of fewer than which one GEMM does not divide the sum among multiprocessors: up to how
# many terms that is slower than parts of at least LEAST_TERMS, by an element's bytes; and the most parts.
TINY, TINY_TERMS, LEAST_TERMS, MOST_PARTS = 16, {2: 1 << 14, 4: 1 << 63, 8: 1 << 14}, 32, 1024
# Terms of a float64 sum, of how many one GEMM for a gradient between PART and LARGE divides them badly; and parts then.
WIDE_TERMS, WIDE_PARTS = range(1 << 12, 9216 + 1), 16
# Products a row that are worth it for sums of fewer terms than FEW_BACK: rows, those of tiny gradients, and elements.
SHORT_ROWS, SHORT_ROWS_TINY, SHORT_ELEMENTS = 100, 1024, 3 << 19
# Where batches in the room of x, one after the other, are faster than two rearranging copies: up to how many rows of a
# gradient for two terms of a row's sum, by an element's bytes; from how many bytes on.
IN_TURNS, BYTES_IN_TURNS = {2: 5, 4: 5, 8: 3}, 1 << 22
# Rows of the second of two factors, from how many on nothing is rearranged between these: after a larger one, and else.
ACROSS, LEAST_ACROSS = 26, 18
MOST_TURNED = 60  # factors, whose sizes are dimensions of a tensor, of which PyTorch takes 64


def out_shape(x: Tensor, factors: Sequence[Tensor]) -> tuple[int, ...]:
    """y's shape."""
    return (*x.shape[:-1], math.prod(w.shape[0] for w in factors))


def product_of(factors: Sequence[Tensor]) -> Tensor:
    """Their Kronecker product, in the same order in memory whatever theirs is: one matrix for a kernel or a GEMM."""
    if len(factors) == 1:
        return factors[0]
    # contiguous() leaves a dimension of size 1 its stride, which torch.kron would take for an order.
    return functools.reduce(torch.kron, [w.reshape(-1).view(w.shape) for w in factors])


def _is_small(state: Tensor, w: Tensor, rest: int) -> bool:
    """Whether the library's GEMM is slower than a batch of a product a row, as measured."""
    products = state.shape[0] * rest * w.numel()
    few = (
        state.shape[0] <= FEW_ROWS
        and state.numel() < FEW_ELEMENTS
        and products <= (FEW_PRODUCTS if rest > 1 else FEW_ALONE[w.element_size()])
    )
    return few and (rest > 1 or w.element_size() > 2 or w.shape[0] % 8 != 0 or w.shape[1] % 8 != 0)


def _is_in_batch(rows: int, w: Tensor, rest: int) -> bool:
    """Whether a batch of products, of `rest` columns each, is faster than one GEMM and a rearranging copy."""
    products = rows * max(w.shape[0], TILE) * max(w.shape[1], TILE)
    return rest >= FEW or (w.shape[1] <= FEW_TERMS and products <= FEW_OF_COLUMN)


def _apply_factor(state: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """One factor on the last dimension inside `state`, (rows, ... i), which becomes the first: (rows, o ...).

    The transposed product comes out of the batched GEMM in this order, so nothing is ever rearranged.
    """
    o, i = w.shape
    rows, rest = state.shape[0], state.shape[1] // i
    small = _is_small(state, w, rest)
    if rest == 1 and not small:
        return torch.nn.functional.linear(state, w, bias)
    bias = None if bias is None else bias.reshape(o, rest)
    if not small and not _is_in_batch(rows, w, rest):
        y = (state.reshape(rows * rest, i) @ w.mT).reshape(rows, rest, o).mT
        return (y if bias is None else y + bias).reshape(rows, o * rest)
    matrices = w.expand(rows, o, i), state.reshape(rows, rest, i).mT
    return (torch.bmm(*matrices) if bias is None else torch.baddbmm(bias, *matrices)).reshape(rows, o * rest)


def apply_along(state: Tensor, w: Tensor, inner: int, bias: Tensor | None = None) -> Tensor:
    """One factor on the first dimension inside `state`, (rows, i inner), where it stays: (rows, o inner).

    A bias, which `inner` is 1 for, is of as many of these rows as make a sample.
    """
    (o, i), rows = w.shape, state.shape[0]
    if inner == 1:
        if bias is None or bias.shape[0] == o:
            return _apply_factor(state, w, bias)
        return _apply_factor(state, w).reshape(-1, bias.shape[0]) + bias
    state = state.reshape(rows, i, inner)
    if _is_in_batch(rows, w, inner):
        return torch.bmm(w.expand(rows, o, i), state).reshape(rows, o * inner)
    return (state.mT.reshape(rows * inner, i) @ w.mT).reshape(rows, inner, o).mT.reshape(rows, o * inner)


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
    return second.shape[0] >= least and state.shape[0] * first.shape[1] * second.numel() > FEW_OF_COLUMN


def _apply_two(
    state: Tensor, first: Tensor, second: Tensor, bias: Tensor | None, states: MutableSequence[Tensor] | None
) -> Tensor:
    """Two factors, by one GEMM and a batched one: as W1 (X W2^T), where X is a row of `state` as a matrix."""
    (o, i), (p, j) = first.shape, second.shape
    after = (state.reshape(-1, j) @ second.mT).reshape(-1, i, p)
    if states is not None:
        states.append(after)
    matrices = first.expand(after.shape[0], o, i), after
    return torch.bmm(*matrices) if bias is None else torch.baddbmm(bias.reshape(o, p), *matrices)


def chain_of_matmuls(
    x: Tensor, factors: Sequence[Tensor], bias: Tensor | None, states: MutableSequence[Tensor] | None = None
) -> Tensor:
    """y by a GEMM a factor, the last factor first. Nothing is empty. `states`: where what lies between them goes."""
    if turns(factors):
        outs, ins = zip(*(w.shape for w in factors), strict=True)
        turned = None if bias is None else _turned(bias, outs)
        return _turned(chain_of_matmuls(_turned(x, ins), factors[::-1], turned, states), outs[::-1])
    state = x.reshape(-1, x.shape[-1])
    if _are_two(state, factors):
        return _apply_two(state, factors[0], factors[1], bias, states).reshape(out_shape(x, factors))
    for w in reversed(factors[1:]):
        state = _apply_factor(state, w)
        if states is not None:
            states.append(state)
    return _apply_factor(state, factors[0], bias).reshape(out_shape(x, factors))


@functools.lru_cache(4096)
def _parts_of_sum(terms: int) -> int:
    """Into how many equal parts to divide a long sum; 1 where it does not divide."""
    return next(p for p in range(max(1, min(terms // LEAST_TERMS, MOST_PARTS)), 0, -1) if terms % p == 0)


def _parts(terms: int, inner: int, o: int, i: int, width: int) -> int:
    """Into how many equal parts to divide a sum along one axis, which one GEMM leaves to few multiprocessors."""
    if not isinstance(terms, int):  # but a size that a graph leaves open
        return 1
    if inner == 1 and min(o, i) < TINY and terms <= TINY_TERMS[width]:
        return _parts_of_sum(terms)
    is_wide = width == 8 and min(o, i) > PART and max(o, i) <= LARGE
    return WIDE_PARTS if is_wide and terms in WIDE_TERMS and terms % WIDE_PARTS == 0 else 1


def _parted(t: Tensor, parts: int) -> Tensor:
    """(parts, size, terms of a part), of (terms, size, 1) or (1, size, terms)."""
    _, size, inner = t.shape
    return t.reshape(parts, -1, size).mT if inner == 1 else t.reshape(size, parts, -1).transpose(0, 1)


def _row_after_row(g: Tensor, x: Tensor) -> Tensor:
    """`sum_of_products` by a GEMM for each row, which adds to those before."""
    dw = g[0] @ x[0].mT
    for k in range(1, len(g)):
        dw.addmm_(g[k], x[k].mT)
    return dw


def _in_turns(g: Tensor, x: Tensor, turns: int) -> Tensor:
    """`sum_of_products` by batches of products, one batch after the other."""
    batches = zip(g.chunk(turns), x.chunk(turns), strict=True)
    return torch.stack([torch.bmm(a, b.mT).sum(0) for a, b in batches]).sum(0)


def sum_of_products(g: Tensor, x: Tensor) -> Tensor:
    """A factor's gradient: the sum over rows and inner of g (rows, o, inner) times x (rows, i, inner), (o, i)."""
    (rows, o, inner), i, width = g.shape, x.shape[1], g.element_size()
    if (rows == 1 or inner == 1) and (parts := _parts(rows * inner, inner, o, i, width)) > 1:
        return torch.bmm(_parted(g, parts), _parted(x, parts).mT).sum(0)
    if rows == 1:
        return g[0] @ x[0].mT
    large = max(o, i) > LARGE
    few_long = isinstance(rows, int) and rows <= ROWS_ADDED[width] and inner >= rows * TERMS_ADDED[width]
    if large and few_long and not is_batched(g):  # for which there is no rule to add in place
        return _row_after_row(g, x)
    long = max(o, i) <= PART and inner >= LONG[width] and rows <= ROWS_OF_LONG[width]
    many = large or (not long and rows * -(-o // PART) * -(-i // PART) >= MANY_PARTS[width]) or inner <= SHORT[width]
    few = rows <= (SHORT_ROWS_TINY if min(o, i) < TINY else SHORT_ROWS) and rows * o * i <= SHORT_ELEMENTS
    # Where a product a row is no larger than x, or small; one of a single column is a GEMM without copies.
    if inner > 1 and many and (few if inner < FEW_BACK else o <= inner):
        return torch.bmm(g, x.mT).sum(0)
    in_turns = isinstance(rows, int) and 2 * o <= IN_TURNS[width] * inner and g.nbytes >= BYTES_IN_TURNS
    # So many products have room where x has, and so have the sums of all batches.
    if many and inner >= FEW_BACK and in_turns and (fit := rows * inner // o) ** 2 >= rows:
        return _in_turns(g, x, -(-rows // fit))
    return g.mT.reshape(rows * inner, o).mT @ x.mT.reshape(rows * inner, i)


def _apply_transposed(
    grad: Tensor, w: Tensor, state: Tensor | None, needs_state: bool, gradient: Gradient
) -> tuple[Tensor | None, Tensor | None]:
    """Back through `_apply_factor(state, w)`: the gradients for state, where needed, and for w, if there is a state."""
    o, i = w.shape
    rows, rest = grad.shape[0], grad.shape[1] // o
    grads, dw = grad.reshape(rows, o, rest), None
    in_batch = rest >= FEW_BACK and o <= rest  # then a gradient a row is no larger than the state
    small = _is_small(grad, w, rest)
    flat = None if in_batch or (small and state is None) else grads.mT.reshape(rows * rest, o)
    if state is not None and flat is None:
        dw = gradient(grads, state.reshape(rows, rest, i).mT)
    elif state is not None and flat is not None:
        dw = gradient(flat.unsqueeze(-1), state.reshape(rows * rest, i, 1))
    if not needs_state:
        return None, dw
    if flat is None or small:
        return torch.bmm(grads.mT, w.expand(rows, o, i)).reshape(rows, rest * i), dw
    return (flat @ w).reshape(rows, rest * i), dw


def _backward_of_two(
    dy: Tensor,
    x: Tensor,
    first: Tensor,
    second: Tensor,
    needs_x: bool,
    needs_factors: Sequence[bool],
    gradient: Gradient,
    kept: Sequence[Tensor],
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Back through `_apply_two`: gradients for x and both factors."""
    (o, i), (p, j) = first.shape, second.shape
    states, grads = x.reshape(-1, i, j), dy.reshape(-1, o, p)
    dx = dfirst = dsecond = None
    if needs_factors[0]:
        after = kept[0] if kept else (states.reshape(-1, j) @ second.mT).reshape(-1, i, p)
        dfirst = gradient(grads, after)
    if needs_x or needs_factors[1]:
        before = torch.bmm(first.mT.expand(grads.shape[0], i, o), grads).reshape(-1, p)
        dsecond = gradient(before.unsqueeze(-1), states.reshape(-1, j, 1)) if needs_factors[1] else None
        dx = (before @ second).reshape(x.shape) if needs_x else None
    return dx, [dfirst, dsecond]


def chain_of_matmuls_backward(
    dy: Tensor,
    x: Tensor,
    factors: Sequence[Tensor],
    needs_x: bool,
    needs_factors: Sequence[bool],
    gradient: Gradient = sum_of_products,
    kept: Sequence[Tensor] = (),
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients for x and the factors, None where not needed: `chain_of_matmuls` again, then back through it.

    `gradient`: what finds that of a factor, as `sum_of_products` does. `kept`: the last states of `chain_of_matmuls`.
    """
    if not (needs_x or any(needs_factors)):
        return None, [None] * len(factors)
    if turns(factors):
        outs, ins = zip(*(w.shape for w in factors), strict=True)
        turned = _turned(dy, outs), _turned(x, ins) if any(needs_factors) else x, factors[::-1]
        dx, dfactors = chain_of_matmuls_backward(*turned, needs_x, needs_factors[::-1], gradient, kept)
        return None if dx is None else _turned(dx, ins[::-1]), dfactors[::-1]
    state, states = x.reshape(-1, x.shape[-1]), {}
    if _are_two(state, factors):
        return _backward_of_two(dy, x, factors[0], factors[1], needs_x, needs_factors, gradient, kept)
    for k in reversed(range(len(factors))):
        if needs_factors[k]:
            states[k] = state
        if not any(needs_factors[:k]):
            break
        state = kept[-k] if k <= len(kept) else _apply_factor(state, factors[k])
    grad, dfactors = dy.reshape(state.shape[0], -1), [None] * len(factors)
    for k, w in enumerate(factors):
        if grad is not None:
            needs_state = needs_x or any(needs_factors[k + 1 :])
            grad, dfactors[k] = _apply_transposed(grad, w, states.pop(k, None), needs_state, gradient)
    return None if grad is None else grad.reshape(x.shape), dfactors
