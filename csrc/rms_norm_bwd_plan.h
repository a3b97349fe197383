// Which kernels compute a gradient of RMSNorm, and how they are launched.
#pragma once

#include <cstdint>

#include "host/kernel.h"
#include "rms_norm.h"

namespace cuops {

// Of the common case, several rows a block (two kernels, by length) or several blocks a row, for aligned rows and for those that
// start anywhere (rms_norm_bwd_held.cu); of all other aligned rows; and those for any rows on any GPU, which work in pairs
// (rms_norm_bwd_any.cu).
enum RmsNormBwdKernel {
  kHeld,
  kHeldLong,
  kWide,
  kHeldPhased,
  kWidePhased,
  kGeneral,
  kRowsAny,
  kRowsVectors,
  kColumnsAny,
  kColumnsVectors,
  kRmsNormBwdKernels
};

Kernel& rms_norm_bwd_kernel(DType dtype, RmsNormBwdKernel kernel);

// Where rows start: all at a multiple of 16 bytes, weight and n too; those of one number equally far behind one; or anywhere.
enum RowStarts { kAligned, kTogether, kAnywhere };

struct RmsNormBwdProblem {
  std::int64_t rows, n;
  DType dtype;
  RowStarts starts;
  bool common;  // a weight of h's dtype, without offset, and no bias
};

// Blocks stay until all rows are done.
struct RmsNormBwdPlan {
  RmsNormBwdKernel kernel;
  LaunchShape shape;
  std::int64_t partial_rows;   // of sums for dweight and dbias
  bool finds_results = false;  // of these sums, rather than partial ones
  long long released_from = kNoRow;
};
RmsNormBwdPlan plan_rms_norm_bwd(const RmsNormBwdProblem& problem, int device);

// For the kernel before kColumns*: a part of a warp a row, a block, or several where rows are few.
LaunchShape rms_norm_bwd_rows_shape(std::int64_t rows, std::int64_t n, int device);

// For the sum of so many rows of partial sums.
LaunchShape sum_rows_shape(std::int64_t rows, std::int64_t n);

}  // namespace cuops
