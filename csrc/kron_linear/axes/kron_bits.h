// What the host tells the kernels of kron_linear_bits.cu and kron_linear_twos.cu.
#pragma once

#include "kron_linear.h"

namespace cuops {

// The most warps of a block, factors, elements of these, and passes.
constexpr int kBitsWarps = 4, kBitsFactors = 10, kBitsElements = 576, kBitsPasses = 6;

// Factors of 2^log, of which the last one is for an element's bit `first` and those after it, and has elements from `at` on.
struct KronBitsPass {
  int first, log, count, at;
};
struct KronBitsParams {
  Rows x, y;  // of one stride
  const void* bias;
  long long rows, bias_lead;
  KronFactor factors[kBitsFactors];
  KronBitsPass pass[kBitsPasses];
  int count, passes, elements;  // of the factors
  int log_sample, warps;        // of a sample's elements; of a block, that have elements
  DType dtype;
};
static_assert(sizeof(KronBitsParams) == 768, "host and device must agree on the layout");

}  // namespace cuops
