// Reductions over the threads that share a row: blockDim.x threads of each block of a cluster; blockDim.y rows a block.
#pragma once

#include "cluster.cuh"
#include "numeric.cuh"

namespace cuops {

struct Sum {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};

struct Max {  // of a number and NaN the second one: threads may get either, and whatever follows adds up NaN as well
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};

template <class T, class Op>
__device__ T reduce_lanes(T v, int lanes, Op op) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) v = op(v, __shfl_xor_sync(0xffffffffu, v, offset));
  return v;
}

// Adds up each of kValues values, a power of two, over the lanes of a warp: each lane goes on with half of them, until it has one,
// in v[0]. Returns which.
template <int kValues>
__device__ int add_up_by_halves(float (&v)[kValues]) {
  const int lane = threadIdx.x % 32;
  int which = 0;
#pragma unroll
  for (int count = kValues / 2, offset = 16; count >= 1; count /= 2, offset /= 2) {
    const bool upper = lane & offset;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const float mine = upper ? v[i + count] : v[i], other = upper ? v[i] : v[i + count];
      v[i] = mine + __shfl_xor_sync(0xffffffffu, other, offset);
    }
    which = 2 * which + upper;
  }
  v[0] = reduce_lanes(v[0], 32 / kValues, Sum());
  return which;
}

// Neighbouring lanes that share a row, blockDim.x of them: what a Team of up to a warp does, without shared memory.
struct Lanes {
  __device__ unsigned first() const { return threadIdx.x; }
  __device__ unsigned threads() const { return blockDim.x; }
  __device__ bool any(bool condition) const { return __any_sync(0xffffffffu, condition); }
  template <class T, class Op>
  __device__ T reduce(T v, Op op) {
    return reduce_lanes(v, blockDim.x, op);
  }
};

// The team of threads that shares a row. blockDim.x is a power of two up to 32, or a multiple of 32 and then blockDim.y is 1.
// Blocks of a cluster (compute capability 9.0) exchange their results by asynchronous stores, which signal their arrival on
// the receiver's barrier: a cluster-wide barrier would wait for each thread's global memory traffic too.
// kValues are reduced at a time. Without kClusters a team is never more than a block.
template <class Acc, int kValues, bool kClusters = true>
class Team {
 public:
  unsigned index = blockIdx.x;    // of the team in the grid
  unsigned rank = 0, blocks = 1;  // of this block in the team, and all

  static constexpr int kDirect = 64;  // warps of a cluster that send what they have to all blocks, rather than to their own first
  using Sent = Acc[2][kValues][kClusters ? kDirect : 1];

  __device__ Team(unsigned long long (&arrived)[2], Acc (&by_warp)[2][kValues][32], Sent& sent)
      : arrived_(arrived), by_warp_(by_warp), sent_(sent) {
#if CUOPS_CLUSTERS
    if constexpr (!kClusters) return;
    rank = cluster_rank();
    blocks = cluster_blocks();
    if (blocks == 1) return;
    index = cluster_index();
    if (threadIdx.x == 0) {
      for (int phase = 0; phase < 2; ++phase) init_arrivals(&arrived_[phase], 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
  }

  __device__ unsigned first() const { return rank * blockDim.x + threadIdx.x; }
  __device__ unsigned threads() const { return blocks * blockDim.x; }

  // Whether the condition holds for any row of this warp: what a warp decides, it must decide as one.
  __device__ bool any(bool condition) const { return blockDim.x <= 32 ? __any_sync(0xffffffffu, condition) : condition; }

  // Combines each value over the team, and gives every thread the same bits. 0 must be neutral for op. Every thread must come here.
  template <class Op>
  __device__ void reduce(Acc (&v)[kValues], Op op) {
    if (blockDim.x <= 32) {
#pragma unroll
      for (int k = 0; k < kValues; ++k) v[k] = reduce_lanes(v[k], blockDim.x, op);
      return;
    }
    const int slot = phase_ & 1, lane = threadIdx.x % 32, warps = blockDim.x / 32;
#pragma unroll
    for (int k = 0; k < kValues; ++k) v[k] = reduce_lanes(v[k], 32, op);
    const bool direct = kClusters && blocks > 1 && warps * blocks <= kDirect;
    if (!direct) {
#pragma unroll
      for (int k = 0; k < kValues; ++k) {
        if (lane == 0) by_warp_[slot][k][threadIdx.x / 32] = v[k];
      }
      __syncthreads();
      const int lanes = 1 << (32 - __clz(warps - 1)), from = lane & (lanes - 1);  // as few steps as the warps need
#pragma unroll
      for (int k = 0; k < kValues; ++k) v[k] = reduce_lanes(from < warps ? by_warp_[slot][k][from] : Acc(0), lanes, op);
    }
#if CUOPS_CLUSTERS
    if (kClusters && blocks > 1) {
      const unsigned senders = direct ? warps : 1, warp = threadIdx.x / 32;
      // Stores that arrived before are counted too.
      if (threadIdx.x == 0) arrive_expecting(&arrived_[slot], static_cast<int>(sizeof(Acc) * kValues * senders * blocks));
      if (phase_ == 0) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // all barriers are initialised
#pragma unroll
      for (int k = 0; k < kValues; ++k) {
        if (warp < senders && lane < blocks) send_to_block(&sent_[slot][k][rank * senders + warp], v[k], &arrived_[slot], lane);
      }
      wait_for_sent(&arrived_[slot], phase_ / 2 & 1);
#pragma unroll
      for (int k = 0; k < kValues; ++k) {
        v[k] = lane < senders * blocks ? sent_[slot][k][lane] : Acc(0);
        if (lane + 32 < senders * blocks) v[k] = op(v[k], sent_[slot][k][lane + 32]);
        v[k] = reduce_lanes(v[k], 32, op);
      }
    }
#endif
    ++phase_;
  }
  // After a copy of this team has reduced.
  __device__ void skip(unsigned reductions) { phase_ += reductions; }

  template <class Op>
  __device__ Acc reduce(Acc v, Op op) {
    Acc values[kValues] = {v};
    reduce(values, op);
    return values[0];
  }

 private:
  unsigned long long (&arrived_)[2];
  Acc (&by_warp_)[2][kValues][32];
  Sent& sent_;
  unsigned phase_ = 0;
};

// Declares the team of a kernel and the shared memory that it works in.
#define CUOPS_TEAM(Acc, kValues, team) CUOPS_TEAM_OF(Acc, kValues, true, team)
#define CUOPS_TEAM_OF(Acc, kValues, kClusters, team)                   \
  __shared__ unsigned long long team##_arrived[2];                     \
  __shared__ Acc team##_by_warp[2][kValues][32];                       \
  __shared__ typename Team<Acc, kValues, kClusters>::Sent team##_sent; \
  Team<Acc, kValues, kClusters> team(team##_arrived, team##_by_warp, team##_sent)

}  // namespace cuops
