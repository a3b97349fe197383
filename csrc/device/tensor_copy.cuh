// Copies from device memory to shared memory that one thread asks for and others wait for, on compute capability 9.0.
#pragma once

#include "mma.cuh"
#include "tensor_map.h"

namespace cuops {

// A barrier in shared memory: a phase of it ends when so many have arrived, and the bytes that are expected as well.
__device__ inline void init_arrivals(unsigned long long* barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
__device__ inline void arrive(unsigned long long* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ inline void arrive_expecting(unsigned long long* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// Until the phase of this parity has ended: the first one is even.
__device__ inline void wait_for_arrivals(unsigned long long* barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(
          shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// What copies are to know of the map is on its way.
__device__ inline void fetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// Starts to copy the box of matrix `matrix` from this row and column on; its bytes arrive at the barrier.
__device__ inline void copy_box(void* to, const TensorMap& map, int column, int row, int matrix, unsigned long long* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
          shared_address(to)),
      "l"(&map), "r"(column), "r"(row), "r"(matrix), "r"(shared_address(barrier))
      : "memory");
}

}  // namespace cuops
