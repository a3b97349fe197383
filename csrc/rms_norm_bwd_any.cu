// The gradient of RMSNorm in two passes over h and dy, and the sums over rows that both ways end with.
#include "device/overlap.cuh"
#include "device/reduce.cuh"
#include "device/weight.cuh"
#include "rms_norm.h"

namespace cuops {

// The weight of a pack of columns, as weight_of has it of one.
template <class T, int kWidth>
__device__ Pack<Accumulator<T>, kWidth> weights_of(const RmsNormBwdParams& p, long long at) {
  using Acc = Accumulator<T>;
  Pack<Acc, kWidth> weight;
  if (kWidth == 1 || !p.weight || p.weight_wide) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) weight.at[j] = weight_of<T>(p, at * kWidth + j);
  } else {
    weight = convert<Acc>(static_cast<const Pack<T, kWidth>*>(p.weight)[at]);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) weight.at[j] += scalars<Acc>(p).weight_offset;
  }
  return weight;
}

template <int kWidth, class T>
__device__ Pack<T, kWidth>* packs_of(const Rows& rows, long long row) {
  return reinterpret_cast<Pack<T, kWidth>*>(static_cast<T*>(rows.data) + row * rows.stride);
}

// Any rows on any GPU, in two kernels, which both read h and dy: for rows too wide for the kernel in one pass, and GPUs without
// tuned kernels. Packs are vectors where all is aligned, else single elements. A block finds out about one row what its gradient
// needs.
template <class T, int kWidth>
__device__ void rms_norm_bwd_rows(const RmsNormBwdParams& p) {
  using Acc = Accumulator<T>;
  CUOPS_TEAM(Acc, 2, team);
  wait_for_previous();
  const long long row = team.index, packs = p.n / kWidth;
  const auto *const h = packs_of<kWidth, T>(p.h, row), *const dy = packs_of<kWidth, T>(p.dy, row);
  const auto& constants = scalars<Acc>(p);
  Acc sums[2], scale = 1;
#pragma unroll 1
  for (int pass = 0;; ++pass) {  // of h^2 and g h, the largest h, of both with h times a power of two
    sums[0] = pass == 1 ? constants.sqrt_eps : Acc(0);
    sums[1] = 0;
#pragma unroll(kWidth == 1 ? 4 : 2)
    for (long long i = team.first(); i < packs; i += team.threads()) {
      const auto wide = convert<Acc>(h[i]), grad = convert<Acc>(dy[i]), weight = weights_of<T, kWidth>(p, i);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const Acc v = wide.at[j] * scale;
        sums[0] = pass == 1 ? Max()(sums[0], abs(v)) : sums[0] + v * v;
        sums[1] += grad.at[j] * weight.at[j] * v;
      }
    }
    team.reduce(sums, [&](Acc a, Acc b) { return pass == 1 ? Max()(a, b) : a + b; });
    if (pass == 2) break;
    if (pass == 1) {
      scale = isinf(sums[0]) ? Acc(1) : power_of_two_to_one(sums[0]);
    } else if (sums[0] <= Range<Acc>::kLargest && mean_plus_eps(sums[0], constants, constants.eps) >= Range<Acc>::kSmallest) {
      break;
    }
  }
  if (team.first() != 0) return;
  const Acc rstd = rstd_of(sums[0], constants, scale);
  Acc* const found = static_cast<Acc*>(p.found) + 3 * row;
  found[0] = scale;
  found[1] = rstd;
  found[2] = sums[1] * constants.inverse_n;
}

// A thread has one pack of columns, and a block every n-th row.
template <class T, int kWidth>
__device__ void rms_norm_bwd_columns(const RmsNormBwdParams& p) {
  using Acc = Accumulator<T>;
  const long long packs = p.n / kWidth, across = (packs + blockDim.x - 1) / blockDim.x;
  const long long group = blockIdx.x / across, groups = gridDim.x / across;
  const long long at = (blockIdx.x - group * across) * blockDim.x + threadIdx.x;
  wait_for_previous();
  if (at >= packs) return;
  const auto weight = weights_of<T, kWidth>(p, at);
  Pack<Acc, kWidth> dweight = {}, dbias = {};
#pragma unroll(kWidth == 1 ? 4 : 2)
  for (long long row = group; row < p.rows; row += groups) {
    const Acc* const found = static_cast<const Acc*>(p.found) + 3 * row;
    const Acc scale = found[0], rstd = found[1], mean = found[2];
    const auto h = convert<Acc>(packs_of<kWidth, T>(p.h, row)[at]), dy = convert<Acc>(packs_of<kWidth, T>(p.dy, row)[at]);
    Pack<Acc, kWidth> dx;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const Acc xhat = h.at[j] * scale * rstd;
      dx.at[j] = rstd * scale * (dy.at[j] * weight.at[j] - xhat * (rstd * mean));
      dweight.at[j] += dy.at[j] * xhat;
      dbias.at[j] += dy.at[j];
    }
    if (p.dh.data) {
      const auto dh = convert<Acc>(packs_of<kWidth, T>(p.dh, row)[at]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) dx.at[j] += dh.at[j];
    }
    packs_of<kWidth, T>(p.dx, row)[at] = convert<T>(dx);
  }
  if (p.dweight) static_cast<Pack<Acc, kWidth>*>(p.dweight)[group * packs + at] = dweight;
  if (p.dbias) static_cast<Pack<Acc, kWidth>*>(p.dbias)[group * packs + at] = dbias;
}

// Adds up the columns of a matrix of partial sums: blocks of 32 columns by blockDim.y rows at a time.
template <class Acc>
__device__ void sum_rows(const SumRowsParams& p) {
  __shared__ Acc shared[32][33];
  const long long column = static_cast<long long>(blockIdx.x) * 32 + threadIdx.x;
  const Acc* const partial = static_cast<const Acc*>(p.partial) + column;
  wait_for_previous();
  Acc sum = 0;
  if (column < p.n) {
#pragma unroll 8
    for (long long row = threadIdx.y; row < p.rows; row += blockDim.y) sum += partial[row * p.n];
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || column >= p.n) return;
  for (unsigned i = 1; i < blockDim.y; ++i) sum += shared[i][threadIdx.x];
  switch (p.dtype) {
    case kFloat64: static_cast<double*>(p.sum)[column] = sum; return;
    case kFloat32: static_cast<float*>(p.sum)[column] = sum; return;
    case kFloat16: static_cast<__half*>(p.sum)[column] = convert<__half>(static_cast<float>(sum)); return;
    case kBFloat16: static_cast<__nv_bfloat16*>(p.sum)[column] = convert<__nv_bfloat16>(static_cast<float>(sum)); return;
  }
}

}  // namespace cuops

extern "C" __global__ void rms_norm_sum_rows_f32(cuops::SumRowsParams p) { cuops::sum_rows<float>(p); }
extern "C" __global__ void rms_norm_sum_rows_f64(cuops::SumRowsParams p) { cuops::sum_rows<double>(p); }

// Instances, as plan_bwd in rms_norm_bwd.cc asks for them.
#define RMS_NORM_BWD_IN_TWO(name, T, suffix, kWidth)                                                                   \
  extern "C" __global__ void __launch_bounds__(1024) rms_norm_bwd_##name##_rows##suffix(cuops::RmsNormBwdParams p) {   \
    cuops::rms_norm_bwd_rows<T, kWidth>(p);                                                                            \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256) rms_norm_bwd_##name##_columns##suffix(cuops::RmsNormBwdParams p) { \
    cuops::rms_norm_bwd_columns<T, kWidth>(p);                                                                         \
  }
#define RMS_NORM_BWD_IN_TWO_OF(name, T) \
  RMS_NORM_BWD_IN_TWO(name, T, _any, 1) \
  RMS_NORM_BWD_IN_TWO(name, T, _vectors, cuops::kVectorWidth<T>)
RMS_NORM_BWD_IN_TWO(f64, double, _any, 1)
RMS_NORM_BWD_IN_TWO_OF(f32, float)
RMS_NORM_BWD_IN_TWO_OF(f16, __half)
RMS_NORM_BWD_IN_TWO_OF(bf16, __nv_bfloat16)
