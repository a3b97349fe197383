// Kronecker products of neighbouring factors, each a matrix for kernels and GEMMs that take it for one factor; and the factors'
// gradients from those of such products.
#include "device/overlap.cuh"
#include "device/reduce.cuh"
#include "device/row_sums.cuh"
#include "kron_linear/kron_shared.cuh"
#include "kron_merge.h"

namespace cuops {

template <class Acc>
__device__ Acc element_of(const KronMergeParams& p, int factor, int row, int column) {
  const KronFactor& f = p.factors[factor];
  return load_element<Acc>(p.dtype, f.data, row * f.row_stride + column * f.column_stride);
}

// The exponents of the largest elements of two products, by all threads: sums of those of their factors. One that is zero, or has
// an infinity, counts as 1.
template <class Acc>
__device__ void find_exponents(const KronMergeParams& p, int (&exponents)[kMergeProducts]) {
  __shared__ int of_factor[kMergeFactors];
  const int lane = threadIdx.x % 32;
  for (int k = threadIdx.x / 32; k < p.factor_count; k += kMergeThreads / 32) {
    const KronFactor& f = p.factors[k];
    float most = 0;
    for (int i = lane; i < f.out * f.in; i += 32) {
      const int row = i / f.in;
      most = fmaxf(most, fabsf(static_cast<float>(element_of<Acc>(p, k, row, i - row * f.in))));
    }
    most = reduce_lanes(most, 32, Max());
    if (lane == 0) of_factor[k] = most > 0 && !isinf(most) ? ((__float_as_int(most) >> 23) & 255) - 127 : 0;
  }
  __syncthreads();
  for (int which = 0; which < p.product_count; ++which) {
    exponents[which] = 0;
    for (int k = 0; k < p.products[which].count; ++k) exponents[which] += of_factor[p.products[which].first + k];
  }
}

// A thread has an element of a product.
template <class Acc>
__device__ void kron_merge(const KronMergeParams& p) {
  const int which = blockIdx.x >= p.products[0].blocks, block = blockIdx.x - which * p.products[0].blocks;
  const KronMergeProduct& product = p.products[which];
  wait_for_previous();
  Acc v = 1;
  if (p.scales) {
    int exponents[kMergeProducts];
    find_exponents<Acc>(p, exponents);
    const int half = (exponents[1] - exponents[0]) / 2;
    const float scale = power_of_two(max(-126, min(which == 0 ? half : -half, 126)));
    if (block == 0 && threadIdx.x == 0) p.scales[which] = scale;
    v = scale;
  }
  const int at = block * kMergeThreads + threadIdx.x;
  if (at >= product.rows * product.columns) return;
  int row = at / product.columns, column = at - row * product.columns;
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

// Some neighbouring threads have an element of a factor's gradient: the sum, over all elements of the product that it is in, of
// their gradients times what the other factors have there.
template <class Acc>
__device__ void kron_unmerge(const KronMergeParams& p) {
  __shared__ Acc found[kMergeThreads];
  int k = 0, block = blockIdx.x;
  for (; block >= p.gradients[k].blocks; ++k) block -= p.gradients[k].blocks;
  const int which = p.product_count > 1 && k >= p.products[1].first;
  const KronFactor& own = p.factors[k];
  const KronMergeProduct& product = p.products[which];
  const int lanes = 1 << p.gradients[k].log_lanes, lane = threadIdx.x % lanes;
  const int at = block * (kMergeThreads / lanes) + threadIdx.x / lanes, own_row = at / own.in;
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
  for (int half = lanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half) found[threadIdx.x] = sum += found[threadIdx.x + half];
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
