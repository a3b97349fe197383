// The reciprocal root mean square of a row, from the sum of its squares.
#pragma once

#include "numeric.cuh"
#include "rms_norm.h"

namespace cuops {

// 1 / sqrt(mean(x^2) + eps) as a product: `scale` is a power of two, other than 1 only where squares left the range of Acc.
template <class Acc>
struct Rstd {
  Acc scale, value;
};

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

// Where a sum of squares is neither overflowing nor drowning.
template <class Acc>
struct Range;
template <>
struct Range<float> {
  static constexpr float kSmallest = 1e-18f, kLargest = 3e38f;
};
template <>
struct Range<double> {
  static constexpr double kSmallest = 1e-280, kLargest = 1e308;
};

}  // namespace cuops
