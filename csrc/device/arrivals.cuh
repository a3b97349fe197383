// Barriers that count what arrives in shared memory; bytes that are expected, from compute capability 9.0 on.
#pragma once

#include "numeric.cuh"

namespace cuops {

// A barrier in shared memory: a phase of it ends when so many have arrived, and the bytes that are expected as well.
__device__ inline void init_arrivals(unsigned long long* barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
// Several, by one thread: those of a warp that had one each would take turns.
template <int kCount>
__device__ void init_all_arrivals(unsigned long long (&barriers)[kCount], int count) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) init_arrivals(&barriers[i], count);
}
__device__ inline void arrive(unsigned long long* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ inline void arrive_expecting(unsigned long long* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// Once all that this thread copies asynchronously is there.
__device__ inline void arrive_once_copied(unsigned long long* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Until the phase of this parity has ended: the first one is even.
__device__ inline void wait_for_arrivals(unsigned long long* barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(
          shared_address(barrier)),
      "r"(parity)
      : "memory");
}
// Arrives and waits: like a barrier of a block's threads, of which some come from elsewhere in the code.
__device__ inline void arrive_and_wait(unsigned long long* barrier, unsigned parity) {
  arrive(barrier);
  wait_for_arrivals(barrier, parity);
}

}  // namespace cuops
