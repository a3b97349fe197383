"""What kron_linear and its gradients have in GPU memory beyond arguments and results."""

from __future__ import annotations

import cuops
import pytest
import torch
from kron_samples import columns_of, factors_of, random
from samples import DTYPES

pytestmark = [pytest.mark.gpu, pytest.mark.cached]


def peak_beyond_results(run):
    """In bytes; what libraries allocate once is there before."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = run()
    return torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(1000, [(32, 32)] * 3), (8192, [(64, 64)] * 2), (300, [(4, 4)] * 4), (4096, [(5, 6), (7, 8)])],
    ids=str,
)
def test_one_launch_has_no_buffer(rows, sizes, dtype):
    x, factors = random((rows, columns_of(sizes)), dtype), factors_of(sizes, dtype)
    assert len(cuops.kron_plan(rows, sizes, dtype).groups) == 1
    assert peak_beyond_results(lambda: [cuops.kron_linear(x, factors)]) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (300, [(600, 600), (100, 100)]),
        (1000, [(200, 200), (100, 100)]),
        (8192, [(65, 65), (23, 23)]),
        (600, [(37, 37), (132, 132), (9, 9)]),
        (64, [(300, 300), (600, 600), (10, 10)]),
        (512, [(128, 128), (128, 128), (4, 4)]),
        (2000, [(4, 4), (1000, 1000), (4, 4)]),
        (64, [(31, 31), (33, 33), (37, 37), (41, 41)]),
    ],
    ids=str,
)
def test_several_launches_have_one_buffer_of_the_largest_state(rows, sizes, dtype):
    x, factors = random((rows, columns_of(sizes)), dtype), factors_of(sizes, dtype)
    unsplit = 3 << 20  # up to a megabyte of each block, which the allocator does not split, and factors' products
    assert unsplit < x.nbytes / 2
    assert peak_beyond_results(lambda: [cuops.kron_linear(x, factors)]) <= x.nbytes + unsplit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "sizes", "buffers"),
    [
        (8192, [(64, 64)] * 2, 0),
        (16384, [(48, 52), (64, 52)], 1),
        (8192, [(16, 16)] * 3, 1),
        (2048, [(24, 24)] * 3, 1),
        (1024, [(32, 32)] * 3, 1),
        (128, [(64, 64)] * 3, 1),
        (1024, [(8, 8)] * 5, 1),
        (1024, [(16, 16)] * 4, 2),
        (128, [(24, 24)] * 4, 2),
    ],
    ids=str,
)
def test_gradients_have_one_buffer_for_each_launch_but_one_beside_what_is_kept(rows, sizes, buffers, dtype):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("launches are counted for compute capability 9.0")
    x, factors = random((rows, columns_of(sizes)), dtype).requires_grad_(), factors_of(sizes, dtype)
    factors = [w.requires_grad_() for w in factors]
    y = cuops.kron_linear(x, factors)
    dy = torch.randn_like(y)
    partial_sums = 24 << 20  # of each block, in both gradients of factors
    assert partial_sums < x.nbytes / 2
    peak = peak_beyond_results(lambda: torch.autograd.grad(y, [x, *factors], dy, retain_graph=True))
    assert peak <= buffers * max(x.nbytes, y.nbytes) + partial_sums
