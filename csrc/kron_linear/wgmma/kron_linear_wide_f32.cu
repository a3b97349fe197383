// Kronecker-factored linear layers of two factors of up to 64, 96 or 128 in float32, on compute capability 9.0, for samples as
// matrices: y = (W1 x) W2^T. 128 threads have 64 rows of it. Other warps bring samples meanwhile, and make tiles of float16 of
// them. And of one factor of up to 64 with columns beyond it, y = W1 x.
#include "device/overlap.cuh"
#include "device/tuned.cuh"
#include "kron_linear/kron_pairs.cuh"
#include "kron_wide.h"
#include "kron_wide_products.cuh"

CUOPS_ONLY_FOR(90a, CUDA 12.0)

namespace cuops {

struct OfOutput {
  static constexpr bool kSums = false, kIsA = false, kAcrossA = false, kAcrossB = true, kAcrossC = false;
};

// A matrix of results, `pitch` apart, which are multiplied by a power of two.
struct WideOutput {
  float* y;
  const float* bias;
  int rows, columns, pitch;
  float cut_off;  // of the results, by the tensor cores
  PowerOfTwo scale;

  // From this row and column on.
  __device__ void move(int row, int column) {
    const int by = row * pitch + column;
    y += by;
    if (bias) bias += by;
    rows -= row;
    columns -= column;
  }

  __device__ float whole(float v) const { return fmaf(scale.of(v), cut_off, scale.of(v)); }
  // Four neighbours of a row.
  __device__ void store(int row, int column, float4 v) const {
    if (row >= rows || column >= columns) return;
    v = {whole(v.x), whole(v.y), whole(v.z), whole(v.w)};
    const long long at = 1LL * row * pitch + column;
    if (bias) v = {v.x + bias[at], v.y + bias[at + 1], v.z + bias[at + 2], v.w + bias[at + 3]};
    *reinterpret_cast<float4*>(y + at) = v;
  }
  __device__ void store(int row, int column, float v) const {
    if (row >= rows || column >= columns) return;
    const long long at = 1LL * row * pitch + column;
    y[at] = bias ? whole(v) + bias[at] : whole(v);
  }
};

// Two groups of 128 threads have sums of half the terms each, of all columns, and are left with the whole sums of half of these, in
// the first half of y. They exchange them where rows of the first factor from the 64th on would be in its tile.
template <int kCount>
__device__ __forceinline__ void exchange_halves(float (&y)[kCount][4], int half, char* tile, int barrier) {
  constexpr int kHalf = kCount / 2;
  static_assert(kHalf % 4 == 0);
  float4* const sent = reinterpret_cast<float4*>(tile + 64 * 128) + threadIdx.x % 128;
  const auto place = [&](int to, int i) { return sent + (to * kHalf + i) / 4 * (WideTile<128>::kMatrix / 16) + i % 4 * 128; };
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    float4 v;
    v.x = half ? y[i][0] : y[kHalf + i][0], v.y = half ? y[i][1] : y[kHalf + i][1];
    v.z = half ? y[i][2] : y[kHalf + i][2], v.w = half ? y[i][3] : y[kHalf + i][3];
    *place(1 - half, i) = v;
  }
  sync_warps(barrier, 8);
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float4 v = *place(half, i);
    y[i][0] = (half ? y[kHalf + i][0] : y[i][0]) + v.x, y[i][1] = (half ? y[kHalf + i][1] : y[i][1]) + v.y;
    y[i][2] = (half ? y[kHalf + i][2] : y[i][2]) + v.z, y[i][3] = (half ? y[kHalf + i][3] : y[i][3]) + v.w;
  }
}

enum class WideCalls { kAny, kPlain, kOdd };

// Of kFactors factors. Where blocks share a sample, each has 64 rows of its results, and 64 columns if there are four; they have no
// other sample, and 128 threads have the sums of half the second product's terms. WideCalls::kPlain: factors come in vectors, and
// there is no bias; kOdd: rows of samples start anywhere.
template <int kSize, int kUsed, int kFactors, int kBlocks, WideCalls kCalls>
__device__ void kron_wide_f32(const KronWideParams& p) {
  using Tile = WideTile<kSize>;
  constexpr bool kShared = kBlocks > 1, kPlain = kCalls == WideCalls::kPlain, kOdd = kCalls == WideCalls::kOdd;
  static_assert(!kShared || kSize == 128);
  using First = WideFactor<kSize, kPlain, kShared ? 64 : kSize>;
  using Second = WideFactor<kSize, kPlain, kBlocks == 4 ? 64 : kSize>;
  using Maker = WideMaker<kSize, kUsed, kOdd>;
  using Products = WideProducts<OfOutput, kSize, kUsed, kShared ? 64 : kUsed>;
  constexpr int kSlots = wide_f32_slots(kSize), kMakers = wide_f32_warps(kSize), kTeams = 128 / kSize;  // which have samples
  using Shared = WideShared<kSize, kSlots>;
  __shared__ Shared shared;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  char* const start = shared_at<char>(0) + (-shared_address(kron_shared) & 1023);
  const unsigned tiles = __shfl_sync(~0u, shared_address(start), 0);  // which compilers would find again at each product
  const int first_row = kShared ? blockIdx.x % 2 * 64 : 0, first_column = blockIdx.x % kBlocks / 2 * 64;
  const int across = kFactors == 1 ? (p.columns + kSize - 1) / kSize : 1;
  const WideTurns turns{static_cast<int>(blockIdx.x) / kBlocks, static_cast<int>(gridDim.x) / kBlocks,
                        static_cast<int>(p.rows) * across, across};
  constexpr int kConsumers = 1;  // their barrier
  if (threadIdx.x == 0) {
    init_all_arrivals(shared.full, Maker::kWarps);
    init_all_arrivals(shared.empty, 8 / kTeams * 32);
  }
  __syncthreads();
  if (warp >= 8) {
    const int maker_warp = warp % kMakers;
    if constexpr (kSize == 128) keep_registers<kWideF32CopyRegisters>();
    const auto make = [&](const auto& x) {
      Maker maker(x, x, 1, turns, start + (2 + kSlots) * Tile::kBytes + maker_warp * (Shared::kPieces * kWideF32Piece),
                  shared.pieces[maker_warp]);
      if (warp < 8 + Maker::kWarps) maker.make(start + 2 * Tile::kBytes, shared, kSlots);
    };
    if constexpr (kOdd) {
      make(WideMatrices{p.x.data, p.x.stride, p.factors[0].in, p.factors[1].in});
    } else {
      make(p.matrices);
    }
    return;
  }
  if constexpr (kSize == 128) take_registers<kWideF32Registers>();
  typename First::Pieces first;  // both on their way
  typename Second::Pieces second;
  first.load(p.factors[0], first_row);
  if constexpr (kFactors == 2) second.load(p.factors[1], first_column);
  First::make(start, first, WideOrder::kRows, shared.largest[0], &shared.factors[0], kConsumers);
  constexpr WideOrder kOrder = kOdd ? WideOrder::kLanes : WideOrder::kFours;
  if constexpr (kFactors == 2)
    Second::make(start + Tile::kBytes, second, kOrder, shared.largest[1], &shared.factors[1], kConsumers);
  sync_warps(kConsumers, 8);
  // Of the first product each 16 terms lose some; of the second, each sum of the 16 so far.
  const int terms = kFactors == 1 ? 0 : kShared ? min(p.factors[1].in, 64) : p.factors[1].in;
  const float cut_off = kCutOff * (kFactors == 1 ? 1 : 1 + ((terms + 15) / 16 + 1) / 2.0f);
  const int row = (kSize == 128 && !kShared ? warp : warp % 4) * 16;
  const int team = warp / 4 % kTeams;
  const int half = kShared ? warp / 4 : 0;  // of t's columns, and of the results' columns
  int slot = 0;
  unsigned parity = 0;
  const auto advance = [&](int by) {
    slot += by;
    if (slot >= kSlots) {
      slot -= kSlots;
      parity ^= 1;
    }
  };
  if (team) advance(1);
#pragma unroll 1
  for (int turn = turns.first + team * turns.step; turn < turns.count; turn += kTeams * turns.step) {
    const unsigned factors = found_anew(tiles);
    typename Products::Results t;
    float y[kBlocks == 4 ? 8 : kUsed / 8][4];
    wait_for_arrivals(&shared.full[slot], parity);
    int exponent = Products::first(t, factors, factors + (2 + slot) * Tile::kBytes, shared.exponents[slot], row, half * 64);
    arrive(&shared.empty[slot]);  // each lane, as each has read the exponents
    advance(kTeams);
    const int sample = turn / across;
    WideOutput output{static_cast<float*>(p.y.data) + offset_of(p.y, sample), nullptr, p.factors[0].out, p.columns, p.columns};
    if constexpr (kFactors == 1) {
      exponent += shared.factors[0] - 28;
      const int column = (turn - sample * across) * kSize;
      output.y += column;
      output.columns -= column;
    } else {
      Products::whole_second(y, t, factors + Tile::kBytes, half * 64);
      exponent += shared.factors[0] + shared.factors[1] - 27 + kLogSums;
      output.columns = output.pitch = p.factors[1].out;
      if (!kPlain && p.bias)
        output.bias = static_cast<const float*>(p.bias) + sample % p.bias_lead * (output.rows * output.columns);
    }
    if constexpr (kShared) {
      exchange_halves(y, half, start, kConsumers);
      output.move(first_row, first_column + half * (kBlocks == 4 ? 32 : 64));
    }
    output.cut_off = cut_off;
    output.scale = PowerOfTwo(exponent);
    const int from = found_anew(row) + lane / 4;
    const bool odd = lane % 2;
    constexpr int kTiles = sizeof(y) / 16 / (kShared ? 2 : 1);
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        if constexpr (kOdd) {
#pragma unroll
          for (int k = 0; k < 4; ++k) output.store(from + i * 4, j * 8 + k * 4 + lane % 4, y[j + k / 2][i + k % 2]);
        } else if constexpr (kFactors == 1) {
          // Two lanes exchange halves, so that each has four neighbours.
          const float2 own = odd ? float2{t[j + 1][i], t[j + 1][i + 1]} : float2{t[j][i], t[j][i + 1]};
          const float2 other = {__shfl_xor_sync(~0u, odd ? t[j][i] : t[j + 1][i], 1),
                                __shfl_xor_sync(~0u, odd ? t[j][i + 1] : t[j + 1][i + 1], 1)};
          output.store(from + i * 4, (j + odd) * 8 + lane % 4 / 2 * 4,
                       odd ? float4{other.x, other.y, own.x, own.y} : float4{own.x, own.y, other.x, other.y});
        } else {
          output.store(from + i * 4, j * 8 + lane % 4 * 4, {y[j][i], y[j][i + 1], y[j + 1][i], y[j + 1][i + 1]});
        }
      }
    }
  }
}

}  // namespace cuops

#define KRON_WIDE_F32(name, size, used, factors, blocks, calls)                       \
  extern "C" __global__ void __launch_bounds__(cuops::wide_f32_threads(size), 1)      \
      kron_wide_##name(const __grid_constant__ cuops::KronWideParams p) {             \
    cuops::wait_in_turn();                                                            \
    cuops::kron_wide_f32<size, used, factors, blocks, cuops::WideCalls::k##calls>(p); \
  }
#define KRON_WIDE_F32_TWO(name, size, used, blocks)     \
  KRON_WIDE_F32(name##_f32, size, used, 2, blocks, Any) \
  KRON_WIDE_F32(name##_f32_odd, size, used, 2, blocks, Odd)
#define KRON_WIDE_F32_ALL(name, size, used, blocks)             \
  KRON_WIDE_F32(name##_f32_plain, size, used, 2, blocks, Plain) \
  KRON_WIDE_F32_TWO(name, size, used, blocks)

// Instances, as kron_plan_wide.cc asks for them. Of up to 64, or of few samples, plain ones are no faster, or slower.
KRON_WIDE_F32(columns_64_f32, 64, 64, 1, 1, Any)
KRON_WIDE_F32_TWO(64, 64, 64, 1)
KRON_WIDE_F32_ALL(96, 128, 96, 1)
KRON_WIDE_F32_ALL(128, 128, 128, 1)
KRON_WIDE_F32_TWO(halves, 128, 128, 2)
KRON_WIDE_F32_TWO(quarters, 128, 128, 4)
