"""Products of neighbouring factors, each a matrix for a kernel or a GEMM; and the factors' gradients from theirs."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _backend
from .copies import is_plain

MOST, LARGEST = 16, 1 << 15  # factors of a product of the library, its rows and columns


def _size(factors: Sequence[Tensor]) -> tuple[int, int]:
    return math.prod(w.shape[0] for w in factors), math.prod(w.shape[1] for w in factors)


def _has_kernel(factors: Sequence[Tensor]) -> bool:
    return len(factors) <= MOST and max(_size(factors)) <= LARGEST and all(map(is_plain, factors))


def product_of(factors: Sequence[Tensor]) -> Tensor:
    """Their Kronecker product, in the same order in memory whatever theirs is."""
    if len(factors) == 1:
        return factors[0]
    if not _has_kernel(factors):
        # contiguous() leaves a dimension of size 1 its stride, which torch.kron would take for an order.
        return functools.reduce(torch.kron, [w.reshape(-1).view(w.shape) for w in factors])
    return products_of([factors])[0][0]


def products_of(groups: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], Tensor | None]:
    """The product of each group, by one launch, and by which power of two each was multiplied.

    That is of several of float16 alone, whose range such products may leave. All these powers together are 1.
    """
    first = groups[0][0]
    is_scaled = first.dtype == torch.float16 and len(groups) > 1
    products = [first.new_empty(_size(group)) for group in groups]
    scales = first.new_empty(len(groups), dtype=torch.float32) if is_scaled else None
    factors, counts = list(itertools.chain(*groups)), list(map(len, groups))
    _backend.library().kron_linear_merge(products, scales, factors, counts)
    return products, scales


def unmerge_groups(
    dproducts: Sequence[Tensor | None],
    groups: Sequence[Sequence[Tensor]],
    needs: Sequence[bool],
    scales: Tensor | None = None,
) -> list[Tensor | None]:
    """The gradients of all factors from those of `products_of`, None where not needed."""
    factors, counts = list(itertools.chain(*groups)), list(map(len, groups))
    gradients = [w.new_empty(w.shape) if needed else None for w, needed in zip(factors, needs, strict=True)]
    _backend.library().kron_linear_unmerge(gradients, dproducts, scales, factors, counts)
    return gradients


class Merged(NamedTuple):
    """The factors of a part of a chain, or their product in place of these."""

    factors: list[Tensor]
    scale: Tensor | None = None  # by which power of two one of them was multiplied
    at: int = 0  # that one


def merged(parts: Sequence[Sequence[Tensor]], is_merged: Sequence[bool]) -> list[Merged]:
    """Each part, and of those that are to be merged the product.

    The powers of two that float16 has products with undo one another; that of one alone is undone by the smallest of
    the other factors, of which plans with such a product have a small one (`kron_plan.cc`).
    """
    # Without their subclasses, whose elements the library may read as well.
    groups = {(k, 0): [w.as_subclass(Tensor) for w in parts[k]] for k, merges in enumerate(is_merged) if merges}
    if not groups:
        return [Merged(list(part)) for part in parts]
    if not all(map(_has_kernel, groups.values())):
        return [Merged([product_of(p)] if merges else list(p)) for p, merges in zip(parts, is_merged, strict=True)]
    single = [(k, i) for k, part in enumerate(parts) if not is_merged[k] for i in range(len(part))]
    if single and len(groups) == 1 and parts[0][0].dtype == torch.float16:
        k, i = min(single, key=lambda place: parts[place[0]][place[1]].numel())
        groups[k, i] = [parts[k][i].as_subclass(Tensor)]
    products, scales = products_of(list(groups.values()))
    found = [Merged(list(part)) for part in parts]
    for number, ((k, i), product) in enumerate(zip(groups, products, strict=True)):
        scale = None if scales is None else scales[number : number + 1]
        found[k] = Merged([product] if is_merged[k] else [*parts[k][:i], product, *parts[k][i + 1 :]], scale, i)
    return found


def unmerge(
    dproduct: Tensor, factors: Sequence[Tensor], needs: Sequence[bool], scale: Tensor | None = None
) -> list[Tensor | None]:
    """The factors' gradients from that of their product, None where not needed; `scale`: as in `products_of`."""
    n = len(factors)
    if n == 1:
        return [dproduct]
    if _has_kernel(factors) and is_plain(dproduct):
        return unmerge_groups([dproduct.contiguous()], [factors], needs, scale)
    sizes = [w.shape[0] for w in factors] + [w.shape[1] for w in factors]
    # An axis for the elements of each factor, of which the last ones are summed away.
    left = dproduct.reshape(sizes).permute([axis for k in range(n) for axis in (k, n + k)]).reshape(-1)
    if scale is not None:
        left = left * scale
    elements = [w.reshape(-1).to(dproduct.dtype) for w in factors]
    products = list(itertools.accumulate(elements[:-1], lambda a, b: torch.outer(a, b).reshape(-1)))
    found: list[Tensor | None] = [None] * n
    for k in reversed(range(n)):
        if needs[k]:
            own = products[k - 1] @ left.reshape(-1, factors[k].numel()) if k else left
            found[k] = own.reshape(factors[k].shape).to(factors[k].dtype)
        if not any(needs[:k]):
            break
        left = left.reshape(-1, factors[k].numel()) @ elements[k]
    return found
