// Kronecker-factored linear layers in float32 whose factors, neighbours multiplied out, are two or three of 16, without tensor
// cores. A thread has 64 elements of a tile in registers, along one axis after the other; between them is shared memory, where the
// next tile is on its way meanwhile.
#include "device/overlap.cuh"
#include "device/tuned.cuh"
#include "kron_axes.cuh"

CUOPS_ONLY_FOR(90)

namespace cuops {

// Multiplies a thread's four fibers along an axis: calls put(i, four) for elements i of all four.
template <class Put>
__device__ void multiply_fibers(const float* weight, const float (&v)[16][4], Put&& put) {
#pragma unroll 1
  for (int first = 0; first < 16; first += 8) {
    float acc[8][4];
    multiply<16, 4, 8>(weight + first * 16, v, acc);
    put(first, acc);
  }
}

// The same of fibers that are neighbours, from `at` on, whose elements are kStep apart: calls put(i, four).
template <int kStep, class Put>
__device__ void multiply_across(const float* weight, const float* at, Put&& put) {
  float v[16][4];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const auto four = load_pack<float, 4>(at + i * kStep);
#pragma unroll
    for (int e = 0; e < 4; ++e) v[i][e] = four.at[e];
  }
  multiply_fibers(weight, v, [&](int first, const float (&acc)[8][4]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) put(first + i, float4{acc[i][0], acc[i][1], acc[i][2], acc[i][3]});
  });
}

// And of fibers of 16 neighbours each, in place.
__device__ inline void multiply_along(const float* weight, float* (&at)[4]) {
  float v[16][4];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const auto four = load_pack<float, 4>(at[i / 4] + i % 4 * 4);
#pragma unroll
    for (int e = 0; e < 4; ++e) v[i % 4 * 4 + e][i / 4] = four.at[e];
  }
  multiply_fibers(weight, v, [&](int first, const float (&acc)[8][4]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int j = i / 2, from = i % 2 * 4;
      store_shared(at[j] + first + from, {acc[from][j], acc[from + 1][j], acc[from + 2][j], acc[from + 3][j]});
    }
  });
}

// A team has a tile: of two axes a warp has eight samples, or, where there are columns beyond the axes, four warps 32 of these; of
// three axes two warps have a sample.
template <int kAxes, bool kColumns>
__device__ void kron_sixteens(const KronAxesParams& p) {
  constexpr int kTeam = kColumns ? 128 : kAxes == 3 ? 64 : 32, kTile = kSixteensTile * kTeam / 32, kSamples = kTeam == 32 ? 8 : 1;
  constexpr int kRow = kColumns ? 32 : 16, kSlice = 256 + 4;  // of 16 rows, such that those of a warp are in different banks
  __shared__ __align__(16) float weight[kAxes][256];
  const int team = threadIdx.x / kTeam, thread = threadIdx.x % kTeam;
  float* const buffers = shared_at<float>(0) + team * 2 * kTile;
  auto meet = [&] {
    if constexpr (kTeam > 32) {
      asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(kTeam) : "memory");
    } else {
      __syncwarp();
    }
  };
  // Tiles of a sample's columns are side by side. A few tiles have a multiprocessor each.
  const int across = kColumns ? static_cast<int>(p.inner / kRow) : 1;
  struct {
    long long sample;
    int column;
  } at, step;
  const int begin = team * gridDim.x + blockIdx.x, teams = gridDim.x * (blockDim.x / kTeam);
  at = {begin / across * kSamples, begin % across};
  step = {teams / across * kSamples, teams % across};
  auto advance = [&] {
    at.sample += step.sample;
    at.column += step.column;
    if (at.column < across) return;
    at.column -= across;
    at.sample += kSamples;
  };
  const float* const x = static_cast<const float*>(p.x.data);
  auto copy = [&](float* to) {
    if (at.sample >= p.rows) return;
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      if constexpr (kColumns) {
        const int row = k * 16 + thread / 8, chunk = thread % 8 * 4;
        copy_async(reinterpret_cast<float4*>(to + row * kRow + chunk),
                   reinterpret_cast<const float4*>(x + at.sample * p.x.stride + row * p.inner + at.column * kRow + chunk));
      } else {
        const int i = k * kTeam * 4 + thread * 4, slice = i / 256, rest = i % 256;
        const float* const from = x + (kSamples == 1 ? at.sample : min(at.sample + slice, p.rows - 1)) * p.x.stride;
        copy_async(reinterpret_cast<float4*>(to + slice * kSlice + rest),
                   reinterpret_cast<const float4*>(from + (kSamples == 1 ? i : rest)));
      }
    }
  };

  copy(buffers);
  commit_copies();
  bring_weights<kAxes, 16>(p, [&](int axis, int row, int column) { return &weight[axis][row * 16 + column]; });
  __syncthreads();

#pragma unroll 1
  for (int turn = 0; at.sample < p.rows; ++turn) {
    float* const state = buffers + turn % 2 * kTile;
    const auto here = at;
    advance();
    meet();  // nobody reads the other buffer any more
    copy(buffers + (turn + 1) % 2 * kTile);
    commit_copies();
    wait_for_copies<1>();
    meet();
    // The last axis.
    if constexpr (kColumns) {
      float* const from = state + thread / 8 * 16 * kRow + thread % 8 * 4;
      multiply_across<kRow>(weight[kAxes - 1], from, [&](int i, const float4& four) { store_shared(from + i * kRow, four); });
    } else {
      float* from[4];
      constexpr int kHigh = kSamples == 8 ? 2 : 4;  // slices, four at a time
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        from[j] =
            state + (thread % 4 + thread / 8 % kHigh * 4) * kSlice + (thread / 4 % 2 + thread / (8 * kHigh) * 2 + j * 4) * kRow;
      }
      multiply_along(weight[kAxes - 1], from);
    }
    meet();
    const int chunk = kColumns ? thread % 8 * 4 : thread % 4 * 4;
    const int slice = kColumns ? thread / 8 : thread / 4 % 2 * 4 + thread / 8 % 4 + thread / 32 * 8;
    if constexpr (kAxes == 3) {  // the middle one
      float* const from = state + slice * kSlice + chunk;
      multiply_across<kRow>(weight[1], from, [&](int i, const float4& four) { store_shared(from + i * kRow, four); });
      meet();
    }
    // The first one, whose results go to device memory: 64 bytes and more side by side.
    const long long sample = here.sample + (kSamples == 8 ? slice : 0);
    if (sample >= p.rows) continue;
    constexpr int kStep = kAxes == 3 ? kSlice : kColumns ? 16 * kRow : kRow;
    const int rest = kAxes == 3 ? (thread / 4 % 2 + thread / 8 * 2) * kRow + chunk : chunk;
    const long long y_step = kAxes == 3 ? 256 : 16 * (kColumns ? p.inner : 1);
    float* const y =
        static_cast<float*>(p.y.data) + sample * p.y.stride + (kColumns ? slice * p.inner + here.column * kRow : 0) + rest;
    const float* bias = nullptr;
    if (p.bias) bias = static_cast<const float*>(p.bias) + (p.bias_lead == 1 ? 0 : sample % p.bias_lead) * 16 * y_step + rest;
    const float* const from = state + (kColumns ? slice * kRow : kAxes == 2 ? slice * kSlice : 0) + rest;
    multiply_across<kStep>(weight[0], from, [&](int i, const float4& four) {
      float4 sum = four;
      if (!kColumns && bias) {
        const float* const more = bias + i * y_step;
        sum = {sum.x + __ldg(more), sum.y + __ldg(more + 1), sum.z + __ldg(more + 2), sum.w + __ldg(more + 3)};
      }
      __stcg(reinterpret_cast<float4*>(y + i * y_step), sum);
    });
  }
}

}  // namespace cuops

#define KRON_SIXTEENS(name, kAxes, kColumns)                                  \
  extern "C" __global__ void __launch_bounds__(32 * cuops::kSixteensWarps, 1) \
      kron_sixteens_##name(const __grid_constant__ cuops::KronAxesParams p) { \
    cuops::wait_in_turn();                                                    \
    cuops::kron_sixteens<kAxes, kColumns>(p);                                 \
  }
KRON_SIXTEENS(two, 2, false)
KRON_SIXTEENS(columns, 2, true)
KRON_SIXTEENS(three, 3, false)
