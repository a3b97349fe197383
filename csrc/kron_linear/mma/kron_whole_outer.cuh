// Where the results of kron_linear_whole.cu go, and its product along the outer axis.
#pragma once

#include "kron_whole.cuh"

namespace cuops {

__device__ __noinline__ Pack<float, 4> add_bias(Pack<float, 4> v, DType dtype, const void* bias, long long at) {
#pragma unroll
  for (int j = 0; j < 4; ++j) v.at[j] += load_element<float>(dtype, bias, at + j);
  return v;
}

// Where a sample of y is. Results are multiplied with two powers of two, whose product overflows only if these do.
struct WholeOutput {
  long long start, bias_start;
  void* data;
  const void* bias;
  DType dtype;

  __device__ WholeOutput(const KronWholeParams& p, long long sample)
      : start(sample < p.rows ? offset_of(p.y, sample) : -1),
        bias_start(p.bias ? sample % p.bias_lead * p.sample_out : 0),
        data(p.y.data),
        bias(p.bias),
        dtype(p.dtype) {}

  template <bool kPairs>
  __device__ void store(int at, int exponent, float a, float b, float c, float d) const {
    const PowerOfTwo scale(exponent);
    Pack<float, 4> v{scale.of(a), scale.of(b), scale.of(c), scale.of(d)};
    const DType as = kPairs ? kFloat32 : dtype;
    if (bias) v = add_bias(v, as, bias, bias_start + at);
    store_chunk(as, data, start + at, v);
  }
};

// The outer axis: outputs = weight times state, 32 columns at a time.
template <bool kPairs>
__device__ __noinline__ void step_outer(const KronWholeParams& p, int state, long long sample, int exponent) {
  const KronWholeStep s = p.step[0];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int slice_units = p.slice_units, slice_bytes = p.slice_pitch * 16, pitch = p.pitch, units = kPairs ? 2 : p.units;
  const KronDivisor by_row_units = p.by_row_units;
  const unsigned zero = shared_address(shared_at<char>(p.zero));
  const unsigned weight = shared_address(shared_at<char>(s.weight + lane % 16 * s.pitch + lane / 16));
  const unsigned weight_low = (s.weight_low - s.weight) * 16;
  const WholeOutput output(p, sample);
  for (int unit = warp * 2; unit < slice_units; unit += warps * 2) {
    unsigned at[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = divide(unit + i, by_row_units), column = unit + i - row * static_cast<int>(by_row_units.divisor);
      at[i] = shared_address(shared_at<char>(state + row * pitch + (column * 2 + lane / 16) * units));
    }
#pragma unroll 1
    for (int m = 0; m < s.rows; m += 32) {
      float acc[2][4][4] = {};
      const bool whole = m + 16 < s.rows;
#pragma unroll 1
      for (int k = 0; k < s.columns; k += 16) {
        const int depth = k + lane % 16;
        unsigned b[2][4], b_low[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const unsigned from = depth < s.in ? at[i] + depth * slice_bytes : zero;
          load_matrices_transposed(b[i], from);
          if constexpr (kPairs) load_matrices_transposed(b_low[i], from + 16);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (i == 1 && !whole) break;
          unsigned a[4], a_low[4];
          load_matrices(a, weight + (m + i * 16) * s.pitch * 16 + k * 2);
          if constexpr (kPairs) load_matrices(a_low, weight + weight_low + (m + i * 16) * s.pitch * 16 + k * 2);
#pragma unroll
          for (int n = 0; n < 4; ++n) multiply<kPairs>(acc[i][n], a, a_low, b[n / 2] + n % 2 * 2, b_low[n / 2] + n % 2 * 2);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = m + i * 16 + half * 8 + lane / 4;
          if (row >= s.out) continue;
#pragma unroll
          for (int pair = 0; pair < 2; ++pair) {
            const float (&u)[4] = acc[i][2 * pair], (&v)[4] = acc[i][2 * pair + 1];
            output.store<kPairs>((row * slice_units + unit + pair) * 16 + lane % 4 * 4, exponent, u[2 * half], u[2 * half + 1],
                                 v[2 * half], v[2 * half + 1]);
          }
        }
      }
    }
  }
}

}  // namespace cuops
