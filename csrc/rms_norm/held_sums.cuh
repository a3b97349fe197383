// What threads that hold the sums of their columns leave behind, once all rows are done.
#pragma once

#include "device/row_sums.cuh"
#include "windows.cuh"

namespace cuops {

// Rows side by side in a block add up in their order, first those of a warp where they have the same columns. A thread has `sums`
// of vectors first, first + step and so on.
template <bool kWide, class T, class Acc, int kResident, bool kPhased>
__device__ void leave_sums(Pack<Acc, kVectorWidth<T>> (&sums)[kResident], const Windows<T, kPhased>& windows, int first, int step,
                           Acc* shared, const SumsTarget<T, Acc>& target) {
  constexpr int kWidth = kVectorWidth<T>;
  const int n = target.n, side = kPhased ? 1 : max(32 / step, 1), count = kWide ? 1 : blockDim.y / side;
  if constexpr (!kWide && !kPhased) {
#pragma unroll 1
    for (int offset = step; offset < 32; offset *= 2) {
#pragma unroll
      for (int i = 0; i < kResident; ++i) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sums[i].at[j] += __shfl_xor_sync(0xffffffffu, sums[i].at[j], offset);
      }
    }
  }
  const bool alone = kWide || (count == 1 && cluster_blocks() == 1);
  Acc* const to = shared + threadIdx.y / side * sums_stride(n);
#pragma unroll
  for (int i = 0; i < kResident; ++i) {
    const int column = windows.column(first + i * step);
    if (threadIdx.y % side != 0 || first + i * step >= windows.count) continue;
    if constexpr (kPhased) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        if (column + j < 0 || column + j >= n) continue;
        if (alone) {
          target.store_one(column + j, sums[i].at[j]);
        } else {
          to[column + j] = sums[i].at[j];
        }
      }
    } else if (alone) {
      target.store(column, sums[i]);
    } else {
      *reinterpret_cast<Pack<Acc, kWidth>*>(to + column) = sums[i];
    }
  }
  if (!alone) add_up_shared(shared, count, n, target);
}

}  // namespace cuops
