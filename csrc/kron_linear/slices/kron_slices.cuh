// What the kernels for few small samples share: elements on their way to shared memory.
#pragma once

#include "kron_linear/kron_shared.cuh"

namespace cuops {

// Calls use(i, element) for i = first, first + step and so on, with what find(i) points to: kBatch of them are on their way at a
// time.
template <class T, int kBatch, class Find, class Use>
__device__ void in_batches(int first, int count, int step, Find&& find, Use&& use) {
#pragma unroll 1
  for (int start = first; start < count; start += kBatch * step) {
    T v[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      if (start + j * step < count) v[j] = *find(start + j * step);
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      if (start + j * step < count) use(start + j * step, v[j]);
  }
}

// Starts to bring a factor of out by in elements to shared memory, where rows and columns have these distances; where numbers are
// converted, they are there afterwards.
template <class T, class Acc>
__device__ void bring_factor(Acc* to, int row_pitch, int column_pitch, const T* from, long long row_stride, long long column_stride,
                             int count, KronDivisor by_in) {
  const int in = by_in.divisor;
  if constexpr (kSame<Acc, T>) {
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      const int row = divide(i, by_in), column = i - row * in;
      copy_number(to + row * row_pitch + column * column_pitch, from + row * row_stride + column * column_stride);
    }
  } else {
    auto element = [&](int i) {
      const int row = divide(i, by_in);
      return from + row * row_stride + (i - row * in) * column_stride;
    };
    in_batches<T, 4>(threadIdx.x, count, blockDim.x, element, [&](int i, T v) {
      const int row = divide(i, by_in);
      to[row * row_pitch + (i - row * in) * column_pitch] = convert<Acc>(v);
    });
  }
}

}  // namespace cuops
