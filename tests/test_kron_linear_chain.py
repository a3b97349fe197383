"""The chain of GEMMs that CUDA tensors take where no fused kernel does, tried on the CPU in float64."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from cuops import _kron_linear_fused
from cuops._kron_linear_gemm import chain_of_matmuls, chain_of_matmuls_backward
from kron_samples import EMPTY, LARGE, SAMPLES, arguments, check, gradients, make

FULL = {name: s for name, s in SAMPLES.items() if name not in EMPTY} | {"large factors": LARGE["large factors"]}


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9 * want.abs().max().item())


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("sample", FULL)
def test_is_the_product(sample, with_bias):
    x, factors, bias = arguments(FULL[sample], torch.float64)
    bias = bias if with_bias else None
    check(chain_of_matmuls(x, factors, bias), x, factors, bias)


class OneLaunch:
    """Instead of the library: a group of factors in one launch."""

    def kron_linear_fwd(self, y, x, factors, inner, bias, allow_tf32):
        rows = len(y) if y.ndim > 1 else 1
        state = x.reshape(rows, -1, inner)
        y.copy_((functools.reduce(torch.kron, factors) @ state).reshape(y.shape))
        if bias is not None:
            assert inner == 1
            y.view(-1, bias.numel()).add_(bias)  # which rows of y take in turn, where factors have been applied before


@pytest.mark.parametrize(
    "sample",
    [name for name, (_, s) in FULL.items() if len(s) in (2, 3) and math.prod(o * i for o, i in s) <= 1 << 20],
)
def test_groups_of_factors_make_the_product_however_they_are_computed(sample, monkeypatch):
    x, factors, bias = arguments(FULL[sample], torch.float64)
    monkeypatch.setattr(_kron_linear_fused, "library", OneLaunch)
    for counts in [(1, 1, 1), (2, 1), (1, 2)] if len(factors) == 3 else [(1, 1)]:
        for kinds in itertools.product((True, False), repeat=len(counts)):
            groups = list(zip(itertools.accumulate(counts, initial=0), counts, kinds, strict=False))
            monkeypatch.setattr(_kron_linear_fused, "_plan_of", lambda *_, groups=groups: groups)
            check(_kron_linear_fused.fused_chain(x, factors, bias), x, factors, bias)


@pytest.mark.parametrize("sample", FULL)
def test_gradients_are_those_of_the_product(sample):
    x, factors, _ = arguments(FULL[sample], torch.float64)
    dy = make((*x.shape[:-1], math.prod(w.shape[0] for w in factors)), torch.float64, seed=9)
    want, *wanted, _ = gradients(dy, x, factors)
    dx, dfactors = chain_of_matmuls_backward(dy, x, factors, True, [True] * len(factors))
    close(dx, want)
    for got, gradient in zip(dfactors, wanted, strict=True):
        close(got, gradient)


@pytest.mark.parametrize("k", [None, 0, 1, 2])
def test_what_is_not_needed_is_not_computed(k):
    x, factors, _ = arguments(SAMPLES["primes"], torch.float64)
    dy = make((2, 3, 7 * 13 * 3), torch.float64, seed=9)
    want, *wanted, _ = gradients(dy, x, factors)
    dx, dfactors = chain_of_matmuls_backward(dy, x, factors, k is None, [j == k for j in range(3)])
    assert [d is not None for d in (dx, *dfactors)] == [k is None, *(j == k for j in range(3))]
    if k is None:
        close(dx, want)
    else:
        close(dfactors[k], wanted[k])
