// All gradients of small factors of any size, and of their input, in one pass: what each step started from stays in shared memory
// until the gradient is there.
#include "device/tuned.cuh"

#if CUOPS_TUNED == 90
#include "device/overlap.cuh"
#include "device/row_sums.cuh"
#include "kron_fibers.cuh"

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
__device__ void store_gradient(DType dtype, void* gradient, int i, Acc v) {
  with_dtype<Acc>(dtype, [&](auto element) {
    using T = decltype(element);
    static_cast<T*>(gradient)[i] = convert<T>(v);
  });
}

// The elements of a step's factors, one after the other: where store_gradients() has the first, how many, and one of them.
template <class Acc>
struct RawFactors {
  const KronFactor* first;
  int at, count = 0, factors;
  DType dtype;

  template <class Step>
  __device__ RawFactors(const Step& step, const KronFactor* all, DType dtype)
      : first(all + step.first), at(first->raw), factors(step.count), dtype(dtype) {
    const KronFactor& last = first[factors - 1];
    if (factors > 1) count = last.raw + last.out * last.in - at;
  }
  __device__ Acc load(int i) const {
    const KronFactor* f = first;
    while (f < first + factors - 1 && i >= f[1].raw - at) ++f;
    i -= f->raw - at;
    const int row = divide(i, f->by_in);
    return load_element<Acc>(dtype, f->data, row * f->row_stride + (i - row * f->in) * f->column_stride);
  }
};

// The gradients of a step's factors from that of their product: dWj = the sum over all that Wj does not have of it times the other
// factors.
template <class Acc, class Step>
__device__ void store_gradients(const Step& step, const KronFactor* factors, void* const* gradients, DType dtype, const Acc* raw,
                                const Acc* total) {
  const int n = step.out * step.in;
  if (step.count == 1) {
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += blockDim.x) store_gradient(dtype, gradients[step.first], i, total[i]);
    return;
  }
  // So many lanes share an element of a factor.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int before = 0;
#pragma unroll 1
  for (int j = step.first; j < step.first + step.count; ++j) {
    if (gradients[j] == nullptr) continue;
    const KronFactor& own = factors[j];
    const int size = own.out * own.in, others = n / size;
    int lanes = 1;
    while (lanes < 32 && lanes < others) lanes *= 2;
    const int at_once = 32 / lanes;
#pragma unroll 1
    for (int first = (warp + warps - before % warps) % warps * at_once; first < size; first += warps * at_once) {
      const int e = first + lane / lanes, row = divide(e, own.by_in), column = e - row * own.in;
      Acc of_element = 0;
#pragma unroll 1
      for (int other = e < size ? lane % lanes : others; other < others; other += lanes) {
        int rest = other, at_row = 0, at_column = 0, rows = 1, columns = 1;
        Acc product = 1;
#pragma unroll 1
        for (int l = step.first + step.count - 1; l >= step.first; --l) {
          const KronFactor& f = factors[l];
          int o = row, k = column;
          if (l != j) {
            const int above = divide(rest, f.by_out);
            o = rest - above * f.out;
            rest = divide(above, f.by_in);
            k = above - rest * f.in;
            product *= raw[f.raw + o * f.in + k];
          }
          at_row += o * rows;
          at_column += k * columns;
          rows *= f.out;
          columns *= f.in;
        }
        of_element += product * total[at_row * step.in + at_column];
      }
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        const Acc more = __shfl_xor_sync(~0u, of_element, distance);
        if (distance < lanes) of_element += more;
      }
      if (e < size && lane % lanes == 0) store_gradient(dtype, gradients[j], e, of_element);
    }
    before += (size + at_once - 1) / at_once;
  }
}

// The end of a launch whose blocks are a cluster, or only one: each adds up the gradients of some steps, in their order.
template <class Acc>
__device__ void add_up(const KronFibersBwdParams& p, Acc* shared) {
  const KronFibersChain& chain = p.chain;
  Acc *const found = shared + p.found, *const raw = shared + p.raw, *const total = gridDim.x > 1 ? shared + p.total : found;
  const int threads = blockDim.x, warps = threads / 32;
  const bool has_tile = blockIdx.x < chain.tiles;
  auto each_step = [&](auto&& visit) {
#pragma unroll 1
    for (int s = blockIdx.x; s < chain.steps; s += gridDim.x) {
      if (p.wanted >> s & 1) visit(chain.step[s]);
    }
  };
#pragma unroll 1
  for (int i = threadIdx.x; i < chain.sums; i += threads) {
    Acc sum = 0;
#pragma unroll 4
    for (int warp = 0; warp < warps && has_tile; ++warp) sum += found[warp * chain.sums + i];
    found[i] = sum;
  }
  each_step([&](const KronFibersStep& step) {
    const RawFactors<Acc> elements(step, chain.factors, chain.dtype);
#pragma unroll 1
    for (int i = threadIdx.x; i < elements.count; i += threads) raw[elements.at + i] = elements.load(i);
  });
  if (gridDim.x > 1) {
    cluster_barrier();
    each_step([&](const KronFibersStep& step) {
#pragma unroll 1
      for (int i = step.sums + threadIdx.x; i < step.sums + step.out * step.in; i += threads) {
        Acc sum = 0;
#pragma unroll 4
        for (int block = 0; block < gridDim.x; ++block) sum += load_remote(found + i, block);
        total[i] = sum;
      }
    });
    cluster_barrier();  // a block that ended would take its sums with it
  } else {
    __syncthreads();
  }
  each_step(
      [&](const KronFibersStep& step) { store_gradients(step, chain.factors, p.gradients, chain.dtype, raw, total + step.sums); });
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
      if (!back) {
        multiply_axis<Acc>({step, false}, shared, state, shared + chain.step[s + 1].state, fibers);
        continue;
      }
      const bool wanted = p.wanted >> s & 1, goes_on = p.dx.rows.data != nullptr || (p.wanted & ((1 << s) - 1)) != 0;
      Acc* const sums = mine + step.sums;
      switch (step.transposed.size) {
        case 2: back_small<Acc, 2>(step, shared, g, state, fibers, sums, wanted, goes_on); break;
        case 3: back_small<Acc, 3>(step, shared, g, state, fibers, sums, wanted, goes_on); break;
        case 4: back_small<Acc, 4>(step, shared, g, state, fibers, sums, wanted, goes_on); break;
        case 6:
          if constexpr (sizeof(Acc) == 4) {
            back_small<Acc, 6>(step, shared, g, state, fibers, sums, wanted, goes_on);
            break;
          }
          [[fallthrough]];
        default:
          if (wanted) {
            if (max(step.out, step.in) == 9) {
              add_products<Acc, 3>(step, g, state, fibers, sums);
            } else {
              add_products<Acc, 4>(step, g, state, fibers, sums);
            }
          }
          if (!goes_on) break;
          __syncthreads();
          multiply_axis<Acc>({step, true}, shared, g, state, fibers);
      }
      if (!goes_on) break;
      g = state;
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

template <class Acc>
__device__ void kron_fibers_sum(const KronFibersSum& p) {
  constexpr int kMost = kFibersMost * kFibersMost;
  __shared__ Acc parts[1024], total[kMost], raw[kMost + kFibersMerged];
  const auto& step = p.step[blockIdx.x];
  const int n = step.out * step.in, shares = blockDim.x / n, share = threadIdx.x / n, element = threadIdx.x - share * n;
  const RawFactors<Acc> elements(step, p.factors, p.dtype);
  wait_for_previous();
  // On its way together with the sums.
  const Acc own = threadIdx.x < elements.count ? elements.load(threadIdx.x) : Acc(0);
  const Acc* const partial = static_cast<const Acc*>(p.partial) + step.sums + element;
  Acc sum = 0;
  if (share < shares) {
#pragma unroll 8
    for (long long block = share; block < p.blocks; block += shares) sum += partial[block * p.sums];
  }
  parts[threadIdx.x] = sum;
  if (threadIdx.x < elements.count) raw[threadIdx.x] = own;
  for (int i = threadIdx.x + blockDim.x; i < elements.count; i += blockDim.x) raw[i] = elements.load(i);
  __syncthreads();
  if (threadIdx.x < n) {
    sum = 0;
#pragma unroll 4
    for (int s = 0; s < shares; ++s) sum += parts[s * n + threadIdx.x];
    total[threadIdx.x] = sum;
  }
  __syncthreads();
  store_gradients(step, p.factors, p.gradient, p.dtype, raw, total);
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
#else
extern "C" __global__ void kron_fibers_bwd_nowhere() {}
#endif
