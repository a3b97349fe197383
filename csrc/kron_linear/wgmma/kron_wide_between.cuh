// What kron_linear_wide.cu has between its two products: W2 X^T in registers, of which a thread has two rows, as the first operand
// of the product with W1; and W1 in shared memory, as matrices of 128 bytes a row, as its second one.
#pragma once

#include "device/wgmma.cuh"
#include "kron_linear/kron_pairs.cuh"
#include "kron_linear/mma/kron_half.cuh"

namespace cuops {

// In 16 bits, as float16: each row divided by a power of two, by which results are multiplied, and all of W1 by one. What is less
// than 2^-39 of the largest is lost.
template <class T, int kSize, int kTiles>
struct WideBetween {
  static constexpr int kTop = kHalfTop<__half>;  // the exponent of W1's largest element
  static constexpr int kWhole = kSize * 128;     // bytes of a matrix of it
  unsigned operand[kTiles / 2][4];
  PowerOfTwo scales[2];

  // Stores 8 columns of a row of W1.
  __device__ static void store(char* first, int row, int column, const Pack<float, 8>& v, float scale) {
    Pack<float, 8> scaled;
#pragma unroll
    for (int e = 0; e < 8; ++e) scaled.at[e] = v.at[e] * scale;
    store_pack(first + column / 64 * kWhole + swizzled(row, column / 8 % 8), convert<__half>(scaled));
  }

  // `exponent`: of both factors.
  __device__ __forceinline__ WideBetween(const float (&t)[kTiles][4], int exponent) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = 0;
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) most = fmaxf(most, fabsf(t[i / 2][half * 2 + i % 2]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const int shift = 14 - exponent_of(__float_as_int(most));
      const float scale = power_of_two(shift);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        operand[i / 2][i % 2 * 2 + half] = pack<__half>(t[i][half * 2] * scale, t[i][half * 2 + 1] * scale);
      }
      scales[half] = PowerOfTwo(exponent - shift);
    }
  }
  // y = what lies between, times the transpose of W1, or of some of its rows.
  template <int kOut>
  __device__ __forceinline__ void begin(float (&y)[kOut][4], unsigned long long first) const {
    begin_products<__half, kTiles / 2>(
        y, [&](int s) { return operand[s]; }, [&](int s) { return first + (s / 4 * kWhole + s % 4 * 32) / 16; });
  }
  // A result in the first or the second of the rows.
  __device__ float result(float v, int half) const { return scales[half].of(v); }
};

// As TF32, which has float32's range. Of 8 columns of W1, those of even numbers come first, so that what multiplies them lies in
// registers.
template <int kSize, int kTiles>
struct WideBetween<float, kSize, kTiles> {
  static constexpr int kTop = kHalfTop<float>, kWhole = kSize * 128;
  unsigned operand[kTiles][4];
  float scale;

  __device__ static void store(char* first, int row, int column, const Pack<float, 8>& v, float scale) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      Pack<float, 4> four;
#pragma unroll
      for (int e = 0; e < 4; ++e) four.at[e] = near_tf32(v.at[2 * e + odd] * scale);
      store_pack(first + column / 32 * kWhole + swizzled(row, column / 4 % 8 + odd), four);
    }
  }

  __device__ __forceinline__ WideBetween(const float (&t)[kTiles][4], int exponent) {
    scale = take_power_of_two(exponent);
    const float rest = power_of_two(exponent);
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i)  // rows, then columns
      operand[i / 4][i % 4] = __float_as_uint(near_tf32(t[i / 4][i % 2 * 2 + i % 4 / 2] * rest));
  }
  template <int kOut>
  __device__ __forceinline__ void begin(float (&y)[kOut][4], unsigned long long first) const {
    begin_products<float, kTiles>(
        y, [&](int s) { return operand[s]; }, [&](int s) { return first + (s / 4 * kWhole + s % 4 * 32) / 16; });
  }
  __device__ float result(float v, int) const { return v * scale; }
};

}  // namespace cuops
