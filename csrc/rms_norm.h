// What the host tells the kernels of RMSNorm.
#pragma once

#include "rows.h"

namespace cuops {

struct RmsNormFwdParams {
  Rows x, y;
  long long rows;
  long long n;         // hidden size
  const void* weight;  // nullptr: all ones
  double inverse_n;
  double eps, sqrt_eps;
  bool weight_wide;  // the weight has the dtype of the sums (float32) where x has 16 bits
};
static_assert(sizeof(RmsNormFwdParams) == 120, "host and device must agree on the layout");

}  // namespace cuops
