"""The modules of cuops.nn in training: activation checkpointing, and parameters that are sharded."""

from __future__ import annotations

import os

import cuops
import pytest
import torch
import torch.nn.functional as F
from samples import make
from torch.utils.checkpoint import checkpoint


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant, device):
    model = torch.nn.Sequential(cuops.nn.RMSNorm(8), cuops.nn.KronLinear((2, 4), (4, 2))).to(device)
    x = make((3, 8), device=device).requires_grad_()
    leaves = [x, *model.parameters()]
    want = torch.autograd.grad(model(x).square().sum(), leaves)
    checkpoint(lambda t: model(t).square().sum(), x, use_reentrant=reentrant).backward()
    assert all(torch.equal(leaf.grad, wanted) for leaf, wanted in zip(leaves, want, strict=True))


def losses(model, x, total=lambda loss: loss):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(total(loss.detach()).item())
    return found


class KronLinearOfPytorch(cuops.nn.KronLinear):
    def forward(self, x):
        return F.linear(x, torch.kron(*self.factors), self.bias)


def train_sharded(rank, world, folder):
    """One of the processes that share a model: its rows of the batch, its part of each parameter."""
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    models, x = torch.load(folder / "models.pt", weights_only=False)
    device = x.device.type
    if device == "cuda":
        torch.cuda.set_device(rank)
        models, x = models.to(f"cuda:{rank}"), x.to(f"cuda:{rank}")
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    distributed.init_process_group(backend, init_method=f"file://{folder}/group", rank=rank, world_size=world)
    mesh = distributed.init_device_mesh(device, (world,))

    def mean_over_all(loss):
        distributed.all_reduce(loss)
        return loss / world

    found = []
    for model in models:
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        assert model[1].weight.to_local().numel() == 8 // world
        found.append(losses(model, x.chunk(world)[rank], mean_over_all))
    torch.save(found, folder / f"losses{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()
    # Threads of gloo may still hold tensors, and abort when they let go of them while the interpreter ends
    # (https://github.com/pytorch/pytorch/pull/179291).
    os._exit(0)


def test_trains_fully_sharded_as_pytorchs(device, tmp_path):
    world = min(2, torch.cuda.device_count()) if device.type == "cuda" else 2
    x = make((4, 8), device=device)
    layers = [
        (cuops.nn.RMSNorm(8, eps=1e-6), cuops.nn.KronLinear((2, 4), (4, 2))),
        (torch.nn.RMSNorm(8, eps=1e-6), KronLinearOfPytorch((2, 4), (4, 2))),
    ]
    models = [torch.nn.Sequential(torch.nn.Linear(8, 8), *of) for of in layers]
    models[1].load_state_dict(models[0].state_dict())
    torch.save((torch.nn.ModuleList(models).to(device), x), tmp_path / "models.pt")
    torch.multiprocessing.spawn(train_sharded, (world, tmp_path), nprocs=world)
    for rank in range(world):
        got, want = torch.load(tmp_path / f"losses{rank}.pt")
        assert got == pytest.approx(want)
        assert want[2] < want[0]
