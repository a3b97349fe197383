"""The Kronecker product nearest to a matrix, by the method of Van Loan and Pitsianis."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

SWEEPS = 200  # of the power iteration, which mostly needs a few
STARTS = 10  # from beside where it ended, of which one mostly shows that nothing is better there


def nearest_kronecker(
    matrix: Tensor, out_factors: Sequence[int], in_factors: Sequence[int]
) -> tuple[list[Tensor], float]:
    """W1 to Wn, of one norm, and ||matrix - kron(W1, ..., Wn)|| / ||matrix|| in the Frobenius norm.

    The factors are rounded to the matrix's dtype, and the distance is that of the rounded ones.
    The entries of a Kronecker product, ordered by the entries of its factors, are a tensor of rank one. Of two factors,
    the leading singular vectors give the best; of more, they start a power iteration that finds a local optimum.

    Source: Van Loan and Pitsianis, Approximation with Kronecker products, https://doi.org/10.1007/978-94-015-8196-7_17.
    """
    n = len(out_factors)
    order = [dim for k in range(n) for dim in (k, n + k)]
    wide = matrix.detach().double().reshape(*out_factors, *in_factors).permute(order)
    entries = wide.reshape([o * i for o, i in zip(out_factors, in_factors, strict=True)])
    # A power of two keeps squares in range, exactly.
    exponent = max(int(torch.frexp(entries.abs().max()).exponent) - 1, -1000)
    entries, share = entries * 2.0**-exponent, 2 ** (exponent / n)
    total = torch.linalg.vector_norm(entries).item()
    vectors = _local_optimum(entries) if n > 2 else _leading_vectors(entries)
    scale = _contract(entries, vectors)
    factors = [
        (vector * scale ** (1 / n) * share).reshape(o, i).to(matrix.dtype)
        for vector, o, i in zip(vectors, out_factors, in_factors, strict=True)
    ]
    rounded = [w.double().flatten() / share for w in factors]
    product = functools.reduce(lambda a, b: torch.tensordot(a, b, dims=0), rounded)
    error = torch.linalg.vector_norm(entries - product).item() / total if total else 0.0
    return factors, error


def _leading_vectors(entries: Tensor) -> list[Tensor]:
    """A unit vector a dimension: the leading left singular vector of the first, then the same of what it leaves."""
    if entries.ndim == 1:
        return [_unit(entries)]
    flat = entries.flatten(1)
    if len(flat) <= flat.shape[1]:
        left = torch.linalg.eigh(flat @ flat.mT).eigenvectors[:, -1]
    else:
        left = _unit(flat @ torch.linalg.eigh(flat.mT @ flat).eigenvectors[:, -1])
    return [left, *_leading_vectors((left @ flat).reshape(entries.shape[1:]))]


def _local_optimum(entries: Tensor) -> list[Tensor]:
    """By the power iteration, which stays on a saddle where singular values are equal, but leaves it from beside it."""
    vectors = _power_iteration(entries, _leading_vectors(entries))
    generator = torch.Generator("cpu").manual_seed(0)
    for _ in range(STARTS):
        steps = [
            torch.randn(len(v), generator=generator, dtype=torch.float64, device="cpu").to(v.device) for v in vectors
        ]
        beside = [_unit(v + 0.01 * _unit(step)) for v, step in zip(vectors, steps, strict=True)]
        found = _power_iteration(entries, beside)
        if _contract(entries, found).abs() <= _contract(entries, vectors).abs() * (1 + 1e-9):
            break
        vectors = found
    return vectors


def _power_iteration(entries: Tensor, vectors: list[Tensor]) -> list[Tensor]:
    """Each vector in turn becomes the best beside the others, until none gains."""
    reached = 0.0
    for _ in range(SWEEPS):
        for k in range(entries.ndim):
            best = _contract(entries, vectors, k)
            vectors = [*vectors[:k], _unit(best), *vectors[k + 1 :]]
        gained = torch.linalg.vector_norm(best).item()
        if gained <= reached * (1 + 1e-12):
            break
        reached = gained
    return vectors


def _contract(entries: Tensor, vectors: Sequence[Tensor], left_out: int | None = None) -> Tensor:
    """The product of the tensor with the vectors, over all dimensions or all but one."""
    first = 0 if left_out is None else left_out
    for k in range(len(vectors) - 1, first, -1):  # those at the ends, where nothing has to be rearranged
        entries = entries.flatten(0, -2).mv(vectors[k]).reshape(entries.shape[:-1])
    for k in range(first):
        entries = (vectors[k] @ entries.flatten(1)).reshape(entries.shape[1:])
    return entries if left_out is not None else vectors[0] @ entries


def _unit(vector: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vector, dim=0, eps=torch.finfo(torch.float64).tiny)
