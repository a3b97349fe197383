"""Normal samples: from a generator or a seed, in parts, in either layout, truncated, in pairs, with gradients."""

import cuops
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
mu = torch.zeros(30, device=device, requires_grad=True)
sigma = torch.full((30,), 0.5, device=device, requires_grad=True)

x = cuops.sample_normal(mu, sigma, 1024)  # (1024, 30); torch.manual_seed reproduces it
x.square().mean().backward()  # the gradient draws the same noise again

with torch.no_grad():
    whole = cuops.sample_normal(mu, sigma, 1024, seed=7)  # always the same numbers
    half = cuops.sample_normal(mu, sigma, 512, seed=7, start=512)  # the second half of them
    columns = cuops.sample_normal(mu, sigma, 1024, seed=7, sample_dim=-1)  # (30, 1024)
    bounded = cuops.sample_normal(mu, sigma, 1024, low=-1.0, high=1.0)  # truncated, not clipped
    pairs = cuops.sample_normal(mu, sigma, 1024, antithetic=True)  # mu + sigma z and mu - sigma z

print(torch.equal(half, whole[512:]), torch.equal(columns, whole.T), bounded.abs().max() <= 1, pairs.sum(0).abs().max())
