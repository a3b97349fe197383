// Kronecker-factored linear layers in float32 whose factors, neighbours multiplied out, are four of 16, by tensor cores as two
// float16 each. Two blocks share a sample: each has half of the first axis, then half of the third one. Some warps take parts of a
// sample to their registers, multiply along the last two axes, and leave the results in the shared memory of the block that needs
// them. Other warps multiply along the first two axes, once all parts of a sample are there, while the first ones go on to the next
// sample.
#include "device/cluster.cuh"
#include "device/overlap.cuh"
#include "device/tuned.cuh"
#include "kron_axes.cuh"
#include "kron_linear/kron_pairs.cuh"

CUOPS_ONLY_FOR(90, CUDA 12.0)

namespace cuops {

// That a block makes of a sample, 8 matrices of the last two axes each; and of columns, that it finishes.
constexpr int kFourParts = 16;
using FourMaker = PartCursor<kFourMakers, kFourParts>;
using FourFinisher = PartCursor<kFourFinishers, kFourParts>;

struct FourShared {
  __align__(16) float weight[4][16 * 16];
  unsigned long long made[2], finished[2];  // parts of every second sample
};
constexpr int kFourSent = kFourParts * kFourPart * 4;  // bytes of a sample that come from the other block

// Where row (i, j) of 32 times four neighbours has one of these: such that threads with other rows, or others of 8 in each eight of
// a row, reach different banks.
__device__ inline int four_place(int i, int j, int four) { return (four ^ (i + four / 4) % 2 ^ (j / 2 ^ four / 8) % 4 * 2) * 4; }

// Of `number` parts of both blocks, one after the other: 8 rows.
__device__ inline float* four_part(float* places, int number) { return places + number % kFourPlaces * kFourPart; }

// Multiplies matrices X of 16 x 16 from both sides: last X^T first^T. A thread has rows lane / 4 and 8 more of X, in a tile each,
// and of these the columns from lane % 4 * 4 on, if kNear, else lane % 4 * 2 and 8 further on, two each; and of the results rows
// lane / 4 * 2 and the next one, and in each tile of 8 columns lane % 4 * 2 and the next one.
template <bool kNear>
class FourSquares {
 public:
  using Operand = HalfOperand<true, 2>[2];

  __device__ FourSquares(const float* last, const float* first) {
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    float a[8], b[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int column = kNear ? quad * 4 + i / 4 * 2 : quad * 2 + i / 4 * 8;
      a[i] = last[(group * 2 + i / 2 % 2) * 16 + column + i % 2];
      b[i] = first[(i / 4 * 8 + group) * 16 + quad * 2 + i / 2 % 2 * 8 + i % 2];
    }
    const int a_exponent = exponent_of(__float_as_int(largest_of_warp(a))),
              b_exponent = exponent_of(__float_as_int(largest_of_warp(b)));
    const float a_scale = power_of_two(14 - a_exponent), b_scale = power_of_two(14 - b_exponent);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a_.set(i, a[2 * i] * a_scale, a[2 * i + 1] * a_scale);
      b_[i / 2].set(i % 2, b[2 * i] * b_scale, b[2 * i + 1] * b_scale);
    }
    exponent_ = a_exponent + b_exponent;
  }

  // Of X, scaled by a power of two of `exponent`.
  __device__ PowerOfTwo scale_of_results(int exponent) const { return PowerOfTwo(exponent + exponent_ - (3 * 14 - 19)); }

  // Results, scaled, in tiles of 8 columns.
  __device__ __forceinline__ void multiply(float (&y)[2][4], const Operand& x) const {
    constexpr float kDown = 1.0f / (1 << (15 + 4));  // what sums of 16 products below 2^30 are multiplied by
    float t[2][4];
    HalfOperand<true, 4> state;
#pragma unroll
    for (int i = 0; i < 2; ++i) multiply(t[i], a_, x[i]);
#pragma unroll
    for (int i = 0; i < 4; ++i) state.set(i, t[i / 2][i % 2 * 2] * kDown, t[i / 2][i % 2 * 2 + 1] * kDown);
#pragma unroll
    for (int i = 0; i < 2; ++i) multiply(y[i], state, b_[i]);
  }

 private:
  __device__ __forceinline__ static void multiply(float (&c)[4], const HalfOperand<true, 4>& a, const HalfOperand<true, 2>& b) {
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] = 0;
    mma<__half>(c, a.low, b.high[0], b.high[1]);
    mma<__half>(c, a.high, b.low[0], b.low[1]);
    mma<__half>(c, a.high, b.high[0], b.high[1]);
  }

  HalfOperand<true, 4> a_;
  Operand b_;
  int exponent_;
};

__device__ inline void make_fours(const KronAxesParams& p, FourShared& shared, float* places, int warp) {
  const int lane = threadIdx.x % 32, rank = cluster_rank();
  const long long step = gridDim.x / 2;
  FourMaker own(warp), next = own;
  float4 raw[8][2];
  const auto load = [&] {
    const long long sample = min(blockIdx.x / 2 + next.sample * step, p.rows - 1);
    const float* const from =
        static_cast<const float*>(p.x.data) + offset_of(p.x, sample) + (rank * kFourParts + next.part) * 2 * kFourPart + lane * 4;
#pragma unroll
    for (int i = 0; i < 16; ++i) raw[i / 2][i % 2] = __ldg(reinterpret_cast<const float4*>(from + i * 128));
  };
  load();
  cluster_barrier();
  const FourSquares<true> squares(shared.weight[3], shared.weight[2]);
#pragma unroll 1
  for (; blockIdx.x / 2 + own.sample * step < p.rows; own.advance()) {
    const int exponent = exponent_of(__float_as_int(largest_of_warp(reinterpret_cast<const float (&)[64]>(raw))));
    const float scale = power_of_two(14 - exponent);
    const PowerOfTwo up = squares.scale_of_results(exponent);
    FourSquares<true>::Operand x[8];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float4& v = raw[i / 2][i % 2];
      x[i / 2][i % 2].set(0, v.x * scale, v.y * scale);
      x[i / 2][i % 2].set(1, v.z * scale, v.w * scale);
    }
    next.advance();
    load();
    const int of_sample = rank * kFourParts + own.part, number = own.sample * 2 * kFourParts + of_sample;
    // The place is free once the sample is finished that had it before.
    if (number >= kFourPlaces) {
      const int before = (number - kFourPlaces) / (2 * kFourParts);
      wait_for_arrivals(&shared.finished[before % 2], before / 2 % 2);
    }
    float* const part = four_part(places, number);
    // Of two threads with rows lane / 4 * 2 and the next one, each takes both rows of the other one in one of two columns.
    const bool odd = lane / 4 % 2;
    const int four = found_anew(lane) % 4 * 8 + odd * 4 + lane / 8;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float* const at = part + j * 128 + four_place(of_sample / 2, j, four);
      float y[2][4];
      squares.multiply(y, x[j]);
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        const float (&v)[4] = y[block];
        const float keep[2] = {odd ? v[1] : v[0], odd ? v[3] : v[2]};
        const float come[2] = {__shfl_xor_sync(~0u, odd ? v[0] : v[1], 4), __shfl_xor_sync(~0u, odd ? v[2] : v[3], 4)};
        const float4 both = {up.of(odd ? come[0] : keep[0]), up.of(odd ? come[1] : keep[1]), up.of(odd ? keep[0] : come[0]),
                             up.of(odd ? keep[1] : come[1])};
        if (block == rank) {
          store_shared(at, both);
        } else {
          send_to_block(reinterpret_cast<float4*>(at), both, &shared.made[own.sample % 2], block);
        }
      }
    }
    arrive(&shared.made[own.sample % 2]);
  }
}

__device__ inline void finish_fours(const KronAxesParams& p, FourShared& shared, float* places, int warp) {
  const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const long long step = gridDim.x / 2;
  cluster_barrier();
  const FourSquares<false> squares(shared.weight[1], shared.weight[0]);
#pragma unroll 1
  for (FourFinisher own(warp);; own.advance()) {
    const long long sample = blockIdx.x / 2 + own.sample * step;
    if (sample >= p.rows) return;
    // What the other block has sent is counted as it arrives; acquiring for the cluster would empty the L1 cache.
    wait_for_arrivals(&shared.made[own.sample % 2], own.sample / 2 % 2);
    if (own.part == 0 && lane == 0 && sample + 2 * step < p.rows) arrive_expecting(&shared.made[own.sample % 2], kFourSent);
    float raw[8][2][4];  // of 8 columns: two rows, and of these four columns
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      const int i = n / 4 % 2 * 8 + group, j = quad * 2 + n / 2 % 2 * 8 + n % 2, four = own.part * 2 + n / 8;
      const float4 v = *reinterpret_cast<const float4*>(four_part(places, own.sample * 2 * kFourParts + i * 2 + j / 8) +
                                                        j % 8 * 128 + four_place(i, j, four));
      float (&to)[8][2][4] = raw;
      to[n / 8 * 4][n / 4 % 2][n % 4] = v.x, to[n / 8 * 4 + 1][n / 4 % 2][n % 4] = v.y;
      to[n / 8 * 4 + 2][n / 4 % 2][n % 4] = v.z, to[n / 8 * 4 + 3][n / 4 % 2][n % 4] = v.w;
    }
    const int exponent = exponent_of(__float_as_int(largest_of_warp(reinterpret_cast<const float (&)[64]>(raw))));
    arrive(&shared.finished[own.sample % 2]);
    __syncwarp();
    if (lane == 0) arrive_in(cluster_rank() ^ 1, &shared.finished[own.sample % 2]);
    const float scale = power_of_two(14 - exponent);
    const PowerOfTwo up = squares.scale_of_results(exponent);
    float out[8][2][4];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      FourSquares<false>::Operand x;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const two = &raw[c][i / 2][i % 2 * 2];
        x[i / 2].set(i % 2, two[0] * scale, two[1] * scale);
      }
      squares.multiply(out[c], x);
    }
    // Of two threads side by side, each takes the other one's results in one of two fours, so that both together have eight of a
    // row.
    const bool odd = quad % 2;
    const int first = quad / 2 * 4 * 4096 + group * 2 * 256 + cluster_rank() * 128 + own.part * 8 + odd * 4;
    float* const y = static_cast<float*>(p.y.data) + offset_of(p.y, sample) + first;
    const float* const bias = p.bias ? static_cast<const float*>(p.bias) + sample % p.bias_lead * 65536 + first : nullptr;
    const auto store = [&](int at, const float (&v)[4]) {
      float sum[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float whole = up.of(v[c]);
        sum[c] = fmaf(whole, 4 * kCutOff, whole);
        if (bias) sum[c] += __ldg(bias + at + c);
      }
      *reinterpret_cast<float4*>(y + at) = {sum[0], sum[1], sum[2], sum[3]};
    };
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float a[4], b[4];  // of the row of the thread of even number, and of the other one
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float keep = odd ? out[4 + c][i / 4][i % 4] : out[c][i / 4][i % 4];
        const float come = __shfl_xor_sync(~0u, odd ? out[c][i / 4][i % 4] : out[4 + c][i / 4][i % 4], 1);
        a[c] = odd ? come : keep;
        b[c] = odd ? keep : come;
      }
      const int at = (i / 4 * 8 + i % 2) * 4096 + i / 2 % 2 * 256;
      store(at, a);
      store(at + 2 * 4096, b);
    }
  }
}

}  // namespace cuops

extern "C" __global__ void __launch_bounds__(32 * (cuops::kFourMakers + cuops::kFourFinishers), 1)
    kron_four_sixteens(const __grid_constant__ cuops::KronAxesParams p) {
  using namespace cuops;
  __shared__ FourShared shared;
  wait_in_turn();
  if (threadIdx.x == 0) {  // lanes that arrive here, and one for the other block: for what it sends, and for each of its warps
    init_all_arrivals(shared.made, 32 * kFourParts + 1);
    init_all_arrivals(shared.finished, 33 * kFourParts);
    for (int i = 0; i < 2; ++i) {
      if (blockIdx.x / 2 + i * (gridDim.x / 2) < p.rows) arrive_expecting(&shared.made[i], kFourSent);
    }
  }
  bring_weights<4, 16>(p, [&](int axis, int row, int column) { return &shared.weight[axis][row * 16 + column]; });
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  float* const places = shared_at<float>(0);
  if (warp < kFourMakers) {
    make_fours(p, shared, places, warp);
  } else {
    finish_fours(p, shared, places, warp - kFourMakers);
  }
  cluster_barrier();  // neither block ends while the other one stores to it
}
