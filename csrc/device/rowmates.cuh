// Reductions where a block has several rows, whose threads do not wait for those of other rows.
#pragma once

#include "reduce.cuh"

namespace cuops {

// The threads that share a row, one of blockDim.y in a block: those of other rows are not waited for.
template <class Acc>
class Rowmates {
 public:
  using Memory = Acc[2][32][2];
  __device__ explicit Rowmates(Memory& memory) : memory_(memory) {}

  // Combines both values over the row's threads, and gives each of them the same bits. 0 must be neutral for op.
  template <class Op>
  __device__ void reduce(Acc (&v)[2], Op op) {
    for (Acc& value : v) value = blockDim.x >= 32 ? reduce_lanes(value, 32, op) : reduce_lanes(value, blockDim.x, op);
    if (blockDim.x <= 32) return;
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    auto* const mine = memory_[turn_] + threadIdx.y * warps;
    if (lane == 0) {
      mine[threadIdx.x / 32][0] = v[0];
      mine[threadIdx.x / 32][1] = v[1];
    }
    asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.y), "r"(blockDim.x) : "memory");
    const int lanes = 1 << (32 - __clz(warps - 1)), from = lane & (lanes - 1);
    for (int k = 0; k < 2; ++k) v[k] = reduce_lanes(from < warps ? mine[from][k] : Acc(0), lanes, op);
    turn_ ^= 1;
  }

 private:
  Memory& memory_;
  unsigned turn_ = 0;
};

}  // namespace cuops
