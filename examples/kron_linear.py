"""Kronecker-factored linear layers: as a function, as a module, and from a layer that is there already."""

import cuops
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(2, 8, 64 * 80, device=device)
w1 = torch.randn(32, 64, device=device, requires_grad=True)  # (out, in) of each factor
w2 = torch.randn(40, 80, device=device, requires_grad=True)

y = cuops.kron_linear(x, [w1, w2])  # F.linear(x, torch.kron(w1, w2)), which would be 1280 x 5120
y.sum().backward()

layer = cuops.nn.KronLinear(in_factors=(64, 80), out_factors=(32, 40), device=device)
print(layer(x).shape, sum(p.numel() for p in layer.parameters()))

nearest, error = cuops.nn.KronLinear.from_linear(torch.nn.Linear(48, 36), (6, 8), (6, 6))
print(nearest.extra_repr(), f"relative error {error:.3f}")
