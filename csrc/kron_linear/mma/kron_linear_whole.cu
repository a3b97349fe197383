// Kronecker-factored linear layers for sizes that fill the tensor cores: the last two axes of a sample are multiplied in registers,
// one after the other, without a barrier between; an outer axis follows from shared memory.
#include "device/overlap.cuh"
#include "device/tuned.cuh"
#include "kron_whole_outer.cuh"

CUOPS_ONLY_FOR(90)

namespace cuops {

// The first product: c = weight (16 kTiles rows) times a slice in `state`. weight_low: from a row to its lower half, where it has
// one.
template <class Half, bool kPairs, int kColumns, int kTiles>
__device__ __forceinline__ void multiply_rows(float (&c)[kTiles][kColumns / 8][4], const KronWholeStep& step, unsigned weight,
                                              unsigned weight_low, unsigned state, int units, int pitch) {
  const int tile = 16 * step.pitch * 16;
#pragma unroll 1
  for (int k = 0; k < step.columns; k += 16) {
    unsigned a[kTiles][4], a_low[kTiles][4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      load_matrices(a[t], weight + t * tile);
      if constexpr (kPairs) load_matrices(a_low[t], weight + weight_low + t * tile);
    }
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      unsigned b[4], b_low[4];
      load_matrices_transposed(b, state + n * 32 * units);
      if constexpr (kPairs) load_matrices_transposed(b_low, state + n * 64 + 16);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if constexpr (kPairs) {
            multiply<true>(c[t][2 * n + i], a[t], a_low[t], b + 2 * i, b_low + 2 * i);
          } else {
            mma<Half>(c[t][2 * n + i], a[t], b[2 * i], b[2 * i + 1]);
          }
        }
      }
    }
    state += 16 * pitch * 16;
    weight += 32;
  }
}

template <bool kPairs, int kColumns, int kTiles>
__device__ void kron_whole(const KronWholeParams& p) {
  constexpr int kSteps = kColumns / 16, kLeast = -105;  // exponents below are held as if they were this one
  // An odd pitch: neighbouring rows are in different banks.
  const int units = kPairs ? 2 : p.units, pitch = kColumns / 8 * units + 1;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const KronWholeStep &by_rows = p.step[1], &by_columns = p.step[2];
  const bool has_outer = p.step[0].count > 0;
  const bool as_it_is = !kPairs && p.units == 1, bfloat = as_it_is && p.dtype == kBFloat16;  // 16 bits are operands as they come
  auto exponent_in = [&](int bits) { return as_it_is ? max(exponent_of(bits), kLeast) : exponent_of(bits); };
  const bool by_row = as_it_is && !has_outer;  // between the products, each row has a scale of its own
  int* const magnitudes = magnitudes_of(p);    // of the factors, then of the samples of this tile and the next
  const long long tiles = p.tiles, stride = gridDim.x;
  for (int i = 0; i < p.buffers; ++i) {
    if (blockIdx.x + i * stride < tiles) load_tile(p, p.x, p.state[i], blockIdx.x + i * stride);
    commit_copies();
  }
  for (int i = threadIdx.x; i < kKronFactors + 2 * p.samples; i += blockDim.x) magnitudes[i] = 0;
  if (threadIdx.x < 2) shared_at<uint4>(p.zero)[threadIdx.x] = uint4{};
  copy_factors(p);
  __syncthreads();
  find_magnitudes(factors_of(p), p.factor_count, p.dtype, magnitudes);
  __syncthreads();
#pragma unroll 1
  for (int i = has_outer ? 0 : 1; i < 3; ++i) {
    prepare_weight<kPairs>(p, i, i == 2, i == 1 && bfloat);
  }
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
    if (!by_row) {
      if (as_it_is) {
        find_tile_magnitudes(p, state, own);
      } else {
        convert_tile<kPairs>(p, state, own);
      }
      for (int i = threadIdx.x; i < p.samples; i += blockDim.x) magnitudes[kKronFactors + (parity ^ 1) * p.samples + i] = 0;
      __syncthreads();
    }
    const long long next = tile + p.buffers * stride;
#pragma unroll 1
    for (int first = 0; first < items; first += warps) {
      const bool busy = first + warp < items, last = first + warps >= items;
      const int item = busy ? first + warp : 0, slice = divide(item, p.by_groups), group = item - slice * p.groups;
      float c[kTiles][kColumns / 8][4] = {};
      const unsigned at = shared_address(shared_at<char>(state + slice * p.slice_pitch + lane % 16 * pitch + lane / 16 * units));
      const unsigned from = weight_rows + group * kTiles * 16 * by_rows.pitch * 16;
      if (!kPairs && bfloat) {
#pragma unroll 1
        for (unsigned low = 0; low <= rows_low; low += max(rows_low, 1u))  // also what 16 bits don't hold of a product of factors
          multiply_rows<__nv_bfloat16, kPairs, kColumns, kTiles>(c, by_rows, from + low, 0, at, units, pitch);
      } else {
        multiply_rows<__half, kPairs, kColumns, kTiles>(c, by_rows, from, rows_low, at, units, pitch);
      }
      const int in_tile = has_outer ? 0 : slice;
      // Results become operands: a lane has the elements that the next product asks of it.
      unsigned s[kTiles][kSteps][4], s_low[kTiles][kSteps][4];
      const float outer_shift = power_of_two(-p.outer_shift);
      int held[kTiles][2];  // what two rows' exponents are more than what is meant
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int down = p.shift;
          held[t][half] = exponent_in(own[in_tile]);
          if (!kPairs && by_row) {
            float most = 0;
#pragma unroll
            for (int n = 0; n < kColumns / 8; ++n)
              most = fmaxf(most, fmaxf(fabsf(c[t][n][2 * half]), fabsf(c[t][n][2 * half + 1])));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            down = max(exponent_of(__float_as_int(most)), kLeast) - 14;
            held[t][half] = down + 14 - p.shift;
          } else if (!kPairs && as_it_is) {
            down += held[t][half] - 14;
          }
          const float shift = power_of_two(-down);
#pragma unroll
          for (int n = 0; n < kColumns / 8; ++n) {
            const float* const two = &c[t][n][2 * half];
            split<__half>(two[0] * shift, two[1] * shift, s[t][n / 2][n % 2 * 2 + half], s_low[t][n / 2][n % 2 * 2 + half]);
          }
        }
      }
      if (has_outer || last) __syncthreads();  // the tile has been read
      if (!has_outer && last) {
        if (next < tiles) load_tile(p, p.x, state, next);
        commit_copies();
      }
      if (!busy) continue;
      const WholeOutput output(p, tile * p.samples + in_tile);
      if (output.start < 0) continue;
#pragma unroll 1
      for (int n = 0; n < out_columns; n += 32) {
        float acc[kTiles][4][4] = {};
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
          for (int t = 0; t < kTiles; ++t) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
              multiply<kPairs>(acc[t][i], s[t][k], s_low[t][k], b[i / 2] + i % 2 * 2, b_low[i / 2] + i % 2 * 2);
          }
        }
#pragma unroll
        for (int half = 0; half < 2 * kTiles; ++half) {
          const int row = group * kTiles * 16 + half * 8 + lane / 4, power = exponent + held[half / 2][half % 2];
          if (row >= by_rows.out) continue;
#pragma unroll
          for (int pair = 0; pair < 2; ++pair) {
            if (pair == 1 && !whole) continue;
            const float *const u = acc[half / 2][2 * pair] + half % 2 * 2, *const v = acc[half / 2][2 * pair + 1] + half % 2 * 2;
            if (has_outer) {
              unsigned* const to =
                  shared_at<unsigned>(state + slice * p.slice_pitch + row * pitch + (n / 8 + pair * 2) * units) + lane % 4;
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                unsigned high, low;
                const float* const w = i == 0 ? u : v;
                split<__half>(w[0] * outer_shift, w[1] * outer_shift, high, low);
                to[i * 4 * units] = high;
                if constexpr (kPairs) to[i * 4 * units + 4] = low;
              }
            } else {
              output.store<kPairs>(row * out_columns + n + pair * 16 + lane % 4 * 4, power, u[0], u[1], v[0], v[1]);
            }
          }
        }
      }
    }
    if (!has_outer) continue;
    __syncthreads();
    step_outer<kPairs>(p, state, tile, exponent + exponent_in(own[0]));
    __syncthreads();
    if (next < tiles) load_tile(p, p.x, state, next);
    commit_copies();
  }
}

}  // namespace cuops

#define KRON_WHOLE(name, threads)                                                                                                \
  extern "C" __global__ void __launch_bounds__(threads, 1) kron_whole_##name(const __grid_constant__ cuops::KronWholeParams p) { \
    cuops::wait_in_turn();                                                                                                       \
    cuops::run_##name(p);                                                                                                        \
  }

// Instances, as kron_plan_whole.cc asks for them.
namespace cuops {
__device__ inline void run_pairs(const KronWholeParams& p) {
  if (p.columns_log == 4) return kron_whole<true, 16, 1>(p);
  if (p.columns_log == 5) return kron_whole<true, 32, 1>(p);
  kron_whole<true, 64, 1>(p);
}
__device__ inline void run_pairs_128(const KronWholeParams& p) { kron_whole<true, 128, 1>(p); }
__device__ inline void run_single(const KronWholeParams& p) {
  if (p.columns_log == 4) return kron_whole<false, 16, 1>(p);
  if (p.columns_log == 5) return kron_whole<false, 32, 1>(p);
  kron_whole<false, 64, 2>(p);
}
}  // namespace cuops
KRON_WHOLE(pairs, 512)
KRON_WHOLE(pairs_128, 256)
KRON_WHOLE(single, 512)
