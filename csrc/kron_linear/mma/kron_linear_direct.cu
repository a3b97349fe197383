// Kronecker-factored linear layers in float32, by tensor cores: a warp takes 16 columns of a sample from device memory to its
// registers, where they are operands. Two factors in one pass, with the first one's results in shared memory; or one factor along
// an axis with columns beyond it.
#include "device/overlap.cuh"
#include "device/tuned.cuh"
#include "kron_direct.cuh"

CUOPS_ONLY_FOR(90)

namespace cuops {

// Warps of a group share a sample, a warp for 16 columns of x, and for as many of y. Blocks of a small batch share samples, too:
// each has some rows of the first factor.
template <int kSteps>
__device__ void kron_direct(const KronDirectParams& p) {
  const int lane = threadIdx.x % 32, warps = p.group_warps, group = threadIdx.x / 32 / warps, warp = threadIdx.x / 32 % warps;
  const int in_rows = p.factors[0].in, in_columns = p.factors[1].in, out_columns = p.factors[1].out;
  const int slice = blockIdx.x % p.slices, first_row = slice * p.slice_rows, rows = min(p.slice_rows, p.factors[0].out - first_row);
  const int column = warp * 16 + lane / 4 * 2, out_column = warp * 16 + lane % 4 * 4;
  const int row_steps = (in_rows + 15) / 16, column_steps = (in_columns + 15) / 16;
  const long long stride = gridDim.x / p.slices * p.groups;
  long long sample = blockIdx.x / p.slices * p.groups + group;
  auto sample_at = [&](long long i) { return i < p.rows ? static_cast<const float*>(p.x.data) + offset_of(p.x, i) : nullptr; };
  DirectOperand<kSteps> x, weight;
  x.load(sample_at(sample), in_rows, in_columns, column);
  weight.load_transposed(p.factors[1], warp * 16);
  prepare_rows<kSteps>(p, p.factors[0], first_row, rows, p.weight, p.exponents);
  const int weight_exponent = exponent_of(weight.magnitude());
  weight.split(14 - weight_exponent);
  int* const maxima = shared_at<int>(p.maxima) + group * 16;
  const int* const row_exponents = shared_at<int>(p.exponents);
  const unsigned first_weight = shared_address(shared_at<char>(p.weight)) + lane % 16 * p.weight_pitch + lane / 16 * 16;
  char* const state = shared_at<char>(p.state) + group * 4 * p.state_bytes;
  for (int i = threadIdx.x; i < 4 * p.groups * p.state_bytes / 16; i += blockDim.x) shared_at<uint4>(p.state)[i] = uint4{};
  const unsigned state_at = shared_address(state) + lane % 16 * p.state_pitch + lane / 16 * 16;
  __syncthreads();
  int parity = 0, half = 0;
  for (; sample < p.rows; sample += stride, parity ^= 8) {
    const int own = x.magnitude();
    if (lane == 0) maxima[parity + warp] = own;
    p.group_warps == 1 ? __syncwarp() : sync_warps(1 + group, warps);
    const int exponent = exponent_of(__reduce_max_sync(~0u, lane < warps ? maxima[parity + lane] : 0));
    x.split(14 - exponent);
    const float* const next = sample_at(sample + stride);
    float* const y = static_cast<float*>(p.y.data) + offset_of(p.y, sample);
    const float* const bias =
        p.bias ? static_cast<const float*>(p.bias) + sample % p.bias_lead * (p.factors[0].out * out_columns) : nullptr;
    for (int m = 0; m < rows; m += 32, half ^= 1) {
      char* const at = state + half * 2 * p.state_bytes;
      if (warp < column_steps) {
        float c[2][2][4] = {};
        multiply_rows<kSteps>(c, first_weight + m * p.weight_pitch, p.weight_pitch, p.weight_bytes, x, row_steps);
        const float down = power_of_two(-p.shift);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          char* const to = at + (i * 8 + lane / 4) * p.state_pitch + warp * 32 + lane % 4 * 4;
          const float *const u = &c[i / 2][0][i % 2 * 2], *const v = &c[i / 2][1][i % 2 * 2];
          store_near(to, p.state_bytes, u[0] * down, v[0] * down, u[1] * down, v[1] * down);
        }
      }
      p.group_warps == 1 ? __syncwarp() : sync_warps(1 + group, warps);
      if (m + 32 >= rows) x.load(next, in_rows, in_columns, column);
      if (warp * 16 >= out_columns) continue;
      float c[2][2][4] = {};
      multiply_rows<kSteps>(c, state_at + half * 2 * p.state_bytes, p.state_pitch, p.state_bytes, weight, column_steps);
      if (out_column >= out_columns) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = m + i * 8 + lane / 4;
        if (row >= rows) break;
        const float *const u = &c[i / 2][0][i % 2 * 2], *const v = &c[i / 2][1][i % 2 * 2];
        store_four(y, bias, (first_row + row) * out_columns + out_column,
                   p.last_shift + exponent + weight_exponent + row_exponents[row], u[0], u[1], v[0], v[1]);
      }
    }
  }
}

// One factor along an axis with columns beyond it. Each warp is on its own.
template <int kSteps>
__device__ void kron_direct_columns(const KronDirectParams& p) {
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32, in = p.factors[0].in, out = p.factors[0].out;
  const int steps = (in + 15) / 16;
  const long long items = p.rows * p.column_tiles, stride = 1LL * gridDim.x * warps;
  long long item = 1LL * blockIdx.x * warps + threadIdx.x / 32;
  DirectOperand<kSteps> x;
  auto load = [&](long long i) {
    const long long row = i / p.column_tiles;
    const int column = static_cast<int>(i - row * p.column_tiles) * 16 + lane / 4 * 2;
    x.load(i < items ? static_cast<const float*>(p.x.data) + offset_of(p.x, row) : nullptr, in, p.columns, column);
  };
  load(item);
  prepare_rows<kSteps>(p, p.factors[0], 0, out, p.weight, p.exponents);
  const int* const row_exponents = shared_at<int>(p.exponents);
  const unsigned weight = shared_address(shared_at<char>(p.weight)) + lane % 16 * p.weight_pitch + lane / 16 * 16;
  __syncthreads();
  for (; item < items; item += stride) {
    const int exponent = exponent_of(x.magnitude());
    x.split(14 - exponent);
    const long long row = item / p.column_tiles;
    const int column = static_cast<int>(item - row * p.column_tiles) * 16 + lane % 4 * 4;
    float* const y = static_cast<float*>(p.y.data) + offset_of(p.y, row) + column;
    for (int m = 0; m < out; m += 32) {
      float c[2][2][4] = {};
      multiply_rows<kSteps>(c, weight + m * p.weight_pitch, p.weight_pitch, p.weight_bytes, x, steps);
      if (m + 32 >= out) load(item + stride);
      if (column >= p.columns) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = m + i * 8 + lane / 4;
        if (at >= out) break;
        const float *const u = &c[i / 2][0][i % 2 * 2], *const v = &c[i / 2][1][i % 2 * 2];
        store_four(y + 1LL * at * p.columns, nullptr, 0, exponent + row_exponents[at] - 28, u[0], v[0], u[1], v[1]);
      }
    }
  }
}

}  // namespace cuops

#define KRON_DIRECT(name, threads, function)                                                                                       \
  extern "C" __global__ void __launch_bounds__(threads, 1) kron_direct_##name(const __grid_constant__ cuops::KronDirectParams p) { \
    cuops::wait_in_turn();                                                                                                         \
    cuops::function(p);                                                                                                            \
  }

// Instances, as kron_plan_direct.cc asks for them.
KRON_DIRECT(32, 512, kron_direct<2>)
KRON_DIRECT(64, 384, kron_direct<4>)
KRON_DIRECT(128, 256, kron_direct<8>)
KRON_DIRECT(columns_64, 512, kron_direct_columns<4>)
KRON_DIRECT(columns_128, 384, kron_direct_columns<8>)
