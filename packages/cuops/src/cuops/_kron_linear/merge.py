"""Products of neighbouring factors, each a matrix for a kernel or a GEMM; and the factors' gradients from theirs."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

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
    product = factors[0].new_empty(_size(factors))
    _backend.library().kron_linear_merge([product], None, factors, len(factors))
    return product


def two_products(factors: Sequence[Tensor], cut: int) -> tuple[list[Tensor], Tensor | None]:
    """The products of the first `cut` factors and of the others, and by which power of two each was multiplied.

    That is of float16 alone, whose range such products may leave: as much as the other one was divided by.
    """
    pair = [factors[0].new_empty(_size(group)) for group in (factors[:cut], factors[cut:])]
    scales = factors[0].new_empty(2, dtype=torch.float32) if factors[0].dtype == torch.float16 else None
    _backend.library().kron_linear_merge(pair, scales, factors, cut)
    return pair, scales


def unmerge_two(
    dproducts: Sequence[Tensor | None],
    factors: Sequence[Tensor],
    cut: int,
    needs: Sequence[bool],
    scales: Tensor | None = None,
) -> list[Tensor | None]:
    """The factors' gradients from those of `two_products`, None where not needed."""
    gradients = [w.new_empty(w.shape) if needed else None for w, needed in zip(factors, needs, strict=True)]
    _backend.library().kron_linear_unmerge(gradients, dproducts, scales, factors, cut)
    return gradients


def unmerge(dproduct: Tensor, factors: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    """The factors' gradients from that of their product, None where not needed."""
    n = len(factors)
    if n == 1:
        return [dproduct]
    if _has_kernel(factors) and is_plain(dproduct):
        return unmerge_two([dproduct.contiguous()], factors, n, needs)
    sizes = [w.shape[0] for w in factors] + [w.shape[1] for w in factors]
    # An axis for the elements of each factor, of which the last ones are summed away.
    left = dproduct.reshape(sizes).permute([axis for k in range(n) for axis in (k, n + k)]).reshape(-1)
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
