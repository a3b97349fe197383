// The gradient of RMSNorm in two passes over h and dy, and the sums over rows that both ways end with.
#include "device/reduce.cuh"
#include "device/weight.cuh"
#include "rms_norm.h"

namespace cuops {

// Waits for the kernel before this one, where the launch overlaps with it.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Any rows on any GPU, in two kernels, which both read h and dy: for rows too wide for the one above, and GPUs without asynchronous
// copies. A block or a cluster finds out about one row what its gradient needs.
template <class T>
__device__ void rms_norm_bwd_rows(const RmsNormBwdParams& p) {
  using Acc = Accumulator<T>;
  CUOPS_TEAM(Acc, 2, team);
  const long long row = team.index;
  const T* const h = static_cast<const T*>(p.h.data) + row * p.h.stride;
  const T* const dy = static_cast<const T*>(p.dy.data) + row * p.dy.stride;
  const auto& constants = scalars<Acc>(p);
  Acc sums[2], scale = 1;
#pragma unroll 1
  for (int pass = 0;; ++pass) {  // of h^2 and g h, the largest h, of both with h times a power of two
    sums[0] = pass == 1 ? constants.sqrt_eps : Acc(0);
    sums[1] = 0;
#pragma unroll 4
    for (long long i = team.first(); i < p.n; i += team.threads()) {
      const Acc v = convert<Acc>(h[i]) * scale;
      sums[0] = pass == 1 ? Max()(sums[0], abs(v)) : sums[0] + v * v;
      sums[1] += convert<Acc>(dy[i]) * weight_of<T>(p, i) * v;
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

// A thread has one column, and a block every n-th row.
template <class T>
__device__ void rms_norm_bwd_columns(const RmsNormBwdParams& p) {
  using Acc = Accumulator<T>;
  const long long across = (p.n + blockDim.x - 1) / blockDim.x, group = blockIdx.x / across, groups = gridDim.x / across;
  const long long column = (blockIdx.x - group * across) * blockDim.x + threadIdx.x;
  if (column >= p.n) return;
  const Acc weight = weight_of<T>(p, column);
  Acc dweight = 0, dbias = 0;
#pragma unroll 4
  for (long long row = group; row < p.rows; row += groups) {
    const Acc* const found = static_cast<const Acc*>(p.found) + 3 * row;
    const Acc scale = found[0], rstd = found[1], mean = found[2];
    const Acc dy = convert<Acc>(static_cast<const T*>(p.dy.data)[row * p.dy.stride + column]);
    const Acc xhat = convert<Acc>(static_cast<const T*>(p.h.data)[row * p.h.stride + column]) * scale * rstd;
    Acc dx = rstd * scale * (dy * weight - xhat * (rstd * mean));
    if (p.dh.data) dx += convert<Acc>(static_cast<const T*>(p.dh.data)[row * p.dh.stride + column]);
    static_cast<T*>(p.dx.data)[row * p.dx.stride + column] = convert<T>(dx);
    dweight += dy * xhat;
    dbias += dy;
  }
  if (p.dweight) static_cast<Acc*>(p.dweight)[group * p.n + column] = dweight;
  if (p.dbias) static_cast<Acc*>(p.dbias)[group * p.n + column] = dbias;
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

extern "C" __global__ void sum_rows_f32(cuops::SumRowsParams p) { cuops::sum_rows<float>(p); }
extern "C" __global__ void sum_rows_f64(cuops::SumRowsParams p) { cuops::sum_rows<double>(p); }

// Instances, as plan_bwd in rms_norm_bwd.cc asks for them.
#define RMS_NORM_BWD_IN_TWO(name, T)                                                                         \
  extern "C" __global__ void __launch_bounds__(1024) rms_norm_bwd_##name##_rows(cuops::RmsNormBwdParams p) { \
    cuops::rms_norm_bwd_rows<T>(p);                                                                          \
  }                                                                                                          \
  extern "C" __global__ void rms_norm_bwd_##name##_columns(cuops::RmsNormBwdParams p) { cuops::rms_norm_bwd_columns<T>(p); }
RMS_NORM_BWD_IN_TWO(f64, double)
RMS_NORM_BWD_IN_TWO(f32, float)
RMS_NORM_BWD_IN_TWO(f16, __half)
RMS_NORM_BWD_IN_TWO(bf16, __nv_bfloat16)
