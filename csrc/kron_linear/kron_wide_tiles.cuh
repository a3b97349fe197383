// Tiles of kron_linear_wide_bwd_f32.cu: a number of float32 is the sum of two float16, after a power of two for each 16 rows and 32
// columns of a sample, or for a whole factor.
#pragma once

#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "kron_shared.cuh"
#include "kron_wide_bwd_f32.h"

namespace cuops {

constexpr int kTile = kWideF32Tile, kMatrix = kWideF32Matrix, kLow = 2 * kMatrix;  // bytes; where the second float16 are in a tile

// Powers of two that numbers of a tile were divided by: of each 16 rows and 32 columns.
using Exponents = int[kWideF32Size / 16][kWideF32Size / 32];

// Where 8 columns of a row of a tile are.
__device__ inline int place_of(int row, int column) { return column / 64 * kMatrix + swizzled(row, column % 64 / 8); }

// 8 neighbours of a row become two float16 each.
__device__ inline void store_halves(char* to, const float (&v)[8], float scale) {
  uint4 high, low;
  split<__half>(v[0] * scale, v[1] * scale, high.x, low.x);
  split<__half>(v[2] * scale, v[3] * scale, high.y, low.y);
  split<__half>(v[4] * scale, v[5] * scale, high.z, low.z);
  split<__half>(v[6] * scale, v[7] * scale, high.w, low.w);
  *reinterpret_cast<uint4*>(to) = high;
  *reinterpret_cast<uint4*>(to + kLow) = low;
}

__device__ inline float largest_of(const float (&v)[8]) {
  float most = 0;
#pragma unroll
  for (int e = 0; e < 8; ++e) most = fmaxf(most, fabsf(v[e]));
  return most;
}

// NaN counts as none here, and stays NaN.
__device__ inline int exponent_of_warp(float most) { return exponent_of(__reduce_max_sync(~0u, __float_as_int(most))); }

// A factor, from device memory to a tile, where it is float32 at first, in rows of 128.
struct WideFactor {
  static constexpr int kRow = kWideF32Size, kEach = (kRow * kRow / 8 + kWideF32Threads - 1) / kWideF32Threads;

  __device__ __forceinline__ static void copy(char* tile, const void* from, int rows, int columns) {
    const float *const data = static_cast<const float*>(from), zero = 0;
    float* const to = reinterpret_cast<float*>(tile);
    if (columns % 4 == 0) {
#pragma unroll 4
      for (int i = threadIdx.x * 4; i < kRow * kRow; i += kWideF32Threads * 4) {
        const int row = i / kRow, column = i % kRow;
        const bool valid = row < rows && column < columns;
        copy_or_zero(reinterpret_cast<char*>(to + i), data + (valid ? row * columns + column : 0), valid);
      }
    } else {
#pragma unroll 8
      for (int i = threadIdx.x; i < kRow * kRow; i += kWideF32Threads) {
        const int row = i / kRow, column = i % kRow;
        to[i] = row < rows && column < columns ? data[row * columns + column] : zero;
      }
    }
  }

  __device__ static int element(int i) { return (threadIdx.x + i * kWideF32Threads) * 8; }

  // Of what copy() brought there, divided by the power of two of the largest, whose exponent is left where it is asked for.
  __device__ __forceinline__ static void make(char* tile, int (&largest)[kWideF32Threads / 32], int* exponent_at) {
    float v[kEach][8], most = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const bool exists = element(i) < kRow * kRow;
#pragma unroll
      for (int e = 0; e < 8; e += 4)
        *reinterpret_cast<float4*>(&v[i][e]) = exists ? *reinterpret_cast<const float4*>(tile + (element(i) + e) * 4) : float4{};
      most = fmaxf(most, largest_of(v[i]));
    }
    const int exponent_here = exponent_of_warp(most);
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = exponent_here;
    __syncthreads();
    int exponent = -127;
#pragma unroll
    for (const int of_warp : largest) exponent = max(exponent, of_warp);
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (element(i) < kRow * kRow)
        store_halves(tile + place_of(element(i) / kRow, element(i) % kRow), v[i], power_of_two(14 - exponent));
    if (threadIdx.x == 0) *exponent_at = exponent;
  }
};

// What the warps of a block tell each other, in shared memory: of samples' tiles, of which a block has one or two.
struct WideShared {
  Exponents exponents[2];
  unsigned long long full[2], empty[2], pieces[kWideF32Warps][kWideF32Pieces];
  int largest[2][kWideF32Threads / 32], factors[2];  // exponents, of warps and of all
};

// The samples of a block.
struct WideTurns {
  long long first, step, rows;
};

// A warp's part in making tiles of all samples: every second 16 rows of 32 columns.
template <int kUsed>
struct WideMaker {
  static constexpr int kEach = kUsed / 32, kWarps = kEach * 2;  // pieces of a tile; warps that have any

  const TensorMap &first, &second;
  const int count;  // of tiles
  const WideTurns turns;
  char* const pieces;
  unsigned long long (&arrivals)[kWideF32Pieces];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kWideF32Warps, group = warp / kEach, quarter = warp % kEach;
  // The piece that is asked for next.
  long long next = turns.first;
  int next_tile = 0, next_piece = 0;

  __device__ void ask(int slot) {
    if (next >= turns.rows) return;
    if (lane == 0) {
      arrive_expecting(&arrivals[slot], kWideF32Piece);
      copy_box(pieces + slot * kWideF32Piece, next_tile == 0 ? first : second, quarter * 32,
               (next_piece * 2 + group) * kWideF32Rows, static_cast<int>(next), &arrivals[slot]);
    }
    if (++next_piece == kEach) {
      next_piece = 0;
      if (++next_tile == count) {
        next_tile = 0;
        next += turns.step;
      }
    }
  }

  // All of them; those that shared memory has room for have been asked for.
  __device__ void make(char* tiles, WideShared& shared) {
    const int from = swizzled(lane % 8, lane / 8 * 2), to = place_of(lane % 8, quarter * 32 + lane / 8 * 8);
    int slot = 0;
    unsigned arrived = 0, left = 1;
#pragma unroll 1
    for (long long sample = turns.first; sample < turns.rows; sample += turns.step, left ^= 1) {
#pragma unroll 1
      for (int t = 0; t < count; ++t) {
#pragma unroll 1
        for (int i = 0; i < kEach; ++i) {
          wait_for_arrivals(&arrivals[slot], arrived);
          // A lane has 8 columns of two rows, 8 apart.
          float v[2][8];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const char* const piece = pieces + slot * kWideF32Piece + j * 1024;
            *reinterpret_cast<float4*>(&v[j][0]) = *reinterpret_cast<const float4*>(piece + from);
            *reinterpret_cast<float4*>(&v[j][4]) = *reinterpret_cast<const float4*>(piece + (from ^ 16));
          }
          const int exponent = exponent_of_warp(fmaxf(largest_of(v[0]), largest_of(v[1]))), part = i * 2 + group;
          ask(slot);
          slot = (slot + 1) % kWideF32Pieces;
          arrived ^= slot == 0;
          if (i == 0) wait_for_arrivals(&shared.empty[t], left);
#pragma unroll
          for (int j = 0; j < 2; ++j)
            store_halves(tiles + t * kTile + (part * kWideF32Rows + j * 8) * 128 + to, v[j], power_of_two(14 - exponent));
          if (lane == 0) shared.exponents[t][part][quarter] = exponent;
        }
        show_to_products();
        __syncwarp();
        if (lane == 0) arrive(&shared.full[t]);
      }
    }
  }
};

}  // namespace cuops
