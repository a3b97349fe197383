// What the host tells the kernels of kron_linear_merge.cu.
#pragma once

#include "kron_linear.h"

namespace cuops {

constexpr int kMergeThreads = 256, kMergeProducts = 8, kMergeFactors = 2 * kKronFactors;
constexpr int kMergeLargest = 1 << 15;  // rows and columns of a product
constexpr int kMergeTerms = 4;          // of a sum, which a thread has on their way together
constexpr int kMergeCluster = 8;        // blocks that share a sum, at most
constexpr int kMergeBalanced = 512;     // blocks of a product, at most, where each finds the factors' magnitudes
// Powers of two that the largest elements of products are between, where these stay as they are: below, float16 has fewer digits of
// them; above, what they make of x may leave its range.
constexpr int kMergeLow = -14, kMergeHigh = 4;

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
  float* scales;  // a power of two by which each product is multiplied, so that all are of about the same magnitude; or nothing
  int product_count, factor_count;
  DType dtype;  // of the factors and of their gradients
};
static_assert(sizeof(KronMergeParams) == 2584, "host and device must agree on the layout");

}  // namespace cuops
