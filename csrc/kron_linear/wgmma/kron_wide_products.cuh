// Products of tiles in kron_linear_wide_f32.cu and kron_linear_wide_bwd_f32.cu. 128 threads have 64 rows of them, and what a first
// product leaves in their registers is, without a move, the first operand of the second. Tensor cores truncate sums: they form
// those of 16 products only, and threads add these up.
#pragma once

#include "kron_wide_tiles.cuh"

namespace cuops {

constexpr int kLogSums = 7;  // of a sum's terms, at most

// Of two products a b and (a b) c, Role says whether c is a sample's (kSums: of all samples there is one result), whether a is the
// sample's rather than b, and which matrices products take across: where sums are over rows of the second operand, or columns of
// the first. Threads have kColumns columns of the first product, from `column` on.
template <class Role, int kSize, int kUsed, int kColumns = kUsed>
struct WideProducts {
  using Tile = WideTile<kSize>;
  using Exponents = typename Tile::Exponents;
  static constexpr int kTiles = kColumns / 8, kSteps = kUsed / 16, kColumnSteps = kColumns / 16;
  using Results = float[kTiles][4];
  static constexpr float kShift = 1.0f / (1 << (15 + kLogSums));  // brings a first product below 2^15, as both were

  // Of up to 128, parts of the second product are columns up to the 64th, and the others.
  static constexpr bool kHalves = kUsed > 64;
  static constexpr int kRest = kHalves ? kTiles - 8 : 8;

  // Begins and adds up so many pairs of parts. While one is added up, the tensor cores are busy with the other one. Compilers do
  // not let products go on from one round of a loop to the next.
  template <int kPairs, class First, class Second, class Start, class Add>
  __device__ __forceinline__ static void in_pairs(First& first, Second& second, int from, const Start& start, const Add& add) {
    start(first, from, 0);
    start(second, from, 1);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const bool more = i + 1 < kPairs;
      wait_for_products<1>(first);
      add(first, from + i, 0);
      if (more) {
        start(first, from + i + 1, 0);
        wait_for_products<1>(second);
      } else {
        wait_for_products<0>(second);
      }
      add(second, from + i, 1);
      if (more) start(second, from + i + 1, 1);
    }
  }

  // A tile, or what begins with its row or column `from`, one of 64.
  template <bool kAcross>
  __device__ static unsigned operand(unsigned tile, int from = 0) {
    return kAcross ? place_across(tile + from / 64 * Tile::kMatrix, Tile::kMatrix) : (tile + from * 128) / 16;
  }
  // How far the 16 of step s are, and column `8 * of` of what they are multiplied by, in units of 16 bytes.
  template <bool kAcross>
  __device__ static int step(int s, int of = 0) {
    return kAcross ? s * 16 * 8 + of / 8 * (Tile::kMatrix / 16) : s / 4 * (Tile::kMatrix / 16) + s % 4 * 2 + of * 64;
  }

  // Begins part = a b, of 16 of the depth: the products of low and high, high and low, and high halves.
  template <bool kAcrossA, bool kAcrossB, int kCount>
  __device__ __forceinline__ static void begin(float (&part)[kCount][4], unsigned a, unsigned b) {
    begin_products<__half, 3, kAcrossA, kAcrossB>(
        part, [&](int i) { return matrix(i == 0 ? a + Tile::kLow / 16 : a); },
        [&](int i) { return matrix(i == 1 ? b + Tile::kLow / 16 : b); });
  }
  struct Halves {
    unsigned high[4], low[4];
  };
  template <bool kAcrossB, int kCount>
  __device__ __forceinline__ static void begin(float (&part)[kCount][4], const Halves& a, unsigned b) {
    begin_products<__half, 3, false, kAcrossB>(
        part, [&](int i) { return i == 0 ? a.low : a.high; }, [&](int i) { return matrix(i == 1 ? b + Tile::kLow / 16 : b); });
  }

  // t = a b, divided by a power of two, which is returned. `of` is the sample's tile; `row` the first of a warp, `column` its first
  // one of b.
  __device__ __forceinline__ static int first(Results& t, unsigned a_tile, unsigned b_tile, const Exponents& of, int row,
                                              int column = 0) {
    const unsigned a = operand<Role::kAcrossA>(a_tile, row / 64 * 64), b = operand<Role::kAcrossB>(b_tile, column);
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
    const auto start = [&](Results& part, int pair, int second) {
      const int s = 2 * pair + second;
      begin<Role::kAcrossA, Role::kAcrossB>(part, a + step<Role::kAcrossA>(s), b + step<Role::kAcrossB>(s));
    };
    const auto add = [&](const Results& part, int pair, int second) {
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) {
        const int quarter = kColumns == kUsed ? i / 16 % kQuarters : i / 16 + column / 32;
        const float scale = power_of_two(exponent(2 * pair + second, quarter) - most);
        t[i / 4][i % 4] = fmaf(part[i / 4][i % 4], scale, t[i / 4][i % 4]);
      }
    };
    if constexpr (Role::kSums && kHalves) {  // whose sums leave registers for one part
      Results part;
#pragma unroll 1
      for (int s = 0; s < kSteps; ++s) {
        start(part, 0, s);
        wait_for_products<0>(part);
        add(part, 0, s);
      }
    } else {
      Results parts[2];
      constexpr int kPairs = kSteps == 4 || kSteps == 8 ? 2 : 3;
#pragma unroll 1
      for (int pair = 0; pair < kSteps / 2; pair += kPairs) in_pairs<kPairs>(parts[0], parts[1], pair, start, add);
    }
    return most;
  }

  // y = t c, where c is a factor. Tensor cores form whole sums, those of lower halves first: what is cut off of these is little.
  template <int kCount>
  __device__ __forceinline__ static void whole_second(float (&y)[kCount][4], const Results& t, unsigned c_tile, int column = 0) {
    static_assert(!Role::kSums);
    const unsigned c = operand<Role::kAcrossC>(c_tile) + step<Role::kAcrossC>(column / 16);
    Halves halves[kColumnSteps];
#pragma unroll
    for (int i = 0; i < 4 * kColumnSteps; ++i) {
      const float* const two = &t[i / 2][i % 2 * 2];
      split<__half>(two[0] * kShift, two[1] * kShift, halves[i / 4].high[i % 4], halves[i / 4].low[i % 4]);
    }
    begin_products<__half, 3 * kColumnSteps, false, Role::kAcrossC>(
        y, [&](int i) { return i < kColumnSteps ? halves[i].low : halves[i % kColumnSteps].high; },
        [&](int i) { return matrix(c + (i / kColumnSteps == 1 ? Tile::kLow / 16 : 0) + step<Role::kAcrossC>(i % kColumnSteps)); });
    wait_for_products<0>(y);
  }

  // sum += t c, times powers of two where c is of the sample, too, of which `of` says them. Sums are divided by that of `level`,
  // the largest of finite samples so far: the warp's, in shared memory, as registers are few.
  __device__ __forceinline__ static void second(Results& sum, const Results& t, unsigned c_tile, const Exponents& of, int exponent,
                                                int& level) {
    static_assert(kColumns == kUsed);
    const unsigned c = operand<Role::kAcrossC>(c_tile);
    float first_part[8][4], second_part[kRest][4];
    Halves halves[2];  // of t, for steps of even and of odd numbers
    const auto convert = [&](int s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const two = &t[2 * s + i / 2][i % 2 * 2];
        split<__half>(two[0] * kShift, two[1] * kShift, halves[s % 2].high[i], halves[s % 2].low[i]);
      }
    };
    const auto start = [&](auto& part, int pair, int second) {
      const int s = kHalves ? pair : 2 * pair + second;
      if (!kHalves || second == 0) convert(s);
      begin<Role::kAcrossC>(part, halves[s % 2], c + step<Role::kAcrossC>(s, kHalves * second * 8));
    };
    const auto settle = [&] {  // the level
      constexpr int kAcross = kUsed / 32;
      const int lane = threadIdx.x % 32, at = lane < 2 * kAcross * kAcross ? lane : 0;
      const int most = __reduce_max_sync(~0u, of[at / kAcross][at % kAcross]);
      int now = level;
      if (exponent + most > now && max(exponent, most) < 128) {
        const float down = power_of_two(now - exponent - most);
        now = exponent + most;
#pragma unroll
        for (int i = 0; i < 4 * kTiles; ++i) sum[i / 4][i % 4] *= down;
        __syncwarp();
        if (lane == 0) level = now;
        __syncwarp();
      }
      exponent -= now;
    };
    const auto add = [&](const auto& part, int pair, int second) {
      if (Role::kSums && kUsed > 64 && pair == 0 && second == 0) settle();  // while the next product goes on
      constexpr int kCount = sizeof(part) / 16;
      const int s = kHalves ? pair : 2 * pair + second;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int tile = kHalves * second * 8 + i, j = tile / 2;  // of 16 columns
        const float scale = Role::kSums ? power_of_two(exponent + (Role::kAcrossC ? of[s][j / 2] : of[j][s / 2])) : 1;
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[tile][e] = fmaf(part[i][e], scale, sum[tile][e]);
      }
    };
    if constexpr (Role::kSums && kUsed <= 64) settle();  // registers are too few for that
    in_pairs<kHalves ? kSteps : kSteps / 2>(first_part, second_part, 0, start, add);
  }
};

}  // namespace cuops
