// Blocks of a cluster, which reach each other's shared memory: where both the GPU and the toolchain know how (PTX 8.0, which
// CUDA 11.8 does not speak).
#pragma once

#include "arrivals.cuh"

#define CUOPS_CLUSTERS (__CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ >= 12)

namespace cuops {

// Of the cluster in the grid, of the block in it, and its blocks: without clusters, those of the block.
__device__ inline unsigned cluster_index() {
  unsigned index = blockIdx.x;
#if CUOPS_CLUSTERS
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
#endif
  return index;
}
__device__ inline unsigned cluster_rank() {
  unsigned rank = 0;
#if CUOPS_CLUSTERS
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}
__device__ inline unsigned cluster_blocks() {
  unsigned blocks = 1;
#if CUOPS_CLUSTERS
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
#endif
  return blocks;
}
__device__ inline void cluster_barrier() {
#if CUOPS_CLUSTERS
  asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

#if CUOPS_CLUSTERS
// Where block `rank` of the cluster has what is here at this address.
__device__ inline unsigned address_in(unsigned rank, const void* shared) {
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(shared)), "r"(rank));
  return there;
}

// Stores a value where block `rank` of the cluster has what is here at this address. It is counted as arrived there.
template <class Acc>
__device__ void send_to_block(Acc* to, Acc v, unsigned long long* arrived, unsigned rank) {
  const unsigned there = address_in(rank, to), barrier = address_in(rank, arrived);
  if constexpr (sizeof(Acc) == 8) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(there),
                 "l"(__double_as_longlong(v)), "r"(barrier)
                 : "memory");
  } else if constexpr (sizeof(Acc) == 16) {
    const auto& bits = reinterpret_cast<const unsigned (&)[4]>(v);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(there),
                 "r"(bits[0]), "r"(bits[1]), "r"(bits[2]), "r"(bits[3]), "r"(barrier)
                 : "memory");
  } else {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(there), "r"(__float_as_uint(v)),
                 "r"(barrier)
                 : "memory");
  }
}

// Arrives there, after all that the thread has read. What it has stored there may come later: that is what send_to_block() is for,
// as a barrier that waits for stores to other blocks waits for all those to device memory, too.
__device__ inline void arrive_in(unsigned rank, unsigned long long* barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(rank, barrier)) : "memory");
}

__device__ inline void wait_for_sent(unsigned long long* arrived, unsigned parity) {
  unsigned done = 0;
  while (!done) {
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(shared_address(arrived)), "r"(parity)
        : "memory");
  }
}
#endif

// What is at this address in the shared memory of another block of the cluster.
template <class Acc>
__device__ Acc load_remote(const Acc* shared, unsigned block) {
  Acc v = 0;
#if CUOPS_CLUSTERS
  const unsigned there = address_in(block, shared);
  if constexpr (sizeof(Acc) == 8) {
    asm volatile("ld.shared::cluster.f64 %0, [%1];" : "=d"(v) : "r"(there));
  } else {
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there));
  }
#endif
  return v;
}

}  // namespace cuops
