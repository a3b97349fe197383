"""The normal distribution between two bounds, by inversion, for NumPy arrays and torch tensors alike.

Everything is said of the upper tail Q(x) = 1 - Phi(x) = erfcx(x / sqrt 2) exp(-x^2 / 2) / 2 for x >= 0, in logarithms,
so that bounds may be any number of standard deviations away. The other tail is its mirror image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

NARROW = 4e-6  # sigmas, over which the logarithm of the density bends by 2e-12
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


def truncated(xp: Any, parameters: Sequence[Any], u: Any) -> Any:
    """The quantile u, in (0, 1), of the distribution of (mu, sigma, low, high), float64 arrays that broadcast."""
    mu, sigma, low, high = parameters
    a, b = (low - mu) / sigma, (high - mu) / sigma
    # Between bounds that are near for sigma, an exponential function: tails would leave no digits between them.
    width = (high - low) / sigma
    narrow = width < NARROW
    between = low + (high - low) * _share(xp, u, xp.where(narrow, (a + b) / 2 * width, 0 * width))
    mirrored = b < 0
    near, far, v = xp.where(mirrored, -b, a), xp.where(mirrored, -a, b), xp.where(mirrored, 1 - u, u)
    # Both bounds are on one side of mu: from the nearer one outwards.
    anchor, end = xp.clip(near, 0, FARTHEST), xp.clip(far, 0, FARTHEST)
    at_anchor, outside = _log_erfcx(xp, anchor), near >= 0
    log_ratio = _log_erfcx(xp, end) - at_anchor - (end - anchor) * (end / 2 + anchor / 2)
    # mu is between them: from mu outwards, on the side where less is left.
    below, above = _tail(xp, -a), _tail(xp, b)
    p, q = below * (1 - u) + (1 - above) * u, (1 - below) * (1 - u) + above * u
    inner = xp.log(2 * xp.clip(xp.where(p < q, p, q), None, 0.5))
    distance = sigma * _beyond(xp, anchor, at_anchor, xp.where(outside, xp.log1p(v * xp.expm1(log_ratio)), inner))
    origin = xp.where(outside, xp.where(mirrored, high, low), mu)
    x = origin + xp.where(xp.where(outside, mirrored, p < q), -distance, distance)
    x = xp.where(narrow, between, x)
    x = xp.where(sigma == 0, mu, x)
    return xp.where(low < high, xp.where(x < low, low, xp.where(x > high, high, x)), math.nan * x)


def _tail(xp: Any, x: Any) -> Any:
    """Q(x) for x >= 0; what it gives elsewhere is of no use."""
    x = xp.clip(x, 0, FARTHEST)
    return xp.exp(_log_erfcx(xp, x) - x * x / 2) / 2


def slopes(xp: Any, parameters: Sequence[Any], u: Any, x: Any) -> tuple[Any, Any, Any, Any]:
    """The derivatives of the quantile x by mu, sigma, low and high."""
    mu, sigma, low, high = parameters
    still, inside = sigma == 0, (low < mu) & (mu < high)  # with a sigma of 0, x is mu, or the bound that it is beyond
    sigma = xp.where(still, 1, sigma)

    def by_bound(bound: Any, share: Any) -> Any:
        finite = abs(bound) < math.inf
        at = xp.where(finite, (bound - mu) / sigma, 0)
        z = (x - mu) / sigma
        return xp.where(finite, share * xp.exp((z - at) * (z + at) / 2), 0), at

    (by_low, a), (by_high, b) = by_bound(low, 1 - u), by_bound(high, u)
    # Shifting everything shifts x, and stretching everything stretches it.
    by_mu, by_sigma = 1 - by_low - by_high, (x - mu) / sigma - by_low * a - by_high * b
    return (
        xp.where(still, xp.where(inside, 1.0, 0.0), by_mu),
        xp.where(still, 0.0, by_sigma),
        xp.where(still, xp.where(mu <= low, 1.0, 0.0), by_low),
        xp.where(still, xp.where(mu >= high, 1.0, 0.0), by_high),
    )
