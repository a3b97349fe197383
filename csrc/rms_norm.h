// What the host tells the kernels of RMSNorm.
#pragma once

#include "dtype.h"
#include "rows.h"

namespace cuops {

struct RmsNormFwdParams {
  Rows x, residual, y, h;  // h = x + residual, where there is a residual
  long long rows;
  long long n;  // hidden size
  const void* weight;
  const void* bias;
  void* rstd;  // one a row, in the dtype of the sums
  double inverse_n;
  double eps, sqrt_eps;
  double weight_offset;
  DType y_dtype;
  bool weight_wide, bias_wide;  // they have the dtype of the sums (float32) where x has 16 bits
};
static_assert(sizeof(RmsNormFwdParams) == 208, "host and device must agree on the layout");

}  // namespace cuops
