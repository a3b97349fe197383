// Kronecker-factored linear layers of three factors of up to 32 in float32. Columns of a sample come from device memory to
// registers for the first factor; its results, in shared memory, are matrices that a warp multiplies by the other two, one after
// the other.
#include "device/overlap.cuh"
#include "device/tuned.cuh"

#if CUOPS_TUNED == 90
#include "kron_direct.cuh"

namespace cuops {

__device__ void kron_cube(const KronDirectParams& p) {
  constexpr int kChunks = 4, kWarps = 16;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int in_rows = p.factors[0].in, in_columns = p.factors[1].in * p.factors[2].in;
  const int outs0 = p.factors[0].out, outs1 = p.factors[1].out, outs2 = p.factors[2].out;
  Operand<2> x[kChunks];
  auto load = [&](long long sample) {
    const float* const from = sample < p.rows ? static_cast<const float*>(p.x.data) + offset_of(p.x, sample) : nullptr;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) x[j].load(from, in_rows, in_columns, (warp + kWarps * j) * 16 + lane / 4 * 2);
  };
  long long sample = blockIdx.x;
  load(sample);
  int* const exponents = shared_at<int>(p.exponents);
  uint4* const last_weight = shared_at<uint4>(p.maxima + 8);
  if (warp < 2) {
    Operand<2> w;
    w.load_transposed<false>(p.factors[2], warp * 16);
    const int own = exponent_of(w.magnitude());
    w.split(14 - own);
    if (lane == 0) exponents[64 + warp] = own;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      last_weight[(warp * 4 + s * 2) * 32 + lane] = make_uint4(w.high[s][0], w.high[s][1], w.high[s][2], w.high[s][3]);
      last_weight[(warp * 4 + s * 2 + 1) * 32 + lane] = make_uint4(w.low[s][0], w.low[s][1], w.low[s][2], w.low[s][3]);
    }
  }
  const int second = p.weight + p.weight_bytes / 8;
  prepare_rows<2>(p, p.factors[0], 0, outs0, p.weight, p.exponents);
  prepare_rows<2>(p, p.factors[1], 0, outs1, second, p.exponents + 8);
  for (int i = threadIdx.x; i < 32 * p.state_bytes / 16; i += blockDim.x) shared_at<uint4>(p.state)[i] = uint4{};
  int* const maxima = shared_at<int>(p.maxima);
  const unsigned first_at = shared_address(shared_at<char>(p.weight)) + lane % 16 * p.weight_pitch + lane / 16 * 16;
  const unsigned second_at = shared_address(shared_at<char>(second)) + lane % 16 * p.weight_pitch + lane / 16 * 16;
  char* const state = shared_at<char>(p.state);
  const int to_low = 32 * p.state_pitch, slice_bytes = p.state_bytes;
  const unsigned state_at = shared_address(state) + lane % 16 * p.state_pitch + lane / 16 * 16;
  const float down = power_of_two(-p.shift);
  int parity = 0;
  for (; sample < p.rows; parity ^= 16) {
    int own = 0;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) own = max(own, x[j].magnitude());
    if (lane == 0) maxima[parity + warp] = own;
    __syncthreads();
    const int exponent = exponent_of(__reduce_max_sync(~0u, maxima[parity + lane % 16]));
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const int column = (warp + kWarps * j) * 16 + lane % 4 * 4;
      x[j].split(14 - exponent);
      float c[2][2][4] = {};
      multiply_rows<2>(c, first_at, p.weight_pitch, p.weight_bytes, x[j], 2);
      if (column >= in_columns) continue;
      const int row = divide(column, p.by_columns);
      char* const to = state + row * p.state_pitch + (column - row * p.factors[2].in) * 2;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        char* const at = to + (i * 8 + lane / 4) * slice_bytes;
        const float *const u = &c[i / 2][0][i % 2 * 2], *const v = &c[i / 2][1][i % 2 * 2];
        uint2 high, low;
        split<__half>(u[0] * down, v[0] * down, high.x, low.x);
        split<__half>(u[1] * down, v[1] * down, high.y, low.y);
        *reinterpret_cast<uint2*>(at) = high;
        *reinterpret_cast<uint2*>(at + to_low) = low;
      }
    }
    __syncthreads();
    float* const y = static_cast<float*>(p.y.data) + offset_of(p.y, sample);
    const float* const bias = p.bias ? static_cast<const float*>(p.bias) + sample % p.bias_lead * (outs0 * outs1 * outs2) : nullptr;
    sample += gridDim.x;
#pragma unroll 1
    for (int slice = warp; slice < outs0; slice += kWarps) {
      unsigned b[2][2][4], b_low[2][2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned at = state_at + slice * slice_bytes + i / 2 * 16 * p.state_pitch + i % 2 * 32;
        load_matrices_transposed(b[i / 2][i % 2], at);
        load_matrices_transposed(b_low[i / 2][i % 2], at + to_low);
      }
#pragma unroll 1
      for (int m = 0; m < outs1; m += 16) {
        float c[4][4] = {};
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          float sum[4][4] = {};
          unsigned a[4], a_low[4];
          load_matrices(a, second_at + m * p.weight_pitch + s * 32);
          load_matrices(a_low, second_at + p.weight_bytes + m * p.weight_pitch + s * 32);
#pragma unroll
          for (int n = 0; n < 4; ++n) mma<__half>(sum[n], a_low, b[s][n / 2][n % 2 * 2], b[s][n / 2][n % 2 * 2 + 1]);
#pragma unroll
          for (int n = 0; n < 4; ++n) mma<__half>(sum[n], a, b_low[s][n / 2][n % 2 * 2], b_low[s][n / 2][n % 2 * 2 + 1]);
#pragma unroll
          for (int n = 0; n < 4; ++n) mma<__half>(sum[n], a, b[s][n / 2][n % 2 * 2], b[s][n / 2][n % 2 * 2 + 1]);
#pragma unroll
          for (int e = 0; e < 16; ++e) c[e / 4][e % 4] += sum[e / 4][e % 4];
        }
        unsigned t[2][4], t_low[2][4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
          for (int half = 0; half < 2; ++half)
            split<__half>(c[n][2 * half] * down, c[n][2 * half + 1] * down, t[n / 2][n % 2 * 2 + half],
                          t_low[n / 2][n % 2 * 2 + half]);
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float acc[2][4] = {};
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            const uint4 high = last_weight[(j * 4 + s * 2) * 32 + lane], low = last_weight[(j * 4 + s * 2 + 1) * 32 + lane];
            float sum[2][4] = {};
            mma<__half>(sum[0], t_low[s], high.x, high.y);
            mma<__half>(sum[1], t_low[s], high.z, high.w);
            mma<__half>(sum[0], t[s], low.x, low.y);
            mma<__half>(sum[1], t[s], low.z, low.w);
            mma<__half>(sum[0], t[s], high.x, high.y);
            mma<__half>(sum[1], t[s], high.z, high.w);
#pragma unroll
            for (int e = 0; e < 8; ++e) acc[e / 4][e % 4] += sum[e / 4][e % 4];
          }
          const int column = j * 16 + lane % 4 * 4;
          if (column >= outs2) continue;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int row = m + half * 8 + lane / 4, e = 2 * half;
            if (row >= outs1) continue;
            store_four(y, bias, (slice * outs1 + row) * outs2 + column,
                       p.last_shift + exponent + exponents[slice] + exponents[32 + row] + exponents[64 + j], acc[0][e],
                       acc[0][e + 1], acc[1][e], acc[1][e + 1]);
          }
        }
      }
    }
    load(sample);
  }
}

}  // namespace cuops

extern "C" __global__ void __launch_bounds__(512, 1) kron_cube(const __grid_constant__ cuops::KronDirectParams p) {
  cuops::wait_in_turn();
  cuops::kron_cube(p);
}
#else
extern "C" __global__ void kron_cube_nowhere() {}
#endif
