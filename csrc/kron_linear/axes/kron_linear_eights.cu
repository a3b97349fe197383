// Kronecker-factored linear layers in float32 whose factors, neighbours multiplied out, are five of 8, without tensor cores. Some
// warps make parts of a sample: 64 elements of each thread come from device memory to its registers, along two axes, and go through
// shared memory, where they are multiplied along the last one and stay. Other warps multiply along the first two axes, once all
// parts of a sample are there, while the first ones go on to the next sample.
#include "device/arrivals.cuh"
#include "device/overlap.cuh"
#include "device/tuned.cuh"
#include "kron_axes.cuh"

CUOPS_ONLY_FOR(90)

namespace cuops {

constexpr int kEightsParts = 32768 / kEightsPart;
using EightsMaker = PartCursor<kEightsMakers, kEightsParts>;
using EightsFinisher = PartCursor<kEightsFinishers, kEightsParts>;

struct EightsShared {
  __align__(16) float weight[5][64];
  unsigned long long made[2], finished[2], weights;  // parts of every second sample
};

// Where a part, 4 x 8 x 8 x 8 elements, has one: such that threads with other numbers along the first and the last axis, or along
// the last two, reach different banks.
__device__ inline int eights_place(int i, int j, int k, int l) { return i * 512 + j * 64 + (k ^ i) * 8 + (l ^ k / 4 * 4); }

__device__ inline void make_eights(const KronAxesParams& p, EightsShared& shared, float* places, int warp) {
  const int lane = threadIdx.x % 32, i = lane / 8, l = lane % 8;
  EightsMaker own(warp), next = own;
  float v[8][8];  // [k][j]
  const auto load = [&] {
    const long long sample = min(blockIdx.x + 1LL * next.sample * gridDim.x, p.rows - 1);
    const float* const from = static_cast<const float*>(p.x.data) + offset_of(p.x, sample) + next.part * kEightsPart + i * 512 + l;
#pragma unroll
    for (int e = 0; e < 64; ++e) v[e % 8][e / 8] = __ldg(from + e * 8);
  };
  load();
  arrive_and_wait(&shared.weights, 0);
#pragma unroll 1
  for (; blockIdx.x + 1LL * own.sample * gridDim.x < p.rows; own.advance()) {
    const int number = own.sample * kEightsParts + own.part;
    float* const part = places + number % kEightsPlaces * kEightsPart;
    {
      float u[8][8], t[8][8];
      multiply(shared.weight[3], v, u);
      transpose(u, t);
      multiply(shared.weight[2], t, u);
      // The place is free once the sample is finished that had it before.
      if (number >= kEightsPlaces) {
        const int before = (number - kEightsPlaces) / kEightsParts;
        wait_for_arrivals(&shared.finished[before % 2], before / 2 % 2);
      }
#pragma unroll
      for (int e = 0; e < 64; ++e) part[eights_place(i, e / 8, e % 8, l)] = u[e / 8][e % 8];
    }
    next.advance();
    load();
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float t[8][4], u[8][4];
      float* const at = part + (half * 4 + lane / 8) * 64;
      const int k = lane % 8;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float4 four = *reinterpret_cast<const float4*>(at + eights_place(e / 2, 0, k, e % 2 * 4));
        t[e % 2 * 4][e / 2] = four.x, t[e % 2 * 4 + 1][e / 2] = four.y;
        t[e % 2 * 4 + 2][e / 2] = four.z, t[e % 2 * 4 + 3][e / 2] = four.w;
      }
      multiply(shared.weight[4], t, u);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int first = e % 2 * 4;
        store_shared(at + eights_place(e / 2, 0, k, first),
                     {u[first][e / 2], u[first + 1][e / 2], u[first + 2][e / 2], u[first + 3][e / 2]});
      }
    }
    arrive(&shared.made[own.sample % 2]);
  }
}

__device__ inline void finish_eights(const KronAxesParams& p, EightsShared& shared, const float* places, int warp) {
  const int lane = threadIdx.x % 32;
  arrive_and_wait(&shared.weights, 0);
#pragma unroll 1
  for (EightsFinisher own(warp);; own.advance()) {
    const long long sample = blockIdx.x + 1LL * own.sample * gridDim.x;
    if (sample >= p.rows) return;
    const int first = own.sample * kEightsParts % kEightsPlaces, column = own.part * 32 + lane;
    wait_for_arrivals(&shared.made[own.sample % 2], own.sample / 2 % 2);
    float v[8][8], u[8][8], t[8][8];
#pragma unroll
    for (int n = 0; n < kEightsParts; ++n) {
      const float* const part = places + (first + n - (first + n < kEightsPlaces ? 0 : kEightsPlaces)) * kEightsPart;
#pragma unroll
      for (int i = 0; i < 4; ++i) v[n % 2 * 4 + i][n / 2] = part[eights_place(i, column / 64, column / 8 % 8, column % 8)];
    }
    arrive(&shared.finished[own.sample % 2]);
    multiply(shared.weight[1], v, u);
    transpose(u, t);
    multiply(shared.weight[0], t, u);
    float* const y = static_cast<float*>(p.y.data) + offset_of(p.y, sample) + column;
    if (p.bias) {
      const float* const bias = static_cast<const float*>(p.bias) + sample % p.bias_lead * 32768 + column;
#pragma unroll
      for (int e = 0; e < 64; ++e) u[e / 8][e % 8] += __ldg(bias + e * 512);
    }
#pragma unroll
    for (int e = 0; e < 64; ++e) y[e * 512] = u[e / 8][e % 8];
  }
}

}  // namespace cuops

extern "C" __global__ void __launch_bounds__(32 * (cuops::kEightsMakers + cuops::kEightsFinishers), 1)
    kron_eights(const __grid_constant__ cuops::KronAxesParams p) {
  using namespace cuops;
  __shared__ EightsShared shared;
  wait_in_turn();
  if (threadIdx.x == 0) {
    init_all_arrivals(shared.made, 32 * kEightsParts);
    init_all_arrivals(shared.finished, 32 * kEightsParts);
    init_arrivals(&shared.weights, blockDim.x);
  }
  __syncthreads();
  bring_weights<5, 8>(p, [&](int axis, int row, int column) { return &shared.weight[axis][row * 8 + column]; });
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  float* const places = shared_at<float>(0);
  if (warp < kEightsMakers) {
    make_eights(p, shared, places, warp);
  } else {
    finish_eights(p, shared, places, warp - kEightsMakers);
  }
}
