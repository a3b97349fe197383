// Gradients of two factors and of their input, from samples as matrices x and dy, in tiles of one size:
//   dx = W1^T dy W2,   dW1 = sum of (dy W2) x^T,   dW2^T = sum of (x^T W1^T) dy.
// A team of warps has a sample. Each warp multiplies 16 rows by one matrix, and what it then has in registers by another one.
#include "device/overlap.cuh"
#include "device/tuned.cuh"
#include "kron_linear/kron_block_sums.cuh"
#include "kron_squares.cuh"
#include "kron_squares.h"

CUOPS_ONLY_FOR(90)

namespace cuops {

// kSplit: a block finds one of the gradients, because shared memory is too small for all that they need. kM = 2: half of the warps
// find one factor's gradient and half the other's, 32 rows each; else each warp has 16 rows of both.
template <class T, int kSize, int kTeams, int kBuffers, bool kSplit, int kM>
__device__ void squares(const KronSquaresParams& p) {
  using S = Squares<T, kSize>;
  constexpr int kGroups = S::kGroups, kElements = kSize * kSize, kAt = kSquaresMagnitudes;
  constexpr int kWeights = kSplit ? 1 : 2, kState = kWeights * S::kTile + kAt;
  const int thread = threadIdx.x % S::kThreads, team = threadIdx.x / S::kThreads, barrier = 1 + team;
  const int lane = threadIdx.x % 32, group = thread / 32;
  int wanted = p.wanted, share = 1;
  if constexpr (kSplit) {
    share = __popc(wanted);
    for (int i = blockIdx.x % share; i > 0; --i) wanted &= wanted - 1;
    wanted &= -wanted;
  }
  const int block = blockIdx.x / share, blocks = gridDim.x / share;
  const bool wants_first = wanted & kFirstGradient, wants_second = wanted & kSecondGradient, wants_x = wanted & kInputGradient;
  const bool reads_x = !kSplit || !wants_x;
  const int state = kState + team * kBuffers * 2 * S::kTile;
  // Where only one of the factors fits, dx, which does without x, at first has the first one in its place.
  const int first_at = !kSplit || wants_second ? kAt : state, second_at = kSplit ? kAt : kAt + S::kTile;
  const T* const x = static_cast<const T*>(p.x);
  const T* const dy = static_cast<const T*>(p.dy);
  // Zeros surround matrices that are smaller than a tile.
  const bool padded = min(min(p.out[0], p.in[0]), min(p.out[1], p.in[1])) < kSize;
  if (padded) {
    for (int i = kAt + threadIdx.x; i < kState + kTeams * kBuffers * 2 * S::kTile; i += blockDim.x) kron_shared[i] = uint4{};
    __syncthreads();
  }
  if (!kSplit || !wants_first) S::copy_factor(first_at, p.first, p.out[0], p.in[0]);
  if (!kSplit || !wants_second) S::copy_factor(second_at, p.second, p.out[1], p.in[1]);
  // x, or dy where `is_dy`.
  auto load = [&](bool is_dy, int at, long long sample) {
    if (sample >= p.rows) return;
    const int rows = is_dy ? p.out[0] : p.in[0], columns = is_dy ? p.out[1] : p.in[1];
    S::copy(at, (is_dy ? dy : x) + sample * (rows * columns), rows, columns, thread, S::kThreads);
  };
  const long long start = static_cast<long long>(block) * kTeams + team, stride = static_cast<long long>(blocks) * kTeams;
  commit_copies();
#pragma unroll 1
  for (int i = 0; i < 2 * kBuffers; ++i) {
    if (i % 2 == 1 || reads_x) load(i % 2 == 1, state + i * S::kTile, start + i / 2 * stride);
    if (i % 2 == 1) commit_copies();
  }
  wait_for_copies<kBuffers>();
  __syncthreads();
  int* const largest = reinterpret_cast<int*>(kron_shared) + team * kGroups;
  int* const exponents = reinterpret_cast<int*>(kron_shared) + 4 * kAt - 2;
  if constexpr (S::kPairs) {
    if (team == 0 && (!kSplit || !wants_first)) {
      const int e = S::normalize(first_at, largest, thread, barrier);
      if (thread == 0) exponents[0] = e;
      S::sync(barrier);
    }
    if (team == kTeams - 1 && (!kSplit || !wants_second)) {
      const int e = S::normalize(second_at, largest, thread, barrier);
      if (thread == 0) exponents[1] = e;
    }
    __syncthreads();
  }
  const unsigned base = shared_address(kron_shared);
  // A lane's part of four matrices that are taken as they lie in memory, and across.
  const unsigned as_is = ((lane / 16 * 8 + lane % 8) * S::kPitch + lane / 8 % 2 * S::kUnits) * 16;
  const unsigned across = (lane % 16 * S::kPitch + lane / 16 * S::kUnits) * 16;
  const unsigned first = base + first_at * 16, second = base + second_at * 16;
  const int own = kM == 2 ? group % (kGroups / 2) * 2 : group;  // 16 rows, or the first of 32, of the factors' gradients
  float dw[2][kGroups][2][4] = {};
  typename S::Part own_rows[1][kGroups];
  if (kSplit && wants_x) {
    S::template load_rows<true>(own_rows, first + as_is + group * S::kRight);
    if (padded) {
      __syncthreads();
      for (int i = state + threadIdx.x; i < state + S::kTile; i += blockDim.x) kron_shared[i] = uint4{};
    }
  }
  int buffer = 0, level = -254;  // level: the exponent that dw is divided by, the largest of finite samples so far
#pragma unroll 1
  for (long long sample = start; sample < p.rows; sample += stride) {
    const bool swapped = kSplit && wants_x && buffer == 1;
    const int at = state + (kSplit ? 0 : buffer * 2 * S::kTile), other = at + (swapped ? 0 : S::kTile);
    wait_for_copies<kBuffers - 1>();
    S::sync(barrier);
    int x_exponent = 0, dy_exponent = 0;
    if constexpr (S::kPairs) {
      dy_exponent = S::normalize(other, largest, thread, barrier);
      S::sync(barrier);
      if (reads_x) x_exponent = S::normalize(at, largest, thread, barrier);
      S::sync(barrier);
    }
    if (S::kPairs && x_exponent + dy_exponent > level && max(x_exponent, dy_exponent) < 128) {
      const float down = power_of_two(level - x_exponent - dy_exponent);
      level = x_exponent + dy_exponent;
#pragma unroll
      for (int i = 0; i < kGroups * 16; ++i) dw[i / (kGroups * 8)][i / 8 % kGroups][i / 4 % 2][i % 4] *= down;
    }
    const float scale = S::kPairs ? power_of_two(x_exponent + dy_exponent - level) : 1;
    const unsigned x_at = base + at * 16, dy_at = base + other * 16;
    if constexpr (kSplit) {
      auto& sum = *reinterpret_cast<float (*)[1][kGroups][2][4]>(dw[0]);
      if (wants_first) S::template load_rows<false>(own_rows, dy_at + across + group * S::kDown);
      if (wants_second) S::template load_rows<true>(own_rows, x_at + as_is + group * S::kRight);
      if (!wants_x) S::sync(barrier);
      // What only registers still need, or nothing, makes room for the next sample.
      load(!wants_second, wants_second || (wants_x && !swapped) ? at : at + S::kTile, sample + stride);
      if (wants_first) S::template add_chain<true, false>(sum, own_rows, second + across, x_at + as_is, scale);
      if (wants_second) S::template add_chain<false, true>(sum, own_rows, first + as_is, dy_at + across, scale);
    } else {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        if (!(which == 0 ? wants_first : wants_second) || (kM == 2 && group / (kGroups / 2) != which)) continue;
        typename S::Part a[kM][kGroups];
        auto& sum = *reinterpret_cast<float (*)[kM][kGroups][2][4]>(dw[kM == 2 ? 0 : which]);
        if (which == 0) {
          S::template load_rows<false>(a, dy_at + across + own * S::kDown);
          S::template add_chain<true, false>(sum, a, second + across, x_at + as_is, scale);
        } else {
          S::template load_rows<true>(a, x_at + as_is + own * S::kRight);
          S::template add_chain<false, true>(sum, a, first + as_is, dy_at + across, scale);
        }
      }
      if (wants_x) S::template load_rows<true>(own_rows, first + as_is + group * S::kRight);
    }
    if (wants_x) {
      const int power = S::kPairs ? dy_exponent + exponents[0] + exponents[1] - 27 + S::kLog : 0;
      S::store_chain(static_cast<T*>(p.dx) + (sample * p.in[0] + group * 16) * p.in[1], p.in[0] - group * 16, p.in[1], own_rows,
                     dy_at + across, second + across, power_of_two(power / 2), power_of_two(power - power / 2));
    }
    S::sync(barrier);
#pragma unroll 1
    for (int i = 0; i < 2; ++i)
      if (!kSplit || (i == 0 ? wants_first : wants_second)) load(i == 1, at + i * S::kTile, sample + kBuffers * stride);
    commit_copies();
    if (kBuffers == 2 || kSplit) buffer ^= 1;
  }
  launch_dependents();
  wait_for_copies<0>();
  // Teams add up, in order, by way of the memory of their samples. Partial sums lie as the threads have them.
  float4* const sums = reinterpret_cast<float4*>(kron_shared + state) + thread;
  constexpr int kNext = kBuffers * 2 * S::kTile;  // team
  static_assert(2 * kGroups * 2 * S::kThreads <= kNext || kTeams == 1);
  const auto role_of = [&](int which) { return kSplit ? wants_second : kM == 2 ? group / (kGroups / 2) : which; };
  if constexpr (S::kPairs) {
#pragma unroll
    for (int which = 0; which < (kSplit ? 1 : 2); ++which) {
      const int power = exponents[role_of(which) == 0] - 27 + S::kLog + level;
      const float scale = power_of_two(power / 2), rest = power_of_two(power - power / 2);
#pragma unroll
      for (int i = 0; i < kGroups * 8; ++i) {
        float& sum = dw[which][i / 8][i / 4 % 2][i % 4];
        sum = sum * scale * rest;
      }
    }
  }
  if (kTeams > 1) {
    if (team > 0) {
#pragma unroll
      for (int i = 0; i < 2 * kGroups * 2; ++i)
        sums[i * S::kThreads] = *reinterpret_cast<float4*>(dw[i / (kGroups * 2)][i / 2 % kGroups][i % 2]);
    }
    __syncthreads();
    if (team > 0) return;
  }
  const int number = __popc(p.wanted & (kFirstGradient | kSecondGradient));
#pragma unroll
  for (int which = 0; which < (kSplit ? 1 : 2); ++which) {
    const int role = role_of(which);
    if (!(kSplit ? !wants_x : role == 0 ? wants_first : wants_second)) continue;
    const int place = kM == 2 ? (own + which) * 32 + lane : thread;
    float4* const to = static_cast<float4*>(p.partial) +
                       (static_cast<long long>(block) * number + (role == 1 && p.wanted & kFirstGradient)) * (kElements / 4) +
                       place;
#pragma unroll
    for (int i = 0; i < kGroups * 2; ++i) {
      float4 v = *reinterpret_cast<float4*>(dw[which][i / 2][i % 2]);
#pragma unroll
      for (int more = 1; more < kTeams; ++more) add(v, sums[more * kNext + (which * kGroups * 2 + i) * S::kThreads]);
      to[i * S::kThreads] = v;
    }
  }
}

}  // namespace cuops

#define KRON_SQUARES(name, T, size, teams, buffers, is_split, tiles)            \
  extern "C" __global__ void __launch_bounds__(teams * size * 2, 1)             \
      kron_squares_##name(const __grid_constant__ cuops::KronSquaresParams p) { \
    cuops::wait_in_turn();                                                      \
    cuops::squares<T, size, teams, buffers, is_split, tiles>(p);                \
  }

// Instances, as kron_linear_squares_bwd.cc asks for them.
KRON_SQUARES(16_f32, float, 16, 16, 2, false, 1)
KRON_SQUARES(32_f32, float, 32, 8, 2, false, 1)
KRON_SQUARES(64_f32, float, 64, 2, 2, false, 1)
KRON_SQUARES(96_f32, float, 96, 1, 2, false, 1)
#if __CUDACC_VER_MAJOR__ * 10 + __CUDACC_VER_MINOR__ < 128  // or kron_linear_wide_bwd_f32.cu has it
KRON_SQUARES(128_f32, float, 128, 1, 1, true, 1)
#endif
KRON_SQUARES(16_f16, __half, 16, 24, 2, false, 1)
KRON_SQUARES(32_f16, __half, 32, 8, 2, false, 1)
KRON_SQUARES(64_f16, __half, 64, 4, 2, false, 1)
KRON_SQUARES(80_f16, __half, 80, 3, 2, false, 1)
KRON_SQUARES(96_f16, __half, 96, 2, 2, false, 1)
KRON_SQUARES(128_f16, __half, 128, 1, 2, false, 2)
KRON_SQUARES(16_bf16, __nv_bfloat16, 16, 24, 2, false, 1)
KRON_SQUARES(32_bf16, __nv_bfloat16, 32, 8, 2, false, 1)
KRON_SQUARES(64_bf16, __nv_bfloat16, 64, 4, 2, false, 1)
KRON_SQUARES(80_bf16, __nv_bfloat16, 80, 3, 2, false, 1)
KRON_SQUARES(96_bf16, __nv_bfloat16, 96, 2, 2, false, 1)
KRON_SQUARES(128_bf16, __nv_bfloat16, 128, 1, 2, false, 2)

extern "C" __global__ void __launch_bounds__(512) kron_squares_sum(const __grid_constant__ cuops::KronSquaresSum p) {
  using namespace cuops;
  const int n = p.size * p.size;
  add_up_blocks<float, float4>(p, static_cast<long long>(n / 4) * p.gradients, true, [&](int i, float sum) {
    // Where the thread that had this sum says that it belongs.
    const int which = i >= n;
    i -= which * n;
    const int threads = 2 * p.size, thread = i / 4 % threads, tile = i / 4 / threads;
    const int row = thread / 32 * 16 + i % 4 / 2 * 8 + thread % 32 / 4, at = tile * 8 + thread % 4 * 2 + i % 2;
    const int out = p.transposed[which] ? at : row, in = p.transposed[which] ? row : at, to = out * p.in[which] + in;
    if (out >= p.out[which] || in >= p.in[which]) return;
    if (p.dtype[which] == kFloat32) {
      static_cast<float*>(p.gradient[which])[to] = sum;
    } else if (p.dtype[which] == kFloat16) {
      static_cast<__half*>(p.gradient[which])[to] = convert<__half>(sum);
    } else {
      static_cast<__nv_bfloat16*>(p.gradient[which])[to] = convert<__nv_bfloat16>(sum);
    }
  });
}
