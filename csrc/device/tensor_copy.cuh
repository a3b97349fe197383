// Copies from device memory to shared memory that one thread asks for and others wait for, on compute capability 9.0.
#pragma once

#include "arrivals.cuh"
#include "mma.cuh"
#include "tensor_map.h"

namespace cuops {

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

// Starts to copy so many bytes, a multiple of 16, as it does places; they arrive at the barrier.
__device__ inline void copy_bulk(void* to, const void* from, int bytes, unsigned long long* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

}  // namespace cuops
