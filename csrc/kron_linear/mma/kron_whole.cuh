// What kron_linear_whole.cu works with: the factors and the tile in shared memory, as float16 scaled by powers of two: the sum of
// two numbers, or for TF32 one. A tile of 16 bits is taken as it is.
#pragma once

#include "kron_linear/kron_magnitudes.cuh"
#include "kron_whole.h"

namespace cuops {

// acc += a b. Tensor cores truncate sums: where float32 is meant, only those of 16 products are formed there.
template <bool kPairs>
__device__ void multiply(float (&acc)[4], const unsigned (&a)[4], const unsigned (&a_low)[4], const unsigned* b,
                         const unsigned* b_low) {
  if constexpr (kPairs) {
    float sum[4] = {};
    mma<__half>(sum, a_low, b[0], b[1]);
    mma<__half>(sum, a, b_low[0], b_low[1]);
    mma<__half>(sum, a, b[0], b[1]);
#pragma unroll
    for (int j = 0; j < 4; ++j) acc[j] += sum[j];
  } else {
    mma<__half>(acc, a, b[0], b[1]);
  }
}

// 8 neighbours as they came, of float32 or 16 bits. Of every 8 lanes, 4 may take the second half of float32 first, so that they do
// not meet in the banks of shared memory.
struct Chunk {
  float at[8];

  __device__ Chunk(DType dtype, const uint4* from, bool swap) {
    if (dtype == kFloat32) {
      const float4 a = *reinterpret_cast<const float4*>(from + swap), b = *reinterpret_cast<const float4*>(from + !swap);
      const float4 u = swap ? b : a, v = swap ? a : b;
      at[0] = u.x, at[1] = u.y, at[2] = u.z, at[3] = u.w, at[4] = v.x, at[5] = v.y, at[6] = v.z, at[7] = v.w;
    } else {
      const auto v = load_chunk<float>(dtype, from);
#pragma unroll
      for (int e = 0; e < 8; ++e) at[e] = v.at[e];
    }
  }
  __device__ float magnitude() const {
    float most = 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) most = fmaxf(most, fabsf(at[e]));
    return most;
  }
};

// The functions below are calls, so that all sizes share their code. They copy what they need of the parameters, which are far away
// for them.

__device__ inline int* magnitudes_of(const KronWholeParams& p) { return shared_at<int>(p.scales); }

// The factors as `copy_factors` left them.
__device__ inline const KronFactor* factors_of(const KronWholeParams& p) { return shared_at<KronFactor>(p.factors_at); }

// Only the kernel itself has its parameters at hand.
__device__ inline void copy_factors(const KronWholeParams& p) {
  const int* const from = reinterpret_cast<const int*>(p.factors);
  for (int i = threadIdx.x; i < p.factor_count * static_cast<int>(sizeof(KronFactor) / 4); i += blockDim.x)
    shared_at<int>(p.factors_at)[i] = from[i];
}

// The factors of a step, multiplied, zeros around them. kPermuted: of 16 rows, those that give a lane four neighbouring results are
// where its two matrices have their rows. bfloat: as bfloat16, for a tile of it.
template <bool kPairs>
__device__ __noinline__ void prepare_weight(const KronWholeParams& p, int which, bool permuted, bool bfloat) {
  const KronWholeStep s = p.step[which];
  const DType dtype = p.dtype;
  const float top = power_of_two((bfloat ? kBFloatWeightTop : kWeightTop) - s.count);
  const int* const magnitudes = magnitudes_of(p) + s.first;
  unsigned short* const to = shared_at<unsigned short>(s.weight);
  unsigned short* const to_low = shared_at<unsigned short>(s.weight_low);
  const bool lows = s.weight_low != s.weight;
  auto split_as = [bfloat](float a, float b, unsigned& high, unsigned& low) {
    if (!kPairs && bfloat) {
      split<__nv_bfloat16>(a, b, high, low);
    } else {
      split<__half>(a, b, high, low);
    }
  };
  auto row_at = [&](int m) { return (permuted ? (m & ~15) | (m & 2) << 2 | (m & 12) >> 1 | (m & 1) : m) * s.pitch * 8; };
  const KronFactor* const factors = factors_of(p) + s.first;
  const KronFactor f = factors[0];
  if (s.count == 1 && is_dense(f) && s.rows == s.out && s.columns == s.in) {
    const bool across = f.column_stride == 1;
    const float scale = top * 0x1p-14f * power_of_two(14 - exponent_of(magnitudes[0]));
    const int size = size_of(dtype);
    const KronDivisor by = across ? f.by_in : f.by_out;
#pragma unroll 2
    for (int i = threadIdx.x; i < s.rows * s.columns / 8; i += blockDim.x) {
      const Chunk v(dtype, reinterpret_cast<const uint4*>(static_cast<const char*>(f.data) + i * 8 * size), false);
      const int outer = divide(i * 8, by), inner = i * 8 - outer * static_cast<int>(by.divisor);
      unsigned high[4], low[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) split_as(v.at[2 * e] * scale, v.at[2 * e + 1] * scale, high[e], low[e]);
      if (across) {
        const int at = row_at(outer) + inner;
        *reinterpret_cast<uint4*>(to + at) = make_uint4(high[0], high[1], high[2], high[3]);
        if (lows) *reinterpret_cast<uint4*>(to_low + at) = make_uint4(low[0], low[1], low[2], low[3]);
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const int at = row_at(inner + e) + outer;
          to[at] = static_cast<unsigned short>(high[e / 2] >> e % 2 * 16);
          if (lows) to_low[at] = static_cast<unsigned short>(low[e / 2] >> e % 2 * 16);
        }
      }
    }
    return;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < s.rows * s.columns; i += blockDim.x) {
    const int m = divide(i, s.by_columns), k = i - m * s.columns;
    float v = m < s.out && k < s.in ? top : 0;
    if (v != 0) {
      int row = m, column = k;
#pragma unroll 1
      for (int j = s.count - 1; j >= 0; --j) {
        const KronFactor& w = factors[j];
        const KronDivisor by_out = w.by_out, by_in = w.by_in;
        const int outer_row = divide(row, by_out), outer_column = divide(column, by_in);
        v *= 0x1p-14f * power_of_two(14 - exponent_of(magnitudes[j])) *
             load_element<float>(dtype, w.data,
                                 (row - outer_row * static_cast<int>(by_out.divisor)) * w.row_stride +
                                     (column - outer_column * static_cast<int>(by_in.divisor)) * w.column_stride);
        row = outer_row;
        column = outer_column;
      }
    }
    unsigned high, low;
    split_as(v, 0.0f, high, low);
    to[row_at(m) + k] = static_cast<unsigned short>(high);
    if (lows) to_low[row_at(m) + k] = static_cast<unsigned short>(low);
  }
}

// Where the chunks of a tile are.
struct TileLayout {
  int pitch, gap, units, row_log;
  KronDivisor by_in_rows;

  __device__ explicit TileLayout(const KronWholeParams& p)
      : pitch(p.pitch), gap(p.slice_gap), units(p.units), row_log(p.columns_log - 3), by_in_rows(p.by_in_rows) {}
  __device__ int operator()(int chunk) const {
    const int row = chunk >> row_log;
    return row * pitch + (gap ? divide(row, by_in_rows) : 0) + (chunk - (row << row_log)) * units;
  }
};

// Starts to copy a tile as it is.
__device__ __noinline__ void load_tile(const KronWholeParams& p, const Rows& from_rows, int state, long long tile) {
  const Rows rows = from_rows;
  const TileLayout at(p);
  const int size = size_of(p.dtype), pieces = p.sample_pieces, count = p.samples * pieces, piece_log = size == 4;
  const KronDivisor by_pieces = p.by_sample_pieces;
  const bool linear = p.x_linear;
  const long long first = tile * p.samples, left = (p.rows - first) * pieces;
  const char* const x = static_cast<const char*>(rows.data);
  const char* const start = x + offset_of(rows, first) * size;
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const bool valid = i < left;
    const char* from = start + i * 16;
    if (!linear) {
      const int sample = divide(i, by_pieces);
      from = x + offset_of(rows, valid ? first + sample : 0) * size + (i - sample * pieces) * 16;
    }
    copy_or_zero(shared_at<char>(state + at(i >> piece_log) + (i & piece_log)), valid ? from : x, valid);
  }
}

// The largest magnitude of each sample of a tile of 16 bits, whose halves are compared as integers.
__device__ __noinline__ void find_tile_magnitudes(const KronWholeParams& p, int state, int* magnitudes) {
  const TileLayout at(p);
  const int samples = p.samples, count = samples * p.sample_chunks;
  const KronDivisor by_chunks = p.by_sample_chunks;
  const bool bfloat = p.dtype == kBFloat16;
  unsigned first = 0, second = 0;
  auto add = [&](int sample) {
    const unsigned most = max(first & 0x7fff0000u, second >> 1 & 0x7fff0000u);
    const float value = bfloat ? __uint_as_float(most) : __half2float(__ushort_as_half(static_cast<unsigned short>(most >> 16)));
    const int bits = __reduce_max_sync(~0u, __float_as_int(value));
    if (threadIdx.x % 32 == 0) atomicMax(magnitudes + sample, bits);
    first = second = 0;
  };
#pragma unroll 2
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const uint4 v = *shared_at<uint4>(state + at(i));
    first = max(max(max(first, v.x & 0x7fffffffu), max(v.y & 0x7fffffffu, v.z & 0x7fffffffu)), v.w & 0x7fffffffu);
    second = max(max(max(second, v.x << 17), max(v.y << 17, v.z << 17)), v.w << 17);
    if (samples > 1) add(divide(i, by_chunks));
  }
  if (samples == 1) add(0);
}

// A tile becomes float16 in place, scaled by powers of two so that the largest of each sample is near 2^14.
template <bool kPairs>
__device__ __noinline__ void convert_tile(const KronWholeParams& p, int state, int* magnitudes) {
  const TileLayout at(p);
  const int samples = p.samples, count = samples * p.sample_chunks;
  const KronDivisor by_chunks = p.by_sample_chunks;
  const DType dtype = kPairs ? kFloat32 : p.dtype;
  const bool swap = threadIdx.x & 4;
  int most = 0;
#pragma unroll 2
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    most = max(most, __float_as_int(Chunk(dtype, shared_at<uint4>(state + at(i)), swap).magnitude()));
    if (samples > 1) {
      most = __reduce_max_sync(~0u, most);
      if (threadIdx.x % 32 == 0) atomicMax(magnitudes + divide(i, by_chunks), most);
      most = 0;
    }
  }
  if (samples == 1) {
    most = __reduce_max_sync(~0u, most);
    if (threadIdx.x % 32 == 0) atomicMax(magnitudes, most);
  }
  __syncthreads();
#pragma unroll 2
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    uint4* const to = shared_at<uint4>(state + at(i));
    const Chunk v(dtype, to, swap);
    const float scale = power_of_two(14 - exponent_of(magnitudes[samples > 1 ? divide(i, by_chunks) : 0]));
    unsigned high[4], low[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) split<__half>(v.at[2 * e] * scale, v.at[2 * e + 1] * scale, high[e], low[e]);
    const uint4 a = make_uint4(high[0], high[1], high[2], high[3]), b = make_uint4(low[0], low[1], low[2], low[3]);
    if constexpr (kPairs) {
      to[swap] = swap ? b : a;
      to[!swap] = swap ? a : b;
    } else {
      *to = a;
    }
  }
}

}  // namespace cuops
