// The numbers of a launch of RMSNorm, from those that a caller gives.
#pragma once

#include <cmath>
#include <limits>

#include "host/error.h"
#include "rms_norm.h"

namespace cuops {

// As scalars have it.
template <class Acc>
Acc eps_as(double eps) {
  using Limits = std::numeric_limits<Acc>;
  return eps < Limits::min() ? 0 : eps > Limits::max() ? Limits::quiet_NaN() : static_cast<Acc>(eps);
}

// ValueError for numbers that are none.
template <class Params>
void set_scalars(Params* p, long long n, double eps, double weight_offset) {
  if (!(eps >= 0) || std::isinf(eps))
    raise("ValueError", "eps: expected a finite number of at least 0, got " + std::to_string(eps));
  if (!std::isfinite(weight_offset)) raise("ValueError", "weight_offset: expected a finite number");
  const double inverse_n = 1.0 / n;
  const float rounded = static_cast<float>(inverse_n);
  p->float64 = {inverse_n, 0, eps_as<double>(eps), std::sqrt(eps), weight_offset};
  p->float32 = {rounded, static_cast<float>(inverse_n - rounded), eps_as<float>(eps), static_cast<float>(std::sqrt(eps)),
                static_cast<float>(weight_offset)};
}

}  // namespace cuops
