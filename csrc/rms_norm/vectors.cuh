// What the forwards do with a vector of a row.
#pragma once

#include "device/numeric.cuh"

namespace cuops {

// h = x + residual, rounded as it is stored.
template <class T, int kWidth>
__device__ Pack<T, kWidth> plus(const Pack<T, kWidth>& x, const Pack<T, kWidth>& residual) {
  auto wide = convert<Accumulator<T>>(x);
  const auto other = convert<Accumulator<T>>(residual);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) wide.at[j] += other.at[j];
  return convert<T>(wide);
}

template <class T, int kWidth>
__device__ Accumulator<T> sum_of_squares(const Pack<T, kWidth>& h) {
  const auto wide = convert<Accumulator<T>>(h);
  Accumulator<T> sum = 0;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) sum += wide.at[j] * wide.at[j];
  return sum;
}

}  // namespace cuops
