// What a warp or a team of warps does with tiles of one size in shared memory: copies, the products of three of them.
#pragma once

#include "kron_linear/kron_shared.cuh"
#include "kron_squares.h"

namespace cuops {

// 16 x 16 of a matrix in shared memory, as the tensor cores take it; float32 as two float16.
template <bool kPairs>
struct Square {
  unsigned high[4], low[4];

  template <bool kTransposed>
  __device__ void load(unsigned address) {
    if constexpr (kTransposed) {
      load_matrices_transposed(high, address);
      if constexpr (kPairs) load_matrices_transposed(low, address + 16);
    } else {
      load_matrices(high, address);
      if constexpr (kPairs) load_matrices(low, address + 16);
    }
  }
};

template <class T, int kSize>
struct Squares {
  static constexpr bool kPairs = kSame<T, float>;
  using Part = Square<kPairs>;
  static constexpr int kGroups = kSize / 16, kThreads = 32 * kGroups, kUnits = kPairs ? 2 : 1,
                       kPitch = squares_pitch(kSize, kPairs);
  static constexpr int kTile = kSize * kPitch;                      // units of 16 bytes
  static constexpr int kDown = 256 * kPitch, kRight = 32 * kUnits;  // bytes to the next 16 rows, or columns
  static constexpr int kLog = kSize > 64 ? 7 : kSize == 64 ? 6 : kSize == 32 ? 5 : 4;

  // sum += scale * a b, for the two halves of b. Tensor cores truncate sums: for float32 they form those of 16 products only.
  template <class A>
  __device__ static void add(float (&sum)[2][4], const A& a, const Part& b, float scale) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kPairs) {
        float part[4] = {};
        mma<__half>(part, a.low, b.high[2 * i], b.high[2 * i + 1]);
        mma<__half>(part, a.high, b.low[2 * i], b.low[2 * i + 1]);
        mma<__half>(part, a.high, b.high[2 * i], b.high[2 * i + 1]);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(part[j], scale, sum[i][j]);
      } else {
        mma<T>(sum[i], a.high, b.high[2 * i], b.high[2 * i + 1]);
      }
    }
  }

  // 16 kM rows of the first matrix by 16 columns of the second, as the first operand of another product.
  template <bool kTransposed, int kM>
  __device__ static void first_product(Part (&result)[kM], const Part (&a)[kM][kGroups], unsigned b_at) {
    float c[kM][2][4] = {};
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
      Part b;
      b.template load<kTransposed>(b_at + k * (kTransposed ? kDown : kRight));
#pragma unroll
      for (int m = 0; m < kM; ++m) add(c[m], a[m][k], b, 1.0f);
    }
    constexpr float kShift = 1.0f / (1 << (15 + kLog));  // below 2^15, as both were
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float u = c[m][j / 2][j % 2 * 2], v = c[m][j / 2][j % 2 * 2 + 1];
        if constexpr (kPairs) {
          split<__half>(u * kShift, v * kShift, result[m].high[j], result[m].low[j]);
        } else {
          result[m].high[j] = pack<T>(u, v);
        }
      }
    }
  }

  template <bool kTransposed, int kM>
  __device__ static void load_rows(Part (&a)[kM][kGroups], unsigned at) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int k = 0; k < kGroups; ++k)
        a[m][k].template load<kTransposed>(at + m * (kTransposed ? kRight : kDown) + k * (kTransposed ? kDown : kRight));
    }
  }

  // sum += scale * a b c, for 16 kM rows of a; b and c as they lie in memory or transposed.
  template <bool kB, bool kC, int kM>
  __device__ static void add_chain(float (&sum)[kM][kGroups][2][4], const Part (&a)[kM][kGroups], unsigned b_at, unsigned c_at,
                                   float scale) {
#pragma unroll 1
    for (int j = 0; j < kGroups; ++j) {
      Part s[kM];
      first_product<kB>(s, a, b_at + j * (kB ? kRight : kDown));
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        Part c;
        c.template load<kC>(c_at + j * (kC ? kDown : kRight) + n * (kC ? kRight : kDown));
#pragma unroll
        for (int m = 0; m < kM; ++m) add(sum[m][n], s[m], c, scale);
      }
    }
  }

  // A warp's 16 x 16 results, those of them that exist. kOdd: of float32 whose rows start anywhere.
  template <bool kOdd = false>
  __device__ static void store(T* to, int rows, int columns, int column, const float (&d)[2][4], float scale, float rest) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = r * 8 + lane / 4;
      T* const at = to + row * columns;
      if constexpr (kPairs) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int first = column + i * 8 + lane % 4 * 2;
          if (row >= rows || first >= columns) continue;
          const float2 two = {d[i][2 * r] * scale * rest, d[i][2 * r + 1] * scale * rest};
          if constexpr (kOdd) {
            at[first] = two.x;
            if (first + 1 < columns) at[first + 1] = two.y;
          } else {
            *reinterpret_cast<float2*>(at + first) = two;
          }
        }
      } else {
        // Two lanes exchange halves, so that each has four neighbours.
        const unsigned left = pack<T>(d[0][2 * r], d[0][2 * r + 1]), right = pack<T>(d[1][2 * r], d[1][2 * r + 1]);
        const bool odd = lane % 2;
        const unsigned other = __shfl_xor_sync(~0u, odd ? left : right, 1);
        const int first = column + odd * 8 + lane % 4 / 2 * 4;
        if (row < rows && first < columns)
          *reinterpret_cast<uint2*>(at + first) = odd ? make_uint2(other, right) : make_uint2(left, other);
      }
    }
  }

  // 16 rows of dx = scale * rest * a b c, those of `rows` by `columns` that exist.
  __device__ static void store_chain(T* to, int rows, int columns, const Part (&a)[1][kGroups], unsigned b_at, unsigned c_at,
                                     float scale, float rest) {
    if constexpr (kPairs) {
      float d[1][kGroups][2][4] = {};
      add_chain<true, true>(d, a, b_at, c_at, 1.0f);
#pragma unroll
      for (int n = 0; n < kGroups; ++n) store(to, rows, columns, n * 16, d[0][n], scale, rest);
    } else {
      // Registers are few beside the sums of both gradients.
      Part s[kGroups][1];
#pragma unroll
      for (int j = 0; j < kGroups; ++j) first_product<true>(s[j], a, b_at + j * kRight);
#pragma unroll 1
      for (int n = 0; n < kGroups; ++n) {
        float d[2][4] = {};
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
          Part c;
          c.template load<true>(c_at + j * kDown + n * kRight);
          add(d, s[j][0], c, 1.0f);
        }
        store(to, rows, columns, n * 16, d, scale, rest);
      }
    }
  }

  __device__ static void sync(int barrier) {
    if constexpr (kGroups == 1) {
      __syncwarp();
    } else {
      sync_warps(barrier, kGroups);
    }
  }

  // Starts to copy a contiguous matrix, whose rows are whole vectors. Of a pair of float32's, normalize() has left halves in both:
  // where the row ends with the first, zeros take the second's place.
  static constexpr int kWidth = 16 / static_cast<int>(sizeof(T)), kRow = kSize / kWidth;
  __device__ static void copy(int to, const T* from, int rows, int columns, int thread, int threads) {
    const int units = columns / kWidth, filled = (units + kUnits - 1) / kUnits * kUnits;
#pragma unroll 4
    for (int i = thread; i < rows * kRow; i += threads) {
      const int row = i / kRow, unit = i % kRow;
      const bool valid = unit < units;
      if (unit < filled)
        copy_or_zero(reinterpret_cast<char*>(kron_shared + to + row * kPitch + unit),
                     reinterpret_cast<const uint4*>(from) + (valid ? row * units + unit : 0), valid);
    }
  }

  // A factor, whose rows may not be.
  __device__ __noinline__ static void copy_factor(int to, const void* from, int rows, int columns) {
    static_assert(sizeof(T) <= 4);
    if (columns % kWidth == 0) {
      copy(to, static_cast<const T*>(from), rows, columns, threadIdx.x, blockDim.x);
    } else if (sizeof(T) == 4 || columns % 2 == 0) {
      copy_words<unsigned>(to, from, rows, columns * static_cast<int>(sizeof(T)) / 4);
    } else {
      copy_words<unsigned short>(to, from, rows, columns);
    }
  }
  template <class Word>
  __device__ static void copy_words(int to, const void* from, int rows, int columns) {
    constexpr int kColumns = kSize * sizeof(T) / sizeof(Word);
#pragma unroll 8
    for (int i = threadIdx.x; i < rows * kColumns; i += blockDim.x) {
      const int row = i / kColumns, column = i % kColumns;
      if (column < columns)
        reinterpret_cast<Word*>(kron_shared + to + row * kPitch)[column] = static_cast<const Word*>(from)[row * columns + column];
    }
  }

  // A matrix of float32 becomes two of float16 in place, by a team, below 2^15; returns the exponent of its largest element.
  __device__ static int normalize(int at, int* largest, int thread, int barrier) {
    constexpr int kEach = kSize * kSize / 8 / kThreads, kRow = kSize / 8;
    float4 v[kEach][2];
    const bool swap = thread & 4;
    float most = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int chunk = thread + i * kThreads;
      const float4* const from = reinterpret_cast<const float4*>(kron_shared + at + chunk / kRow * kPitch + chunk % kRow * 2);
      v[i][0] = from[swap];
      v[i][1] = from[!swap];
#pragma unroll
      for (int j = 0; j < 2; ++j)
        most = fmaxf(fmaxf(fmaxf(most, fabsf(v[i][j].x)), fmaxf(fabsf(v[i][j].y), fabsf(v[i][j].z))), fabsf(v[i][j].w));
    }
    const int bits = __reduce_max_sync(~0u, __float_as_int(most));
    if (thread % 32 == 0) largest[thread / 32] = bits;
    sync(barrier);
    int all = 0;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) all = max(all, largest[i]);
    const int exponent = exponent_of(all);
    const float scale = power_of_two(14 - exponent);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int chunk = thread + i * kThreads;
      uint4* const to = kron_shared + at + chunk / kRow * kPitch + chunk % kRow * 2;
      uint2 high[2], low[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        split<__half>(v[i][j].x * scale, v[i][j].y * scale, high[j].x, low[j].x);
        split<__half>(v[i][j].z * scale, v[i][j].w * scale, high[j].y, low[j].y);
      }
      const uint4 a =
          swap ? make_uint4(high[1].x, high[1].y, high[0].x, high[0].y) : make_uint4(high[0].x, high[0].y, high[1].x, high[1].y);
      const uint4 b =
          swap ? make_uint4(low[1].x, low[1].y, low[0].x, low[0].y) : make_uint4(low[0].x, low[0].y, low[1].x, low[1].y);
      to[swap] = swap ? b : a;
      to[!swap] = swap ? a : b;
    }
    return exponent;
  }
};

}  // namespace cuops
