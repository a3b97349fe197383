// What the kernels of kron_linear_cube.cu work with: numbers that are two float16 each, or one, as operands of tensor cores, and
// matrices that lie in shared memory as lanes take them.
#pragma once

#include "kron_cube.h"
#include "kron_linear/kron_pairs.cuh"

namespace cuops {

constexpr int kCubeAhead = 4;  // samples that slabs may be made of before the first of them is finished
// Barriers for finished samples: a warp may have no slab of the next 5 samples, and look for one of 3 before these only then. By
// that time its barrier must not be two phases on.
constexpr int kCubeFinished = 16;

struct CubeShared {
  unsigned long long made[kCubeAhead], finished[kCubeFinished], stored;  // stored: the last two factors
  float largest[kCubeAhead][kCubeSize];                                  // of each slab
  int exponents[kCubeThreads / 32];                                      // of what a warp has of the last two factors
};

// c += a b, for 16 of the depth: two operands of 16 rows, four of 8 columns. Tensor cores truncate sums, so those of float32 are of
// 16 products only.
template <bool kPairs>
__device__ __forceinline__ void add_products(float (&c)[2][4][4], const HalfOperand<kPairs, 4> (&a)[2],
                                             const HalfOperand<kPairs, 2> (&b)[4]) {
  if constexpr (kPairs) {
    float part[2][4][4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) mma<__half>(part[i / 4][i % 4], a[i / 4].low, b[i % 4].high[0], b[i % 4].high[1]);
#pragma unroll
    for (int i = 0; i < 8; ++i) mma<__half>(part[i / 4][i % 4], a[i / 4].high, b[i % 4].low[0], b[i % 4].low[1]);
#pragma unroll
    for (int i = 0; i < 8; ++i) mma<__half>(part[i / 4][i % 4], a[i / 4].high, b[i % 4].high[0], b[i % 4].high[1]);
#pragma unroll
    for (int i = 0; i < 32; ++i) c[i / 16][i / 4 % 4][i % 4] += part[i / 16][i / 4 % 4][i % 4];
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) mma<__half>(c[i / 4][i % 4], a[i / 4].high, b[i % 4].high[0], b[i % 4].high[1]);
  }
}

__device__ inline float element_of(const KronFactor& f, int row, int column) {
  return row < f.out && column < f.in ? static_cast<const float*>(f.data)[row * f.row_stride + column * f.column_stride] : 0.0f;
}

// Where 4 neighbours of a slab's row are: in different banks for what lanes read or write at a time, also of different slabs.
__device__ inline int cube_place(int slab, int row, int four) { return row * 128 + (four ^ row % 8 ^ slab / 2 % 4 * 2) * 16; }

// The last two factors, in shared memory in the order in which lanes take them: a warp's part of one of them.
template <bool kPairs>
class CubeFactors {
 public:
  static constexpr int kLast = 4 * 2 * 32, kSecond = 8 * 32;  // vectors
  static_assert(kCubeThreads == 128 + 256);

  __device__ explicit CubeFactors(const KronCubeParams& p) {
    const int i = static_cast<int>(threadIdx.x) / 32 - 4, lane = threadIdx.x % 32;
    if (i < 0) {  // 16 rows, of which a lane has two, and 16 columns, of which it has four neighbours
      const int row = lane / 4 * 4 + (i + 4) % 2 * 2, column = (i + 4) / 2 * 16 + lane % 4 * 4;
#pragma unroll
      for (int e = 0; e < 8; ++e) v_[e] = element_of(p.factors[2], row + e / 2 % 2, column + e / 4 * 2 + e % 2);
    } else {  // 8 rows, of which a lane has one, and 16 columns, of which it has twice two neighbours
      const int row = i % 4 * 8 + lane / 4, column = i / 4 * 16 + lane % 4 * 2;
#pragma unroll
      for (int e = 0; e < 4; ++e) v_[e] = element_of(p.factors[1], row, column + e / 2 * 8 + e % 2);
    }
  }

  // Notes the exponent of a warp's part; for a barrier to follow.
  __device__ void find_exponent(CubeShared& shared) const {
    const int exponent = exponent_of(__float_as_int(largest_of_warp(v_)));
    if (threadIdx.x % 32 == 0) shared.exponents[threadIdx.x / 32] = exponent;
  }

  // Returns what both were divided by.
  __device__ int store(const CubeShared& shared, uint4* to) const {
    int exponents[2] = {-127, -127};
#pragma unroll
    for (int i = 0; i < kCubeThreads / 32; ++i) exponents[i >= 4] = max(exponents[i >= 4], shared.exponents[i]);
    const bool is_second = threadIdx.x >= 128;
    const float scale = power_of_two(14 - (is_second ? exponents[1] : exponents[0]));
    HalfOperand<kPairs, 4> a = {};
#pragma unroll
    for (int e = 0; e < 4; ++e) a.set(e, v_[2 * e] * scale, v_[2 * e + 1] * scale);
    if (is_second) {
      to[kLast + threadIdx.x - 128] = {a.high[0], a.high[1], a.low[0], a.low[1]};
    } else {
      to += threadIdx.x / 32 * 64 + threadIdx.x % 32;
      to[0] = {a.high[0], a.high[1], a.high[2], a.high[3]};
      to[32] = {a.low[0], a.low[1], a.low[2], a.low[3]};
    }
    return exponents[0] + exponents[1];
  }

  __device__ static void load_last(const uint4* from, int k, HalfOperand<kPairs, 4> (&a)[2]) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      *reinterpret_cast<uint4*>(a[m].high) = from[(k * 2 + m) * 64 + threadIdx.x % 32];
      if constexpr (kPairs) *reinterpret_cast<uint4*>(a[m].low) = from[(k * 2 + m) * 64 + 32 + threadIdx.x % 32];
    }
  }
  __device__ static void load_second(const uint4* from, int k, HalfOperand<kPairs, 2> (&b)[4]) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const uint4 v = from[kLast + (k * 4 + n) * 32 + threadIdx.x % 32];
      b[n] = {{v.x, v.y}, {v.z, v.w}};
    }
  }

 private:
  float v_[8] = {};
};

}  // namespace cuops
