// What the vendor's matrix products take of a chain, as _kron_linear/gemm.py makes them.
#pragma once

#include "kron_plan.h"

namespace cuops {

// How a factor is applied: by one product, by a batch, or by one of small products; by one and a copy that rearranges; and, in a
// chain with fused kernels, by one between two copies.
enum Gemm { kOne, kBatched, kSmall, kCopied, kBetweenCopies };

// How a chain of GEMMs has one of its factors.
Gemm how_in_gemms(const KronProblem& problem);

// How a chain with fused kernels has one: nothing comes out transposed there.
Gemm how_in_chain(const KronProblem& problem);

// Whether a chain of GEMMs has nothing to rearrange between its factors, which are two.
bool are_two(const KronProblem& problem);

KronGroup plan_gemm(const KronProblem& problem, Gemm gemm, const KronDevice& device);

}  // namespace cuops
