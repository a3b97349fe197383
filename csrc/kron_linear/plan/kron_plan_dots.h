// How kron_linear_dots.cu applies factors, and finds the gradients of one.
#pragma once

#include "kron_linear/products/kron_dots.h"
#include "kron_plan_product.h"

namespace cuops {

// The predicted nanoseconds of a launch that finds dx, dw or both: infinite where there is no kernel.
double plan_dots_bwd(const KronProductProblem& problem, bool needs_dx, bool needs_dw, const KronDevice& device);

// What is launched for one factor: y, dx from dy, and dw.
KronDots dots_of_y(const KronProductProblem& problem, const KronProductArray& y, const KronProductArray& x, const KronFactor& w);
KronDots dots_of_dx(const KronProductProblem& problem, const KronProductArray& dx, const KronProductArray& dy, const KronFactor& w);
KronDots dots_of_dw(const KronProductProblem& problem, void* dw, const KronProductArray& dy, const KronProductArray& x);
Kernel& dots_kernel(DType dtype);

// Of all factors, from the plan's on: what arrays and factors add.
KronTermsParams terms_of(KronTermsParams p, const KronProductArray& y, const KronProductArray& x, const KronFactor* factors);

// Of all gradients: the predicted nanoseconds behind another launch, infinite where there is no kernel; `p` is all that sizes say.
double plan_terms_bwd(KronTermsBwdParams* p, DType dtype, std::int64_t rows, const std::vector<KronSize>& sizes,
                      const KronDevice& device);
// What arrays and factors add; `dfactors` and dx may be null. Returns the number of blocks.
unsigned terms_bwd_of(KronTermsBwdParams* p, const void* x, const void* dy, void* dx, void* const* dfactors,
                      const KronFactor* factors);
Kernel& terms_bwd_kernel(DType dtype, int factors);

}  // namespace cuops
