// What the host tells the kernels of kron_linear_sum.cu.
#pragma once

#include "dtype.h"

namespace cuops {

constexpr int kSumThreads = 512;  // of a block, at most

// y (parts, n): the sums of x (rows, n), of `rows_of_part` rows each. A block has 1 << log_columns columns, or vectors of them,
// of one part.
struct KronSumParams {
  const void* x;
  void* y;
  long long n, rows, rows_of_part;
  int column_blocks, log_columns;
  DType to;  // y's
};
static_assert(sizeof(KronSumParams) == 56, "host and device must agree on the layout");

}  // namespace cuops
