"""Gaussian process regression on a grid: (K1 x K2 x K3 + noise) a = y by conjugate gradients, no matrix of the whole."""

import argparse
import functools
import time
from collections.abc import Callable

import cuops
import torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--grid", type=int, nargs="+", default=[10, 12, 9], help="points along each axis")
parser.add_argument("--noise", type=float, default=0.1, help="standard deviation")
parser.add_argument("--device", default="cpu")
args = parser.parse_args()
if args.device.startswith("cuda") and not torch.cuda.is_available():
    parser.error("--device: PyTorch sees no GPU")


def kernel(n: int) -> torch.Tensor:
    """Squared exponential of n points between 0 and 1."""
    points = torch.linspace(0, 1, n, dtype=torch.float64, device=args.device)
    return torch.exp(-0.5 * ((points[:, None] - points) / 0.2).square())


def conjugate_gradients(
    product: Callable[[torch.Tensor], torch.Tensor], y: torch.Tensor, tolerance: float = 1e-10
) -> tuple[torch.Tensor, int]:
    """a with product(a) = y, and how many products that took."""
    a, residual = torch.zeros_like(y), y.clone()
    direction, size = residual, residual.dot(residual)
    bound, steps = tolerance**2 * size, 0
    while size > bound and steps < 10 * len(y):
        image = product(direction)
        step = size / direction.dot(image)
        a, residual = a + step * direction, residual - step * image
        size, last = residual.dot(residual), size
        direction = residual + size / last * direction
        steps += 1
    return a, steps


torch.manual_seed(0)
factors = [kernel(n) for n in args.grid]
axes = torch.meshgrid(*(torch.linspace(0, 1, n, dtype=torch.float64) for n in args.grid), indexing="ij")
truth = functools.reduce(torch.mul, (torch.sin(3 * axis + k) for k, axis in enumerate(axes))).flatten().to(args.device)
y = truth + args.noise * torch.randn_like(truth)


def covariance(v: torch.Tensor) -> torch.Tensor:
    return cuops.kron_linear(v, factors) + args.noise**2 * v


start = time.perf_counter()
a, steps = conjugate_gradients(covariance, y)
seconds = time.perf_counter() - start
mean = cuops.kron_linear(a, factors)  # of the process, at the points of the grid
residual = (torch.linalg.vector_norm(covariance(a) - y) / torch.linalg.vector_norm(y)).item()
print(f"{len(y)} points, {steps} products in {seconds:.2f} s, relative residual {residual:.1e}")
print(f"distance from the truth: observations {(y - truth).std():.4f}, process {(mean - truth).std():.4f}")
if len(y) <= 4096:
    whole = functools.reduce(torch.kron, factors) + args.noise**2 * torch.eye(len(y), dtype=y.dtype, device=y.device)
    difference = torch.linalg.vector_norm(torch.linalg.solve(whole, y) - a) / torch.linalg.vector_norm(a)
    print(f"against the solution by the whole matrix: {difference:.1e}")
