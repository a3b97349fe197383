// Which kernels add up the gradient of normal samples, and how they share it.
#pragma once

#include "sample_normal_params.h"

namespace cuops {

// With so many columns a thread along rows; kBwdRows2 is float64's.
enum SampleNormalBwdKernel { kBwdRows1, kBwdRows2, kBwdRows4, kBwdColumns };

constexpr int columns_of(SampleNormalBwdKernel kernel) { return kernel == kBwdRows4 ? 4 : kernel == kBwdRows2 ? 2 : 1; }

struct SampleNormalBwdPlan {
  SampleNormalBwdKernel kernel;
  std::int64_t chunks;    // of the samples, whose sums a second launch adds up; 0: one launch does all, with what follows
  std::int64_t step = 0;  // groups that a thread takes
  std::int64_t blocks = 0;
  int threads = 0;           // of a block
  unsigned tiles_shift = 0;  // tiles of columns that a block has, as a power of two
  std::int64_t cycles = 0;   // that it is going to take
};

SampleNormalBwdPlan plan_bwd(const SampleNormalParams& p, DType dtype, const Hardware& hw);

// The kernel that adds up chunks.
SampleNormalBwdKernel chunk_kernel_for(const SampleNormalParams& p, DType dtype, const Hardware& hw);

// Threads for a chunk along rows, or for all of the groups.
std::int64_t tiles_of(const SampleNormalParams& p, SampleNormalBwdKernel kernel);

}  // namespace cuops
