"""The normal distribution between two bounds, by inversion, for NumPy arrays and torch tensors alike.

Everything is said of the upper tail Q(x) = 1 - Phi(x) = erfcx(x / sqrt 2) exp(-x^2 / 2) / 2 for x >= 0, in logarithms,
so that bounds may be any number of standard deviations away. The other tail is its mirror image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

NARROW = 4e-6  # sigmas, over which the logarithm of the density bends by 2e-12
FAR = 100  # sigmas, from where on three terms of the series for a tail are enough
FARTHEST = 1e150  # sigmas, whose square is finite: what is beyond gives the bound
# log(erfcx(x) / t) as a Chebyshev series in 2 t - 1, with t = 3 / (3 + x); within 1e-16.
LOG_ERFCX = (
    -0.9289605913797089,
    0.8332788452260321,
    0.09583256063951603,
    0.002680194165913263,
    -0.002394160955439755,
    -0.0004989450515503821,
    3.137729698484355e-05,
    2.9828298661601428e-05,
    2.4901331293353466e-06,
    -1.3490707792188855e-06,
    -3.137106094321004e-07,
    4.2361409904632405e-08,
    2.3523063975949498e-08,
    -7.933780071054005e-12,
    -1.4108196436866416e-09,
    -1.3897094008031716e-10,
    7.011941726216429e-11,
    1.4635169453147402e-11,
    -2.6943404186866545e-12,
    -1.0733561880933424e-12,
    5.040994179110759e-14,
    6.339407484455535e-14,
    3.671470812490627e-15,
    -2.999257956521508e-15,
    -5.536542756817618e-16,
    9.603871451823613e-17,
    4.5764359579823415e-17,
)


def _log_erfcx(xp: Any, x: Any) -> Any:
    """log(erfcx(x / sqrt 2)) for x >= 0."""
    t = 3 / (3 + x * math.sqrt(0.5))
    y, last, before = 4 * t - 2, 0 * t, 0 * t
    for coefficient in LOG_ERFCX[:0:-1]:
        last, before = y * last - before + coefficient, last
    return xp.log(t) + (y / 2 * last - before + LOG_ERFCX[0])


def _beyond(xp: Any, a: Any, at_a: Any, log_p: Any) -> Any:
    """The distance d >= 0 with Q(a + d) = p Q(a), for a >= 0, whose `_log_erfcx` is `at_a`, and log p <= 0."""
    hazard = math.sqrt(2 / math.pi) * xp.exp(-at_a)
    weight = -0.08 * log_p  # log Q bends by hazard (hazard - a) at a, and by 1 far away
    curvature = (hazard * (hazard - a) + weight) / (1 + weight)
    d = -2 * log_p / (hazard + xp.sqrt(hazard * hazard - 2 * curvature * log_p))
    for _ in range(3):  # Halley's iteration: the error becomes its third power
        at_d = _log_erfcx(xp, a + d)
        error = at_d - at_a - d * (a + d / 2) - log_p
        hazard = math.sqrt(2 / math.pi) * xp.exp(-at_d)
        d = d + error / (hazard - error * (hazard - a - d) / 2)
        d = xp.clip(d, 0, None)
    return d


def _share(xp: Any, u: Any, slope: Any) -> Any:
    """The quantile u of the density exp(-slope x) on [0, 1]."""
    falls = slope >= 0
    v, t = xp.where(falls, u, 1 - u), xp.clip(abs(slope), 1e-300, None)
    share = -xp.log1p(v * xp.expm1(-t)) / t
    return xp.where(falls, share, 1 - share)


class _Place(NamedTuple):
    """Where a quantile lies between its bounds; lengths are in standard deviations."""

    narrow: Any  # whether the bounds are so near that the density is an exponential function between them,
    slope: Any  # with this one of its logarithm over all of the interval,
    share: Any  # and this share of the interval below the quantile
    mirrored: Any  # whether the nearer bound is the upper one; from the nearer bound on:
    v: Any  # how much of the distribution lies before the quantile
    near: Any
    far: Any
    width: Any
    outside: Any  # whether both bounds are on one side of mu
    falls: Any  # where they are not: whether the quantile is below mu
    distance: Any  # of the quantile from the nearer bound, or from mu
    anchor: Any  # what the distance is from, with its `_log_erfcx`, and that of the farther bound
    at_anchor: Any
    at_end: Any


def _placed(xp: Any, parameters: Sequence[Any], u: Any) -> _Place:
    """Where the quantile u lies."""
    mu, sigma, low, high = parameters
    a, b = (low - mu) / sigma, (high - mu) / sigma
    # Between bounds that are near for sigma, an exponential function: tails would leave no digits between them.
    width = (high - low) / sigma
    narrow = width < NARROW
    slope = xp.where(narrow, (a + b) / 2 * width, 0 * width)
    mirrored = b < 0
    near, far, v = xp.where(mirrored, -b, a), xp.where(mirrored, -a, b), xp.where(mirrored, 1 - u, u)
    # Both bounds are on one side of mu: from the nearer one outwards.
    anchor, end = xp.clip(near, 0, FARTHEST), xp.clip(far, 0, FARTHEST)
    at_anchor, at_end, outside = _log_erfcx(xp, anchor), _log_erfcx(xp, end), near >= 0
    log_ratio = at_end - at_anchor - (end - anchor) * (end / 2 + anchor / 2)
    # mu is between them: from mu outwards, on the side where less is left.
    below, above = _tail(xp, -a), _tail(xp, b)
    p, q = below * (1 - u) + (1 - above) * u, (1 - below) * (1 - u) + above * u
    inner = xp.log(2 * xp.clip(xp.where(p < q, p, q), None, 0.5))
    distance = _beyond(xp, anchor, at_anchor, xp.where(outside, xp.log1p(v * xp.expm1(log_ratio)), inner))
    return _Place(
        narrow, slope, _share(xp, u, slope), mirrored, v, near, far, width, outside, p < q, distance,
        anchor, at_anchor, at_end,
    )  # fmt: skip


def truncated(xp: Any, parameters: Sequence[Any], u: Any) -> Any:
    """The quantile u, in (0, 1), of the distribution of (mu, sigma, low, high), float64 arrays that broadcast."""
    mu, sigma, low, high = parameters
    at = _placed(xp, parameters, u)
    origin = xp.where(at.outside, xp.where(at.mirrored, high, low), mu)
    distance = sigma * at.distance
    x = origin + xp.where(xp.where(at.outside, at.mirrored, at.falls), -distance, distance)
    x = xp.where(at.narrow, low + (high - low) * at.share, x)
    x = xp.where(sigma == 0, mu, x)
    return xp.where(low < high, xp.where(x < low, low, xp.where(x > high, high, x)), math.nan * x)


def _tail(xp: Any, x: Any) -> Any:
    """Q(x) for x >= 0; what it gives elsewhere is of no use."""
    x = xp.clip(x, 0, FARTHEST)
    return xp.exp(_log_erfcx(xp, x) - x * x / 2) / 2


def _mills_falls(xp: Any, a: Any, at_a: Any, d: Any, at_d: Any) -> Any:
    """1 - M(a + d) / M(a), with M = Q / density, for a and d >= 0, and the `_log_erfcx` of a and a + d."""
    a, near = xp.clip(a, FAR, None), a < FAR
    z = a + d
    # Far out x M(x) is 1 - 1/x^2 + 3/x^4 - …, and its logarithm -1/x^2 + 2.5/x^4 - …
    log_ratio = d / a * (1 + a / z) / a / z * (1 - 2.5 / a**2 - 2.5 / z**2) - xp.log1p(d / a)
    return -xp.expm1(xp.where(near, at_d - at_a, log_ratio))


def slopes(xp: Any, parameters: Sequence[Any], u: Any) -> tuple[Any, Any, Any, Any]:
    """The derivatives of the quantile by mu, sigma, low and high."""
    mu, sigma, low, high = parameters
    still, inside = sigma == 0, (low < mu) & (mu < high)  # with a sigma of 0, x is mu, or the bound that it is beyond
    at = _placed(xp, (mu, xp.where(still, 1, sigma), low, high), u)
    still = still | ~at.narrow & (at.near > FARTHEST)  # beyond a bound so far out, x is the bound, too
    # From the nearer bound to the quantile, and from there to the farther one, which may be infinitely far.
    share = xp.where(at.mirrored, 1 - at.share, at.share)
    z = xp.where(at.falls, -at.distance, at.distance)
    near, bounded = xp.where(abs(at.near) < math.inf, at.near, 0), abs(at.far) < math.inf
    far, width = xp.where(bounded, at.far, 0), xp.where(bounded & (at.width < math.inf), at.width, 0)
    before = xp.where(at.narrow, share * width, xp.where(at.outside, at.distance, z - near))
    after = xp.where(at.narrow, (1 - share) * width, xp.where(at.outside, width - at.distance, far - z))
    by_near = xp.where(abs(at.near) < math.inf, (1 - at.v) * xp.exp(before * (near + before / 2)), 0)
    by_far = xp.where(bounded, at.v * xp.exp(after * (after / 2 - far)), 0)
    by_low, by_high = xp.where(at.mirrored, by_far, by_near), xp.where(at.mirrored, by_near, by_far)
    # Shifting everything shifts the quantile, and stretching everything stretches it. Differences that would lose all
    # digits are found otherwise.
    away = xp.where(at.outside, at.distance, 0)
    falls = _mills_falls(xp, at.anchor, at.at_anchor, away, _log_erfcx(xp, at.anchor + away))
    falls = falls - by_far * _mills_falls(xp, at.anchor, at.at_anchor, xp.where(at.outside, width, 0), at.at_end)
    stretched = at.anchor * falls + at.distance - width * by_far
    bends = _share_by_slope(xp, u, at.slope, at.share)
    by_mu = xp.where(at.narrow, -width * width * bends, xp.where(at.outside, falls, 1 - by_near - by_far))
    by_sigma = xp.where(at.outside, xp.where(at.mirrored, -stretched, stretched), z - by_near * near - by_far * far)
    by_sigma = xp.where(at.narrow, -2 * at.slope * width * bends, by_sigma)
    return (
        xp.where(still, xp.where(inside, 1.0, 0.0), by_mu),
        xp.where(still, 0.0, by_sigma),
        xp.where(still, xp.where(mu <= low, 1.0, 0.0), by_low),
        xp.where(still, xp.where(mu >= high, 1.0, 0.0), by_high),
    )


def _share_by_slope(xp: Any, u: Any, slope: Any, share: Any) -> Any:
    """The derivative of `_share`, which is `share`, by the slope."""
    falls, t = slope >= 0, xp.clip(abs(slope), 1e-4, None)
    v, s = xp.where(falls, u, 1 - u), xp.where(falls, share, 1 - share)  # and from 1 on, the derivative is the same
    steep = (v * xp.exp(-t) / (1 + v * xp.expm1(-t)) - s) / t
    flat = -v * (1 - v) / 2 + v * (1 - v) * (1 - 2 * v) / 3 * abs(slope)
    return xp.where(abs(slope) < 1e-4, flat, steep)
