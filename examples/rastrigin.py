"""Rastrigin's function in 100 dimensions, 10 to the power of 100 local minima, by the Cross-Entropy Method. Plots the search
(pip install matplotlib)."""

import math

import torch
from cuops import cem

device = "cuda" if torch.cuda.is_available() else "cpu"


def rastrigin(x: torch.Tensor) -> torch.Tensor:
    return (x**2 - 10 * torch.cos(2 * math.pi * x) + 10).sum(-1)


found = cem.minimize(
    rastrigin,
    torch.full((100,), 2.0, device=device),
    3.0,
    num_samples=1000,
    steps=400,
    elites=0.2,
    smoothing=(1.0, 0.5),
    seed=1,
    callbacks=cem.EarlyStopping(target=1e-3),
    cuda_graph=device == "cuda",
)
print(f"{found.score.item():.2e} after {found.evaluations} evaluations, {found.steps} steps")
found.history.plot("rastrigin.png", offset=0.0)
