// Gradients of two factors of 64 x 64, each by half of the blocks: a team of warps multiplies one side of a sample by the other
// factor, and what it has in registers at once by the other side, and adds this up over its samples.
#include "device/tuned.cuh"

#if CUOPS_TUNED == 90
#include "device/kron_tuned.cuh"

namespace cuops {

__device__ inline void load_either(unsigned (&r)[4], unsigned address, bool transposed) {
  if (transposed) {
    load_matrices_transposed(r, address);
  } else {
    load_matrices(r, address);
  }
}

// x and dy (p.y) are (samples, kSize, kSize). The first factor's gradient is the sum of (dy W2) x^T, the second's, transposed, of
// (x^T W1^T) dy.
template <int kSize>
__device__ void gradient(const KronTunedParams& p) {
  constexpr int kGroups = kSize / 16, kWeightPitch = kSize / 8 + 1, kUnits = 2, kPitch = kSize / 8 * kUnits + 1;
  const bool second = p.gradients == 2 || (p.gradients == 3 && blockIdx.x % 2 == 1);
  const int share = p.gradients == 3 ? 2 : 1, block = static_cast<int>(blockIdx.x) / share, blocks = gridDim.x / share;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp % kGroups, team = warp / kGroups;
  const int teams = blockDim.x / 32 / kGroups;
  const KronTunedStep& w = p.step[1 + second];  // the other factor
  int* const magnitudes = magnitudes_of(p);     // of the factors, then of x and dy in this tile and the next
  const int dy = p.samples * p.slice_pitch;     // from x's tile to dy's
  auto load = [&](int buffer, long long tile) {
    if (tile < p.tiles) {
      load_tile(p, p.x, p.state[buffer], tile);
      load_tile(p, p.y, p.state[buffer] + dy, tile);
    }
    commit_copies();
  };
#pragma unroll 1
  for (int i = 0; i < p.buffers; ++i) load(i, block + static_cast<long long>(i) * blocks);
  for (int i = threadIdx.x; i < kKronFactors + 4 * p.samples; i += blockDim.x) magnitudes[i] = 0;
  copy_factors(p);
  __syncthreads();
  find_magnitudes(p);
  __syncthreads();
  prepare_weight<true>(p, 1 + second, false, false);
  // A lane's part of four matrices that are taken as they lie in memory, and transposed; where the next ones are.
  const int as_is = lane / 16 * 8 + lane % 8, as_is_chunk = lane / 8 % 2, across = lane % 16, across_chunk = lane / 16;
  const int in_state[] = {(as_is * kPitch + as_is_chunk * kUnits) * 16, (across * kPitch + across_chunk * kUnits) * 16};
  const int in_weight[] = {(as_is * kWeightPitch + as_is_chunk) * 16, (across * kWeightPitch + across_chunk) * 16};
  const int rows_on = 256 * kPitch, columns_on = 32 * kUnits, weight_rows_on = 256 * kWeightPitch;
  const unsigned weight = shared_address(shared_at<char>(w.weight)) + (second ? in_weight[0] : in_weight[1]);
  const unsigned weight_low = (w.weight_low - w.weight) * 16;
  const int weight_n = second ? weight_rows_on : 32, weight_k = second ? 32 : weight_rows_on;
  const int own_k = second ? rows_on : columns_on, other_k = own_k, other_n = second ? columns_on : rows_on;
  const float shift = power_of_two(-p.shift);
  float dw[kSize / 8][4] = {};
  int parity = 0;
  for (long long tile = block; tile < p.tiles; tile += blocks, parity ^= 1) {
    const int state = p.state[parity];
    int* const own = magnitudes + kKronFactors + parity * 2 * p.samples;
    if (p.buffers == 2) {
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();
    convert_tile<true>(p, state, own);
    convert_tile<true>(p, state + dy, own + p.samples);
    for (int i = threadIdx.x; i < 2 * p.samples; i += blockDim.x) magnitudes[kKronFactors + (parity ^ 1) * 2 * p.samples + i] = 0;
    __syncthreads();
    // A team has one sample of a tile.
    const bool exists = tile * p.samples + team < p.rows;
    if (exists) {
      const unsigned x_at = shared_address(shared_at<char>(state + team * p.slice_pitch)), dy_at = x_at + dy * 16;
      float c[kSize / 8][4] = {};
      // As the first operand, four matrices are in the other order.
      unsigned from = second ? x_at + in_state[0] + group * columns_on : dy_at + in_state[1] + group * rows_on;
      unsigned by = weight;
#pragma unroll 1
      for (int k = 0; k < kSize; k += 16) {
        unsigned a[4], a_low[4];
        load_either(a, from, second);
        load_either(a_low, from + 16, second);
#pragma unroll
        for (int n = 0; n < kGroups; ++n) {
          unsigned b[4], b_low[4];
          load_either(b, by + n * weight_n, !second);
          load_either(b_low, by + weight_low + n * weight_n, !second);
#pragma unroll
          for (int i = 0; i < 2; ++i) multiply<true>(c[2 * n + i], a, a_low, b + 2 * i, b_low + 2 * i);
        }
        from += own_k;
        by += weight_k;
      }
      unsigned s[kGroups][4], s_low[kGroups][4];
#pragma unroll
      for (int k = 0; k < kGroups; ++k) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* const two = &c[2 * k + j / 2][j % 2 * 2];
          split<__half>(two[0] * shift, two[1] * shift, s[k][j], s_low[k][j]);
        }
      }
      const float scale = power_of_two(exponent_of(own[team]) + exponent_of(own[p.samples + team]));
      const unsigned other = second ? dy_at + in_state[1] : x_at + in_state[0];
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        float sum[2][4] = {};
#pragma unroll
        for (int k = 0; k < kGroups; ++k) {
          unsigned b[4], b_low[4];
          const unsigned at = other + k * other_k + n * other_n;
          load_either(b, at, second);
          load_either(b_low, at + 16, second);
#pragma unroll
          for (int i = 0; i < 2; ++i) multiply<true>(sum[i], s[k], s_low[k], b + 2 * i, b_low + 2 * i);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) dw[2 * n + i][j] = fmaf(sum[i][j], scale, dw[2 * n + i][j]);
        }
      }
    }
    __syncthreads();
    load(p.buffers == 2 ? parity : 0, tile + static_cast<long long>(p.buffers) * blocks);
  }
  int power = p.last_shift;
  for (int j = 0; j < w.count; ++j) power += exponent_of(magnitudes[w.first + j]);
  power += w.count;
  const float scale = power_of_two(power / 2), rest = power_of_two(power - power / 2);
  const long long matrix = (p.gradients == 3 && second ? static_cast<long long>(blocks) * teams : 0) + block * teams + team;
  float* const to = p.partial + matrix * kSize * kSize;
#pragma unroll
  for (int n = 0; n < kSize / 8; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = group * 16 + j / 2 * 8 + lane / 4, column = n * 8 + lane % 4 * 2 + j % 2;
      to[second ? column * kSize + row : row * kSize + column] = dw[n][j] * scale * rest;
    }
  }
}

}  // namespace cuops

extern "C" __global__ void __launch_bounds__(512, 1) kron_gradient_64(const __grid_constant__ cuops::KronTunedParams p) {
  cuops::gradient<64>(p);
}
#else
extern "C" __global__ void kron_gradient_nowhere() {}
#endif
