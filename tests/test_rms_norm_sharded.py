"""RMSNorm of DTensors: each process has some of the rows."""

from __future__ import annotations

import itertools
import os

import cuops
import torch
from samples import make

SHAPE = (4, 6, 8)


def arguments(device):
    """x, residual, weight, bias."""
    return [make(s, device=device, seed=k) for k, s in enumerate((SHAPE, SHAPE, SHAPE[-1:], SHAPE[-1:]))]


def results(given, wanted, **options):
    """y, h and rstd, and the gradients of the arguments whose numbers are in `wanted`."""
    inputs = [t.detach().requires_grad_(k in wanted) for k, t in enumerate(given)]
    x, residual, weight, bias = inputs
    y, h, rstd = cuops.rms_norm(x, weight, bias, residual=residual, return_rstd=True, **options)
    loss = (y * y * rstd[..., None]).sum() + h.exp().sum()
    return y, h, rstd, *torch.autograd.grad(loss, [inputs[k] for k in wanted])


def in_each_process(rank, world, device, folder):
    """One of the processes; what goes wrong here ends the test."""
    from torch import distributed
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    distributed.init_process_group(backend, init_method=f"file://{folder}/group", rank=rank, world_size=world)
    mesh = distributed.init_device_mesh(device, (world,))

    def close(got, want):
        torch.testing.assert_close(got.full_tensor() if isinstance(got, DTensor) else got, want)

    whole = arguments(device)
    # The same shapes with other results, one after the other: PyTorch remembers what it found for arguments.
    for placement, wanted in itertools.product(
        (Shard(0), Shard(1), Shard(2), Replicate()), ([0, 1, 2, 3], [0], [0, 3])
    ):
        placements = placement, placement, Replicate(), Replicate()
        shards = [distribute_tensor(t, mesh, [p]) for t, p in zip(whole, placements, strict=True)]
        for options in ({}, {"out_dtype": torch.float64}, {"weight_offset": 1.0, "eps": 1e-2}):
            found = results(shards, wanted, **options)
            for got, want in zip(found, results(whole, wanted, **options), strict=True):
                close(got, want)
            rows = placement if placement != Shard(2) else Replicate()
            assert [t.placements for t in found[:3]] == [(rows,)] * 3

    want = torch.nn.RMSNorm(SHAPE[-1], eps=1e-6, device=device)(whole[0])
    for compiled in (False, True):
        model = torch.nn.Sequential(cuops.nn.RMSNorm(SHAPE[-1], eps=1e-6, device=device))
        parallelize_module(model, mesh, {"0": SequenceParallel()})
        x = distribute_tensor(whole[0], mesh, [Shard(1)]).requires_grad_()
        y = (torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model)(x)
        assert y.placements == (Shard(1),)
        close(y, want)
        y.square().sum().backward()
        close(model[0].weight.grad, 2 * (want * want).sum((0, 1)))
    distributed.barrier()
    distributed.destroy_process_group()
    os._exit(0)  # as in test_nn.py


def test_shards_have_the_results_of_the_whole(device, tmp_path):
    world = min(2, torch.cuda.device_count()) if device.type == "cuda" else 2
    torch.multiprocessing.spawn(in_each_process, (world, device.type, tmp_path), nprocs=world)


def test_it_is_known_where_distributed_tensors_are_imported_later(run_python):
    run_python("""
        import sys, torch, cuops
        class Other(torch.Tensor):
            pass
        cuops.rms_norm(torch.ones(2, 3).as_subclass(Other))
        assert "torch.distributed.tensor" not in sys.modules
        from torch import distributed
        from torch.distributed.tensor import Shard, distribute_tensor
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        x = distribute_tensor(torch.ones(2, 3), distributed.init_device_mesh("cpu", (1,)), [Shard(0)])
        assert cuops.rms_norm(x).placements == (Shard(0),)
    """)
