// Kronecker-factored linear layers for sizes that fill the tensor cores: the last two axes of a sample are multiplied in registers,
// one after the other, without a barrier between; an outer axis follows from shared memory.
#include "device/tuned.cuh"

#if CUOPS_TUNED == 90
#include "device/kron_tuned.cuh"

namespace cuops {

__device__ __noinline__ Pack<float, 4> add_bias(Pack<float, 4> v, DType dtype, const void* bias, long long at) {
#pragma unroll
  for (int j = 0; j < 4; ++j) v.at[j] += load_element<float>(dtype, bias, at + j);
  return v;
}

// Where a sample of y is, and what its results are to be multiplied with: two powers, whose product overflows only if these do.
struct Output {
  long long start, bias_start;
  void* data;
  const void* bias;
  DType dtype;
  float scale, rest;

  __device__ Output(const KronTunedParams& p, long long sample, int exponent)
      : start(sample < p.rows ? offset_of(p.y, sample) : -1),
        bias_start(p.bias ? sample % p.bias_lead * p.sample_out : 0),
        data(p.y.data),
        bias(p.bias),
        dtype(p.dtype),
        scale(power_of_two(exponent / 2)),
        rest(power_of_two(exponent - exponent / 2)) {}

  template <bool kPairs>
  __device__ void store(int at, float a, float b, float c, float d) const {
    Pack<float, 4> v{a * scale * rest, b * scale * rest, c * scale * rest, d * scale * rest};
    const DType as = kPairs ? kFloat32 : dtype;
    if (bias) v = add_bias(v, as, bias, bias_start + at);
    store_chunk(as, data, start + at, v);
  }
};

// The outer axis: outputs = weight times state, 32 columns at a time.
template <bool kPairs>
__device__ __noinline__ void step_outer(const KronTunedParams& p, int state, long long sample, int exponent) {
  const KronTunedStep s = p.step[0];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int slice_units = p.slice_units, slice_bytes = p.slice_pitch * 16, pitch = p.pitch, units = kPairs ? 2 : p.units;
  const KronDivisor by_row_units = p.by_row_units;
  const unsigned zero = shared_address(shared_at<char>(p.zero));
  const unsigned weight = shared_address(shared_at<char>(s.weight + lane % 16 * s.pitch + lane / 16));
  const unsigned weight_low = (s.weight_low - s.weight) * 16;
  const Output output(p, sample, exponent);
  for (int unit = warp * 2; unit < slice_units; unit += warps * 2) {
    unsigned at[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = divide(unit + i, by_row_units), column = unit + i - row * static_cast<int>(by_row_units.divisor);
      at[i] = shared_address(shared_at<char>(state + row * pitch + (column * 2 + lane / 16) * units));
    }
#pragma unroll 1
    for (int m = 0; m < s.rows; m += 32) {
      float acc[2][4][4] = {};
      const bool whole = m + 16 < s.rows;
#pragma unroll 1
      for (int k = 0; k < s.columns; k += 16) {
        const int depth = k + lane % 16;
        unsigned b[2][4], b_low[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const unsigned from = depth < s.in ? at[i] + depth * slice_bytes : zero;
          load_matrices_transposed(b[i], from);
          if constexpr (kPairs) load_matrices_transposed(b_low[i], from + 16);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (i == 1 && !whole) break;
          unsigned a[4], a_low[4];
          load_matrices(a, weight + (m + i * 16) * s.pitch * 16 + k * 2);
          if constexpr (kPairs) load_matrices(a_low, weight + weight_low + (m + i * 16) * s.pitch * 16 + k * 2);
#pragma unroll
          for (int n = 0; n < 4; ++n) multiply<kPairs>(acc[i][n], a, a_low, b[n / 2] + n % 2 * 2, b_low[n / 2] + n % 2 * 2);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = m + i * 16 + half * 8 + lane / 4;
          if (row >= s.out) continue;
#pragma unroll
          for (int pair = 0; pair < 2; ++pair) {
            const float (&u)[4] = acc[i][2 * pair], (&v)[4] = acc[i][2 * pair + 1];
            output.store<kPairs>((row * slice_units + unit + pair) * 16 + lane % 4 * 4, u[2 * half], u[2 * half + 1], v[2 * half],
                                 v[2 * half + 1]);
          }
        }
      }
    }
  }
}

template <bool kPairs, int kColumns>
__device__ void kron_tuned(const KronTunedParams& p) {
  constexpr int kSteps = kColumns / 16;
  // An odd pitch: neighbouring rows are in different banks.
  const int units = kPairs ? 2 : p.units, pitch = kColumns / 8 * units + 1;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const KronTunedStep &by_rows = p.step[1], &by_columns = p.step[2];
  const bool has_outer = p.step[0].count > 0;
  int* const magnitudes = magnitudes_of(p);  // of the factors, then of the samples of this tile and the next
  const long long tiles = p.tiles, stride = gridDim.x;
  for (int i = 0; i < p.buffers; ++i) {
    if (blockIdx.x + i * stride < tiles) load_tile(p, p.x, p.state[i], blockIdx.x + i * stride);
    commit_copies();
  }
  for (int i = threadIdx.x; i < kKronFactors + 2 * p.samples; i += blockDim.x) magnitudes[i] = 0;
  if (threadIdx.x < 2) shared_at<uint4>(p.zero)[threadIdx.x] = uint4{};
  copy_factors(p);
  __syncthreads();
  find_magnitudes(p);
  __syncthreads();
#pragma unroll 1
  for (int i = has_outer ? 0 : 1; i < 3; ++i) prepare_weight<kPairs>(p, i, i == 2);
  int exponent = p.last_shift;
  for (int j = 0; j < p.factor_count; ++j) exponent += exponent_of(magnitudes[j]);
  const unsigned weight_rows = shared_address(shared_at<char>(by_rows.weight + lane % 16 * by_rows.pitch + lane / 16));
  const unsigned rows_low = (by_rows.weight_low - by_rows.weight) * 16;
  const unsigned weight_columns =
      shared_address(shared_at<char>(by_columns.weight + (lane / 16 * 8 + lane % 8) * by_columns.pitch + lane / 8 % 2));
  const unsigned columns_low = (by_columns.weight_low - by_columns.weight) * 16;
  const int items = p.samples * (has_outer ? p.step[0].in : 1) * p.groups, out_columns = by_columns.out;
  int parity = 0;
  for (long long tile = blockIdx.x; tile < tiles; tile += stride, parity ^= 1) {
    const int state = p.state[parity];
    int* const own = magnitudes + kKronFactors + parity * p.samples;
    if (p.buffers == 2) {
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();
    convert_tile<kPairs>(p, state, own);
    for (int i = threadIdx.x; i < p.samples; i += blockDim.x) magnitudes[kKronFactors + (parity ^ 1) * p.samples + i] = 0;
    __syncthreads();
    const long long next = tile + p.buffers * stride;
#pragma unroll 1
    for (int first = 0; first < items; first += warps) {
      const bool busy = first + warp < items, last = first + warps >= items;
      const int item = busy ? first + warp : 0, slice = divide(item, p.by_groups), group = item - slice * p.groups;
      float c[kColumns / 8][4] = {};
      unsigned at = shared_address(shared_at<char>(state + slice * p.slice_pitch + lane % 16 * pitch + lane / 16 * units));
      unsigned from = weight_rows + group * 16 * by_rows.pitch * 16;
#pragma unroll 1
      for (int k = 0; k < by_rows.columns; k += 16) {
        unsigned a[4], a_low[4];
        load_matrices(a, from);
        if constexpr (kPairs) load_matrices(a_low, from + rows_low);
#pragma unroll
        for (int n = 0; n < kColumns / 16; ++n) {
          unsigned b[4], b_low[4];
          load_matrices_transposed(b, at + n * 32 * units);
          if constexpr (kPairs) load_matrices_transposed(b_low, at + n * 64 + 16);
          multiply<kPairs>(c[2 * n], a, a_low, b, b_low);
          multiply<kPairs>(c[2 * n + 1], a, a_low, b + 2, b_low + 2);
        }
        at += 16 * pitch * 16;
        from += 32;
      }
      // Results become operands: a lane has the elements that the next product asks of it.
      unsigned s[kSteps][4], s_low[kSteps][4];
      const float shift = power_of_two(-p.shift), outer_shift = power_of_two(-p.outer_shift);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* const two = &c[2 * k + j / 2][j % 2 * 2];
          split<__half>(two[0] * shift, two[1] * shift, s[k][j], s_low[k][j]);
        }
      }
      if (has_outer || last) __syncthreads();  // the tile has been read
      if (!has_outer && last) {
        if (next < tiles) load_tile(p, p.x, state, next);
        commit_copies();
      }
      if (!busy) continue;
      const int in_tile = has_outer ? 0 : slice;
      const Output output(p, tile * p.samples + in_tile, exponent + exponent_of(own[in_tile]));
      if (output.start < 0) continue;
#pragma unroll 1
      for (int n = 0; n < out_columns; n += 32) {
        float acc[4][4] = {};
        const bool whole = n + 16 < out_columns;
        const unsigned first_at = weight_columns + n * by_columns.pitch * 16;
        const unsigned second_at = first_at + (whole ? 16 * by_columns.pitch * 16 : 0);
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          unsigned b[2][4], b_low[2][4];
          load_matrices(b[0], first_at + k * 32);
          load_matrices(b[1], second_at + k * 32);
          if constexpr (kPairs) {
            load_matrices(b_low[0], first_at + columns_low + k * 32);
            load_matrices(b_low[1], second_at + columns_low + k * 32);
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) multiply<kPairs>(acc[i], s[k], s_low[k], b[i / 2] + i % 2 * 2, b_low[i / 2] + i % 2 * 2);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = group * 16 + half * 8 + lane / 4;
          if (row >= by_rows.out) continue;
#pragma unroll
          for (int pair = 0; pair < 2; ++pair) {
            if (pair == 1 && !whole) continue;
            const float (&u)[4] = acc[2 * pair], (&v)[4] = acc[2 * pair + 1];
            if (has_outer) {
              unsigned* const to =
                  shared_at<unsigned>(state + slice * p.slice_pitch + row * pitch + (n / 8 + pair * 2) * units) + lane % 4;
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                unsigned high, low;
                const float (&w)[4] = i == 0 ? u : v;
                split<__half>(w[2 * half] * outer_shift, w[2 * half + 1] * outer_shift, high, low);
                to[i * 4 * units] = high;
                if constexpr (kPairs) to[i * 4 * units + 4] = low;
              }
            } else {
              output.store<kPairs>(row * out_columns + n + pair * 16 + lane % 4 * 4, u[2 * half], u[2 * half + 1], v[2 * half],
                                   v[2 * half + 1]);
            }
          }
        }
      }
    }
    if (!has_outer) continue;
    __syncthreads();
    step_outer<kPairs>(p, state, tile, exponent + exponent_of(own[0]));
    __syncthreads();
    if (next < tiles) load_tile(p, p.x, state, next);
    commit_copies();
  }
}

}  // namespace cuops

#define KRON_TUNED(name, threads)                                                                                                \
  extern "C" __global__ void __launch_bounds__(threads, 1) kron_tuned_##name(const __grid_constant__ cuops::KronTunedParams p) { \
    cuops::run_##name(p);                                                                                                        \
  }

// Instances, as kron_tuned.cc asks for them.
namespace cuops {
__device__ inline void run_pairs(const KronTunedParams& p) {
  if (p.columns_log == 4) return kron_tuned<true, 16>(p);
  if (p.columns_log == 5) return kron_tuned<true, 32>(p);
  kron_tuned<true, 64>(p);
}
__device__ inline void run_pairs_128(const KronTunedParams& p) { kron_tuned<true, 128>(p); }
__device__ inline void run_single(const KronTunedParams& p) {
  if (p.columns_log == 4) return kron_tuned<false, 16>(p);
  if (p.columns_log == 5) return kron_tuned<false, 32>(p);
  kron_tuned<false, 64>(p);
}
}  // namespace cuops
KRON_TUNED(pairs, 512)
KRON_TUNED(pairs_128, 256)
KRON_TUNED(single, 512)
#else
extern "C" __global__ void kron_tuned_nowhere() {}
#endif
