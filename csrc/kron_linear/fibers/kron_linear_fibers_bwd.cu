// All gradients of small factors of any size, and of their input, in one pass: what each step started from stays in shared memory
// until the gradient is there.
#include "device/overlap.cuh"
#include "device/tuned.cuh"
#include "kron_fibers.cuh"
#include "kron_fibers_sums.cuh"

CUOPS_ONLY_FOR(90)

namespace cuops {

// Adds up values over a warp, and gives each lane its share of the sums: calls add(i, sum) for these.
template <int kDistance, int kCount, class Acc, int kAll, class Add>
__device__ void scatter_sums(Acc (&v)[kAll], int first, int count, Add&& add) {
  if constexpr (kDistance == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) add(first + i, v[i]);
    }
  } else {
    constexpr int kHalf = (kCount + 1) / 2;
    const bool upper = threadIdx.x & kDistance;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const Acc low = v[i], high = kHalf + i < kCount ? v[kHalf + i] : Acc(0);
      v[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, kDistance);
    }
    scatter_sums<kDistance / 2, kHalf>(v, first + upper * kHalf, upper ? count - kHalf : min(count, kHalf), add);
  }
}

// Back through a step of a small factor: adds the sums over its fibers of g times x to those of this warp, and puts the gradient
// for x in x's place. A thread has whole fibers.
template <class Acc, int kSize>
__device__ void back_small(const KronFibersStep& step, const Acc* weights, const Acc* g, Acc* x, int fibers, Acc* sums, bool wanted,
                           bool goes_on) {
  if (static_cast<int>(threadIdx.x) / 32 * 32 >= fibers) return;
  Acc weight[kSize][kSize], sum[kSize * kSize] = {};
  load_weight(weights + step.transposed.at, weight);
  const bool together = step.inner == 1 && step.in == kSize;
#pragma unroll 1
  for (int fiber = threadIdx.x; fiber < fibers; fiber += blockDim.x) {
    const Fiber place(fiber, step.by_inner);
    Acc* const at = x + place.start(step.in);
    Acc from_g[kSize], v[kSize];
    load_fiber(g + place.start(step.out), step.inner, step.out, from_g);
    if (wanted) {
      load_fiber(at, step.inner, step.in, v);
#pragma unroll
      for (int i = 0; i < kSize * kSize; ++i) sum[i] += from_g[i / kSize] * v[i % kSize];
    }
    if (!goes_on) continue;
    multiply(weight, from_g, v);
    store_fiber(at, step.inner, step.in, together, v);
  }
  if (!wanted) return;
  scatter_sums<16, kSize * kSize>(sum, 0, kSize * kSize, [&](int i, Acc v) {
    const int o = i / kSize, k = i - o * kSize;
    if (o < step.out && k < step.in) sums[o * step.in + k] += v;
  });
}

// Whether the factor was small enough for that.
template <class Acc>
__device__ bool back_small(const KronFibersStep& step, const Acc* weights, const Acc* g, Acc* x, int fibers, Acc* sums, bool wanted,
                           bool goes_on) {
  switch (step.transposed.size) {
    case 2: back_small<Acc, 2>(step, weights, g, x, fibers, sums, wanted, goes_on); return true;
    case 3: back_small<Acc, 3>(step, weights, g, x, fibers, sums, wanted, goes_on); return true;
    case 4: back_small<Acc, 4>(step, weights, g, x, fibers, sums, wanted, goes_on); return true;
    case 6:
      if constexpr (sizeof(Acc) == 4) {
        back_small<Acc, 6>(step, weights, g, x, fibers, sums, wanted, goes_on);
        return true;
      }
  }
  return false;
}

// Adds to a warp's sums those over its fibers of g times x, in blocks of kBlock x kBlock a lane.
template <class Acc, int kBlock>
__device__ void add_products(const KronFibersStep& axis, const Acc* g, const Acc* x, int fibers, Acc* sums) {
  const int out_blocks = (axis.out + kBlock - 1) / kBlock, in_blocks = (axis.in + kBlock - 1) / kBlock;
  const int lanes = out_blocks * in_blocks, groups = 32 / lanes, lane = threadIdx.x % 32, group = lane / lanes;
  const int block = lane - group * lanes, o = block % out_blocks * kBlock, k = block / out_blocks * kBlock;
  const int step = static_cast<int>(blockDim.x) / 32 * groups;
  if (static_cast<int>(threadIdx.x) / 32 * groups >= fibers) return;
  int out_at[kBlock], in_at[kBlock];  // those beyond the end are read as others, and not written
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    out_at[i] = min(o + i, axis.out - 1) * axis.inner;
    in_at[i] = min(k + i, axis.in - 1) * axis.inner;
  }
  Acc sum[kBlock][kBlock] = {};
#pragma unroll 2
  for (int fiber = static_cast<int>(threadIdx.x) / 32 * groups + group; fiber < fibers; fiber += step) {
    const Fiber place(fiber, axis.by_inner);
    const Acc *const from_g = g + place.start(axis.out), *const from_x = x + place.start(axis.in);
    Acc a[kBlock], b[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      a[i] = from_g[out_at[i]];
      b[i] = from_x[in_at[i]];
    }
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
#pragma unroll
      for (int j = 0; j < kBlock; ++j) sum[i][j] += a[i] * b[j];
    }
  }
  const bool own = group < groups;
#pragma unroll 1
  for (int distance = 16; distance > 0; distance /= 2) {
    if (distance >= groups) continue;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
#pragma unroll
      for (int j = 0; j < kBlock; ++j) {
        const Acc other = __shfl_down_sync(~0u, sum[i][j], distance * lanes);
        if (own && group + distance < groups) sum[i][j] += other;
      }
    }
  }
  if (group > 0) return;
  Acc before[kBlock][kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
#pragma unroll
    for (int j = 0; j < kBlock; ++j) before[i][j] = sums[min(o + i, axis.out - 1) * axis.in + min(k + j, axis.in - 1)];
  }
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
#pragma unroll
    for (int j = 0; j < kBlock; ++j) {
      if (o + i < axis.out && k + j < axis.in) sums[(o + i) * axis.in + k + j] = before[i][j] + sum[i][j];
    }
  }
}

template <class Acc>
__device__ void add_products(const KronFibersStep& axis, const Acc* g, const Acc* x, int fibers, Acc* sums) {
  if (max(axis.out, axis.in) == 9) {
    add_products<Acc, 3>(axis, g, x, fibers, sums);
  } else {
    add_products<Acc, 4>(axis, g, x, fibers, sums);
  }
}

template <class Acc>
__device__ void kron_fibers_bwd(const KronFibersBwdParams& p) {
  const KronFibersChain& chain = p.chain;
  Acc* const shared = shared_at<Acc>(0);
  Acc* const found = shared + p.found;
  Acc* const mine = found + threadIdx.x / 32 * chain.sums;
  const int threads = blockDim.x, warps = threads / 32;
  FibersWeight<Acc> weight(chain, threadIdx.x);
  wait_in_turn();
  weight.load();  // on its way together with the first tile
#pragma unroll 1
  for (long long index = blockIdx.x; index < chain.tiles; index += gridDim.x) {
    const FibersTile tile(chain, index);
    load_samples<Acc, 2>(chain, {&p.x, &p.dy}, tile, {shared + chain.step[0].state, shared + p.gradient});
    if (index == blockIdx.x) {
      store_weights(chain, weight.value(), shared);
#pragma unroll 1
      for (int i = threadIdx.x; i < warps * chain.sums; i += threads) found[i] = 0;
      __syncthreads();
#pragma unroll 1
      for (int s = 0; s < chain.steps; ++s) {
        const KronFibersStep& step = chain.step[s];
        const KronFibersMatrix &weight = step.weight, &to = step.transposed;
#pragma unroll 1
        for (int i = threadIdx.x; i < to.count; i += threads) {
          const int row = divide(i, to.by_pitch), column = i - row * to.pitch;
          shared[to.at + i] = row < step.in && column < step.out ? shared[weight.at + column * weight.pitch + row] : Acc(0);
        }
      }
    }
    // Forward to the state before the last step, and back.
    const Acc* g = shared + p.gradient;
#pragma unroll 1
    for (int turn = 0; turn < 2 * chain.steps - 1; ++turn) {
      const bool back = turn >= chain.steps - 1;
      const int s = back ? 2 * chain.steps - 2 - turn : turn;
      const KronFibersStep& step = chain.step[s];
      const int fibers = tile.samples * step.fibers;
      Acc* const state = shared + step.state;
      __syncthreads();
      bool goes_on = true, is_done = false;
      if (back) {
        const bool wanted = p.wanted >> s & 1;
        goes_on = p.dx.rows.data != nullptr || (p.wanted & ((1 << s) - 1)) != 0;
        is_done = back_small(step, shared, g, state, fibers, mine + step.sums, wanted, goes_on);
        if (!is_done && wanted) add_products(step, g, state, fibers, mine + step.sums);
        if (!goes_on) break;
        if (!is_done) __syncthreads();
      }
      if (!is_done)
        multiply_axis<Acc>({step, back}, shared, back ? g : state, back ? state : shared + chain.step[s + 1].state, fibers);
      if (back) g = state;
    }
    __syncthreads();
    if (p.dx.rows.data) store_samples(chain, p.dx, tile, g);
    if (index + gridDim.x < chain.tiles) __syncthreads();
  }
  launch_dependents();
  if (p.together) return add_up(p, shared);
  Acc* const partial = static_cast<Acc*>(p.partial) + static_cast<long long>(blockIdx.x) * chain.sums;
#pragma unroll 1
  for (int i = threadIdx.x; i < chain.sums; i += threads) {
    Acc sum = 0;
#pragma unroll 4
    for (int warp = 0; warp < warps; ++warp) sum += found[warp * chain.sums + i];
    partial[i] = sum;
  }
}

}  // namespace cuops

#define KRON_FIBERS_BWD(name, Acc)                                                                                            \
  extern "C" __global__ void __launch_bounds__(cuops::kFibersThreadsBwd)                                                      \
      kron_fibers_bwd_##name(const __grid_constant__ cuops::KronFibersBwdParams p) {                                          \
    cuops::kron_fibers_bwd<Acc>(p);                                                                                           \
  }                                                                                                                           \
  extern "C" __global__ void __launch_bounds__(1024) kron_fibers_sum_##name(const __grid_constant__ cuops::KronFibersSum p) { \
    cuops::kron_fibers_sum<Acc>(p);                                                                                           \
  }
KRON_FIBERS_BWD(f32, float)
KRON_FIBERS_BWD(f64, double)
