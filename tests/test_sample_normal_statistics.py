"""Whether samples are normal and independent. Seeds are fixed; a right generator fails a test with probability 1e-6.

The statistics are shared with generators that are broken on purpose, each of which must fail one of them.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import cuops
import pytest
import torch

gpu = pytest.mark.gpu

FALSE_ALARMS = 1e-6
SIGMAS = NormalDist().inv_cdf(1 - FALSE_ALARMS / 2)  # of a single two-sided statistic: 4.9
EDGES = [-math.inf, *(k / 4 for k in range(-20, 21)), math.inf]  # of the histogram, out to five sigmas


class Statistics:
    """Sums over blocks of samples (rows) by dimension (columns), so that a draw may be of any size."""

    def __init__(self) -> None:
        self.count = 0
        self.powers = torch.zeros(4, dtype=torch.float64)
        self.lags = dict.fromkeys(
            ["next sample", "two on", "three on", "four on", "next dimension", "four dimensions on"], 0.0
        )
        self.squares = dict.fromkeys(self.lags, 0.0)
        self.pairs = dict.fromkeys(self.lags, 0)
        self.histogram = torch.zeros(len(EDGES) - 1, dtype=torch.float64)

    def add(self, z: torch.Tensor) -> None:
        z = z.double()
        self.count += z.numel()
        self.powers += torch.stack([(z**k).sum() for k in range(1, 5)]).cpu()
        neighbours = [(z[k:], z[:-k]) for k in (1, 2, 3, 4)] + [(z[:, k:], z[:, :-k]) for k in (1, 4)]
        for name, (a, b) in zip(self.lags, neighbours, strict=True):
            self.pairs[name] += a.numel()
            self.lags[name] += float((a * b).sum())
            self.squares[name] += float(((a * a - 1) * (b * b - 1)).sum())
        edges = torch.tensor(EDGES[1:-1], dtype=torch.float64, device=z.device)
        self.histogram += torch.bincount(
            torch.bucketize(z.contiguous(), edges).flatten(), minlength=len(EDGES) - 1
        ).cpu()

    def failures(self) -> dict[str, float]:
        """How many standard deviations each statistic is off, where that is too many."""
        n = self.count
        # Variance of the mean of z^k: E z^2k - (E z^k)^2.
        expected = {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96)}
        off = {
            f"moment {k}": (float(self.powers[k - 1]) / n - mean) / math.sqrt(variance / n)
            for k, (mean, variance) in expected.items()
        }
        for name, total in self.lags.items():
            off[f"correlation with the {name}"] = total / math.sqrt(self.pairs[name])
            off[f"correlation of squares with the {name}"] = self.squares[name] / (2 * math.sqrt(self.pairs[name]))
        cdf = [NormalDist().cdf(edge) for edge in EDGES]
        tail = [0.5 * math.erfc(edge / math.sqrt(2)) for edge in EDGES]
        p = torch.tensor(
            [min(b - a, 1.0) if b <= 0.5 else s - t for a, b, s, t in zip(cdf, cdf[1:], tail, tail[1:], strict=False)]
        )
        p = p.double()
        chi_square = float(((self.histogram - n * p) ** 2 / (n * p)).sum())
        freedom = len(p) - 1
        # Wilson and Hilferty: the cube root of chi^2 over its degrees of freedom is nearly normal.
        spread = 2 / (9 * freedom)
        off["chi-square"] = ((chi_square / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
        # Kolmogorov and Smirnov at the edges: P(sqrt(n) D > x) <= 2 exp(-2 x^2), in sigmas of a normal of that probability.
        distance = float((self.histogram.cumsum(0) / n - p.cumsum(0)).abs().max()) * math.sqrt(n)
        off["Kolmogorov-Smirnov"] = distance / math.sqrt(math.log(2 / FALSE_ALARMS) / 2) * SIGMAS
        return {name: value for name, value in off.items() if abs(value) > SIGMAS}


def statistics_of(draw, blocks=1):
    found = Statistics()
    for block in range(blocks):
        found.add(draw(block))
    return found.failures()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("sample_dim", [0, -1])
def test_samples_are_normal_and_independent(sample_dim, dtype, device):
    zeros = torch.zeros(64, dtype=dtype, device=device)
    samples = 1 << (20 if device.type == "cuda" else 13)
    x = cuops.sample_normal(zeros, 1.0, samples, seed=1, sample_dim=sample_dim)
    assert statistics_of(lambda _: x if sample_dim == 0 else x.T) == {}


@gpu
@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_a_billion_samples_are_normal_and_independent(seed):
    zeros = torch.zeros(1 << 10, device="cuda")
    rows = 1 << 14
    draw = lambda block: cuops.sample_normal(zeros, 1.0, rows, seed=seed, start=block * rows)  # noqa: E731
    assert statistics_of(draw, blocks=64) == {}


@gpu
def test_successive_calls_of_a_generator_are_independent():
    zeros = torch.zeros(1 << 10, device="cuda")
    torch.manual_seed(0)
    assert (
        statistics_of(lambda _: torch.stack([cuops.sample_normal(zeros, 1.0, 4) for _ in range(500)]).flatten(0, 1), 8)
        == {}
    )


def test_streams_and_seeds_are_independent(device):
    zeros = torch.zeros(512, device=device)
    seeds = torch.stack([cuops.sample_normal(zeros, 1.0, 8, seed=seed) for seed in range(64)])
    assert statistics_of(lambda _: seeds.flatten(0, 1)) == {}
    assert statistics_of(lambda _: seeds.movedim(1, 0).flatten(0, 1)) == {}
    streams = [
        cuops.sample_normal(zeros, 1.0, 8, seed=torch.tensor([0, stream], device=device)) for stream in range(64)
    ]
    assert statistics_of(lambda _: torch.stack(streams).movedim(1, 0).flatten(0, 1)) == {}


def test_antithetic_samples_have_no_odd_moments(device):
    x = cuops.sample_normal(torch.zeros(16, dtype=torch.float64, device=device), 1.0, 4096, seed=1, antithetic=True)
    assert x.sum(0).abs().max() < 1e-9
    assert statistics_of(lambda _: x[::2]) == {}


BROKEN = {
    "shared between dimensions": lambda z: z[:, :1].expand(-1, z.shape[1]),
    "a repeated counter": lambda z: torch.cat([z[: len(z) // 2], z[: len(z) // 2]]).unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1),
    "a lane twice": lambda z: z.unflatten(0, (-1, 4))[:, [0, 1, 2, 2]].flatten(0, 1),
    "a lane of the next group": lambda z: torch.where(
        (torch.arange(len(z)) % 4 == 3)[:, None], z.roll(-1, 0), z
    ),
    "the radius of one pair for both": lambda z: z.unflatten(0, (-1, 2, 2)).pow(2).sum(2, keepdim=True).sqrt()[:, [0, 0]].mul(
        torch.nn.functional.normalize(z.unflatten(0, (-1, 2, 2)), dim=2)
    ).flatten(0, 2),
    "a coarse tail": lambda z: z.clamp(-3.2, 3.2),
    "a shifted mean": lambda z: z + 0.01,
    "a rough mantissa": lambda z: (z * 4).round() / 4,
    "no swap of the pair": lambda z: torch.where((torch.arange(len(z)) % 2 == 0)[:, None], z.abs().maximum(z.roll(-1, 0).abs()), z),
}  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_generator_fails(broken):
    z = cuops.sample_normal(torch.zeros(64, dtype=torch.float64), 1.0, 1 << 13, seed=1)
    assert statistics_of(lambda _: z) == {}
    assert statistics_of(lambda _: BROKEN[broken](z)) != {}


@pytest.mark.parametrize("bounds", [(-1.0, 2.0), (-0.25, 0.5), (-3.0, math.inf), (-math.inf, 1.0)], ids=str)
def test_truncated_samples_have_the_truncated_quantiles(bounds, device):
    low, high = bounds
    zeros = torch.zeros(8, dtype=torch.float64, device=device)
    x = cuops.sample_normal(zeros, 1.0, 4096, seed=3, low=low, high=high).flatten().sort().values.cpu()
    assert x[0] >= low
    assert x[-1] <= high
    a, b = (0.5 * math.erfc(-e / math.sqrt(2)) for e in bounds)
    uniform = (torch.special.ndtr(x) - a) / (b - a)
    n = len(x)
    distance = (uniform - (torch.arange(n) + 0.5) / n).abs().max()
    assert distance * math.sqrt(n) < math.sqrt(math.log(2 / FALSE_ALARMS) / 2) + 1 / math.sqrt(n)


@pytest.mark.parametrize("distance", [3.0, 8.0, 30.0, 1e3, 1e6])
@pytest.mark.parametrize("side", [1, -1])
def test_far_tails_are_exponential(distance, side, device):
    zeros = torch.zeros(8, dtype=torch.float64, device=device)
    bound = {"low": distance} if side > 0 else {"high": -distance}
    x = cuops.sample_normal(zeros, 1.0, 4096, seed=3, **bound).flatten().cpu() * side
    beyond = x - distance
    assert (beyond >= 0).all()
    # The probability beyond x, given that beyond the bound, by erfcx, is uniform.
    scaled = [torch.special.erfcx(v / math.sqrt(2)) for v in (x, torch.tensor(distance, dtype=torch.float64))]
    uniform = (scaled[0] / scaled[1] * torch.exp(-beyond * (distance + beyond / 2))).sort().values
    n = len(x)
    assert (uniform - (torch.arange(n) + 0.5) / n).abs().max() * math.sqrt(n) < math.sqrt(
        math.log(2 / FALSE_ALARMS) / 2
    ) + 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_truncated_samples_stay_within_bounds_that_the_dtype_cannot_hold(dtype, device):
    mu = torch.full((16,), 0.7, dtype=dtype, device=device)
    x = cuops.sample_normal(mu, 1.0, 512, seed=3, low=0.7, high=0.7321).double()
    assert x.min() >= 0.7
    assert x.max() <= 0.7321
    assert x.unique().numel() > 1
