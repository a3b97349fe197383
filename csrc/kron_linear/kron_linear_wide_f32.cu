// Kronecker-factored linear layers of two factors of up to 64, 96 or 128 in float32, on compute capability 9.0, for samples as
// matrices: y = (W1 x) W2^T. 128 threads have 64 rows of it. Other warps bring samples meanwhile, and make tiles of float16 of
// them. And of one factor of up to 64 with columns beyond it, y = W1 x.
#include "device/overlap.cuh"
#include "device/tuned.cuh"

#if CUOPS_TUNED == 90 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "kron_pairs.cuh"
#include "kron_wide.h"
#include "kron_wide_products.cuh"

namespace cuops {

struct OfOutput {
  static constexpr bool kSums = false, kIsA = false, kAcrossA = false, kAcrossB = true, kAcrossC = false;
};

// A matrix of results, `pitch` apart, which are multiplied by two powers of two: their product overflows only if results do.
struct WideOutput {
  float* y;
  const float* bias;
  int rows, columns, pitch;
  float scale, rest, cut_off;  // of the results, by the tensor cores

  __device__ float whole(float v) const { return fmaf(v * scale * rest, cut_off, v * scale * rest); }
  // Four neighbours of a row.
  __device__ void store(int row, int column, float4 v) const {
    if (row >= rows || column >= columns) return;
    v = {whole(v.x), whole(v.y), whole(v.z), whole(v.w)};
    const long long at = 1LL * row * pitch + column;
    if (bias) v = {v.x + bias[at], v.y + bias[at + 1], v.z + bias[at + 2], v.w + bias[at + 3]};
    *reinterpret_cast<float4*>(y + at) = v;
  }
};

// Of kFactors factors.
template <int kSize, int kUsed, int kFactors>
__device__ void kron_wide_f32(const KronWideParams& p) {
  using Tile = WideTile<kSize>;
  using Factor = WideFactor<kSize>;
  using Maker = WideMaker<kSize, kUsed>;
  using Products = WideProducts<OfOutput, kSize, kUsed>;
  constexpr int kSlots = wide_f32_slots(kSize), kMakers = wide_f32_warps(kSize), kTeams = 128 / kSize;  // which have samples
  using Shared = WideShared<kSize, kSlots>;
  __shared__ Shared shared;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), maker_warp = warp % kMakers;
  char* const start = shared_at<char>(0) + (-shared_address(kron_shared) & 1023);
  const unsigned tiles = __shfl_sync(~0u, shared_address(start), 0);  // which compilers would find again at each product
  const int halves = p.slices > 1, first_row = (halves & blockIdx.x) * 64;
  const int across = kFactors == 1 ? (p.columns + kSize - 1) / kSize : 1;
  const WideTurns turns{static_cast<int>(blockIdx.x) >> halves, static_cast<int>(gridDim.x) >> halves,
                        static_cast<int>(p.rows) * across, across};
  constexpr int kAll = wide_f32_threads(kSize) / 32, kConsumers = 1;  // barriers: 0 is that of all
  if (warp >= 8) {
    if constexpr (kSize == 128) keep_registers<kWideF32CopyRegisters>();
    Maker maker(p.matrices, p.matrices, 1, turns,
                start + (2 + kSlots) * Tile::kBytes + maker_warp * (Shared::kPieces * kWideF32Piece), shared.pieces[maker_warp]);
    const bool makes = warp < 8 + Maker::kWarps;
    if (makes) maker.start();
    if (const int i = static_cast<int>(threadIdx.x) - 256; i < kSlots) {
      init_arrivals(&shared.full[i], Maker::kWarps);
      init_arrivals(&shared.empty[i], halves ? 4 : 8 / kTeams);
    }
    sync_warps(0, kAll);
    if (makes) maker.make(start + 2 * Tile::kBytes, shared, kSlots);
    return;
  }
  if constexpr (kSize == 128) take_registers<kWideF32Registers>();
  typename Factor::Pieces pieces[kFactors];  // all on their way
  pieces[0].load(p.factors[0], first_row);
  if constexpr (kFactors == 2) pieces[1].load(p.factors[1]);
  sync_warps(0, kAll);
#pragma unroll
  for (int i = 0; i < kFactors; ++i)
    Factor::make(start + i * Tile::kBytes, pieces[i], i == 1, shared.largest[i], &shared.factors[i], kConsumers);
  sync_warps(kConsumers, 8);
  // Of the first product each 16 terms lose some; of the second, each sum of the 16 so far.
  const float cut_off = kCutOff * (kFactors == 1 ? 1 : 1 + ((p.factors[1].in + 15) / 16 + 1) / 2.0f);
  // Where blocks share samples, each has 64 rows of their results, and 128 threads do nothing.
  if (halves && warp >= 4) return;
  const int row = (kSize == 128 ? warp : warp % 4) * 16 + first_row;
  const int team = warp / 4 % kTeams;
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
    typename Products::Results t, y;
    wait_for_arrivals(&shared.full[slot], parity);
    int exponent = Products::first(t, factors, factors + (2 + slot) * Tile::kBytes, shared.exponents[slot], row);
    if (lane == 0) arrive(&shared.empty[slot]);
    advance(kTeams);
    const int sample = turn / across;
    WideOutput output{static_cast<float*>(p.y.data) + offset_of(p.y, sample), nullptr, p.factors[0].out, p.columns, p.columns};
    if constexpr (kFactors == 1) {
      exponent += shared.factors[0] - 28;
      const int column = (turn - sample * across) * kSize;
      output.y += column;
      output.columns -= column;
    } else {
      Products::whole_second(y, t, factors + Tile::kBytes);
      exponent += shared.factors[0] + shared.factors[1] - 27 + kLogSums;
      output.columns = output.pitch = p.factors[1].out;
      if (p.bias) output.bias = static_cast<const float*>(p.bias) + sample % p.bias_lead * (output.rows * output.columns);
    }
    output.cut_off = cut_off;
    output.scale = power_of_two(exponent / 2);
    output.rest = power_of_two(exponent - exponent / 2);
    const int from = found_anew(row) + lane / 4;
    const bool odd = lane % 2;
#pragma unroll
    for (int j = 0; j < Products::kTiles; j += 2) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        if constexpr (kFactors == 1) {
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

#define KRON_WIDE_F32(name, size, used, factors)                                 \
  extern "C" __global__ void __launch_bounds__(cuops::wide_f32_threads(size), 1) \
      kron_wide_##name##_f32(const __grid_constant__ cuops::KronWideParams p) {  \
    cuops::wait_in_turn();                                                       \
    cuops::kron_wide_f32<size, used, factors>(p);                                \
  }

// Instances, as kron_plan_wide.cc asks for them.
KRON_WIDE_F32(columns_64, 64, 64, 1)
KRON_WIDE_F32(64, 64, 64, 2)
KRON_WIDE_F32(96, 128, 96, 2)
KRON_WIDE_F32(128, 128, 128, 2)
#else
extern "C" __global__ void kron_wide_f32_nowhere() {}
#endif
