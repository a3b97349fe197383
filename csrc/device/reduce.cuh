// Reductions over the threads that share a row: (cluster of) blocks of blockDim.x threads a row, blockDim.y rows a block.
#pragma once

namespace cuops {

// The blocks that share a row. Before compute capability 9.0 a row is one block's.
struct Cluster {
  unsigned rank = 0, size = 1;

  __device__ Cluster() {
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#endif
  }

  __device__ void sync() const {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
#endif
  }

  // Writes to the same variable of another block of the cluster.
  template <class T>
  __device__ void store(T* shared, T value, unsigned to_rank) const {
#if __CUDA_ARCH__ >= 900
    unsigned local = static_cast<unsigned>(__cvta_generic_to_shared(shared)), remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(to_rank));
    if constexpr (sizeof(T) == 8) {
      asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(remote), "d"(static_cast<double>(value)) : "memory");
    } else {
      asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(static_cast<float>(value)) : "memory");
    }
#endif
  }
};

struct Sum {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};

struct Max {
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

// Combines v over all threads of the row and gives every one of them the same bits. 0 must be neutral for op.
// blockDim.x is a power of two up to 32, or a multiple of 32. Every thread of the cluster must come here.
template <class T, class Op>
__device__ T reduce_row(T v, const Cluster& cluster, Op op) {
  constexpr int kMaxWarps = 32, kMaxCluster = 16;
  if (blockDim.x <= 32) return reduce_lanes(v, blockDim.x, op);

  __shared__ T by_warp[kMaxWarps];
  __shared__ T by_block[kMaxCluster];
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  T* mine = by_warp + threadIdx.y * warps;
  __syncthreads();  // an earlier reduction may still be reading
  v = reduce_lanes(v, 32, op);
  if (lane == 0) mine[threadIdx.x / 32] = v;
  __syncthreads();
  v = reduce_lanes(lane < warps ? mine[lane] : T(0), 32, op);
  if (cluster.size == 1) return v;

  cluster.sync();
  if (threadIdx.x < cluster.size) cluster.store(&by_block[cluster.rank], v, threadIdx.x);
  cluster.sync();
  return reduce_lanes(lane < cluster.size ? by_block[lane] : T(0), 32, op);
}

}  // namespace cuops
