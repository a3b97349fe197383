// The largest magnitudes of factors, by which kernels scale them.
#pragma once

#include "device/reduce.cuh"
#include "kron_shared.cuh"

namespace cuops {

// Whether a factor, or its transpose, lies in memory as whole vectors.
__device__ inline bool is_dense(const KronFactor& f) {
  const bool rows = f.column_stride == 1 && f.row_stride == f.in, columns = f.row_stride == 1 && f.column_stride == f.out;
  return (rows || columns) && f.in % 8 == 0 && f.out % 8 == 0 && reinterpret_cast<unsigned long long>(f.data) % 16 == 0;
}

// As bits, of floats that are not negative and none of them NaN; `magnitudes` were 0. Large factors by all warps, small ones by a
// warp each.
__device__ __noinline__ void find_magnitudes(const KronFactor* factors, int count, DType dtype, int* magnitudes) {
  constexpr int kSmall = 1024;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
#pragma unroll 1
    for (int j = pass == 0 ? 0 : warp; j < count; j += pass == 0 ? 1 : blockDim.x / 32) {
      const KronFactor f = factors[j];
      const int n = f.out * f.in;
      if ((n <= kSmall) != (pass == 1)) continue;
      const int first = pass == 0 ? threadIdx.x : lane, step = pass == 0 ? blockDim.x : 32;
      float most = 0;
      if (is_dense(f)) {
        const int size = size_of(dtype);
#pragma unroll 4
        for (int i = first; i < n / 8; i += step) {
          const auto v = load_chunk<float>(dtype, static_cast<const char*>(f.data) + i * 8 * size);
#pragma unroll
          for (int e = 0; e < 8; ++e) most = fmaxf(most, fabsf(v.at[e]));
        }
      } else {
#pragma unroll 4
        for (int i = first; i < n; i += step) {
          const int m = divide(i, f.by_in), k = i - m * f.in;
          most = fmaxf(most, fabsf(load_element<float>(dtype, f.data, m * f.row_stride + k * f.column_stride)));
        }
      }
#if __CUDA_ARCH__ >= 800
      const int bits = __reduce_max_sync(~0u, __float_as_int(most));
#else
      const int bits = reduce_lanes(__float_as_int(most), 32, Max());
#endif
      if (lane == 0) atomicMax(magnitudes + j, bits);
    }
  }
}

}  // namespace cuops
