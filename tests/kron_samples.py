"""What the tests of kron_linear share: one list of sample inputs, the definition, and how far rounding may lead away."""

from __future__ import annotations

import functools
import math

import torch
from samples import make
from torch.utils._python_dispatch import TorchDispatchMode

# Leading dimensions of x, and the sizes (rows, columns) of the factors.
SAMPLES = {
    "one factor": ((5,), [(7, 3)]),
    "one by one": ((4,), [(1, 1)]),
    "a vector": ((), [(3, 2), (2, 5)]),
    "batch of 1": ((1,), [(16, 16), (8, 8)]),
    "empty batch": ((0,), [(3, 4), (5, 2)]),
    "empty in the middle": ((2, 0, 3), [(3, 4), (5, 2)]),
    "no rows": ((3,), [(0, 4), (5, 2)]),
    "no columns": ((3,), [(3, 4), (5, 0)]),
    "primes": ((2, 3), [(7, 11), (13, 5), (3, 2)]),
    "a factor of 1": ((4,), [(3, 2), (1, 1), (5, 4)]),
    "factors of 1 around": ((4,), [(1, 1), (6, 6), (1, 1)]),
    "a row and a column": ((4,), [(1, 8), (9, 1)]),
    "a column and a row": ((4,), [(9, 1), (1, 8)]),
    "ten of 2": ((3,), [(2, 2)] * 10),
    "twelve of 2": ((2,), [(2, 2)] * 12),
    "1024 and 2": ((3,), [(1024, 1024), (2, 2)]),
    "2 and 1024": ((3,), [(2, 2), (1024, 1024)]),
    "growing": ((2, 2), [(8, 2), (6, 3), (5, 4)]),
    "shrinking": ((6,), [(2, 8), (3, 6), (4, 5)]),
    "both": ((6,), [(2, 16), (33, 3)]),
    "small by large": ((2, 9), [(4, 4), (96, 64)]),
    "squares of 8": ((17,), [(8, 8)] * 4),
    "squares of 16": ((65,), [(16, 16)] * 2),
    "squares of 32": ((2,), [(32, 32)] * 3),
    "64 x 80": ((3,), [(64, 64), (80, 80)]),
    "86 x 128": ((2,), [(86, 86), (128, 128)]),
}
LARGE = {  # for the GPU
    "128 x 128": ((300,), [(128, 128)] * 2),
    "64 cubed": ((5,), [(64, 64)] * 3),
    "four of 16": ((65,), [(16, 16)] * 4),
    "five of 8": ((129,), [(8, 8)] * 5),
    "many rows": ((100_003,), [(6, 5), (4, 7)]),
    "ten of 2, many rows": ((4099,), [(2, 2)] * 10),
    "large factors": ((7,), [(700, 300), (200, 500)]),
}
FUSED = [  # sizes of factors that fit one kernel, or a few
    [(128, 128)] * 2,
    [(64, 64)] * 2,
    [(8, 8)] * 4,
    [(2, 2)] * 10,
    [(16, 16)] * 3,
    [(86, 86), (128, 128)],
    [(5, 3), (7, 5), (2, 7)],
]
ODD = [  # of two factors whose rows are no whole vectors in 16 bits
    [(71, 71), (119, 119)],
    [(36, 36), (44, 44)],
    [(33, 33), (33, 33)],
    [(60, 50), (45, 63)],
    [(127, 128), (126, 125)],
]
EMPTY = ("empty batch", "empty in the middle", "no rows", "no columns")
TO_DIFFERENTIATE = [
    "one factor",
    "a vector",
    "empty batch",
    "no rows",
    "a factor of 1",
    "growing",
    "shrinking",
    "primes",
]


def random(shape, dtype=torch.float32, seed=0):
    """As `make`, drawn on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cuda").to(dtype)


def factors_of(sizes, dtype=torch.float32):
    return [random(size, dtype, seed) for seed, size in enumerate(sizes, 1)]


def columns_of(sizes):
    return math.prod(i for _, i in sizes)


def arguments(sample, dtype=torch.float32, device="cpu"):
    """x, the factors and a bias of a sample."""
    leading, sizes = sample
    factors = [make(size, dtype, device, seed) for seed, size in enumerate(sizes, 2)]
    x = make((*leading, math.prod(i for _, i in sizes)), dtype, device)
    return x, factors, make((math.prod(o for o, _ in sizes),), dtype, device, 1)


def definition(x, factors, bias=None):
    """In float64: by the whole matrix where it has at most a million entries, else a factor at a time."""
    x, *factors = (a.detach().cpu().double() for a in (x, *factors))
    if math.prod(w.numel() for w in factors) <= 1 << 20:
        y = x @ functools.reduce(torch.kron, factors).mT
    else:
        y = x_of(x, factors)
    return y if bias is None else y + bias.detach().cpu().double()


def exact_gradients(dy, x, factors):
    """Those for x, the factors and the bias in float64, by PyTorch's autograd of the definition."""
    wide = [a.detach().cpu().double().requires_grad_() for a in (x, *factors)]
    y = x_of(wide[0], wide[1:])
    dy = dy.detach().cpu().double()
    return [
        *torch.autograd.grad(y, wide, dy),
        dy.reshape(-1, dy.shape[-1]).sum(0) if dy.numel() else dy.new_zeros(dy.shape[-1]),
    ]


def x_of(x, factors):
    """The product as a loop that autograd follows."""
    y = x.reshape(math.prod(x.shape[:-1]), *(w.shape[1] for w in factors))
    for w in reversed(factors):
        y = (y @ w.mT).movedim(-1, 1)
    return y.reshape(*x.shape[:-1], math.prod(w.shape[0] for w in factors))


def assert_close(got, want, terms, sizes, roundings=0):
    """Within one rounding of the result, and the bound on sums of `sizes` products one after the other.

    `terms` is what the sums would be of magnitudes. Sums are float32, float64 for float64. On a GPU, a GEMM a factor
    rounds `roundings` times before the result.
    """
    result = torch.finfo(got.dtype)
    sums = torch.finfo(torch.float64 if got.dtype == torch.float64 else torch.float32)
    between = result.eps / 2 * roundings if got.is_cuda else 0.0
    got = got.detach().cpu().double()
    assert got.shape == want.shape
    lost = sums.eps * (sum(sizes) + 2 * len(sizes) + 2) + between
    allowed = result.eps / 2 * want.abs() + lost * terms + result.smallest_normal
    assert ((got - want).abs() <= allowed).all()


def close(got, want):
    """In float64, whatever order the sums have."""
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9 * want.abs().max().item())


def row_distance(got, want):
    """Of each row, relative to its length."""
    return ((got.double() - want).norm(dim=-1) / want.norm(dim=-1)).max().item()


def assert_repeatable(run, *arguments):
    """Twenty runs give the same bits."""
    want = run(*arguments)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(run(*arguments), want, strict=True))


def check(y, x, factors, bias=None):
    """y is the product, as well as its dtype can say."""
    magnitudes = [None if a is None else a.detach().cpu().double().abs() for a in (x, *factors, bias)]
    terms = definition(magnitudes[0], magnitudes[1:-1], magnitudes[-1])
    roundings = len(factors) - 1 + (bias is not None)
    assert_close(y, definition(x, factors, bias), terms, [w.shape[1] for w in factors], roundings)


class Largest(TorchDispatchMode):
    """Notes the most bytes of any tensor that an operation gives."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else [result]:
            self.bytes = max(self.bytes, t.untyped_storage().nbytes() if isinstance(t, torch.Tensor) else 0)
        return result


class OneLaunch:
    """Instead of the library: a group of factors in one launch."""

    def kron_linear_fwd(self, y, x, factors, inner, bias, allow_tf32):
        w = functools.reduce(torch.kron, factors)
        y.copy_((w @ x.reshape(-1, w.shape[1], inner)).reshape(y.shape))
        if bias is not None:
            assert inner == 1
            y.view(-1, bias.numel()).add_(bias)  # which rows of y take in turn, where factors have been applied before
