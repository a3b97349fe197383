// The sums over rows that the threads of a kernel have found, on their way to one row of partial sums for each block or cluster.
#pragma once

#include "reduce.cuh"

namespace cuops {

// Rows of sums start at multiples of 16 bytes.
__device__ inline long long sums_stride(long long n) { return (n + 3) / 4 * 4; }

template <class Acc>
__device__ void store_result(DType dtype, void* results, long long at, Acc v) {
  switch (dtype) {
    case kFloat64: static_cast<double*>(results)[at] = v; return;
    case kFloat32: static_cast<float*>(results)[at] = v; return;
    case kFloat16: static_cast<__half*>(results)[at] = convert<__half>(static_cast<float>(v)); return;
    case kBFloat16: static_cast<__nv_bfloat16*>(results)[at] = convert<__nv_bfloat16>(static_cast<float>(v)); return;
  }
}

// Where the sums of a block end up: a row of partial sums, or the result, where there is nothing else to add to it.
template <class T, class Acc>
struct SumsTarget {
  void* data;
  long long partial_row;
  int n;
  bool is_result;

  // A vector's worth, of aligned rows.
  __device__ void store(int column, const Pack<Acc, kVectorWidth<T>>& sum) const {
    if (is_result) {
      cuops::store(reinterpret_cast<Vector<T>*>(static_cast<T*>(data) + column), convert<T>(sum));
    } else {
      *reinterpret_cast<Pack<Acc, kVectorWidth<T>>*>(static_cast<Acc*>(data) + partial_row * sums_stride(n) + column) = sum;
    }
  }
  // Four, fewer at the end of the row.
  __device__ void store_four(int column, const Pack<Acc, 4>& sum) const {
    if (!is_result) {
      *reinterpret_cast<Pack<Acc, 4>*>(static_cast<Acc*>(data) + partial_row * sums_stride(n) + column) = sum;
      return;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (column + j < n) static_cast<T*>(data)[column + j] = convert<T>(sum.at[j]);
    }
  }
  __device__ void store_one(int column, Acc sum) const {
    if (is_result) {
      static_cast<T*>(data)[column] = convert<T>(sum);
    } else {
      static_cast<Acc*>(data)[partial_row * sums_stride(n) + column] = sum;
    }
  }
};

// Of the cluster in the grid, and its blocks: without clusters, those of the block.
__device__ inline unsigned cluster_index() {
  unsigned index = blockIdx.x;
#if CUOPS_CLUSTERS
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
#endif
  return index;
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

// What is at this address in the shared memory of another block of the cluster.
template <class Acc>
__device__ Acc load_remote(const Acc* shared, unsigned block) {
  Acc v = 0;
#if CUOPS_CLUSTERS
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(shared)), "r"(block));
  if constexpr (sizeof(Acc) == 8) {
    asm volatile("ld.shared::cluster.f64 %0, [%1];" : "=d"(v) : "r"(there));
  } else {
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there));
  }
#endif
  return v;
}

// Adds up `count` rows of sums in the shared memory of each block of a cluster, in their order, and stores the total.
template <class Acc, class Target>
__device__ void add_up_shared(Acc* shared, int count, int n, const Target& target) {
  using Four = Pack<Acc, 4>;
  const unsigned blocks = cluster_blocks();
  const int fours = static_cast<int>(sums_stride(n)) / 4, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int threads = blockDim.x * blockDim.y;
  Four* const sums = reinterpret_cast<Four*>(shared);
  __syncthreads();
#pragma unroll 1
  for (int at = thread; at < fours; at += threads) {
    Four total = sums[at];
#pragma unroll 4
    for (int row = 1; row < count; ++row) {
      const Four more = sums[row * fours + at];
#pragma unroll
      for (int j = 0; j < 4; ++j) total.at[j] += more.at[j];
    }
    if (blocks == 1) {
      target.store_four(4 * at, total);
    } else {
      sums[at] = total;
    }
  }
#if CUOPS_CLUSTERS
  if (blocks == 1) return;
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  cluster_barrier();
#pragma unroll 1
  for (int at = rank * threads + thread; at < fours; at += blocks * threads) {
    Four total = {};
#pragma unroll 4
    for (unsigned block = 0; block < blocks; ++block) {
      unsigned there;
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(sums + at)), "r"(block));
      Four more;
      asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(more.at[0]), "=f"(more.at[1]), "=f"(more.at[2]), "=f"(more.at[3])
                   : "r"(there));
#pragma unroll
      for (int j = 0; j < 4; ++j) total.at[j] += more.at[j];
    }
    target.store_four(4 * at, total);
  }
  cluster_barrier();  // a block that ended would take its sums with it
#endif
}

}  // namespace cuops
