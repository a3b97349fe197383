// What the kernels share whose factors, neighbours multiplied out, are axes of one size.
#pragma once

#include "kron_axes.h"
#include "kron_linear/kron_shared.cuh"

namespace cuops {

// An element of the product of factors [first, end), whose sizes are powers of two.
__device__ inline float merged(const KronFactor* factors, int first, int end, int row, int column) {
  float v = 1;
#pragma unroll 1
  for (int j = end - 1; j >= first; --j) {
    const KronFactor& f = factors[j];
    const int mask = f.in - 1, log = __ffs(f.in) - 1;
    v *= static_cast<const float*>(f.data)[(row & mask) * f.row_stride + (column & mask) * f.column_stride];
    row >>= log;
    column >>= log;
  }
  return v;
}

// All axes' weights: calls place(axis, row, column) for where one is to be.
template <int kAxes, int kSize, class Place>
__device__ void bring_weights(const KronAxesParams& p, const Place& place) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kAxes * kSize * kSize; i += blockDim.x) {
    const int axis = i / (kSize * kSize), row = i / kSize % kSize, column = i % kSize;
    *place(axis, row, column) = merged(p.factors, axis > 0 ? p.ends[axis - 1] : 0, p.ends[axis], row, column);
  }
}

// In one instruction, which compilers make of neighbours only sometimes.
__device__ inline void store_shared(float* at, const float4& v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(at)), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

// The same numbers, as other names of registers.
template <int kN, int kM>
__device__ __forceinline__ void transpose(const float (&v)[kN][kM], float (&to)[kM][kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) {
#pragma unroll
    for (int j = 0; j < kM; ++j) to[j][i] = v[i][j];
  }
}

// Samples in parts: every kStep-th part of those that a block has is a warp's.
template <int kStep, int kParts>
struct PartCursor {
  int sample = 0, part;  // sample: of those of the block

  __device__ explicit PartCursor(int first) : part(first) {}
  __device__ void advance() {
    part += kStep;
    if (part >= kParts) {
      part -= kParts;
      ++sample;
    }
  }
};

}  // namespace cuops
