// Sums over the rows of a block whose threads have a pack of columns each, in the gradient of RMSNorm in two kernels.
#pragma once

#include "reduce.cuh"
#include "rms_norm.h"
#include "row_sums.cuh"

namespace cuops {

// Rows side by side add up in their order. A thread has pack `at` of the columns, or, with kPhased, as many columns from `phase`
// before it on; then the block has the sums of its first `own` packs alone.
template <bool kPhased, class Acc, int kWidth>
__device__ void add_up_side_by_side(const RmsNormBwdParams& p, const Pack<Acc, kWidth>& dweight, const Pack<Acc, kWidth>& dbias,
                                    long long at, int phase, unsigned own, long long group) {
  __shared__ Acc shared[256 * kWidth];
  const int columns = blockDim.x * kWidth;
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
      shared[threadIdx.y * columns + to * blockDim.x + pack] = k == 0 ? dweight.at[j] : dbias.at[j];
    }
    __syncthreads();
#pragma unroll 1
    for (int c = threadIdx.y * blockDim.x + threadIdx.x; c < columns; c += blockDim.x * blockDim.y) {
      Acc total = 0;
#pragma unroll 4
      for (int y = 0; y < blockDim.y; ++y) total += shared[y * columns + c];
      const long long column = (at - threadIdx.x + c % blockDim.x) * kWidth + c / blockDim.x;
      if ((kPhased && c % blockDim.x >= own) || column >= p.n) continue;
      if (p.finds_results) {
        store_result(k == 0 ? p.dweight_dtype : p.dbias_dtype, sums, column, total);
      } else {
        static_cast<Acc*>(sums)[group * sums_stride(p.n) + column] = total;
      }
    }
  }
}

}  // namespace cuops
