// Numbers of float32 as two float16 each, or one, in registers: what tensor cores multiply.
#pragma once

#include "kron_linear/kron_shared.cuh"

namespace cuops {

// Neighbours along the depth: as two float16 each, or one.
template <bool kPairs, int kCount>
struct HalfOperand {
  unsigned high[kCount], low[kCount];

  __device__ void set(int i, float a, float b) {
    if constexpr (kPairs) {
      split<__half>(a, b, high[i], low[i]);
    } else {
      high[i] = pack<__half>(a, b);
    }
  }
};

// Tensor cores cut sums off: so much of their results is lost on average, whatever the signs, each time that they multiply pairs.
constexpr float kCutOff = 4e-8f;

// NaN counts as none, and stays NaN.
template <int kCount>
__device__ float largest_of_warp(const float (&v)[kCount]) {
  float most = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) most = fmaxf(most, fabsf(v[i]));
  return __int_as_float(__reduce_max_sync(~0u, __float_as_int(most)));
}

}  // namespace cuops
