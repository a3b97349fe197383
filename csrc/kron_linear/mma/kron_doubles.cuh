// Products of three float64 matrices of one size in shared memory, as they lie there, by tensor cores.
#pragma once

#include "kron_double.h"
#include "kron_linear/kron_shared.cuh"

namespace cuops {

__device__ __forceinline__ double load_double(unsigned from) {
  double v;
  asm volatile("ld.shared.f64 %0, [%1];" : "=d"(v) : "r"(from));
  return v;
}

// Which column of the second matrix a lane has as the n-th of 8.
__device__ inline int spread(int n) { return n ^ n / 4; }

// What a warp has of a product: 16 rows. The first matrix has kRows rows and columns, the second kRows and kSize, the third kSize
// of both. kChunk: tiles of columns between the two products, at a time.
template <int kSize, int kChunk, int kRows = kSize>
struct Doubles {
  static constexpr int kTiles = kSize / 8, kRowTiles = kRows / 8, kParts = (kRows + 15) / 16;
  static_assert(kTiles % kChunk == 0);
  // Bytes: with this pitch, 16 lanes read from different banks, where they have 4 rows of 4 neighbours, or spread() of either.
  static constexpr int kPitch = kSize * 8 + 32, kMatrix = kRows * kPitch;
  double a[kRowTiles][4], sum[kTiles][4];

  // Rows of the first matrix; kAcross: of its transpose.
  template <bool kAcross>
  __device__ void load_rows(unsigned matrix, int part) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The last 8 rows of an odd number are there twice, the second time for nothing.
      const int row = min(part * 2 + half, kRowTiles - 1) * 8 + lane / 4, k = lane % 4;
      const unsigned at = matrix + (kAcross ? k * kPitch + row * 8 : row * kPitch + k * 8);
#pragma unroll
      for (int i = 0; i < kRowTiles * 2; ++i) a[i / 2][i % 2 * 2 + half] = load_double(at + i * 4 * (kAcross ? kPitch : 8));
    }
  }

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) sum[i / 4][i % 4] = 0;
  }

  // sum += a b c; kAcross: c's transpose instead. What one product gives a lane is what the other takes from it.
  template <bool kAcross>
  __device__ void multiply(unsigned b_matrix, unsigned c_matrix) {
    constexpr int kRight = kAcross ? kPitch : 8, kDown = kAcross ? 8 : kPitch;
    const int lane = threadIdx.x % 32, k = lane % 4, n = lane / 4;
    unsigned b = b_matrix + k * kPitch + spread(n) * 8;
    unsigned near = c_matrix + spread(k * 2) * kDown + n * kRight, far = c_matrix + spread(k * 2 + 1) * kDown + n * kRight;
#pragma unroll 1
    for (int chunk = 0; chunk < kTiles; chunk += kChunk) {
      double between[kChunk][4] = {};
#pragma unroll
      for (int s = 0; s < kRowTiles; ++s) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          const unsigned at = b + s * 8 * kPitch + i * 64;
          mma(between[i], a[s], load_double(at), load_double(at + 4 * kPitch));
        }
      }
#pragma unroll
      for (int s = 0; s < kChunk; ++s) {
        const double first[4] = {between[s][0], between[s][2], between[s][1], between[s][3]};
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          const int at = s * 8 * kDown + i * 8 * kRight;
          mma(sum[i], first, load_double(near + at), load_double(far + at));
        }
      }
      b += kChunk * 64;
      near += kChunk * 8 * kDown;
      far += kChunk * 8 * kDown;
    }
  }

  // Writes the sum's `rows` by `columns` that exist to a contiguous matrix; of these, `columns` are even.
  __device__ void store(double* to, int rows, int columns, int part) const {
    const int lane = threadIdx.x % 32, row = part * 16 + lane / 4, left = columns - lane % 4 * 2;
    double* const at = to + row * columns + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + half * 8 >= rows) break;
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
        if (i * 8 < left)
          *reinterpret_cast<double2*>(at + half * 8 * columns + i * 8) = make_double2(sum[i][half * 2], sum[i][half * 2 + 1]);
    }
  }

  // Starts to copy a contiguous matrix, whose rows are whole vectors, by kThreads threads.
  template <int kThreads>
  __device__ static void copy(char* to, const double* from, int rows, int columns, int thread) {
    constexpr int kRow = kSize / 2, kAtOnce = kThreads / kRow;
    const int first = thread / kRow, column = thread % kRow * 2;
    if (column >= columns || (kThreads % kRow != 0 && first == kAtOnce)) return;
    to += first * kPitch + column * 8;
    from += first * columns + column;
#pragma unroll
    for (int i = 0; i < (kRows + kAtOnce - 1) / kAtOnce; ++i)
      if (first + i * kAtOnce < rows) copy_or_zero(to + i * kAtOnce * kPitch, from + i * kAtOnce * columns, true);
  }

  // A factor, in any order, by all threads.
  __device__ static void copy_factor(char* to, const double* from, int rows, int columns, long long row_stride,
                                     long long column_stride) {
#pragma unroll 4
    for (int i = threadIdx.x; i < rows * kSize; i += blockDim.x)
      if (i % kSize < columns)
        copy_number(reinterpret_cast<double*>(to + i / kSize * kPitch) + i % kSize,
                    from + i / kSize * row_stride + i % kSize * column_stride);
  }
};

}  // namespace cuops
