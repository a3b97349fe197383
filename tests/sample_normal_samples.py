"""Parameters of the normal distributions that the tests of sample_normal draw from."""

from __future__ import annotations

import torch


def parameters(shape=(10,), dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    mu = torch.randn(shape, generator=generator, dtype=torch.float64)
    sigma = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1
    return mu.to(device, dtype), sigma.to(device, dtype)


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]
