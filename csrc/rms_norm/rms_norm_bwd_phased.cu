// The gradient of RMSNorm in two passes over h and dy whose rows start anywhere, those of one number equally far behind a multiple
// of 16 bytes.
#include "device/overlap.cuh"
#include "device/reduce.cuh"
#include "device/row.cuh"
#include "device/tuned.cuh"
#include "parts.cuh"
#include "rms_norm.h"
#include "side_by_side.cuh"
#include "weight.cuh"
#include "windows.cuh"

CUOPS_ONLY_FOR(90)

namespace cuops {

template <class T>
__device__ T* row_of(const Rows& rows, long long row) {
  return static_cast<T*>(rows.data) + row * rows.stride;
}

// As rms_norm_bwd_rows in rms_norm_bwd_any.cu, but long rows that are few have several blocks each, with a part of the row.
template <class T>
__device__ void rms_norm_bwd_rows_phased(const RmsNormBwdParams& p) {
  constexpr int kWidth = kVectorWidth<T>, kBatch = 2;  // vectors of a thread on their way
  CUOPS_TEAM_OF(float, 2, false, team);
  wait_for_previous();
  const unsigned part = blockIdx.x % p.parts, first = part * blockDim.x + threadIdx.x, step = p.parts * blockDim.x;
  // Beyond the last row, threads do what those of the last row do.
  const long long wanted = static_cast<long long>(blockIdx.x / p.parts) * blockDim.y + threadIdx.y, row = min(wanted, p.rows - 1);
  const T *const h = row_of<T>(p.h, row), *const dy = row_of<T>(p.dy, row), *const weights = static_cast<const T*>(p.weight);
  const Division<T, kWidth, true, long long> division(h, p.n);
  const bool beside = weights && !p.weight_wide && reinterpret_cast<unsigned long long>(weights) % 16 == 0;
  const auto& constants = p.float32;
  float sums[2];
  const float scale = sums_of_part(p, team, sums, [&](auto&& add) {
    if (beside) {
#pragma unroll 1
      for (long long begin = first; begin < division.packs; begin += kBatch * step) {
        Fetched<T, kWidth> h_of[kBatch], dy_of[kBatch], low[kBatch], high[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const long long i = begin + k * step, at = division.head + i * kWidth;
          if (i >= division.packs) break;
          h_of[k] = fetch<T, kWidth>(h + at);
          dy_of[k] = fetch<T, kWidth>(dy + at);
          low[k] = fetch<T, kWidth>(weights + i * kWidth);
          high[k] = fetch<T, kWidth>(weights + (division.head > 0 ? i + 1 : i) * kWidth);
        }
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          if (begin + k * step >= division.packs) break;
          const auto wide = convert<float>(h_of[k].pack()), grad = convert<float>(dy_of[k].pack());
          const auto weight = convert<float>(shifted(low[k].pack(), high[k].pack(), division.head * static_cast<int>(sizeof(T))));
#pragma unroll
          for (int j = 0; j < kWidth; ++j) add(wide.at[j], grad.at[j] * (weight.at[j] + constants.weight_offset));
        }
      }
    } else {
#pragma unroll 1
      for (long long i = first; i < division.packs; i += step) {
        const long long at = division.head + i * kWidth;
        const auto h_of = fetch<T, kWidth>(h + at), dy_of = fetch<T, kWidth>(dy + at);
        const auto wide = convert<float>(h_of.pack()), grad = convert<float>(dy_of.pack());
#pragma unroll
        for (int j = 0; j < kWidth; ++j) add(wide.at[j], grad.at[j] * weight_of<T>(p, at + j));
      }
    }
#pragma unroll 1
    for (unsigned e = first; e < division.edges; e += step) {
      const long long i = division.edge(e);
      add(convert<float>(h[i]), convert<float>(dy[i]) * weight_of<T>(p, i));
    }
  });
  if (threadIdx.x != 0 || row != wanted) return;
  float* const found = static_cast<float*>(p.found) + 3 * (row * p.parts + part);
  found[0] = scale;
  found[1] = p.parts > 1 ? sums[0] : rstd_of(sums[0], constants, scale);
  found[2] = p.parts > 1 ? sums[1] : sums[1] * constants.inverse_n;
}

// Of rows in several parts, what the kernel above finds about rows in one.
__device__ void combine_rows(const RmsNormBwdParams& p, float* combined) {
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y / 32 * 32;  // of whole warps
  int lanes = 32;
  while (lanes / 2 >= p.parts || (lanes > 1 && p.rows * lanes > threads)) lanes /= 2;
#pragma unroll 1
  for (int wanted = thread / lanes; thread < threads && wanted / (32 / lanes) * (32 / lanes) < p.rows; wanted += threads / lanes) {
    const int row = min(wanted, static_cast<int>(p.rows) - 1);
    float found[3];
    combine_parts<2>(p, static_cast<const float*>(p.found) + 3 * row * p.parts, lanes, found);
    if (thread % lanes != 0 || row != wanted) continue;
#pragma unroll
    for (int i = 0; i < 3; ++i) combined[3 * row + i] = found[i];
  }
  __syncthreads();
}

// A thread has a vector of columns in rows that start alike. Where that is not at a vector, a block has one vector more than its
// columns fill: those at its ends the neighbours store too, and the same.
template <class T>
__device__ void rms_norm_bwd_columns_phased(const RmsNormBwdParams& p) {
  constexpr int kWidth = kVectorWidth<T>;
  const int own = blockDim.x - (p.n % kWidth != 0);  // vectors
  const long long across = ((p.n + kWidth - 1) / kWidth + own - 1) / own, group = blockIdx.x / across, groups = gridDim.x / across;
  const long long first_row = group * blockDim.y + threadIdx.y, step = groups * blockDim.y;
  const long long vector = (blockIdx.x - group * across) * own + threadIdx.x;
  const auto start = reinterpret_cast<unsigned long long>(row_of<T>(p.h, first_row));
  const int phase = static_cast<int>(start % 16 / sizeof(T));
  const long long at = vector * kWidth - phase, end = min((vector - threadIdx.x + own) * kWidth, p.n);
  const bool exists = at < end;
  const int from = static_cast<int>(max(-at, 0ll)), to = static_cast<int>(min(p.n - at, static_cast<long long>(kWidth)));
  const bool whole = from == 0 && to == kWidth;
  auto load = [&](const Rows& rows, long long row) {
    const T* const elements = row_of<T>(rows, row) + at;
    return whole ? __ldg(reinterpret_cast<const uint4*>(elements)) : gather(elements, from, to);
  };
  auto wide = [](const uint4& v) { return convert<float>(*reinterpret_cast<const Vector<T>*>(&v)); };
  Pack<float, kWidth> weight = {}, dweight = {}, dbias = {};
  const T* const weights = static_cast<const T*>(p.weight) + at;
  const bool in_vector = exists && whole && p.weight && !p.weight_wide && reinterpret_cast<unsigned long long>(weights) % 16 == 0;
  uint4 weight_vector = {};
  if (in_vector) weight_vector = __ldg(reinterpret_cast<const uint4*>(weights));
  // The next row is on its way while one is worked on, and the first while the kernel before still runs, which writes none.
  uint4 next_h = {}, next_dy = {};
  auto fetch = [&](long long row) {
    if (!exists || row >= p.rows) return;
    next_h = load(p.h, row);
    next_dy = load(p.dy, row);
  };
  fetch(first_row);
  if (in_vector) {
    weight = wide(weight_vector);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) weight.at[j] += p.float32.weight_offset;
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (j >= from && j < to) weight.at[j] = weight_of<T>(p, at + j);
    }
  }
  wait_for_previous();
  __shared__ float combined[3 * kMostRowsInParts];
  if (p.parts > 1) combine_rows(p, combined);
  const float* const rows_found = p.parts > 1 ? combined : static_cast<const float*>(p.found);
#pragma unroll 1
  for (long long row = first_row; exists && row < p.rows; row += step) {
    const uint4 this_h = next_h, this_dy = next_dy;
    fetch(row + step);
    const float found[] = {rows_found[3 * row], rows_found[3 * row + 1], rows_found[3 * row + 2]};
    auto dx = gradient_of(found, wide(this_h), wide(this_dy), weight, dweight, dbias);
    if (p.dh.data) {
      const auto dh = wide(load(p.dh, row));
#pragma unroll
      for (int j = 0; j < kWidth; ++j) dx.at[j] += dh.at[j];
    }
    T* const elements = row_of<T>(p.dx, row) + at;
    const auto rounded = convert<T>(dx);
    if (whole) {
      __stwb(reinterpret_cast<uint4*>(elements), *reinterpret_cast<const uint4*>(&rounded));  // compilers would take it apart
    } else {
      scatter(elements, *reinterpret_cast<const uint4*>(&rounded), from, to);
    }
  }
  add_up_side_by_side<true>(p, dweight, dbias, vector, phase, own, group);
}

}  // namespace cuops

// Instances, as rms_norm_bwd_plan.cc asks for them.
#define RMS_NORM_BWD_PHASED(name, T)                                                                                  \
  extern "C" __global__ void __launch_bounds__(512, 2) rms_norm_bwd_##name##_rows_phased(cuops::RmsNormBwdParams p) { \
    cuops::rms_norm_bwd_rows_phased<T>(p);                                                                            \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(256) rms_norm_bwd_##name##_columns_phased(cuops::RmsNormBwdParams p) { \
    cuops::rms_norm_bwd_columns_phased<T>(p);                                                                         \
  }
RMS_NORM_BWD_PHASED(f32, float)
RMS_NORM_BWD_PHASED(f16, __half)
RMS_NORM_BWD_PHASED(bf16, __nv_bfloat16)
