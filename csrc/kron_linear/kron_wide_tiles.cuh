// Tiles of kron_linear_wide_f32.cu and kron_linear_wide_bwd_f32.cu: a number of float32 is the sum of two float16, after a power of
// two for each 16 rows and 32 columns of a sample, or for a whole factor.
#pragma once

#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "kron_pieces.cuh"
#include "kron_wide_f32.h"

namespace cuops {

// Bytes of a tile of kSize rows and columns, of a matrix of 64 of its columns, and where the second float16 are.
template <int kSize>
struct WideTile {
  static constexpr int kMatrix = kSize * 128, kLow = kSize / 64 * kMatrix, kBytes = wide_f32_tile(kSize);
  // Powers of two that its numbers were divided by: of each 16 rows and 32 columns.
  using Exponents = int[kSize / 16][kSize / 32];

  // Where 8 columns of a row are.
  __device__ static int place_of(int row, int column) { return column / 64 * kMatrix + swizzled(row, column % 64 / 8); }

  // 8 neighbours of a row become two float16 each.
  __device__ static void store(char* to, const float (&v)[8], float scale) {
    uint4 high, low;
    split<__half>(v[0] * scale, v[1] * scale, high.x, low.x);
    split<__half>(v[2] * scale, v[3] * scale, high.y, low.y);
    split<__half>(v[4] * scale, v[5] * scale, high.z, low.z);
    split<__half>(v[6] * scale, v[7] * scale, high.w, low.w);
    *reinterpret_cast<uint4*>(to) = high;
    *reinterpret_cast<uint4*>(to + kLow) = low;
  }
};

__device__ inline float largest_of(const float (&v)[8]) {
  float most = 0;
#pragma unroll
  for (int e = 0; e < 8; ++e) most = fmaxf(most, fabsf(v[e]));
  return most;
}

// NaN counts as none here, and stays NaN.
__device__ inline int exponent_of_warp(float most) { return exponent_of(__reduce_max_sync(~0u, __float_as_int(most))); }

// A factor, of which 256 threads make a tile, or its first kRows rows.
template <int kSize, bool kVectors = false, int kRows = kSize>
struct WideFactor {
  using Tile = WideTile<kSize>;
  static constexpr int kWarps = 8;
  using Pieces = FactorPieces<float, kSize, kWarps * 32, kVectors, kRows>;

  // Of numbers divided by the power of two of the largest, whose exponent is left where it is asked for. `near`: of each 16 rows,
  // neighbours are where a thread has four neighbours of what products with them give.
  __device__ __forceinline__ static void make(char* tile, const Pieces& pieces, bool near, int (&largest)[kWarps], int* exponent_at,
                                              int barrier) {
    const int exponent_here = exponent_of(pieces.magnitude());
    if (pieces.thread % 32 == 0) largest[pieces.thread / 32] = exponent_here;
    sync_warps(barrier, kWarps);
    int exponent = -127;
#pragma unroll
    for (const int of_warp : largest) exponent = max(exponent, of_warp);
    if (pieces.thread == 0) *exponent_at = exponent;
    const float scale = power_of_two(14 - exponent);
#pragma unroll
    for (int i = 0; i < Pieces::kCount; ++i) {
      const int r = pieces.row(i), to = near ? r / 16 * 16 + r % 4 / 2 * 8 + r % 16 / 4 * 2 + r % 2 : r;
      Tile::store(tile + Tile::place_of(to, pieces.column(i)), pieces.piece(i).at, scale);
    }
    show_to_products();
  }
};

// What the warps of a block tell each other, in shared memory, where tiles of samples are in kSlots places in turn.
template <int kSize, int kPlaces>
struct WideShared {
  static constexpr int kSlots = kPlaces, kWarps = wide_f32_warps(kSize), kPieces = wide_f32_pieces(kSize);
  typename WideTile<kSize>::Exponents exponents[kSlots];
  unsigned long long full[kSlots], empty[kSlots], pieces[kWarps][kPieces];
  int largest[2][WideFactor<kSize>::kWarps], factors[2];  // exponents of factors: of warps, and of all
};

// What a block makes tiles of: samples, or `across` times 64 columns of each. Memory has no room for more than an int counts.
struct WideTurns {
  int first, step, count, across;
};

// A warp's part in making tiles of all samples: every second 16 rows of 32 columns. A sample has `count` tiles, of matrices that
// the two maps have.
template <int kSize, int kUsed>
class WideMaker {
 public:
  static constexpr int kEach = kUsed / 32, kWarps = kEach * 2;  // pieces of a tile; warps that have any
  static_assert(kWarps <= wide_f32_warps(kSize));

  __device__ WideMaker(const TensorMap& first, const TensorMap& second, int count, const WideTurns& turns, char* pieces,
                       unsigned long long (&arrivals)[wide_f32_pieces(kSize)])
      : first_(first), second_(second), count_(count), turns_(turns), pieces_(pieces), arrivals_(arrivals), next_(turns.first) {}

  // Makes all tiles, in the first `slots` of the places that `tiles` has.
  template <class Shared>
  __device__ void make(char* tiles, Shared& shared, int slots) {
    if (lane_ == 0) {
#pragma unroll 1
      for (int i = 0; i < kPieces; ++i) init_arrivals(&arrivals_[i], 1);
      show_to_products();
    }
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < kPieces; ++i) ask(i);
    const int from = swizzled(lane_ % 8, lane_ / 8 * 2), to = Tile::place_of(lane_ % 8, quarter_ * 32 + lane_ / 8 * 8);
    int place = 0, slot = 0;
    unsigned arrived = 0, left = 1;
#pragma unroll 1
    for (int turn = turns_.first; turn < turns_.count; turn += turns_.step) {
#pragma unroll 1
      for (int t = 0; t < count_; ++t) {
#pragma unroll 1
        for (int i = 0; i < kEach; ++i) {
          wait_for_arrivals(&arrivals_[place], arrived);
          // A lane has 8 columns of two rows, 8 apart.
          float v[2][8];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const char* const piece = pieces_ + place * kWideF32Piece + j * 1024;
            *reinterpret_cast<float4*>(&v[j][0]) = *reinterpret_cast<const float4*>(piece + from);
            *reinterpret_cast<float4*>(&v[j][4]) = *reinterpret_cast<const float4*>(piece + (from ^ 16));
          }
          const int exponent = exponent_of_warp(fmaxf(largest_of(v[0]), largest_of(v[1]))), part = i * 2 + group_;
          ask(place);
          place = (place + 1) % kPieces;
          arrived ^= place == 0;
          if (i == 0) wait_for_arrivals(&shared.empty[slot], left);
#pragma unroll
          for (int j = 0; j < 2; ++j)
            Tile::store(tiles + slot * Tile::kBytes + (part * kWideF32Rows + j * 8) * 128 + to, v[j], power_of_two(14 - exponent));
          if (lane_ == 0) shared.exponents[slot][part][quarter_] = exponent;
        }
        show_to_products();
        __syncwarp();
        if (lane_ == 0) arrive(&shared.full[slot]);
        if (++slot == slots) {
          slot = 0;
          left ^= 1;
        }
      }
    }
  }

 private:
  using Tile = WideTile<kSize>;
  static constexpr int kPieces = wide_f32_pieces(kSize);

  __device__ void ask(int place) {
    if (next_ < turns_.count && lane_ == 0) {
      arrive_expecting(&arrivals_[place], kWideF32Piece);
      const int sample = turns_.across == 1 ? next_ : next_ / turns_.across, column = (next_ - sample * turns_.across) * kSize;
      copy_box(pieces_ + place * kWideF32Piece, next_tile_ == 0 ? first_ : second_, column + quarter_ * 32,
               (next_piece_ * 2 + group_) * kWideF32Rows, sample, &arrivals_[place]);
    }
    if (++next_piece_ < kEach) return;
    next_piece_ = 0;
    if (++next_tile_ < count_) return;
    next_tile_ = 0;
    next_ += turns_.step;
  }

  const TensorMap &first_, &second_;
  const int count_;
  const WideTurns turns_;
  char* const pieces_;
  unsigned long long (&arrivals_)[kPieces];
  const int lane_ = threadIdx.x % 32, warp_ = threadIdx.x / 32 % wide_f32_warps(kSize), group_ = warp_ / kEach,
            quarter_ = warp_ % kEach;
  // The piece that is asked for next.
  int next_;
  int next_tile_ = 0, next_piece_ = 0;
};

}  // namespace cuops
