// Kronecker products of neighbouring factors, each a matrix for kernels and GEMMs that take it for one factor; and the factors'
// gradients from those of such products.
#include "device/cluster.cuh"
#include "device/overlap.cuh"
#include "device/row_sums.cuh"
#include "kron_linear/kron_magnitudes.cuh"
#include "kron_merge.h"

namespace cuops {

template <class Acc>
__device__ Acc element_of(const KronMergeParams& p, int factor, int row, int column) {
  const KronFactor& f = p.factors[factor];
  return load_element<Acc>(p.dtype, f.data, row * f.row_stride + column * f.column_stride);
}

// The power of two that makes a product's largest element like those of the others, whose powers cancel it out; 1 where those of
// several factors are between kMergeLow and kMergeHigh. They are found from the factors' largest elements, of which a factor of
// zeros, or with an infinity, has 1.
__device__ float balance(const KronMergeParams& p, int which) {
  __shared__ KronFactor factors[kMergeFactors];
  __shared__ int magnitudes[kMergeFactors];
  if (threadIdx.x < p.factor_count) {
    factors[threadIdx.x] = p.factors[threadIdx.x];
    magnitudes[threadIdx.x] = 0;
  }
  __syncthreads();
  find_magnitudes(factors, p.factor_count, p.dtype, magnitudes);
  __syncthreads();
  auto exponent_of = [&](int first, int count) {
    int exponent = 0;
    for (int k = first; k < first + count; ++k) {
      const int bits = magnitudes[k];
      if (bits > 0 && !isinf(__int_as_float(bits))) exponent += (bits >> 23) - 126;
    }
    return exponent;  // of a power of two above the product of these elements, by 2 a factor at most
  };
  bool fits = true;
  for (int i = 0; i < p.product_count; ++i) {
    const int exponent = exponent_of(p.products[i].first, p.products[i].count);
    const int count = p.products[i].count;
    fits = fits && (count == 1 || (kMergeLow <= exponent - count && exponent <= kMergeHigh));
  }
  if (fits) return 1;
  const int mean = exponent_of(0, p.factor_count) / p.product_count;
  int power = 0, powers = 0;  // a product's, and those of all up to it, which the others have to undo
  for (int i = 0; i <= which; ++i) {
    const KronMergeProduct& product = p.products[i];
    power = i + 1 < p.product_count ? mean - exponent_of(product.first, product.count) : -powers;
    power = max(max(-126, -126 - powers), min(power, min(126, 126 - powers)));
    powers += power;
  }
  return power_of_two(power);
}

// A thread has an element of a product, or some.
template <class Acc>
__device__ void kron_merge(const KronMergeParams& p) {
  int which = 0, block = blockIdx.x;
  for (; block >= p.products[which].blocks; ++which) block -= p.products[which].blocks;
  const KronMergeProduct& product = p.products[which];
  wait_for_previous();
  Acc scale = 1;
  if (p.scales) {
    scale = balance(p, which);
    if (block == 0 && threadIdx.x == 0) p.scales[which] = scale;
  }
#pragma unroll 1
  for (int at = block * kMergeThreads + threadIdx.x; at < product.rows * product.columns; at += product.blocks * kMergeThreads) {
    int row = at / product.columns, column = at - row * product.columns;
    Acc v = scale;
#pragma unroll 1
    for (int k = product.first + product.count - 1; k >= product.first; --k) {
      const KronFactor& f = p.factors[k];
      const int rows = divide(row, f.by_out), columns = divide(column, f.by_in);
      v *= element_of<Acc>(p, k, row - rows * f.out, column - columns * f.in);
      row = rows;
      column = columns;
    }
    store_result(product.dtype, product.data, at, v);
  }
}

// Some neighbouring threads, of several blocks of a cluster where sums are long, have an element of a factor's gradient: the sum,
// over all elements of the product that it is in, of their gradients times what the other factors have there.
template <class Acc>
__device__ void kron_unmerge(const KronMergeParams& p) {
  __shared__ Acc found[kMergeThreads];
  int k = 0, block = blockIdx.x;
  for (; block >= p.gradients[k].blocks; ++k) block -= p.gradients[k].blocks;
  int which = 0;
  while (k >= p.products[which].first + p.products[which].count) ++which;
  const KronFactor& own = p.factors[k];
  const KronMergeProduct& product = p.products[which];
  const int log_lanes = p.gradients[k].log_lanes, lanes = 1 << log_lanes, thread = block * kMergeThreads + threadIdx.x;
  const int lane = thread & (lanes - 1), at = thread >> log_lanes, own_row = at / own.in;
  const bool exists = own_row < own.out;
  const int across = product.columns / own.in, terms = product.rows / own.out * across;
  wait_for_previous();
  Acc sum = 0;
#pragma unroll 1
  for (int first = lane; exists && first < terms; first += kMergeTerms * lanes) {
    // Of these the others' rows and columns, and its own in the product.
    int rest_row[kMergeTerms], rest_column[kMergeTerms], row[kMergeTerms] = {}, column[kMergeTerms] = {}, rows = 1, columns = 1;
    Acc others[kMergeTerms];
#pragma unroll
    for (int i = 0; i < kMergeTerms; ++i) {
      const int term = min(first + i * lanes, terms - 1);
      rest_row[i] = term / across;
      rest_column[i] = term - rest_row[i] * across;
      others[i] = 1;
    }
#pragma unroll 1
    for (int j = product.first + product.count - 1; j >= product.first; --j) {
      const KronFactor& f = p.factors[j];
#pragma unroll
      for (int i = 0; i < kMergeTerms; ++i) {
        int r = own_row, c = at - own_row * own.in;
        if (j != k) {
          const int above = divide(rest_row[i], f.by_out), before = divide(rest_column[i], f.by_in);
          r = rest_row[i] - above * f.out;
          c = rest_column[i] - before * f.in;
          others[i] *= element_of<Acc>(p, j, r, c);
          rest_row[i] = above;
          rest_column[i] = before;
        }
        row[i] += r * rows;
        column[i] += c * columns;
      }
      rows *= f.out;
      columns *= f.in;
    }
#pragma unroll
    for (int i = 0; i < kMergeTerms; ++i) {
      const Acc v = others[i] * load_element<Acc>(product.dtype, product.data, row[i] * product.columns + column[i]);
      if (first + i * lanes < terms) sum += v;
    }
  }
  found[threadIdx.x] = sum;
#pragma unroll 1
  for (int half = min(lanes, kMergeThreads) / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane % kMergeThreads < half) found[threadIdx.x] = sum += found[threadIdx.x + half];
  }
  if (lanes > kMergeThreads) {
    cluster_barrier();
#pragma unroll 1
    for (int other = 1; lane == 0 && other < lanes / kMergeThreads; ++other) sum += load_remote(found, cluster_rank() + other);
    cluster_barrier();  // a block that ended would take its sum with it
  }
  if (lane > 0 || !exists) return;
  store_result(p.dtype, p.gradients[k].data, at, p.scales ? sum * p.scales[which] : sum);
}

}  // namespace cuops

#define KRON_MERGE(name, Acc)                                                                                              \
  extern "C" __global__ void __launch_bounds__(cuops::kMergeThreads) kron_merge_##name(const cuops::KronMergeParams p) {   \
    cuops::kron_merge<Acc>(p);                                                                                             \
  }                                                                                                                        \
  extern "C" __global__ void __launch_bounds__(cuops::kMergeThreads) kron_unmerge_##name(const cuops::KronMergeParams p) { \
    cuops::kron_unmerge<Acc>(p);                                                                                           \
  }
KRON_MERGE(f32, float)
KRON_MERGE(f64, double)
