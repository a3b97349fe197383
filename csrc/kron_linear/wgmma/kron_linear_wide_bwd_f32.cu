// Gradients of two factors of up to 64, 96 or 128 and of their input, in float32, on compute capability 9.0, from samples as
// matrices:
//   dx = W1^T dy W2,   dW1 = sum of (dy W2) x^T,   dW2^T = sum of (x^T W1^T) dy.
// Of up to 64, a block finds all of these, 128 threads one of each; else it finds one, of which 128 threads have 64 rows. Other
// warps bring samples meanwhile, and make tiles of float16 of them.
#include "device/overlap.cuh"
#include "device/tuned.cuh"
#include "kron_linear/mma/kron_squares.cuh"
#include "kron_linear/mma/kron_squares.h"
#include "kron_wide_products.cuh"

// From CUDA 12.8 on, products go on side by side; kron_linear_squares_bwd.cc asks for that, too.
CUOPS_ONLY_FOR(90a, CUDA 12.8)

namespace cuops {

// Who finds which gradient.
struct OfFirst {
  static constexpr bool kSums = true, kIsA = true, kAcrossA = false, kAcrossB = true, kAcrossC = false;
};
struct OfSecond {
  static constexpr bool kSums = true, kIsA = true, kAcrossA = true, kAcrossB = false, kAcrossC = true;
};
struct OfInput {
  static constexpr bool kSums = false, kIsA = false, kAcrossA = true, kAcrossB = true, kAcrossC = true;
};

template <int kSize>
using WideBwdShared = WideShared<kSize, wide_bwd_f32_slots(kSize)>;

// What is multiplied: where factors are, that of the first product and that of the second one, if it has any, and the sum of the
// exponents of those that there are; where tiles of samples are, so many of each, of which the first product takes number `first`,
// and how many samples have a place.
struct WideOperands {
  unsigned factors[2];
  int exponent;
  unsigned samples;
  int count, first, places;
};

template <class Role, int kSize, int kUsed, bool kOdd>
__device__ void multiply_samples(const KronSquaresParams& p, const WideTurns& turns, const WideOperands& of,
                                 WideBwdShared<kSize>& shared, int& level, float4* partial) {
  using Products = WideProducts<Role, kSize, kUsed>;
  constexpr int kTile = WideTile<kSize>::kBytes, kWarps = kUsed / 16;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0) % (kSize / 16), row = warp * 16;
  typename Products::Results t, sum = {};
  int place = 0;
  if (lane == 0) level = -254;
  __syncwarp();
  unsigned parity = 0;
#pragma unroll 1
  for (int sample = turns.first; sample < turns.count; sample += turns.step) {
    const int slot = place * of.count + of.first, other = place * of.count + 1 - of.first;
    const unsigned own = found_anew(of.samples) + slot * kTile, factor = found_anew(of.factors[0]);
    wait_for_arrivals(&shared.full[slot], parity);
    const int exponent = Products::first(t, Role::kIsA ? own : factor, Role::kIsA ? factor : own, shared.exponents[slot], row);
    arrive(&shared.empty[slot]);  // each lane, as each has read the exponents
    if constexpr (Role::kSums) {
      wait_for_arrivals(&shared.full[other], parity);
      Products::second(sum, t, found_anew(of.samples) + other * kTile, shared.exponents[other], exponent, level);
      arrive(&shared.empty[other]);
    } else {
#pragma unroll
      for (int i = 0; i < 4 * Products::kTiles; ++i) sum[i / 4][i % 4] = 0;
      Products::second(sum, t, found_anew(of.factors[1]), shared.exponents[slot], exponent, level);
      const int power = exponent + of.exponent - 27 + kLogSums;
      float* const to = static_cast<float*>(p.dx) + (1LL * sample * p.in[0] + found_anew(row)) * p.in[1];
#pragma unroll
      for (int i = 0; i < kUsed; i += 16)
        Squares<float, kUsed>::template store<kOdd>(to, p.in[0] - row, p.in[1], i,
                                                    reinterpret_cast<const float (&)[2][4]>(sum[i / 8]), power_of_two(power / 2),
                                                    power_of_two(power - power / 2));
    }
    if (++place == of.places) {
      place = 0;
      parity ^= 1;
    }
  }
  launch_dependents();
  if constexpr (Role::kSums) {
    const PowerOfTwo scale(of.exponent + level - 27 + kLogSums);
    if (warp < kWarps) {  // in the order that kron_squares_sum knows
#pragma unroll
      for (int j = 0; j < Products::kTiles; ++j)
        partial[(j * kWarps + warp) * 32 + lane] =
            make_float4(scale.of(sum[j][0]), scale.of(sum[j][1]), scale.of(sum[j][2]), scale.of(sum[j][3]));
    }
  }
}

// kPlain: the first factor comes in vectors, too. kOdd: rows of samples start anywhere.
template <int kSize, int kUsed, bool kPlain, bool kOdd>
__device__ void kron_wide_bwd_f32(const KronWideSquaresParams& p) {
  using Shared = WideBwdShared<kSize>;
  using Factor = WideFactor<kSize, kPlain>;
  using Maker = WideMaker<kSize, kUsed, kOdd>;
  constexpr int kTile = WideTile<kSize>::kBytes, kMakers = wide_f32_warps(kSize), kWarps = kWideBwdF32Threads / 32 - kMakers;
  constexpr bool kTogether = kSize == 64;  // all gradients are one block's
  __shared__ Shared shared;
  __shared__ int levels[kWarps];
  const KronSquaresParams& s = p.squares;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), maker_warp = warp % kMakers;
  const int share = kTogether ? 1 : __popc(s.wanted), block = static_cast<int>(blockIdx.x) / share;
  int wanted = s.wanted;
  for (int i = kTogether ? warp / 4 : blockIdx.x % share; i > 0; --i) wanted &= wanted - 1;
  const bool of_first = wanted & kFirstGradient, of_second = !of_first && wanted & kSecondGradient;
  // Tiles: the first factor, or the only one; the other one behind it, or behind a sample's.
  const bool both = kTogether || !(of_first || of_second),
             any_sums = kTogether ? s.wanted & (kFirstGradient | kSecondGradient) : !both;
  char* const start = reinterpret_cast<char*>(kron_shared) + (-shared_address(kron_shared) & 1023);
  const unsigned tiles = __shfl_sync(~0u, shared_address(start), 0);  // which compilers would find again at each product
  constexpr int kOther = kTogether ? 1 : 2, kSamples = kTogether ? 2 : 1;
  const int count = any_sums ? 2 : 1;
  const WideTurns turns{block, static_cast<int>(gridDim.x) / share, static_cast<int>(s.rows), 1};
  constexpr int kMade = 1;             // the barrier of those that make factors
  __shared__ unsigned long long made;  // that of all who multiply
  if (threadIdx.x == 0) {
    if (kTogether) init_arrivals(&made, kWarps * 32);
    init_all_arrivals(shared.full, Maker::kWarps);
#pragma unroll
    for (int i = 0; i < Shared::kSlots; ++i) {
      // Those of dy are for all gradients, those of x for the factors' alone.
      const int users = i % count == 0 ? s.wanted : s.wanted & (kFirstGradient | kSecondGradient);
      init_arrivals(&shared.empty[i], 32 * (kTogether ? 4 * __popc(users) : kWarps));
    }
  }
  __syncthreads();
  if (warp >= kWarps) {
    keep_registers<kWideF32CopyRegisters>();
    const bool x_first = !kTogether && of_second;
    const auto make = [&](const auto& first, const auto& second) {
      Maker maker(first, second, count, turns,
                  start + (kSamples + Shared::kSlots) * kTile + maker_warp * (Shared::kPieces * kWideF32Piece),
                  shared.pieces[maker_warp]);
      if (warp < kWarps + Maker::kWarps) maker.make(start + kSamples * kTile, shared, kTogether ? Shared::kSlots : count);
    };
    if constexpr (kOdd) {
      const WideMatrices x{s.x, s.in[0] * s.in[1], s.in[0], s.in[1]}, dy{s.dy, s.out[0] * s.out[1], s.out[0], s.out[1]};
      make(one_of(x_first, dy, x), one_of(x_first, x, dy));
    } else {
      make(x_first ? p.x : p.dy, x_first ? p.dy : p.x);
    }
    return;
  }
  take_registers<kTogether ? kWideF32RegistersOf64 : kWideF32Registers>();
  typename Factor::Pieces pieces[2];  // all on their way
  if (warp < Factor::kWarps) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int which = both ? i : of_first;
      if (i == 0 || both)
        pieces[i].load({which ? s.second : s.first, s.in[which], 1, s.out[which], s.in[which], {}, {}, -1, s.in[which] % 4 == 0});
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (i == 0 || both)
        Factor::make(start + i * kOther * kTile, pieces[i], WideOrder::kRows, shared.largest[i], &shared.factors[i], kMade);
  }
  if constexpr (kTogether) {
    arrive_and_wait(&made, 0);
  } else {
    sync_warps(kMade, kWarps);
  }
  const int only = both ? of_first : 0;  // the factor of a sum
  const WideOperands sum{{tiles + only * kTile, 0}, shared.factors[only],
                         tiles + kSamples * kTile,  count,
                         kTogether && of_second,    kTogether ? Shared::kSlots / count : 1};
  float4* const partial = static_cast<float4*>(s.partial) + (1LL * block * __popc(s.wanted & (kFirstGradient | kSecondGradient)) +
                                                             (of_second && s.wanted & kFirstGradient)) *
                                                                (kUsed * kUsed / 4);
  if (of_first) {
    multiply_samples<OfFirst, kSize, kUsed, kOdd>(s, turns, sum, shared, levels[warp], partial);
  } else if (of_second) {
    multiply_samples<OfSecond, kSize, kUsed, kOdd>(s, turns, sum, shared, levels[warp], partial);
  } else if (wanted) {
    WideOperands input = sum;
    input.factors[1] = tiles + kOther * kTile;
    input.exponent = shared.factors[0] + shared.factors[1];
    multiply_samples<OfInput, kSize, kUsed, kOdd>(s, turns, input, shared, levels[warp], partial);
  }
}

}  // namespace cuops

#define KRON_WIDE_BWD_F32_ONE(size, used, name, plain, odd)                          \
  extern "C" __global__ void __launch_bounds__(cuops::kWideBwdF32Threads, 1)         \
      kron_wide_bwd_##name(const __grid_constant__ cuops::KronWideSquaresParams p) { \
    cuops::wait_in_turn();                                                           \
    cuops::kron_wide_bwd_f32<size, used, plain, odd>(p);                             \
  }
#define KRON_WIDE_BWD_F32(size, used)                              \
  KRON_WIDE_BWD_F32_ONE(size, used, used##_f32_plain, true, false) \
  KRON_WIDE_BWD_F32_ONE(size, used, used##_f32, false, false)      \
  KRON_WIDE_BWD_F32_ONE(size, used, used##_f32_odd, false, true)

// Instances, as kron_linear_squares_bwd.cc asks for them.
KRON_WIDE_BWD_F32(64, 64)
KRON_WIDE_BWD_F32(128, 96)
KRON_WIDE_BWD_F32(128, 128)
