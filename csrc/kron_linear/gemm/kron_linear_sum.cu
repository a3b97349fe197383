// Sums of matrices: of what a batched GEMM has made of each row.
#include "device/overlap.cuh"
#include "device/row_sums.cuh"
#include "kron_sum.h"

namespace cuops {

// Threads have kWidth neighbouring columns each, and every `shares`th row.
template <class T, int kWidth>
__device__ void kron_sum(const KronSumParams& p) {
  using Acc = Accumulator<T>;
  constexpr int kAtOnce = 8;
  __shared__ Pack<Acc, kWidth> found[kSumThreads];
  const int share = threadIdx.x >> p.log_columns, shares = blockDim.x >> p.log_columns, columns = 1 << p.log_columns;
  const unsigned part = blockIdx.x / p.column_blocks, block = blockIdx.x - part * p.column_blocks;
  const long long column = ((1LL * block << p.log_columns) + threadIdx.x % columns) * kWidth, step = shares * p.n;
  const long long first = part * p.rows_of_part + share, last = min((part + 1) * p.rows_of_part, p.rows);
  const T* x = static_cast<const T*>(p.x) + first * p.n + column;
  Pack<Acc, kWidth> sum = {};
  auto add = [&](const Pack<Acc, kWidth>& more) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum.at[j] += more.at[j];
  };
  wait_for_previous();

  for (long long row = first; row < last && column < p.n; row += kAtOnce * shares, x += kAtOnce * step) {
    Fetched<T, kWidth> v[kAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (row + i * shares < last) v[i] = fetch<T, kWidth>(x + i * step);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) add(convert<Acc>(v[i].pack()));
  }
  found[threadIdx.x] = sum;
#pragma unroll 1
  for (int half = blockDim.x / 2; half >= columns; half /= 2) {
    __syncthreads();
    if (threadIdx.x >= half) continue;
    add(found[threadIdx.x + half]);
    found[threadIdx.x] = sum;
  }
  if (share > 0 || column >= p.n) return;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) store_result(p.to, p.y, part * p.n + column + j, sum.at[j]);
}

}  // namespace cuops

#define KRON_SUM(name, T, width)                                                                                   \
  extern "C" __global__ void __launch_bounds__(cuops::kSumThreads) kron_sum_##name(const cuops::KronSumParams p) { \
    cuops::kron_sum<T, width>(p);                                                                                  \
  }
KRON_SUM(f64, double, 1)
KRON_SUM(f32, float, 1)
KRON_SUM(f16, __half, 1)
KRON_SUM(bf16, __nv_bfloat16, 1)
KRON_SUM(f64_wide, double, 2)
KRON_SUM(f32_wide, float, 4)
KRON_SUM(f16_wide, __half, 8)
KRON_SUM(bf16_wide, __nv_bfloat16, 8)
