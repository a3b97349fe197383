// The normal distribution between two bounds, by inversion, as packages/cuops/src/cuops/_sample_normal/truncation.py explains. In
// float64 for all dtypes: the tails need its range.
#pragma once

#include "device/numeric.cuh"

namespace cuops {

constexpr double kSqrtHalf = 0.70710678118654752440, kSqrtTwoOverPi = 0.79788456080286535588;

// log(erfcx(x / sqrt 2)) for x >= 0.
__device__ inline double log_erfcx(double x) { return log(erfcx(x * kSqrtHalf)); }

// The upper tail Q(x) for x >= 0.
__device__ inline double upper_tail(double x) { return 0.5 * erfc(x * kSqrtHalf); }

// The distance d >= 0 with Q(a + d) = p Q(a), for a >= 0 and log p <= 0.
__device__ inline double distance_beyond(double a, double log_p) {
  const double at_a = log_erfcx(a);
  double hazard = kSqrtTwoOverPi * exp(-at_a);
  const double weight = -0.08 * log_p, curvature = fma(hazard, hazard - a, weight) / (1 + weight);
  double d = -2 * log_p / (hazard + sqrt(fma(hazard, hazard, -2 * curvature * log_p)));
#pragma unroll 1
  for (int i = 0; i < 3; ++i) {
    const double at_d = log_erfcx(a + d), error = at_d - at_a - d * fma(0.5, d, a) - log_p;
    hazard = kSqrtTwoOverPi * exp(-at_d);
    d = fmax(d + error / fma(-0.5 * error, hazard - a - d, hazard), 0.0);
  }
  return d;
}

constexpr double kNarrow = 4e-6, kFarthest = 1e150;  // sigmas; the latter's square is finite

// The quantile u of the density exp(-slope x) on [0, 1].
__device__ __noinline__ double share_of(double u, double slope) {
  const double v = slope >= 0 ? u : 1 - u, t = fmax(fabs(slope), 1e-300), share = -log1p(v * expm1(-t)) / t;
  return slope >= 0 ? share : 1 - share;
}

struct Truncated {
  double mu, sigma, low, high;
  double slope;         // of the logarithm of the density over all of a narrow interval; NaN where it is not narrow
  double log_ratio;     // of the tail beyond the farther bound to that beyond the nearer one, where both are on one side
  double anchor;        // the nearer bound's distance from mu in sigmas; negative where mu is between the bounds
  double below, above;  // the tails outside the bounds, where mu is between them
  bool mirrored;        // both are below mu

  __device__ Truncated(double mu, double sigma, double low, double high) : mu(mu), sigma(sigma), low(low), high(high) {
    const double a = (low - mu) / sigma, b = (high - mu) / sigma;
    slope = b - a < kNarrow ? 0.5 * (a + b) * ((high - low) / sigma) : __longlong_as_double(0x7ff8000000000000ll);
    mirrored = b < 0;
    anchor = mirrored ? -b : a;
    if (anchor >= 0) {
      const double near = fmin(anchor, kFarthest), end = mirrored ? -a : b;
      const double far = end > kFarthest ? kFarthest : end;  // NaN, of an infinite sigma and bound, stays
      log_ratio = log_erfcx(far) - log_erfcx(near) - (far - near) * (0.5 * far + 0.5 * near);
    } else {
      below = upper_tail(-a);
      above = upper_tail(b);
    }
  }

  // The quantile u, in (0, 1).
  __device__ double at(double u) const {
    if (!(sigma >= 0) || !(low < high)) return __longlong_as_double(0x7ff8000000000000ll);
    double x = mu;
    if (!isnan(slope)) {
      x = low + (high - low) * share_of(u, slope);
    } else if (sigma > 0) {
      const double p = below * (1 - u) + (1 - above) * u, q = (1 - below) * (1 - u) + above * u;
      const bool outside = anchor >= 0;
      const double log_p = outside ? log1p((mirrored ? 1 - u : u) * expm1(log_ratio)) : log(2 * fmin(fmin(p, q), 0.5));
      const double d = sigma * distance_beyond(outside ? fmin(anchor, kFarthest) : 0.0, log_p);
      x = outside ? (mirrored ? high - d : low + d) : p < q ? mu - d : mu + d;
    }
    return x < low ? low : x > high ? high : x;  // NaN stays
  }
};

}  // namespace cuops
