// RMSNorm of a row that needs care, one element at a time.
#pragma once

#include "device/reduce.cuh"
#include "rstd.cuh"

namespace cuops {

// The sum of the squares of a row that is scaled first. `scale`, 1 until then, becomes the power of two that brings the larger of
// the row and sqrt(eps) near 1, exactly. `for_each` visits the elements that are the thread's.
template <class Acc, class Team, class ForEach>
__device__ Acc careful_sum(Acc sqrt_eps, Team& team, Acc& scale, ForEach&& for_each) {
  Acc result = 0;
#pragma unroll 1
  for (bool scaled = false;; scaled = true) {
    result = scaled ? Acc(0) : sqrt_eps;
    for_each([&](Acc element) {
      const Acc v = element * scale;
      result = scaled ? result + v * v : Max()(result, abs(v));
    });
    result = team.reduce(result, [&](Acc a, Acc b) { return scaled ? a + b : Max()(a, b); });
    if (scaled) return result;
    scale = isinf(result) ? Acc(1) : power_of_two_to_one(result);
  }
}

// All of a row whose squares overflow or drown: a power of two brings the larger of the row and sqrt(eps) near 1, exactly. Out of
// line and from memory, so that ordinary rows pay nothing for it. Its arguments are values: a reference would move all parameters
// of the kernel to the stack. Without y, for threads that only help others to reduce.
// The weight is of void where there is none.
template <class T, class W, class Team>
__device__ __noinline__ void careful_row(const T* x, T* y, const W* weight, Accumulator<T>* rstd, long long n,
                                         RmsNormScalars<Accumulator<T>> s, Team team) {
  using Acc = Accumulator<T>;
  Acc scale = 1;
  __syncwarp();  // x may be what other threads have just written
  const Acc result = careful_sum(s.sqrt_eps, team, scale, [&](auto&& visit) {
#pragma unroll 1
    for (long long i = team.first(); i < n; i += team.threads()) visit(convert<Acc>(x[i]));
  });
  if (!y) return;
  const Acc factor = rstd_of(result, s, scale);
  if (rstd && team.first() == 0) *rstd = scale * factor;
#pragma unroll 1
  for (long long i = team.first(); i < n; i += team.threads()) {
    Acc v = convert<Acc>(x[i]) * scale * factor;
    if constexpr (!kSame<W, void>) v *= convert<Acc>(weight[i]) + s.weight_offset;
    y[i] = convert<T>(v);
  }
}

}  // namespace cuops
