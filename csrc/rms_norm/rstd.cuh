// The reciprocal root mean square of a row, from the sum of its squares.
#pragma once

#include "device/reduce.cuh"
#include "rms_norm.h"

namespace cuops {

template <class Acc, class Params>
__device__ const RmsNormScalars<Acc>& scalars(const Params& p) {
  if constexpr (kSame<Acc, double>) {
    return p.float64;
  } else {
    return p.float32;
  }
}

template <class Acc>
__device__ Acc mean_plus_eps(Acc sum, const RmsNormScalars<Acc>& s, Acc eps) {
  return fma(sum, s.inverse_n, fma(sum, s.inverse_n_rest, eps));
}

// 1 / sqrt(mean(x^2) + eps) of a row times `scale`, divided by `scale`, a power of two; 0 for a row of zeros, also with eps = 0.
template <class Acc>
__device__ Acc rstd_of(Acc sum, const RmsNormScalars<Acc>& s, Acc scale) {
  const Acc root = s.sqrt_eps * scale, eps = s.eps > Acc(0) ? s.eps * scale * scale : root * root;
  const Acc mean = isinf(sum) ? sum : mean_plus_eps(sum, s, eps);
  return mean == Acc(0) || isinf(mean) ? Acc(0) : rsqrt_rn(mean);
}

// The power of two that a row with that largest element is scaled by, once its squares left the range of the sums; where it is
// rounded to T then. Squares of half stay within float32, and what is small in a row would lose digits if it was made smaller.
template <class T>
__device__ Accumulator<T> rounded_scale(Accumulator<T> largest) {
  using Acc = Accumulator<T>;
  const Acc scale = isinf(largest) ? Acc(1) : power_of_two_to_one(largest);
  return kSame<T, __half> ? Max()(scale, Acc(1)) : scale;
}

// Where a sum of squares is neither overflowing nor drowning.
template <class Acc>
struct Range;
template <>
struct Range<float> {
  static constexpr float kSmallest = 1e-18f, kLargest = 3e38f;
  static constexpr float kSmallestMean = 1e-14f, kSmallestSum = 1e-30f;  // of a gradient
};
template <>
struct Range<double> {
  static constexpr double kSmallest = 1e-280, kLargest = 1e308;
  static constexpr double kSmallestMean = 1e-31, kSmallestSum = 1e-290;
};

// Whether a gradient may do without scaling: squares, the cube of rstd and the sum of g h are within the range. Products that all
// drowned, of which the sum is 0, are of a subnormal g, or of an h so small that its mean square tells.
template <class Acc>
__device__ bool is_ordinary(Acc mean_eps, Acc sum) {
  using Within = Range<Acc>;
  const Acc size = abs(sum);
  return mean_eps <= 1 / Within::kSmallest && mean_eps >= Within::kSmallestMean && size <= Within::kLargest &&
         (size >= Within::kSmallestSum || size == 0);
}

// Whether it may for rstd^3 mean(g h), other than 0, which leaves the range before dx does. A row that is scaled brings it to the
// size of g.
__device__ inline bool is_ordinary_slope(float slope) { return abs(slope) <= Range<float>::kLargest && abs(slope) >= 1e-36f; }

}  // namespace cuops
