// What a thread does with its pack of columns in the second kernel of RMSNorm's gradient in two, and the sums over the rows of its
// block.
#pragma once

#include "device/reduce.cuh"
#include "device/row_sums.cuh"
#include "rms_norm.h"

namespace cuops {

// The gradient of a row's h, and what the row adds to those of the parameters; `found` by the kernel before: the power of two that
// h was scaled by, rstd, and the mean of g h.
template <class Acc, int kWidth>
__device__ Pack<Acc, kWidth> gradient_of(const Acc (&found)[3], const Pack<Acc, kWidth>& h, const Pack<Acc, kWidth>& dy,
                                         const Pack<Acc, kWidth>& weight, Pack<Acc, kWidth>& dweight, Pack<Acc, kWidth>& dbias) {
  const Acc scale = found[0], rstd = found[1], mean = found[2];
  Pack<Acc, kWidth> dx;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const Acc xhat = h.at[j] * scale * rstd;
    dx.at[j] = rstd * scale * (dy.at[j] * weight.at[j] - xhat * (rstd * mean));
    dweight.at[j] += dy.at[j] * xhat;
    dbias.at[j] += dy.at[j];
  }
  return dx;
}

// Rows side by side add up in their order. A thread has pack `at` of the columns, or, with kPhased, as many columns from `phase`
// before it on; then the block has the sums of its first `own` packs alone.
template <bool kPhased, class Acc, int kWidth>
__device__ void add_up_side_by_side(const RmsNormBwdParams& p, const Pack<Acc, kWidth>& dweight, const Pack<Acc, kWidth>& dbias,
                                    long long at, int phase, unsigned own, long long group) {
  // Neighbouring columns are 32 / kWidth banks apart, where at least 8 threads are side by side.
  constexpr int kApart = 32 / kWidth;
  __shared__ Acc shared[(256 + 256 / 8 * kApart) * kWidth];
  const int columns = blockDim.x * kWidth, pitch = blockDim.x + (blockDim.x < 8 ? 0 : kApart), row = pitch * kWidth;
#pragma unroll 1
  for (int k = 0; k < 2; ++k) {
    void* const sums = k == 0 ? p.dweight : p.dbias;
    if (!sums) continue;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      int pack = threadIdx.x, to = j;
      if constexpr (kPhased) {
        pack -= j < phase;
        to = (j - phase) & (kWidth - 1);
        if (pack < 0) continue;
      }
      shared[threadIdx.y * row + to * pitch + pack] = k == 0 ? dweight.at[j] : dbias.at[j];
    }
    __syncthreads();
#pragma unroll 1
    for (int c = threadIdx.y * blockDim.x + threadIdx.x; c < columns; c += blockDim.x * blockDim.y) {
      Acc total = 0;
#pragma unroll 4
      for (int y = 0; y < blockDim.y; ++y) total += shared[y * row + c % kWidth * pitch + c / kWidth];
      const long long column = (at - threadIdx.x) * kWidth + c;
      if ((kPhased && c / kWidth >= own) || column >= p.n) continue;
      if (p.finds_results) {
        store_result(k == 0 ? p.dweight_dtype : p.dbias_dtype, sums, column, total);
      } else {
        static_cast<Acc*>(sums)[group * sums_stride(p.n) + column] = total;
      }
    }
  }
}

}  // namespace cuops
