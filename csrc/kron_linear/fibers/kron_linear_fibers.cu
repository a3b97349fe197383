// Kronecker-factored linear layers of small factors of any size. A tile stays in shared memory, and each step multiplies the fibers
// along one axis of it; a thread has some of them in registers.
#include "device/overlap.cuh"
#include "device/tuned.cuh"
#include "kron_fibers.cuh"

CUOPS_ONLY_FOR(90)

namespace cuops {

template <class Acc>
__device__ void kron_fibers(const KronFibersParams& p) {
  const KronFibersChain& chain = p.chain;
  Acc* const shared = shared_at<Acc>(0);
  FibersWeight<Acc> weight(chain, threadIdx.x);
  wait_for_previous(gridDim.x >= chain.tiles);
  weight.load();
  const Acc first_weight = weight.value();  // now: elements on their way beside the tile's went to the stack, one after the other
#pragma unroll 1
  for (long long index = blockIdx.x; index < chain.tiles; index += gridDim.x) {
    const FibersTile tile(chain, index);
    load_samples<Acc, 1>(chain, {&p.x}, tile, {shared + chain.step[0].state});
    if (index == blockIdx.x) store_weights(chain, first_weight, shared);
#pragma unroll 1
    for (int s = 0; s < chain.steps; ++s) {
      const KronFibersStep& step = chain.step[s];
      __syncthreads();
      const int to = s + 1 < chain.steps ? chain.step[s + 1].state : p.result;
      multiply_axis<Acc>({step, false}, shared, shared + step.state, shared + to, tile.samples * step.fibers);
    }
    __syncthreads();
    store_samples(chain, p.y, tile, shared + p.result, p.bias, p.bias_lead);
    if (index + gridDim.x < chain.tiles) __syncthreads();
  }
  launch_dependents();
}

}  // namespace cuops

#define KRON_FIBERS(name, Acc, kThreads)                                                                                         \
  extern "C" __global__ void __launch_bounds__(kThreads) kron_fibers_##name(const __grid_constant__ cuops::KronFibersParams p) { \
    cuops::kron_fibers<Acc>(p);                                                                                                  \
  }
KRON_FIBERS(f32, float, cuops::kFibersThreads)
KRON_FIBERS(f64, double, cuops::kFibersThreadsF64)
