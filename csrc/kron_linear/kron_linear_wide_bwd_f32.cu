// Gradients of two factors of up to 96 or 128 and of their input, in float32, on compute capability 9.0, from samples as matrices:
//   dx = W1^T dy W2,   dW1 = sum of (dy W2) x^T,   dW2^T = sum of (x^T W1^T) dy.
// A block finds one of these; 128 threads have 64 rows of it, and what a first product leaves in their registers is, without a
// move, the first operand of the second. Other warps bring samples meanwhile, and make tiles of float16 of them. Tensor cores
// truncate sums: they form those of 16 products only.
#include "device/overlap.cuh"
#include "device/tuned.cuh"

#if CUOPS_TUNED == 90 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "device/wgmma.cuh"
#include "kron_squares.cuh"
#include "kron_squares.h"
#include "kron_wide_tiles.cuh"

namespace cuops {

constexpr int kLogSums = 7;  // of a sum's terms, at most

// The roles of blocks. Of a b c, the sample's first tile is a or b, where kSums c is another one, and a matrix that products take
// across has their sums over its rows.
struct OfFirst {
  static constexpr bool kSums = true, kIsA = true, kAcrossA = false, kAcrossB = true, kAcrossC = false;
};
struct OfSecond {
  static constexpr bool kSums = true, kIsA = true, kAcrossA = true, kAcrossB = false, kAcrossC = true;
};
struct OfInput {
  static constexpr bool kSums = false, kIsA = false, kAcrossA = true, kAcrossB = true, kAcrossC = true;
};

// Whose turn it is to begin products: one warpgroup adds up what it found while the tensor cores are busy for the other one. Left
// to themselves, both would wait for them, and both add up, at the same time.
struct WideTurn {
  int group = threadIdx.x / 128;

  __device__ void wait() const { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); }
  __device__ void pass() const { asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory"); }
};

// Products of a warpgroup, of tiles of which kUsed rows and columns are not zero, or do not matter.
template <class Role, int kUsed>
struct WideProducts {
  static constexpr int kTiles = kUsed / 8, kSteps = kUsed / 16;
  using Results = float[kTiles][4];

  // A tile, or the half of it that begins with row or column `from`.
  template <bool kAcross>
  __device__ static unsigned operand(unsigned tile, int from = 0) {
    return kAcross ? place_across(tile + from / 64 * kMatrix, kMatrix) : (tile + from * 128) / 16;
  }
  // How far the 16 of step s are, in units of 16 bytes.
  template <bool kAcross>
  __device__ static int step(int s) {
    return kAcross ? s * 16 * 8 : s / 4 * (kMatrix / 16) + s % 4 * 2;
  }

  // Begins part = a b, of 16 of the depth.
  template <bool kAcrossA, bool kAcrossB>
  __device__ __forceinline__ static void begin(WideTurn turn, Results& part, unsigned a, unsigned b) {
    turn.wait();
    begin_products(part);
    multiply<__half, kAcrossA, kAcrossB>(part, matrix(a + kLow / 16), matrix(b), false);
    multiply<__half, kAcrossA, kAcrossB>(part, matrix(a), matrix(b + kLow / 16), true);
    multiply<__half, kAcrossA, kAcrossB>(part, matrix(a), matrix(b), true);
    end_products();
    turn.pass();
  }
  template <bool kAcrossB>
  __device__ __forceinline__ static void begin(WideTurn turn, Results& part, const unsigned (&high)[4], const unsigned (&low)[4],
                                               unsigned b) {
    turn.wait();
    begin_products(part);
    multiply<__half, kAcrossB>(part, low, matrix(b), false);
    multiply<__half, kAcrossB>(part, high, matrix(b + kLow / 16), true);
    multiply<__half, kAcrossB>(part, high, matrix(b), true);
    end_products();
    turn.pass();
  }

  // t = a b, divided by a power of two, which is returned. `of` is the sample's tile; `row` the first of a warp.
  __device__ __forceinline__ static int first(WideTurn turn, Results& t, Results& part, unsigned a_tile, unsigned b_tile,
                                              const Exponents& of, int row) {
    const unsigned a = operand<Role::kAcrossA>(a_tile, row / 64 * 64), b = operand<Role::kAcrossB>(b_tile);
    // Of the step, and of each 32 of b's columns.
    const auto exponent = [&](int s, int quarter) {
      return Role::kIsA ? Role::kAcrossA ? of[s][row / 32] : of[row / 16][s / 2] : of[s][quarter];
    };
    constexpr int kQuarters = Role::kIsA ? 1 : kUsed / 32;
    int most = -127;
#pragma unroll
    for (int i = 0; i < kSteps * kQuarters; ++i) most = max(most, exponent(i / kQuarters, i % kQuarters));
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) t[i / 4][i % 4] = 0;
#pragma unroll 1
    for (int s = 0; s < kSteps; ++s) {
      float scale[kQuarters];
#pragma unroll
      for (int i = 0; i < kQuarters; ++i) scale[i] = power_of_two(exponent(s, i) - most);
      begin<Role::kAcrossA, Role::kAcrossB>(turn, part, a + step<Role::kAcrossA>(s), b + step<Role::kAcrossB>(s));
      wait_for_products(part);
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) t[i / 4][i % 4] = fmaf(part[i / 4][i % 4], scale[i / 16 % kQuarters], t[i / 4][i % 4]);
    }
    return most;
  }

  // sum += t c, times powers of two where c is of the sample, too, of which `of` says them.
  __device__ __forceinline__ static void second(WideTurn turn, Results& sum, Results& part, const Results& t, unsigned c_tile,
                                                const Exponents& of, int exponent) {
    constexpr float kShift = 1.0f / (1 << (15 + kLogSums));  // below 2^15, as both were
    const unsigned c = operand<Role::kAcrossC>(c_tile);
    unsigned high[2][4], low[2][4];
    const auto convert = [&](int s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const two = &t[2 * s + i / 2][i % 2 * 2];
        split<__half>(two[0] * kShift, two[1] * kShift, high[s % 2][i], low[s % 2][i]);
      }
    };
    convert(0);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      begin<Role::kAcrossC>(turn, part, high[s % 2], low[s % 2], c + step<Role::kAcrossC>(s));
      if (s + 1 < kSteps) convert(s + 1);
      float scale[kTiles / 2];
#pragma unroll
      for (int j = 0; j < kTiles / 2; ++j)
        scale[j] = Role::kSums ? power_of_two(exponent + (Role::kAcrossC ? of[s][j / 2] : of[j][s / 2])) : 1;
      wait_for_products(part);
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) sum[i / 4][i % 4] = fmaf(part[i / 4][i % 4], scale[i / 8], sum[i / 4][i % 4]);
    }
  }
};

template <class Role, int kUsed>
__device__ void multiply_samples(const KronSquaresParams& p, const WideTurns& turns, unsigned tiles, WideShared& shared,
                                 float4* partial) {
  using Products = WideProducts<Role, kUsed>;
  constexpr int kWarps = kUsed / 16;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), row = warp * 16;
  const WideTurn turn;
  if (turn.group == 1) turn.pass();  // the other one's is the first
  typename Products::Results t, part = {}, sum = {};
  unsigned parity = 0;
#pragma unroll 1
  for (long long sample = turns.first; sample < turns.rows; sample += turns.step, parity ^= 1) {
    wait_for_arrivals(&shared.full[0], parity);
    const int exponent =
        Products::first(turn, t, part, tiles + Role::kIsA * kTile, tiles + !Role::kIsA * kTile, shared.exponents[0], row);
    if (lane == 0) arrive(&shared.empty[0]);
    if constexpr (Role::kSums) {
      wait_for_arrivals(&shared.full[1], parity);
      Products::second(turn, sum, part, t, tiles + 2 * kTile, shared.exponents[1], exponent);
      if (lane == 0) arrive(&shared.empty[1]);
    } else {
#pragma unroll
      for (int i = 0; i < 4 * Products::kTiles; ++i) sum[i / 4][i % 4] = 0;
      Products::second(turn, sum, part, t, tiles + 2 * kTile, shared.exponents[1], exponent);
      const int power = exponent + shared.factors[0] + shared.factors[1] - 27 + kLogSums;
      float* const to = static_cast<float*>(p.dx) + (sample * p.in[0] + row) * p.in[1];
#pragma unroll
      for (int i = 0; i < kUsed; i += 16)
        Squares<float, kUsed>::store(to, p.in[0] - row, p.in[1], i, reinterpret_cast<const float (&)[2][4]>(sum[i / 8]),
                                     power_of_two(power / 2), power_of_two(power - power / 2));
    }
  }
  if (turn.group == 0) turn.wait();
  launch_dependents();
  if constexpr (Role::kSums) {
    const int power = shared.factors[0] - 27 + kLogSums;
    const float scale = power_of_two(power / 2), rest = power_of_two(power - power / 2);
    if (warp < kWarps) {  // in the order that kron_squares_sum knows
#pragma unroll
      for (int j = 0; j < Products::kTiles; ++j)
        partial[(j * kWarps + warp) * 32 + lane] =
            make_float4(sum[j][0] * scale * rest, sum[j][1] * scale * rest, sum[j][2] * scale * rest, sum[j][3] * scale * rest);
    }
  }
}

template <int kUsed>
__device__ void kron_wide_f32(const KronWideSquaresParams& p) {
  __shared__ WideShared shared;
  const KronSquaresParams& s = p.squares;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  // Each of a few blocks in a row has one of the gradients that are wanted.
  const int share = __popc(s.wanted), block = blockIdx.x / share;
  int wanted = s.wanted;
  for (int i = blockIdx.x % share; i > 0; --i) wanted &= wanted - 1;
  const bool of_first = wanted & kFirstGradient, of_second = !of_first && wanted & kSecondGradient;
  const bool sums = of_first || of_second;
  char* const start = reinterpret_cast<char*>(squares_shared) + (-shared_address(squares_shared) & 1023);
  const unsigned tiles = __shfl_sync(~0u, shared_address(start), 0);  // which compilers would find again at each product
  const int factors = sums ? 1 : 2;
#pragma unroll 1
  for (int i = 0; i < factors; ++i) {
    const int which = of_first || i == 1;
    WideFactor::copy(start + 2 * i * kTile, which ? s.second : s.first, s.out[which], s.in[which]);
  }
  commit_copies();
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      init_arrivals(&shared.full[i], WideMaker<kUsed>::kWarps);
      init_arrivals(&shared.empty[i], 8);
    }
#pragma unroll 1
    for (int i = 0; i < kWideF32Warps * kWideF32Pieces; ++i) init_arrivals(&shared.pieces[0][0] + i, 1);
    show_to_products();
  }
  __syncthreads();
  const WideTurns turns{block, gridDim.x / share, s.rows};
  WideMaker<kUsed> maker{of_second ? p.x : p.dy,
                         of_second ? p.dy : p.x,
                         sums ? 2 : 1,
                         turns,
                         start + 3 * kTile + warp % kWideF32Warps * (kWideF32Pieces * kWideF32Piece),
                         shared.pieces[warp % kWideF32Warps]};
  if (warp >= 8 && warp < 8 + maker.kWarps) {
#pragma unroll 1
    for (int i = 0; i < kWideF32Pieces; ++i) maker.ask(i);
  }
  wait_for_copies<0>();
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < factors; ++i) WideFactor::make(start + 2 * i * kTile, shared.largest[i], &shared.factors[i]);
  show_to_products();
  __syncthreads();
  if (warp >= 8) {
    keep_registers<kWideF32CopyRegisters>();
    if (warp < 8 + maker.kWarps) maker.make(start + kTile, shared);
    return;
  }
  take_registers<kWideF32Registers>();
  float4* const partial = static_cast<float4*>(s.partial) + (1LL * block * __popc(s.wanted & (kFirstGradient | kSecondGradient)) +
                                                             (of_second && s.wanted & kFirstGradient)) *
                                                                (kUsed * kUsed / 4);
  if (of_first) {
    multiply_samples<OfFirst, kUsed>(s, turns, tiles, shared, partial);
  } else if (of_second) {
    multiply_samples<OfSecond, kUsed>(s, turns, tiles, shared, partial);
  } else {
    multiply_samples<OfInput, kUsed>(s, turns, tiles, shared, partial);
  }
}

}  // namespace cuops

#define KRON_WIDE_F32(used)                                                          \
  extern "C" __global__ void __launch_bounds__(cuops::kWideF32Threads, 1)            \
      kron_wide_f32_##used(const __grid_constant__ cuops::KronWideSquaresParams p) { \
    cuops::wait_in_turn();                                                           \
    cuops::kron_wide_f32<used>(p);                                                   \
  }

// Instances, as kron_linear_squares_bwd.cc asks for them.
KRON_WIDE_F32(96)
KRON_WIDE_F32(128)
#else
extern "C" __global__ void kron_wide_f32_nowhere() {}
#endif
