// What the host tells the kernels of RMSNorm.
#pragma once

#include "dtype.h"
#include "rows.h"

namespace cuops {

// What the sums need, in their own precision.
template <class Acc>
struct RmsNormScalars {
  Acc inverse_n, inverse_n_rest;  // their sum is 1 / n, to twice the precision
  Acc eps, sqrt_eps;
  Acc weight_offset;
};

struct RmsNormFwdParams {
  Rows x, residual, y, h;  // h = x + residual, where there is a residual
  long long rows;
  long long n;  // hidden size
  const void* weight;
  const void* bias;
  void* rstd;  // one a row, in the dtype of the sums
  RmsNormScalars<double> float64;
  RmsNormScalars<float> float32;
  DType y_dtype;
  bool weight_wide, bias_wide;  // they have the dtype of the sums (float32) where x has 16 bits
};
static_assert(sizeof(RmsNormFwdParams) == 232, "host and device must agree on the layout");

}  // namespace cuops
