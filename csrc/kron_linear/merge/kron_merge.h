// What the host tells the kernels of kron_linear_merge.cu.
#pragma once

#include "kron_linear.h"

namespace cuops {

constexpr int kMergeThreads = 256, kMergeProducts = 2, kMergeFactors = kMergeProducts * kKronFactors;
constexpr int kMergeLargest = 1 << 15;  // rows and columns of a product
constexpr int kMergeTerms = 4;          // of a sum, which a thread has on their way together

// The Kronecker product of some neighbours, a matrix without gaps; or its gradient, where those of the factors are wanted.
struct KronMergeProduct {
  void* data;        // nothing: no gradient
  int first, count;  // of the factors
  int rows, columns, blocks;
  DType dtype;
};

// Where the gradient of a factor goes, and how many threads share one of its sums.
struct KronMergeGradient {
  void* data;
  int blocks, log_lanes;
};

struct KronMergeParams {
  KronFactor factors[kMergeFactors];
  KronMergeGradient gradients[kMergeFactors];
  KronMergeProduct products[kMergeProducts];
  float* scales;  // a power of two by which each product is multiplied, so that both are of the same magnitude; or nothing
  int product_count, factor_count;
  DType dtype;  // of the factors and of their gradients
};
static_assert(sizeof(KronMergeParams) == 2392, "host and device must agree on the layout");

}  // namespace cuops
