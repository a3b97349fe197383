"""Kronecker-factored layers by the vendor's GEMM: the path of factors that no fused kernel takes in less time."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, MutableSequence, Sequence

import torch
from torch import Tensor

from . import _backend
from ._transforms import PLAIN, is_batched
from .reference import elements_between

Gradient = Callable[[Tensor, Tensor], Tensor]

# What a batch of products takes beside one GEMM, and copies beside a batch, as bytes that are moved, fitted to 1300
# problems a dtype on an H100. By an element's bytes: for each tile of results, of TILE rows and columns; for a product
# of columns that are missing to a multiple of STRIP; for a byte of 16-bit operands whose rows are no whole vectors;
# for a launch.
TILE, OF_TILE, STRIP, MISSING, UNALIGNED, LAUNCH = 64, {2: 300, 4: 800, 8: 1900}, 32, 0.07, 0.45, 1.5e6
# A factor's gradient, likewise: for each tile of a row's product; for a byte of these, which are then added up; for a
# term of a row's sum, one of which comes after the other; for a byte that PyTorch copies.
OF_TILE_ADDED, ADDED, TERM, BY_TORCH = {2: 2000, 4: 1200, 8: 2000}, 1.0, {2: 1e4, 4: 2e4, 8: 4e3}, 2.0
ROOM = 3 << 19  # elements of these products, which otherwise are no more than those of x or of dy
# Up to which a batch of small products, of a factor without columns beyond it, is faster than one GEMM: products, by an
# element's bytes; elements, and rows.
FEW_PRODUCTS, FEW_ELEMENTS, FEW_ROWS = {2: 1 << 20, 4: 3 << 20, 8: 3 << 19}, 1 << 15, 1024
# Of few rows with long sums, each is added by a GEMM of its own: of up to how many, by an element's bytes, as 16 bits
# round each; and from how many bytes of a row of both operands on.
ROWS_ADDED, BYTES_ADDED = {2: 2, 4: 16, 8: 16}, 12e6
# Rows or columns of a gradient, of fewer than which one GEMM does not divide the sum among multiprocessors: up to how
# many terms that is slower than parts of at least LEAST_TERMS, by an element's bytes; and the most parts.
TINY, TINY_TERMS, LEAST_TERMS, MOST_PARTS = 16, {2: 1 << 14, 4: 1 << 63, 8: 1 << 14}, 32, 1024
# Rows and columns of a gradient, and terms of its float64 sum, that one GEMM divides badly; and how many parts then.
WIDE, WIDE_TERMS, WIDE_PARTS = range(65, 128 + 1), range(1 << 12, 9216 + 1), 16
# Of two factors, products of the first one's rows, up to which two batches are faster; rows of the second one, from how
# many on else nothing is rearranged between these: after a larger one, and else.
MOST_BATCHES, ACROSS, LEAST_ACROSS = 1 << 21, 26, 18
# The least rows and columns of matrices that the library transposes faster than PyTorch, by an element's bytes.
LEAST_SWAPPED = {2: 24, 4: 16, 8: 12}
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


def is_swapped(t: Tensor) -> bool:
    """Whether the library copies the transposes of t, (n, a, b): faster than PyTorch, which does the narrow ones."""
    is_plain = type(t) in PLAIN and t.is_cuda and not torch.compiler.is_compiling() and not is_batched(t)
    if not is_plain or t.shape[0] == 1 or min(t.shape[1:]) < LEAST_SWAPPED[t.element_size()]:
        return False
    return t.is_contiguous() and not t.mT.is_contiguous() and not (t.requires_grad and torch.is_grad_enabled())


def swapped(t: Tensor) -> Tensor:
    """t.mT, of (n, a, b), to be reshaped to one matrix: without gaps where `is_swapped`."""
    if not is_swapped(t):
        return t.mT
    y = t.new_empty(t.shape[0], t.shape[2], t.shape[1])
    _backend.library().kron_linear_transpose(y, t)
    return y


def _is_small(state: Tensor, w: Tensor) -> bool:
    """Whether the library's GEMM is slower than a batch of a product a row, of a factor without columns beyond it."""
    few = state.shape[0] <= FEW_ROWS and state.numel() < FEW_ELEMENTS
    odd = w.element_size() > 2 or w.shape[0] % 8 != 0 or w.shape[1] % 8 != 0
    return few and odd and state.shape[0] * w.numel() <= FEW_PRODUCTS[w.element_size()]


def _tiles(o: int, i: int) -> int:
    return -(-o // TILE) * -(-i // TILE)


def _unaligned(size: int, width: int) -> float:
    return UNALIGNED * width if width == 2 and size % 8 else 0.0


def _is_in_batch(rows: int, w: Tensor, rest: int, copied: int, launches: int = 2) -> bool:
    """Whether a batch of products, of `rest` columns each, is faster than one GEMM and copies of so many elements."""
    (o, i), width = w.shape, w.element_size()
    cost = OF_TILE[width] * _tiles(o, rest) + MISSING * (-rest % STRIP) * max(o, STRIP) * i
    cost += _unaligned(rest, width) * rest * (o + i)
    return rows * cost <= copied * width + launches * LAUNCH


def _apply_factor(state: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """One factor on the last dimension inside `state`, (rows, ... i), which becomes the first: (rows, o ...).

    The transposed product comes out of the batched GEMM in this order, or is copied so.
    """
    o, i = w.shape
    rows, rest = state.shape[0], state.shape[1] // i
    if rest == 1 and not _is_small(state, w):
        return torch.nn.functional.linear(state, w, bias)
    bias = None if bias is None else bias.reshape(o, rest)
    if rest > 1 and not _is_in_batch(rows, w, rest, rows * rest * o):
        y = swapped((state.reshape(rows * rest, i) @ w.mT).reshape(rows, rest, o))
        return (y if bias is None else y + bias).reshape(rows, o * rest)
    matrices = w.expand(rows, o, i), state.reshape(rows, rest, i).mT
    return (torch.bmm(*matrices) if bias is None else torch.baddbmm(bias, *matrices)).reshape(rows, o * rest)


def _product_along(state: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """w times each matrix of `state`, (rows, i, inner), plus (o, inner): (rows, o, inner)."""
    (o, i), (rows, _, inner) = w.shape, state.shape
    if _is_in_batch(rows, w, inner, rows * inner * (o + i), launches=3):
        matrices = w.expand(rows, o, i), state
        return torch.bmm(*matrices) if bias is None else torch.baddbmm(bias, *matrices)
    y = swapped((swapped(state).reshape(rows * inner, i) @ w.mT).reshape(rows, inner, o))
    return y if bias is None else y + bias


def apply_along(state: Tensor, w: Tensor, inner: int, bias: Tensor | None = None) -> Tensor:
    """One factor on the first dimension inside `state`, (rows, i inner), where it stays: (rows, o inner).

    A bias, which `inner` is 1 for, is of as many of these rows as make a sample.
    """
    (o, i), rows = w.shape, state.shape[0]
    if inner > 1:
        return _product_along(state.reshape(rows, i, inner), w).reshape(rows, o * inner)
    if bias is None or bias.shape[0] == o:
        return _apply_factor(state, w, bias)
    return _apply_factor(state, w).reshape(-1, bias.shape[0]) + bias


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
    (o, i), (p, j) = first.shape, second.shape
    after = (state.reshape(-1, j) @ second.mT).reshape(-1, i, p)
    if states is not None:
        states.append(after)
    return _product_along(after, first, None if bias is None else bias.reshape(o, p))


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
    is_wide = width == 8 and o in WIDE and i in WIDE
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


def _is_sum_in_batch(g: Tensor, x: Tensor) -> bool:
    """Whether a batch of products and their sum are faster than one GEMM of copies of what does not lie across."""
    (rows, o, inner), i, width = g.shape, x.shape[1], g.element_size()
    if min(o, i) > inner and rows * o * i > ROOM:
        return False
    cost = OF_TILE_ADDED[width] * _tiles(o, i) + ADDED * o * i * width + _unaligned(inner, width) * inner * (o + i)
    copies = [t.numel() * (1.0 if is_swapped(t) else BY_TORCH) for t in (g, x) if not t.mT.is_contiguous()]
    return rows * cost + TERM[width] * inner <= sum(copies) * width + 2 * LAUNCH


def sum_of_products(g: Tensor, x: Tensor) -> Tensor:
    """A factor's gradient: the sum over rows and inner of g (rows, o, inner) times x (rows, i, inner), (o, i)."""
    (rows, o, inner), i, width = g.shape, x.shape[1], g.element_size()
    if (rows == 1 or inner == 1) and (parts := _parts(rows * inner, inner, o, i, width)) > 1:
        return torch.bmm(_parted(g, parts), _parted(x, parts).mT).sum(0)
    if rows == 1:
        return g[0] @ x[0].mT
    few_long = isinstance(rows, int) and rows <= ROWS_ADDED[width] and inner * (o + i) * width >= BYTES_ADDED
    if few_long and not is_batched(g):  # for which there is no rule to add in place
        return _row_after_row(g, x)
    if inner == 1:
        return g.squeeze(-1).mT @ x.squeeze(-1)
    if _is_sum_in_batch(g, x):
        return torch.bmm(g, x.mT).sum(0)
    return sum_of_products(*(swapped(t).reshape(rows * inner, -1, 1) for t in (g, x)))


def _apply_transposed(
    grad: Tensor, w: Tensor, state: Tensor | None, needs_state: bool, gradient: Gradient
) -> tuple[Tensor | None, Tensor | None]:
    """Back through `_apply_factor(state, w)`: the gradients for state, where needed, and for w, if there is a state."""
    o, i = w.shape
    rows, rest = grad.shape[0], grad.shape[1] // o
    grads, dw = grad.reshape(rows, o, rest), None
    sums_in_batch = state is None or (rest > 1 and _is_sum_in_batch(grads, state.reshape(rows, rest, i).mT))
    in_batch = not needs_state or (rest > 1 and _is_in_batch(rows, w.mT, rest, rows * rest * o))
    flat = None if sums_in_batch and in_batch else swapped(grads).reshape(rows * rest, o)
    if state is not None and flat is not None:
        dw = gradient(flat.unsqueeze(-1), state.reshape(rows * rest, i, 1))
    elif state is not None:
        dw = gradient(grads, state.reshape(rows, rest, i).mT)
    if not needs_state:
        return None, dw
    if flat is None or (_is_in_batch(rows, w.mT, rest, 0) if rest > 1 else _is_small(grad, w)):
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
        before = _product_along(grads, first.mT).reshape(-1, p)
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
