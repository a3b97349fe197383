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

// The order of a factor's rows in its tile: as they are, or such that of what products with them give, a thread has four
// neighbours, or four lanes have.
enum class WideOrder { kRows, kFours, kLanes };

// A factor, of which 256 threads make a tile, or its first kRows rows.
template <int kSize, bool kVectors = false, int kRows = kSize>
struct WideFactor {
  using Tile = WideTile<kSize>;
  static constexpr int kWarps = 8;
  using Pieces = FactorPieces<float, kSize, kWarps * 32, kVectors, kRows>;

  // Of numbers divided by the power of two of the largest, whose exponent is left where it is asked for.
  __device__ __forceinline__ static void make(char* tile, const Pieces& pieces, WideOrder order, int (&largest)[kWarps],
                                              int* exponent_at, int barrier) {
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
      const int r = pieces.row(i), fours = r / 16 * 16 + r % 4 / 2 * 8 + r % 16 / 4 * 2 + r % 2;
      const int lanes = r / 8 * 8 + r % 4 * 2 + r % 8 / 4;
      const int to = order == WideOrder::kFours ? fours : order == WideOrder::kLanes ? lanes : r;
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

// Matrices of float32 whose rows start anywhere, which no tensor map has: one a sample, `stride` elements apart.
struct WideMatrices {
  const void* data;
  long long stride;
  int rows, columns;
};

// What samples come from, and how many lanes of a warp arrive for a piece of one.
template <bool kOdd>
struct WideSource {
  using Matrices = TensorMap;
  static constexpr int kLanes = 1;
};
template <>
struct WideSource<true> {
  using Matrices = WideMatrices;
  static constexpr int kLanes = 32;
};

// The first or the second one of two; those that are in registers stay there.
__device__ inline const TensorMap& one_of(bool second, const TensorMap& a, const TensorMap& b) { return second ? b : a; }
__device__ inline WideMatrices one_of(bool second, const WideMatrices& a, const WideMatrices& b) {
  return {second ? b.data : a.data, second ? b.stride : a.stride, second ? b.rows : a.rows, second ? b.columns : a.columns};
}

// A warp begins to bring 16 rows and 32 columns of a matrix, with zeros around it.
__device__ inline void bring_piece(char* to, const TensorMap& of, int sample, int row, int column, unsigned long long* there) {
  if (threadIdx.x % 32 > 0) return;
  arrive_expecting(there, kWideF32Piece);
  copy_box(to, of, column, row, sample, there);
}
__device__ inline void bring_piece(char* to, const WideMatrices& of, int sample, int row, int column, unsigned long long* there) {
  const int lane = threadIdx.x % 32, rows = column + lane < of.columns ? of.rows - row : 0;
  const float* from = static_cast<const float*>(of.data);
  if (rows > 0) from += sample * of.stride + row * of.columns + column + lane;
  const unsigned at = shared_address(to) + lane % 4 * 4;
  __syncwarp();  // all lanes have read what was there
#pragma unroll 4
  for (int r = 0; r < kWideF32Rows; ++r) {
    copy_bytes<4>(at + swizzled(r, lane / 4), from, r < rows ? 4 : 0);
    if (r + 1 < rows) from += of.columns;  // and stays where there is something
  }
  arrive_once_copied(there);
}

// A warp's part in making tiles of all samples: every second 16 rows of 32 columns. A sample has `count` tiles, of two matrices.
template <int kSize, int kUsed, bool kOdd>
class WideMaker {
 public:
  using Matrices = typename WideSource<kOdd>::Matrices;
  static constexpr int kWarps = kUsed / 16;  // that have a part
  static_assert(kWarps <= wide_f32_warps(kSize));

  __device__ WideMaker(const Matrices& first, const Matrices& second, int count, const WideTurns& turns, char* pieces,
                       unsigned long long (&arrivals)[wide_f32_pieces(kSize)])
      : first_(first), second_(second), count_(count), turns_(turns), pieces_(pieces), arrivals_(arrivals), next_(turns.first) {}

  // Makes all tiles, in the first `slots` of the places that `tiles` has.
  template <class Shared>
  __device__ void make(char* tiles, Shared& shared, int slots) {
    if (lane_ == 0) {
#pragma unroll 1
      for (int i = 0; i < kPieces; ++i) init_arrivals(&arrivals_[i], WideSource<kOdd>::kLanes);
      show_to_products();
    }
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < kPieces; ++i) bring_next(i);
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
          bring_next(place);
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
  static constexpr int kPieces = wide_f32_pieces(kSize), kEach = kUsed / 32;  // on their way; of a tile

  __device__ void bring_next(int place) {
    if (next_ < turns_.count) {
      const int sample = turns_.across == 1 ? next_ : next_ / turns_.across, column = (next_ - sample * turns_.across) * kSize;
      bring_piece(pieces_ + place * kWideF32Piece, one_of(next_tile_ > 0, first_, second_), sample,
                  (next_piece_ * 2 + group_) * kWideF32Rows, column + quarter_ * 32, &arrivals_[place]);
    }
    if (++next_piece_ < kEach) return;
    next_piece_ = 0;
    if (++next_tile_ < count_) return;
    next_tile_ = 0;
    next_ += turns_.step;
  }

  const Matrices &first_, &second_;
  const int count_;
  const WideTurns turns_;
  char* const pieces_;
  unsigned long long (&arrivals_)[kPieces];
  const int lane_ = threadIdx.x % 32, warp_ = threadIdx.x / 32 % wide_f32_warps(kSize), group_ = warp_ / kEach,
            quarter_ = warp_ % kEach;
  // The piece that is brought next.
  int next_;
  int next_tile_ = 0, next_piece_ = 0;
};

}  // namespace cuops
