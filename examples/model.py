"""A model's own norm layer on cuops."""

import cuops
import torch


class RMSNorm(torch.nn.Module):
    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cuops.rms_norm(x, self.weight, eps=self.eps)


x = torch.randn(16, 64)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), RMSNorm(64))
model(x).square().mean().backward()
print({name: tuple(p.grad.shape) for name, p in model.named_parameters()})
