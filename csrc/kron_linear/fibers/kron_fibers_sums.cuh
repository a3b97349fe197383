// Gradients of small factors from what warps and blocks have added up: those of products are taken apart.
#pragma once

#include "device/cluster.cuh"
#include "device/overlap.cuh"
#include "kron_fibers.cuh"

namespace cuops {

template <class Acc>
__device__ void store_gradient(DType dtype, void* gradient, int i, Acc v) {
  with_element<Acc>(dtype, [&](auto element) {
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
