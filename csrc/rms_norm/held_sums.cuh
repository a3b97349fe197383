// What threads that hold the sums of their columns leave behind, once all rows are done.
#pragma once

#include "device/arrivals.cuh"
#include "device/reduce.cuh"
#include "device/row_sums.cuh"
#include "rms_norm.h"
#include "windows.cuh"

namespace cuops {

// Adds up the sums of rows side by side in a block, in their order. With kCluster a cluster has all rows: each of its blocks adds
// up some of the columns for all, and what the others have of these is sent to it.
template <bool kCluster>
class SumsSideBySide {
 public:
  // Every thread must come here, the earlier the better: none sends before all have.
  __device__ SumsSideBySide(unsigned long long& arrived, const RmsNormBwdParams& p)
      : arrived_(arrived), fours_(static_cast<int>(sums_stride(p.n)) / 4) {
#if CUOPS_CLUSTERS
    if (!kCluster || !p.dweight) return;
    blocks_ = cluster_blocks();
    rank_ = cluster_rank();
    each_ = (fours_ + blocks_ - 1) / blocks_;
    own_ = max(min(each_, fours_ - rank_ * each_), 0);
    if (threadIdx.x == 0 && threadIdx.y == 0) {
      init_arrivals(&arrived_, 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      arrive_expecting(&arrived_, static_cast<int>(sizeof(Four)) * own_ * blocks_);
    }
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");  // all that others are to see is the barrier above
#endif
  }

  // `shared` has `count` rows of sums, and behind them room for what is sent.
  template <class Target>
  __device__ void add_up(float* shared, int count, const Target& target) const {
    Four* const sums = reinterpret_cast<Four*>(shared);
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
    __syncthreads();
    if constexpr (!kCluster) {
#pragma unroll 1
      for (int at = thread; at < fours_; at += threads) target.store_four(4 * at, sum_of_rows(sums + at, count, fours_));
      return;
    }
#if CUOPS_CLUSTERS
    Four* const sent = sums + count * fours_;  // from each block the columns of this one
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#pragma unroll 1
    for (int at = thread; at < fours_; at += threads) {
      const int to = at / each_;
      send_to_block(sent + rank_ * each_ + (at - to * each_), sum_of_rows(sums + at, count, fours_), &arrived_, to);
    }
    wait_for_sent(&arrived_, 0);
#pragma unroll 1
    for (int at = thread; at < own_; at += threads)
      target.store_four(4 * (rank_ * each_ + at), sum_of_rows(sent + at, blocks_, each_));
#endif
  }

 private:
  using Four = Pack<float, 4>;
  unsigned long long& arrived_;
  int fours_, blocks_ = 1, rank_ = 0, each_ = 0, own_ = 0;  // fours of columns: all, those of a block, those of this one
};

// Rows side by side in a block add up in their order, first those of a warp where they have the same columns. A thread has `sums`
// of vectors first, first + step and so on.
template <bool kWide, bool kCluster, class T, class Other, int kResident, bool kPhased>
__device__ void leave_sums(Pack<float, kVectorWidth<T>> (&sums)[kResident], const Windows<T, kPhased>& windows, int first, int step,
                           float* shared, const SumsSideBySide<kCluster>& side_by_side, const SumsTarget<T, float, Other>& target) {
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
  const bool alone = kWide || (count == 1 && !kCluster);
  float* const to = shared + threadIdx.y / side * sums_stride(n);
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
      *reinterpret_cast<Pack<float, kWidth>*>(to + column) = sums[i];
    }
  }
  if (!alone) side_by_side.add_up(shared, count, target);
}

}  // namespace cuops
