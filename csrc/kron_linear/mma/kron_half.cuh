// What the kernels of kron_linear_half.cu, and some of kron_linear_wide.cu, are made of: factors in shared memory in the order of
// the tensor cores' operands, and 32 columns of W1 X W2^T for a matrix X of 16 bits, by one warp and in its registers.
#pragma once

#include "kron_half.h"
#include "kron_linear/kron_shared.cuh"

namespace cuops {

// The exponent that a factor's largest element is given: so that no sum overflows, whatever x is, and no float16 is rounded.
template <class T>
constexpr int kHalfTop = kSame<T, __half> ? 14 : -9;

// The largest magnitude of what the threads of a warp have, as bits.
template <class T, int kCount>
__device__ int magnitude_of(const Pack<T, 8> (&v)[kCount]) {
  float most = 0;
#pragma unroll
  for (int i = 0; i < 8 * kCount; ++i) most = fmaxf(most, fabsf(convert<float>(v[i / 8].at[i % 8])));
  return __reduce_max_sync(~0u, __float_as_int(most));
}

// A thread's part of a factor, in pieces of 8 columns; zeros around it.
template <class T, int kSize, int kThreads>
struct FactorPart {
  static constexpr int kUnits = kSize / 8, kPieces = (kSize * kUnits + kThreads - 1) / kThreads;
  Fetched<T, 8> v[kPieces];

  __device__ void load(const KronFactor& f) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int row = (threadIdx.x + j * kThreads) / kUnits, k = threadIdx.x % kUnits * 8;
      const T* const from = static_cast<const T*>(f.data) + row * f.row_stride + k * f.column_stride;
      v[j] = {};
      if (row >= f.out) continue;
      if (f.vectors) {
        if (k < f.in) v[j] = fetch<T, 8>(from);
      } else {
        auto some = v[j].pack();
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (k + e < f.in) some.at[e] = from[e * f.column_stride];
        v[j] = fetch<T, 8>(&some);
      }
    }
  }

  __device__ int magnitude() const {
    Pack<T, 8> packs[kPieces];
#pragma unroll
    for (int j = 0; j < kPieces; ++j) packs[j] = v[j].pack();
    return magnitude_of(packs);
  }

  // Calls put(row, column, pair of neighbours) for all pairs, scaled.
  template <class Put>
  __device__ void each(float scale, const Put& put) const {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int row = (threadIdx.x + j * kThreads) / kUnits, k = threadIdx.x % kUnits * 8;
      if (kSize * kUnits % kThreads != 0 && row >= kSize) continue;
#pragma unroll
      for (int e = 0; e < 8; e += 2)
        put(row, k + e, convert<float>(v[j].pack().at[e]) * scale, convert<float>(v[j].pack().at[e + 1]) * scale);
    }
  }
};

// The exponents that factors are scaled down by, after which sums stay finite, from the largest magnitudes of each warp's elements.
// kWarps of the block, the first ones, call this; `maxima` are for kCount * kWarps. kTop: what the largest element is given.
template <class T, int kWarps, int kTop = kHalfTop<T>, int kCount>
__device__ void find_exponents(int* maxima, int (&exponents)[kCount], const int (&own)[kCount]) {
  const int lane = threadIdx.x % 32;
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) maxima[i * kWarps + threadIdx.x / 32] = own[i];
  }
  sync_warps(0, kWarps);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int bits = __reduce_max_sync(~0u, maxima[i * kWarps + lane % kWarps]);
    // Those whose powers of two are floats, both ways; elements of float16 are far from where these end.
    exponents[i] = kTop > 0 && !kSame<T, __half> ? max((bits >> 23) - 127 - kTop, -127) : min((bits >> 23) - 127, 116) - kTop;
  }
}

// The most of an exponent that one power of two has; leaves the rest.
__device__ inline float take_power_of_two(int& exponent) {
  const int most = max(-126, min(exponent, 126));
  exponent -= most;
  return power_of_two(most);
}

// Matrices of up to kSize rows and columns. Positions in shared memory count 16 bytes.
template <class T, int kSize>
struct Chain {
  static constexpr int kTiles = kSize / 16, kUnits = kSize / 8, kWarps = kSize / 32;  // that share a matrix
  static constexpr int kFirst = kSize * kUnits * 2, kLast = kSize * kUnits, kMatrix = kSize * kUnits;
  float y[kTiles][4][4];

  // Waits for the warps that share a matrix.
  __device__ static void sync(int warp) {
    if constexpr (kWarps == 1) {
      __syncwarp();
    } else {
      sync_warps(1 + warp / kWarps, kWarps);
    }
  }

  // Where 8 neighbours of X are: those that 8 lanes read at a time are in different banks.
  __device__ static int unit(int row, int u) { return row * kUnits + (kSize == 64 ? u ^ row % 2 * 4 : u); }

  // Starts to copy a matrix, of units of 8 neighbours, by all warps that share it.
  __device__ static void copy(int to, const T* from, int units, KronDivisor by_units) {
#pragma unroll 4
    for (int i = threadIdx.x % (32 * kWarps); i < units; i += 32 * kWarps) {
      const int row = divide(i, by_units);
      copy_or_zero(shared_at<char>(to + unit(row, i - row * static_cast<int>(by_units.divisor))), from + i * 8, true);
    }
  }

  // The last factor's rows, 32 a warp, are dealt out so that a lane has 8 neighbouring results, and its columns so that it has 8 of
  // X.
  template <class Part>
  __device__ static void store_last(int to, const Part& part, float scale) {
    part.each(scale, [&](int row, int k, float a, float b) {
      const int r = row % 32 / 4, tile = row / 32 * 2 + row % 4 / 2, step = k / 32 * 2 + k % 8 / 4;
      const Pack<T, 2> two = {convert<T>(a), convert<T>(b)};
      shared_at<Pack<T, 2>>(to)[((tile * kTiles + step) * 32 + r * 4 + k % 32 / 8) * 4 + row % 2 + k % 4] = two;
    });
  }
  template <class Part>
  __device__ static void store_first(int to, const Part& part, float scale) {
    part.each(scale, [&](int row, int k, float a, float b) {
      float* const at = shared_at<float>(to) + ((k / 8 * kTiles + row / 16) * 32 + row % 8 * 4 + k % 8 / 2) * 4 + row / 8 % 2;
      at[0] = a;
      at[2] = b;
    });
  }

  // The results of warp `part` of those that share the matrix. `scale`: of W2 X^T.
  __device__ __forceinline__ void multiply(int first_at, int last_at, int x_at, float scale, int part = 0) {
    const int lane = threadIdx.x % 32;
    const uint4* const x = shared_at<uint4>(x_at);
    const uint4* const first = shared_at<uint4>(first_at) + lane;
    const uint4* const last = shared_at<uint4>(last_at) + part * 2 * kTiles * 32 + lane;
#pragma unroll
    for (int i = 0; i < kTiles * 16; ++i) y[i / 16][i / 4 % 4][i % 4] = 0;
#pragma unroll 1
    for (int c = 0; c < kTiles; ++c) {
      float t[2][2][4] = {};  // W2 X^T for 16 rows of X: the next product's second operand, as it lies in registers
#pragma unroll
      for (int s = 0; s < kTiles; s += 2) {
        Pack<unsigned, 4> b[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) b[n] = load_pack<unsigned, 4>(x + unit(c * 16 + n * 8 + lane / 4, s * 2 + lane % 4));
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const auto a = load_pack<unsigned, 4>(last + (m / 2 * kTiles + s + m % 2) * 32);
#pragma unroll
          for (int n = 0; n < 2; ++n) mma<T>(t[m / 2][n], a.at, b[n].at[m % 2 * 2], b[n].at[m % 2 * 2 + 1]);
        }
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        unsigned b[4][2];
#pragma unroll
        for (int i = 0; i < 8; ++i) b[i / 2][i % 2] = __float_as_uint(near_tf32(t[i / 4][n][i % 4] * scale));
#pragma unroll
        for (int u = 0; u < kTiles; ++u) {
          const auto a = load_pack<unsigned, 4>(first + ((c * 2 + n) * kTiles + u) * 32);
#pragma unroll
          for (int m = 0; m < 4; ++m) mma_tf32(y[u][m], a.at, b[m][0], b[m][1]);
        }
      }
    }
  }

  // Calls put(row, column, neighbours) for what a lane has of Y's columns of this warp.
  template <class Put>
  __device__ __forceinline__ void each(const Put& put) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int row = 0; row < 2 * kTiles; ++row) {
      Pack<float, 8> v;
#pragma unroll
      for (int e = 0; e < 8; ++e) v.at[e] = y[row / 2][e % 4][row % 2 * 2 + e / 4];
      put(row * 8 + lane / 4, lane % 4 * 8, v);
    }
  }
};

// v and 8 neighbours, which start anywhere. Out of line, because it would be code for each of a lane's results.
template <class T>
__device__ __noinline__ Pack<float, 8> add_bias(Pack<float, 8> v, const T* from) {
  Pack<T, 8> bias;
  if (reinterpret_cast<unsigned long long>(from) % 16 == 0) {
    bias = load_pack<T, 8>(from);
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e) bias.at[e] = from[e];
  }
#pragma unroll
  for (int e = 0; e < 8; ++e) v.at[e] += convert<float>(bias.at[e]);
  return v;
}

// Where the results of a sample go, and their scale.
template <class T>
struct HalfOutput {
  T* y;
  const T* bias;
  float scale;

  __device__ HalfOutput(const KronInRegistersParams& p, long long sample, int elements, float scale)
      : y(static_cast<T*>(p.y.data) + offset_of(p.y, sample)),
        bias(p.bias ? static_cast<const T*>(p.bias) + sample % p.bias_lead * elements : nullptr),
        scale(scale) {}

  __device__ __forceinline__ void store(int at, Pack<float, 8> v) const {
#pragma unroll
    for (int e = 0; e < 8; ++e) v.at[e] *= scale;
    if (bias) v = add_bias(v, bias + at);
    store_pack(y + at, convert<T>(v));
  }
};

}  // namespace cuops
