// The factors of kron_linear in shared memory, merged, scaled and split for the tensor cores.
#pragma once

#include "kron_tile.cuh"

namespace cuops {

// The factors that are merged, one warp a factor, as they are.
template <class Acc>
__device__ void load_raw_factors(const KronFwdParams& p) {
#pragma unroll 1
  for (int i = threadIdx.x / 32; i < p.factor_count; i += blockDim.x / 32) {
    const KronFactor& f = p.factors[i];
    if (f.raw < 0) continue;
#pragma unroll 1
    for (int j = threadIdx.x % 32; j < f.out * f.in; j += 32) {
      const int m = divide(j, f.by_in), k = j - m * f.in;
      shared_at<Acc>(f.raw)[j] = load_element<Acc>(p.dtype, f.data, m * f.row_stride + k * f.column_stride);
    }
  }
}

// The Kronecker product of a step's factors.
template <class Acc>
__device__ void merge_factors(const KronFwdParams& p, const KronStep& step, int first_row, int rows) {
  const int columns = (step.weight_pitch - 1) / step.weight_units * 8;
#pragma unroll 1
  for (int i = threadIdx.x; i < step.weight_rows * columns; i += blockDim.x) {
    const int m = divide(i, step.by_columns), k = i - m * columns;
    int row = m + first_row, column = k;
    Acc v = m < rows && k < step.in;
#pragma unroll 1
    for (int j = step.first + step.count - 1; v != Acc(0) && j >= step.first; --j) {
      const KronFactor& f = p.factors[j];
      const int outer_row = divide(row, f.by_out), outer_column = divide(column, f.by_in);
      v *= shared_at<Acc>(f.raw)[(row - outer_row * f.out) * f.in + column - outer_column * f.in];
      row = outer_row;
      column = outer_column;
    }
    shared_at<Acc>(step.weight + m * step.weight_pitch)[k] = v;
  }
}

// A factor as it is, zeros around it. Where 16 bits stay 16, it takes the first half of each chunk.
template <class Acc, bool kWiden>
__device__ void load_factor(const KronFwdParams& p, const KronStep& step, int first_row, int rows) {
  const KronFactor& f = p.factors[step.first];
  const int columns = (step.weight_pitch - 1) / step.weight_units * 8, size = size_of(p.dtype);
  const char* const data = static_cast<const char*>(f.data);
  if (f.vectors && !(kWiden && size == 2)) {
    const int width = 16 / size, pieces = columns / width, units = size == 2 ? step.weight_units : 1;
#pragma unroll 1
    for (int i = threadIdx.x; i < step.weight_rows * pieces; i += blockDim.x) {
      const int m = divide(i, step.by_pieces), piece = i - m * pieces;
      const bool valid = m < rows && piece * width < step.in;
      const char* const from = data + (valid ? (m + first_row) * f.row_stride + piece * width : 0) * size;
      copy_or_zero(shared_at<char>(step.weight + m * step.weight_pitch + piece * units), from, valid);
    }
    return;
  }
  // Neighbouring threads take neighbours in memory, and each has several loads in flight.
  constexpr int kBatch = 8;
  const bool by_column = f.column_stride > f.row_stride;
  const int inner = by_column ? step.weight_rows : columns, count = step.weight_rows * columns;
#pragma unroll 1
  for (int start = threadIdx.x; start < count; start += kBatch * blockDim.x) {
    Acc v[kBatch];
    char* to[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = min(start + j * static_cast<int>(blockDim.x), count - 1), a = i / inner, b = i - a * inner;
      const int m = by_column ? b : a, k = by_column ? a : b;
      v[j] =
          m < rows && k < step.in ? load_element<Acc>(p.dtype, data, (m + first_row) * f.row_stride + k * f.column_stride) : Acc(0);
      const int at = size == 2 && !kWiden ? k / 8 * step.weight_units * 16 + k % 8 * 2 : k * static_cast<int>(sizeof(Acc));
      to[j] = shared_at<char>(step.weight + m * step.weight_pitch) + at;
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (kWiden) {
        *reinterpret_cast<Acc*>(to[j]) = v[j];
      } else {
        store_chunk(p.dtype, to[j], 0, Pack<Acc, 1>{v[j]});
      }
    }
  }
}

constexpr int kSumExponent = 1024;  // what the exponent of a sum is noted with, so that 0 is none

// Brings each row of a weight near 2^15, splits it, and notes what undoes it; also the exponent of the largest sum of a row, which
// bounds what the step can do to a number. A lane has a chunk, a part of a warp a row.
__device__ inline void split_weight(const KronFwdParams& p, const KronStep& step, int index) {
  const int chunks = (step.weight_pitch - 1) / step.weight_units;
  int lanes = 2;
  while (lanes < chunks) lanes *= 2;
  const int lane = threadIdx.x % lanes, each = blockDim.x / lanes;
#pragma unroll 1
  for (int first = 0; first < step.weight_rows; first += each) {
    const int m = first + threadIdx.x / lanes;
    const bool active = m < step.weight_rows && lane < chunks;
    char* const chunk = shared_at<char>(step.weight + (active ? m * step.weight_pitch + lane * step.weight_units : 0));
    const auto v = active ? load_chunk<float>(step.count > 1 ? kFloat32 : p.dtype, chunk) : Pack<float, 8>{};
    float largest = 0, sum = 0;  // sum: of the row near 2^15, which neither overflows nor vanishes
#pragma unroll
    for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fabsf(v.at[j]));
    for (int distance = lanes / 2; distance > 0; distance /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
    const int exponent = exponent_to_top(__float_as_int(largest));
    const float scale = power_of_two(exponent);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += fabsf(v.at[j]) * scale;
    for (int distance = lanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    uint4 high, low;
    split_chunk(v, scale, high, low);
    if (!active) continue;
    if (lane == 0) {
      shared_at<int>(step.row_scale)[m] = exponent;
      if (0 < sum && sum <= 3.4e38f)
        atomicMax(shared_at<int>(p.scales) + index, (__float_as_int(sum) >> 23) - 127 - exponent + kSumExponent);
    }
    reinterpret_cast<uint4*>(chunk)[0] = high;
    if (step.weight_units == 2) reinterpret_cast<uint4*>(chunk)[1] = low;
  }
}

// How many powers of two the results of a step are scaled down by, so that none exceeds 2^15.
__device__ inline int step_exponent(const KronFwdParams& p, int index) {
  const int exponent = shared_at<int>(p.scales)[index];
  return exponent == 0 ? 0 : exponent - kSumExponent + 1;
}

// Which rows of a step's weight this block has.
struct WeightRows {
  int first, count;
  __device__ WeightRows(const KronFwdParams& p, const KronStep& step, int slice)
      : first(step.axis == 0 ? slice * step.out : 0), count(min(step.out, (step.axis == 0 ? p.sliced_out : step.out) - first)) {}
};

// Sets the factors on their way.
template <class Acc, KronArithmetic kArithmetic>
__device__ void load_raw_weights(const KronFwdParams& p, int slice) {
#pragma unroll 1
  for (int i = 0; i < p.steps; ++i) {
    const KronStep& step = p.step[i];
    const WeightRows rows(p, step, slice);
    if (step.count == 1) load_factor<Acc, kArithmetic == kKronPlain>(p, step, rows.first, rows.count);
  }
  load_raw_factors<Acc>(p);
  commit_copies();
}

// Waits for them and makes of them what the steps need, for threads that meet at a barrier after it.
template <class Acc, KronArithmetic kArithmetic>
__device__ void finish_weights(const KronFwdParams& p, int slice) {
  wait_for_copies<1>();  // the tile's may be on their way
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < p.steps; ++i) {
    const KronStep& step = p.step[i];
    const WeightRows rows(p, step, slice);
    if (step.count > 1) merge_factors<Acc>(p, step, rows.first, rows.count);
  }
  __syncthreads();
  if constexpr (kArithmetic == kKronScaled) {
#pragma unroll 1
    for (int i = 0; i < p.steps; ++i) split_weight(p, p.step[i], i);
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < p.steps; ++i) {
      const KronStep& step = p.step[i];
      for (int m = threadIdx.x; m < step.weight_rows; m += blockDim.x) {
        shared_at<float>(step.row_scale)[m] = power_of_two(-shared_at<int>(step.row_scale)[m] - step_exponent(p, i));
      }
    }
  }
}

// Brings each sample near 2^15, and splits it. Notes the power of two that undoes all scales. `lanes` threads have a sample, of
// which there may be several a warp, or a sample several of `parts` such groups.
__device__ inline void scale_tile(const KronFwdParams& p, int state) {
  int *const exponents = shared_at<int>(p.scales) + kKronSteps, *const largest = exponents + p.samples;
  const unsigned short* const table = shared_at<unsigned short>(p.in_table);
  const int lanes = p.scale_lanes, groups = blockDim.x / lanes, parts = max(1, groups / p.samples);
  const int group = threadIdx.x / lanes, count = p.in_rows * p.in_chunks;
  const int rounds = (p.samples * parts + groups - 1) / groups, step = parts * lanes;
  constexpr int kBatch = 4;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      const int task = round * groups + group, sample = min(task / parts, p.samples - 1);
      const float scale = pass == 0 ? 1.0f : power_of_two(exponent_to_top(largest[sample]));
      const int end = task < p.samples * parts ? count : 0;
      int most = 0;
#pragma unroll 1
      for (int start = (task - sample * parts) * lanes + static_cast<int>(threadIdx.x) % lanes; start < end;
           start += kBatch * step) {
        uint4* at[kBatch];
        Pack<float, 8> v[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const int i = start + (start + b * step < count ? b * step : 0), row = divide(i, p.by_in_chunks);
          at[b] = shared_at<uint4>(state + table[sample * p.in_rows + row] + 2 * (i - row * p.in_chunks));
          v[b] = load_chunk<float>(p.dtype, at[b]);
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          if (pass == 0) {
#pragma unroll
            for (int j = 0; j < 8; ++j) most = max(most, __float_as_int(v[b].at[j]) & 0x7fffffff);
          } else if (start + b * step < count) {
            split_chunk(v[b], scale, at[b][0], at[b][1]);
          }
        }
      }
      if (pass == 1) continue;
      for (int distance = lanes / 2; distance > 0; distance /= 2) most = max(most, __shfl_xor_sync(~0u, most, distance));
      if (end > 0 && threadIdx.x % lanes == 0) atomicMax(largest + sample, most);
    }
    __syncthreads();
  }
  for (int sample = threadIdx.x; sample < p.samples; sample += blockDim.x) {
    int exponent = -exponent_to_top(largest[sample]);
    for (int i = 0; i < p.steps; ++i) exponent += step_exponent(p, i);
    exponents[sample] = exponent;
    largest[sample] = 0;
  }
}

}  // namespace cuops
