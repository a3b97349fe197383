// Gradients of the factors of kron_linear on the device: products of two arrays summed over all that the factor does not touch.
#include "device/overlap.cuh"
#include "device/tuned.cuh"

#if CUOPS_TUNED >= 80
#include "device/row_sums.cuh"
#include "kron_linear.h"
#include "kron_shared.cuh"

namespace cuops {

constexpr int kTile = 32;  // of a warp, in both directions

// How many of `size` rows of the sums from `first` on belong to a block. What lies between them and the next multiple of kTile is
// zero from the start.
__device__ inline int own(int size, int first) { return min(kKronBlock, size - first); }

__device__ inline KronDivisor divisor_of(int n) { return {static_cast<unsigned>(n), n == 1 ? 0 : 0xffffffffu / n + 1}; }

// One operand, those of its `size` rows that belong to this block, at depths from `start` on.
template <class Acc, bool kWiden>
__device__ void load_operand(const KronBwdParams& p, const void* data, int size, int first, int state, int pitch, long long start) {
  const char* const from = static_cast<const char*>(data);
  const int rows = own(size, first), bytes = size_of(p.dtype);
  const bool copy = p.vectors && !(kWiden && bytes == 2);
  const int width = copy ? 16 / bytes : p.vectors ? 8 : 1;
  const long long first_row = start / p.inner, depth = p.rows * p.inner;
  const int first_column = static_cast<int>(start - first_row * p.inner);
  // Neighbouring threads take neighbours in memory.
  const bool by_size = p.depth_rows || p.inner == 1;
  const int step = p.depth_rows ? width : 1, fast = by_size ? rows / step : p.depth / width;
  const int count = p.depth_rows ? rows * p.depth / width : rows * (p.depth / width);
  const KronDivisor by_fast = divisor_of(fast);
#pragma unroll 2
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int slow_index = divide(i, by_fast), fast_index = i - slow_index * fast;
    const int m = by_size ? fast_index * step : slow_index;
    const int k = by_size ? slow_index : fast_index * width;
    const int over = p.inner >= p.depth ? first_column + k >= p.inner : divide(first_column + k, p.by_inner);
    const long long column = first_column + k - over * p.inner;
    const bool valid = start + k < depth;
    const char* const at = from + (valid ? ((first_row + over) * size + first + m) * p.inner + column : 0) * bytes;
    const int row = p.depth_rows ? k : m, position = p.depth_rows ? m : k;
    char* const chunk = shared_at<char>(state + row * pitch + position / 8 * kChunkUnits<Acc>);
    char* const to = chunk + position % 8 * (kWiden ? static_cast<int>(sizeof(Acc)) : bytes);
    if (copy) {
      copy_or_zero(to, at, valid);
    } else if (p.vectors) {
      *reinterpret_cast<Pack<Acc, 8>*>(chunk) = valid ? load_chunk<Acc>(p.dtype, at) : Pack<Acc, 8>{};
    } else {
      const Pack<Acc, 1> v{valid ? load_element<Acc>(p.dtype, at, 0) : Acc(0)};
      if (kWiden) {
        *reinterpret_cast<Acc*>(to) = v.at[0];
      } else {
        store_chunk(p.dtype, to, 0, v);
      }
    }
  }
}

// Brings both operands near 2^15 and splits them.
__device__ inline void scale_operands(const KronBwdParams& p, int buffer, int outs, int ins) {
  constexpr int kBatch = 4;
  int* const largest = shared_at<int>(p.scales);
  const int stride = static_cast<int>(blockDim.x);
#pragma unroll 1
  for (int pass = 0; pass < 4; ++pass) {
    const bool is_g = pass % 2 == 0;
    const int size = is_g ? outs : ins, pitch = is_g ? p.g_pitch : p.x_pitch;
    const int state = is_g ? p.g_state[buffer] : p.x_state[buffer];
    const int chunks = p.depth_rows ? size / 8 : p.depth / 8, count = (p.depth_rows ? p.depth : size) * chunks;
    const KronDivisor by_chunks = divisor_of(chunks);
    const float scale = pass < 2 ? 1.0f : power_of_two(exponent_to_top(largest[pass % 2]));
    int most = 0;
#pragma unroll 1
    for (int start = threadIdx.x; start < count; start += kBatch * stride) {
      uint4* at[kBatch];
      Pack<float, 8> v[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int i = min(start + b * stride, count - 1), row = divide(i, by_chunks);
        at[b] = shared_at<uint4>(state + row * pitch + 2 * (i - row * chunks));
        v[b] = load_chunk<float>(p.dtype, at[b]);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (pass < 2) {
#pragma unroll
          for (int j = 0; j < 8; ++j) most = max(most, __float_as_int(v[b].at[j]) & 0x7fffffff);
        } else if (start + b * stride < count) {
          split_chunk(v[b], scale, at[b][0], at[b][1]);
        }
      }
    }
    most = __reduce_max_sync(~0u, most);
    if (pass < 2 && threadIdx.x % 32 == 0) atomicMax(largest + pass, most);
    if (pass == 1) __syncthreads();
  }
  __syncthreads();
}

// A warp's part of the tile's products: 32 x 32 sums.
__device__ inline void multiply_scaled(const KronBwdParams& p, int buffer, int m0, int n0, int from, int step,
                                       float (&sum)[2][4][4]) {
  const int lane = threadIdx.x % 32, eighth = lane / 8;
  for (int k = from * 16; k < p.depth; k += step * 16) {
    unsigned a[2][2][4], b[2][2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int m = m0 + i * 16, n = n0 + i * 16;
      unsigned a_at, b_at;
      if (p.depth_rows) {
        a_at = shared_address(
            shared_at<char>(p.g_state[buffer] + (k + eighth / 2 * 8 + lane % 8) * p.g_pitch + (m / 8 + eighth % 2) * 2));
        b_at = shared_address(
            shared_at<char>(p.x_state[buffer] + (k + eighth % 2 * 8 + lane % 8) * p.x_pitch + (n / 8 + eighth / 2) * 2));
        load_matrices_transposed(a[i][0], a_at);
        load_matrices_transposed(b[i][0], b_at);
        if (p.pairs) {
          load_matrices_transposed(a[i][1], a_at + 16);
          load_matrices_transposed(b[i][1], b_at + 16);
        }
      } else {
        a_at = shared_address(shared_at<char>(p.g_state[buffer] + (m + lane % 16) * p.g_pitch + (k / 8 + lane / 16) * 2));
        b_at = shared_address(
            shared_at<char>(p.x_state[buffer] + (n + eighth / 2 * 8 + lane % 8) * p.x_pitch + (k / 8 + eighth % 2) * 2));
        load_matrices(a[i][0], a_at);
        load_matrices(b[i][0], b_at);
        if (p.pairs) {
          load_matrices(a[i][1], a_at + 16);
          load_matrices(b[i][1], b_at + 16);
        }
      }
    }
#pragma unroll
    for (int product = 2; product >= 0; --product) {
      if (product > 0 && !p.pairs) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const auto& right = b[n / 2][product == 1];
          mma<__half>(sum[i][n], a[i][product == 2], right[n % 2 * 2], right[n % 2 * 2 + 1]);
        }
      }
    }
  }
}

__device__ inline void multiply_double(const KronBwdParams& p, int buffer, int m0, int n0, int from, int step,
                                       double (&sum)[2][4][4]) {
  const int lane = threadIdx.x % 32;
  const int g_row = p.depth_rows ? 1 : 2 * p.g_pitch, g_depth = p.depth_rows ? 2 * p.g_pitch : 1;
  const int x_row = p.depth_rows ? 1 : 2 * p.x_pitch, x_depth = p.depth_rows ? 2 * p.x_pitch : 1;
  const double* const g = shared_at<double>(p.g_state[buffer]) + (m0 + lane / 4) * g_row + lane % 4 * g_depth;
  const double* const x = shared_at<double>(p.x_state[buffer]) + (n0 + lane / 4) * x_row + lane % 4 * x_depth;
  for (int k = from * 8; k < p.depth; k += step * 8) {
    double a[2][4], b[4][2];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      a[i / 4][i % 4] = g[(i / 4 * 16 + i % 2 * 8) * g_row + (k + i % 4 / 2 * 4) * g_depth];
      b[i / 2][i % 2] = x[i / 2 * 8 * x_row + (k + i % 2 * 4) * x_depth];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) mma(sum[i][j], a[i], b[j][0], b[j][1]);
    }
  }
}

// Where a warp's sums belong in its 32 x 32 tile: visit(row, column, sum).
template <class Acc, class F>
__device__ void for_each_sum(Acc (&sum)[2][4][4], F&& visit) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 32; ++i)
    visit(i / 16 * 16 + i % 4 / 2 * 8 + lane / 4, i / 4 % 4 * 8 + lane % 4 * 2 + i % 2, sum[i / 16][i / 4 % 4][i % 4]);
}

// Blocks take every n-th tile of the depth, so that every run adds in the same order. Warps share the tile's outputs; where these
// are few, several warps share an output tile, each with its part of the depth.
template <class Acc>
__device__ void kron_linear_bwd(const KronBwdParams& p) {
  constexpr bool kScaled = kSame<Acc, float>, kWiden = !kScaled;
  const int first_out = static_cast<int>(blockIdx.x) % p.out_blocks * kKronBlock;
  const int first_in = static_cast<int>(blockIdx.x) / p.out_blocks % p.in_blocks * kKronBlock;
  const int block = blockIdx.x / (p.out_blocks * p.in_blocks), blocks = gridDim.x / (p.out_blocks * p.in_blocks);
  const int outs = min(kKronBlock, p.out - first_out), ins = min(kKronBlock, p.in - first_in);
  const int out_tiles = (outs + kTile - 1) / kTile, in_tiles = (ins + kTile - 1) / kTile, tiles = out_tiles * in_tiles;
  const int warp = threadIdx.x / 32, parts = blockDim.x / 32 / tiles, part = warp / tiles, tile = warp - part * tiles;
  const int m0 = tile % out_tiles * kTile, n0 = tile / out_tiles * kTile;
  const long long steps = (p.rows * p.inner + p.depth - 1) / p.depth;

  Acc total[2][4][4] = {};
  for (int i = threadIdx.x; i < p.shared_units; i += blockDim.x) shared_at<uint4>(0)[i] = uint4{};
  __syncthreads();
  int buffer = 0;
  bool ready = false;
  for (long long next = block, current = block; current < steps;) {
    if (next < steps) {
      load_operand<Acc, kWiden>(p, p.g, p.out, first_out, p.g_state[buffer], p.g_pitch, next * p.depth);
      load_operand<Acc, kWiden>(p, p.x, p.in, first_in, p.x_state[buffer], p.x_pitch, next * p.depth);
    }
    commit_copies();
    next += blocks;
    if (p.buffers == 2) {
      buffer ^= 1;
      if (!ready) {
        ready = true;
        continue;
      }
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();
    if constexpr (kScaled) scale_operands(p, buffer, outs, ins);
    if (part < parts) {
      if constexpr (kScaled) {
        float sum[2][4][4] = {};
        multiply_scaled(p, buffer, m0, n0, part, parts, sum);
        const int exponent = -exponent_to_top(shared_at<int>(p.scales)[0]) - exponent_to_top(shared_at<int>(p.scales)[1]);
        const float scale = power_of_two(exponent / 2), rest = power_of_two(exponent - exponent / 2);
#pragma unroll
        for (int i = 0; i < 32; ++i) total[i / 16][i / 4 % 4][i % 4] += sum[i / 16][i / 4 % 4][i % 4] * scale * rest;
      } else {
        multiply_double(p, buffer, m0, n0, part, parts, total);
      }
    }
    __syncthreads();
    if (kScaled && threadIdx.x < 2) shared_at<int>(p.scales)[threadIdx.x] = 0;
    current += blocks;
  }
  wait_for_copies<0>();
  __syncthreads();
  Acc* const shared_sums = shared_at<Acc>(p.g_state[0]) + tile * kTile * (kTile + 1);
  for (int turn = 1; turn < parts; ++turn) {
    if (part == turn) for_each_sum(total, [&](int row, int column, Acc& v) { shared_sums[row * (kTile + 1) + column] = v; });
    __syncthreads();
    if (part == 0) for_each_sum(total, [&](int row, int column, Acc& v) { v += shared_sums[row * (kTile + 1) + column]; });
    __syncthreads();
  }
  if (part > 0) return;
  Acc* const partial = static_cast<Acc*>(p.partial) + block * sums_stride(static_cast<long long>(p.out) * p.in);
  for_each_sum(total, [&](int row, int column, Acc& v) {
    const int out = first_out + m0 + row, in = first_in + n0 + column;
    if (out < p.out && in < p.in) partial[static_cast<long long>(out) * p.in + in] = v;
  });
}

}  // namespace cuops

#define KRON_LINEAR_BWD(name, Acc)                                                                            \
  extern "C" __global__ void __launch_bounds__(512, 1) kron_linear_bwd_##name(const cuops::KronBwdParams p) { \
    cuops::wait_in_turn();                                                                                    \
    cuops::kron_linear_bwd<Acc>(p);                                                                           \
  }

// Instances, as kron_linear_bwd.cc asks for them.
KRON_LINEAR_BWD(f64, double)
KRON_LINEAR_BWD(f32, float)
#else
extern "C" __global__ void kron_linear_bwd_nowhere() {}
#endif
