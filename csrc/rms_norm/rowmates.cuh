// Reductions where a block has several rows, whose threads do not wait for those of other rows.
#pragma once

#include "device/reduce.cuh"

namespace cuops {

// The threads that share a row, one of blockDim.y in a block: those of other rows are not waited for.
template <class Acc>
class Rowmates {
 public:
  using Memory = Pack<Acc, 4>[2][16];  // two values of each warp, for two rows in turn
  __device__ explicit Rowmates(Memory& memory) : memory_(memory) {}

  // Combines both values over the row's threads, and gives each of them the same bits. 0 must be neutral for op.
  template <class Op>
  __device__ void reduce(Acc (&v)[2], Op op) {
    if (blockDim.x < 32) {
      for (Acc& value : v) value = reduce_lanes(value, blockDim.x, op);
      return;
    }
    // Each half of a warp goes on with one of the values.
    const int lane = threadIdx.x % 32, half = lane / 16, warps = blockDim.x / 32;
    const Acc own = op(half ? v[1] : v[0], __shfl_xor_sync(0xffffffffu, half ? v[0] : v[1], 16));
    const Acc value = reduce_lanes(own, 16, op);
    if (warps == 1) {
      v[0] = __shfl_sync(0xffffffffu, value, 0);
      v[1] = __shfl_sync(0xffffffffu, value, 16);
      return;
    }
    Acc(*const mine)[2] = reinterpret_cast<Acc(*)[2]>(memory_[turn_]) + threadIdx.y * warps;
    if (lane % 16 == 0) mine[threadIdx.x / 32][half] = value;
    asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.y), "r"(blockDim.x) : "memory");
    if (warps == 2 || warps == 4) {
      const auto* const pairs = reinterpret_cast<const Pack<Acc, 4>*>(mine);
      Pack<Acc, 4> sum = pairs[0];
      if (warps == 4) {
        for (int k = 0; k < 4; ++k) sum.at[k] = op(sum.at[k], pairs[1].at[k]);
      }
      for (int k = 0; k < 2; ++k) v[k] = op(sum.at[k], sum.at[k + 2]);
    } else {
      const int lanes = 1 << (32 - __clz(warps - 1)), from = lane & (lanes - 1);
      for (int k = 0; k < 2; ++k) v[k] = reduce_lanes(from < warps ? mine[from][k] : Acc(0), lanes, op);
    }
    turn_ ^= 1;
  }

 private:
  Memory& memory_;
  unsigned turn_ = 0;
};

}  // namespace cuops
