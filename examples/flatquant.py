"""FlatQuant's online rotation: activations times a Kronecker product of two rotations, before they become 4 bits."""

import argparse
import functools
from collections.abc import Callable

import cuops
import torch
from torch.utils.benchmark import Timer

SIZES = [(64, 64), (64, 80), (86, 128), (112, 128)]  # hidden sizes 4096, 5120, 11008, 14336

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--tokens", type=int, default=16)
parser.add_argument("--device", default="cpu")
parser.add_argument("--dtype", default="float32", choices=["float64", "float32", "float16", "bfloat16"])
args = parser.parse_args()
if args.device.startswith("cuda") and not torch.cuda.is_available():
    parser.error("--device: PyTorch sees no GPU")
if args.tokens < 1:
    parser.error(f"--tokens: expected at least 1, got {args.tokens}")


def rotation(n: int) -> torch.Tensor:
    """A random orthogonal matrix."""
    return torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q.to(args.device, getattr(torch, args.dtype))


def in_4_bits(x: torch.Tensor) -> torch.Tensor:
    """x rounded to 15 levels, those of each token scaled by its largest value."""
    scale = x.abs().amax(-1, keepdim=True) / 7
    return (x / scale).round() * scale


def error(x: torch.Tensor, exact: torch.Tensor) -> float:
    return (torch.linalg.vector_norm((x - exact).double()) / torch.linalg.vector_norm(exact.double())).item()


def two_products(x: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return p @ x.unflatten(-1, (len(p), len(q))) @ q.mT


def microseconds(call: Callable[[], object]) -> float:
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.timeit(20).mean * 1e6


torch.manual_seed(0)
for a, b in SIZES:
    n = a * b
    x = torch.randn(args.tokens, n, device=args.device, dtype=getattr(torch, args.dtype))
    x[:, ::97] *= 30  # a few channels with outliers, as models have them
    p, q = rotation(a), rotation(b)
    rotated = cuops.kron_linear(x, [p, q])
    back = cuops.kron_linear(in_4_bits(rotated), [p.mT, q.mT])  # a model puts this into the next weight
    took = microseconds(functools.partial(cuops.kron_linear, x, [p, q]))
    products = microseconds(functools.partial(two_products, x, p, q))
    print(
        f"hidden size {n:5} as {a:3} x {b:3}: error of 4 bits {error(in_4_bits(x), x):.3f}, rotated {error(back, x):.3f}; "
        f"rotated and back {error(cuops.kron_linear(rotated, [p.mT, q.mT]), x):.1e}; "
        f"{took:.0f} µs a rotation, {products:.0f} by two matrix products"
    )
