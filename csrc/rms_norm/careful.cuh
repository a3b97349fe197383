// RMSNorm of a row that needs care, one element at a time.
#pragma once

#include "device/reduce.cuh"
#include "rstd.cuh"

namespace cuops {

// All of a row whose squares overflow or drown: a power of two brings the larger of the row and sqrt(eps) near 1, exactly. Out of
// line and from memory, so that ordinary rows pay nothing for it. Its arguments are values: a reference would move all parameters
// of the kernel to the stack. Without y, for threads that only help others to reduce.
template <class T, class Team>
__device__ __noinline__ void careful_row(const T* x, T* y, const T* weight, Accumulator<T>* rstd, long long n,
                                         RmsNormScalars<Accumulator<T>> s, Team team) {
  using Acc = Accumulator<T>;
  Acc scale = 1, result = 0;
  __syncwarp();  // x may be what other threads have just written
#pragma unroll 1
  for (bool scaled = false;; scaled = true) {
    result = scaled ? Acc(0) : s.sqrt_eps;
#pragma unroll 1
    for (long long i = team.first(); i < n; i += team.threads()) {
      const Acc v = convert<Acc>(x[i]) * scale;
      result = scaled ? result + v * v : Max()(result, abs(v));
    }
    result = team.reduce(result, [&](Acc a, Acc b) { return scaled ? a + b : Max()(a, b); });
    if (scaled) break;
    scale = isinf(result) ? Acc(1) : power_of_two_to_one(result);
  }
  if (!y) return;
  const Acc factor = rstd_of(result, s, scale);
  if (rstd && team.first() == 0) *rstd = scale * factor;
#pragma unroll 1
  for (long long i = team.first(); i < n; i += team.threads()) {
    y[i] = convert<T>(convert<Acc>(x[i]) * scale * factor * (convert<Acc>(weight[i]) + s.weight_offset));
  }
}

}  // namespace cuops
