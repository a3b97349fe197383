// What the kernels of kron_linear_direct.cu work with: float32 as the sum of two float16 scaled by a power of two, in registers as
// operands, and in shared memory as rows.
#pragma once

#include "kron_direct.h"
#include "kron_linear/kron_shared.cuh"

namespace cuops {

// 16 kSteps rows of 16 columns, as the tensor cores' second operand: of a step's 16 rows, a lane has four, of two columns.
template <int kSteps>
struct DirectOperand {
  unsigned high[kSteps][4], low[kSteps][4];  // before split(): a float32 in each

  // Rows of a matrix of `pitch` columns, an even number of each; zeros beyond them. Of 8 rows, a lane takes two, and of these two
  // neighbouring columns.
  __device__ __forceinline__ void load(const float* from, int rows, int pitch, int column) {
    if (from == nullptr || column >= pitch) rows = 0;
    const int first = static_cast<int>(threadIdx.x) % 4 * 2;
    const float* const at = from + column + first * pitch;
    rows -= first;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = s * 16 + i * 8;
        uint2 u = {}, v = {};
        if (row < rows) {
          u = *reinterpret_cast<const uint2*>(at + row * pitch);
          v = *reinterpret_cast<const uint2*>(at + (row + 1) * pitch);
        }
        high[s][i] = u.x, high[s][2 + i] = u.y;
        low[s][i] = v.x, low[s][2 + i] = v.y;
      }
    }
  }

  // The transpose of 16 rows of a factor from `first` on, in the order that gives a lane four neighbouring results. Of 16 columns,
  // a lane has four neighbours, as store_near() leaves the rows to multiply with.
  __device__ __forceinline__ void load_transposed(const KronFactor& f, int first) {
    const int lane = threadIdx.x % 32, row = first + lane / 8 * 4 + lane / 4 % 2, k = lane % 4 * 4;
    const float* const data = static_cast<const float*>(f.data);
    const bool vectors = f.vectors;
    const long long step = f.column_stride;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const int in = row + t * 2 < f.out ? f.in - k : 0;
      const float* const from = data + (row + t * 2) * f.row_stride + k * f.column_stride;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        float4 v = {};
        if (s * 16 < in) {
          const float* const four = from + s * 16 * step;
          v = vectors ? *reinterpret_cast<const float4*>(four) : float4{four[0], four[step], four[2 * step], four[3 * step]};
        }
        high[s][t * 2] = __float_as_uint(v.x), low[s][t * 2] = __float_as_uint(v.y);
        high[s][t * 2 + 1] = __float_as_uint(v.z), low[s][t * 2 + 1] = __float_as_uint(v.w);
      }
    }
  }

  // The largest magnitude of the warp's elements, as bits.
  __device__ __forceinline__ int magnitude() const {
    float most[2] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        most[0] = fmaxf(most[0], fabsf(__uint_as_float(high[s][i])));
        most[1] = fmaxf(most[1], fabsf(__uint_as_float(low[s][i])));
      }
    }
    return __reduce_max_sync(~0u, __float_as_int(fmaxf(most[0], most[1])));
  }

  __device__ __forceinline__ void split(int exponent) {
    const float scale = power_of_two(exponent);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        cuops::split<__half>(__uint_as_float(high[s][i]) * scale, __uint_as_float(low[s][i]) * scale, high[s][i], low[s][i]);
    }
  }
};

// c += a b for 32 rows in shared memory. Tensor cores truncate sums, so only those of 16 products are formed there.
template <int kSteps>
__device__ __forceinline__ void multiply_rows(float (&c)[2][2][4], unsigned rows, int pitch, int to_low,
                                              const DirectOperand<kSteps>& b, int steps) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    if (kSteps > 2 && s >= steps) break;
    unsigned a[2][4], a_low[2][4];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      load_matrices(a[t], rows + t * 16 * pitch + s * 32);
      load_matrices(a_low[t], rows + to_low + t * 16 * pitch + s * 32);
    }
    float sum[2][2][4] = {};
    auto add = [&](const unsigned (&u)[2][4], const unsigned (&v)[4]) {
#pragma unroll
      for (int t = 0; t < 4; ++t) mma<__half>(sum[t / 2][t % 2], u[t / 2], v[t % 2 * 2], v[t % 2 * 2 + 1]);
    };
    add(a_low, b.high[s]);
    add(a, b.low[s]);
    add(a, b.high[s]);
#pragma unroll
    for (int t = 0; t < 16; ++t) c[t / 8][t / 4 % 2][t % 4] += sum[t / 8][t / 4 % 2][t % 4];
  }
}

// Four neighbours of 16 in a row of shared memory, which a lane then has as an operand.
__device__ __forceinline__ void store_near(char* to, int to_low, float a, float b, float c, float d) {
  unsigned high[2], low[2];
  split<__half>(a, b, high[0], low[0]);
  split<__half>(c, d, high[1], low[1]);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    *reinterpret_cast<unsigned*>(to + i * 16) = high[i];
    *reinterpret_cast<unsigned*>(to + to_low + i * 16) = low[i];
  }
}

// Rows of a factor, padded to 32, in shared memory, each scaled by a power of two of its own. Four lanes have a row.
template <int kSteps>
__device__ __forceinline__ void prepare_rows(const KronDirectParams& p, const KronFactor& f, int first, int rows, int weight,
                                             int exponents) {
  const int quad = threadIdx.x % 4, padded = (rows + 31) / 32 * 32;
  const float* const data = static_cast<const float*>(f.data);
  const bool vectors = f.vectors;
  const long long step = f.column_stride;
  for (int row = threadIdx.x / 4; row < padded; row += blockDim.x / 4) {
    float v[kSteps][4];
    const float* const from = data + (first + row) * f.row_stride;
    int most = 0;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int k = s * 16 + quad * 4;
      if (vectors) {
        const float4 four = row < rows && k < f.in ? *reinterpret_cast<const float4*>(from + k) : float4{};
        v[s][0] = four.x, v[s][1] = four.y, v[s][2] = four.z, v[s][3] = four.w;
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) v[s][e] = row < rows && k + e < f.in ? from[(k + e) * step] : 0.0f;
      }
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int e = 0; e < 4; ++e) most = max(most, __float_as_int(fabsf(v[s][e])));
    }
    most = max(most, __shfl_xor_sync(~0u, most, 1));
    most = max(most, __shfl_xor_sync(~0u, most, 2));
    const float scale = power_of_two(14 - exponent_of(most));
    if (quad == 0) shared_at<int>(exponents)[row] = exponent_of(most);
    char* const to = shared_at<char>(weight) + row * p.weight_pitch + quad * 8;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      uint2 high, low;
      split<__half>(v[s][0] * scale, v[s][1] * scale, high.x, low.x);
      split<__half>(v[s][2] * scale, v[s][3] * scale, high.y, low.y);
      *reinterpret_cast<uint2*>(to + s * 32) = high;
      *reinterpret_cast<uint2*>(to + p.weight_bytes + s * 32) = low;
    }
  }
}

// Four neighbours of y, times a power of two.
__device__ __forceinline__ void store_four(float* y, const float* bias, int at, int exponent, float a, float b, float c, float d) {
  const PowerOfTwo scale(exponent);
  float4 v = make_float4(scale.of(a), scale.of(b), scale.of(c), scale.of(d));
  if (bias) v = make_float4(v.x + bias[at], v.y + bias[at + 1], v.z + bias[at + 2], v.w + bias[at + 3]);
  *reinterpret_cast<float4*>(y + at) = v;
}

}  // namespace cuops
