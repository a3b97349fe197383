// How kernels of gradients add up what their blocks have found.
#pragma once

#include "device/numeric.cuh"
#include "device/overlap.cuh"

namespace cuops {

__device__ inline void add(float4& sum, const float4& v) { sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w); }
__device__ inline void add(double2& sum, const double2& v) { sum = make_double2(sum.x + v.x, sum.y + v.y); }

// Of the lane that differs in these bits.
__device__ inline float4 from_lane(const float4& v, int bits) {
  return make_float4(__shfl_xor_sync(~0u, v.x, bits), __shfl_xor_sync(~0u, v.y, bits), __shfl_xor_sync(~0u, v.z, bits),
                     __shfl_xor_sync(~0u, v.w, bits));
}
__device__ inline double2 from_lane(const double2& v, int bits) {
  return make_double2(__shfl_xor_sync(~0u, v.x, bits), __shfl_xor_sync(~0u, v.y, bits));
}

// 8 vectors by 64 blocks at a time, by 512 threads. In p.partial, p.blocks are `stride` vectors apart, and this thread's vector may
// lie beyond that. Calls visit(which one of the sums, the sum).
template <class Acc, class Vector, class Params, class Visit>
__device__ __forceinline__ void add_up_blocks(const Params& p, long long stride, bool exists, const Visit& visit) {
  constexpr int kWidth = sizeof(Vector) / sizeof(Acc), kSums = 8 * kWidth;
  __shared__ Acc shared[16][kSums];
  const int column = threadIdx.x % 8, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Vector* const from = static_cast<const Vector*>(p.partial) + blockIdx.x * 8 + column;
  wait_for_previous();
  Vector v = {};
  if (exists) {
#pragma unroll 4
    for (int i = threadIdx.x / 8; i < p.blocks; i += 64) add(v, from[i * stride]);
  }
#pragma unroll
  for (int step = 8; step < 32; step *= 2) add(v, from_lane(v, step));
  if (lane < 8) reinterpret_cast<Vector*>(shared[warp])[lane] = v;
  __syncthreads();
  if (kSums == 32 ? warp > 0 : threadIdx.x >= kSums) return;
  Acc sum = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) sum += shared[i][lane];
  visit(blockIdx.x * kSums + lane, sum);
}

}  // namespace cuops
