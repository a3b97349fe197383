// How kron_linear_product.cu applies a factor to one axis of an array, and finds the gradients of that.
#pragma once

#include <cmath>

#include "kron_linear/products/kron_product.h"
#include "kron_plan.h"

namespace cuops {

// x (rows, in, inner) and y (rows, out, inner).
struct KronProductProblem {
  DType dtype;
  std::int64_t rows, inner, out, in;
};

// An array of `inner` columns, of one stride from row to row.
struct KronProductArray {
  void* data;
  std::int64_t stride;
};

// The parts of the sums of dw, up to so many, and the predicted time of a launch: infinite where there is no kernel.
struct KronProductPlan {
  int splits = 1;
  double nanoseconds = INFINITY;
};
KronProductPlan plan_product_bwd(const KronProductProblem& problem, bool needs_dx, bool needs_dw, unsigned most_splits,
                                 const KronDevice& device);

// What is launched: y, dx from dy, and dw.
KronProduct product_of_y(const KronProductProblem& problem, const KronProductArray& y, const KronProductArray& x,
                         const KronFactor& w);
KronProduct product_of_dx(const KronProductProblem& problem, const KronProductArray& dx, const KronProductArray& dy,
                          const KronFactor& w);
KronProduct product_of_dw(const KronProductProblem& problem, void* dw, const KronProductArray& dy, const KronProductArray& x);

// Cuts a product into tiles, and its sums into parts.
void set_tiles(KronProduct* product, int splits);

Kernel& product_kernel(DType dtype);

}  // namespace cuops
