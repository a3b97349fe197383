"""Functions to minimise, of arrays of every library; options of methods that do, and how their states compare."""

import math

import numpy as np
import torch

OPTIONS = [
    {},
    {"covariance": "full"},
    {"keep_elites": 3, "noise": 0.5, "noise_decrease": 0.01},
    {"population_decay": 1.2, "low": -4.0, "high": 9.0},
    {"color": 1.0, "antithetic": True, "maximize": True},
]


def on_host(a):
    return a.cpu().double().numpy() if isinstance(a, torch.Tensor) else np.asarray(a)


def sphere(x):
    return (x**2).sum(-1)


def rosenbrock(x):
    return (100 * (x[..., 1:] - x[..., :-1] ** 2) ** 2 + (1 - x[..., :-1]) ** 2).sum(-1)


def rastrigin(x):
    cosine = torch.cos if isinstance(x, torch.Tensor) else np.cos
    return (x**2 - 10 * cosine(2 * math.pi * x) + 10).sum(-1)


def told(method, function, steps=1):
    for _ in range(steps):
        method.tell(function(method.ask()))
    return method


def bits(method):
    return {name: on_host(value).tobytes() for name, value in method._state.arrays().items()}
