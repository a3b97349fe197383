// Which kernel the forward of RMSNorm runs in, and in which shape.
#pragma once

#include <cmath>
#include <limits>

#include "host/error.h"
#include "host/integers.h"
#include "host/kernel.h"
#include "rms_norm.h"

namespace cuops {

// As scalars have it.
template <class Acc>
Acc eps_as(double eps) {
  using Limits = std::numeric_limits<Acc>;
  return eps < Limits::min() ? 0 : eps > Limits::max() ? Limits::quiet_NaN() : static_cast<Acc>(eps);
}

// The constants of a launch; ValueError for numbers that are none.
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

struct RmsNormFwdPlan {
  Kernel& kernel;
  LaunchShape shape;
  Kernel* sums = nullptr;  // of the same shape, to be launched first; both want p->found with two values a block
};

// For a call whose arrays and scalars `p` has; completes `p` with what the kernel needs to know of the plan. `may_allocate`:
// whether there is memory for p->found.
RmsNormFwdPlan plan_rms_norm_fwd(RmsNormFwdParams* p, DType dtype, int device, bool may_allocate);

// For rows of `packs`, each thread having up to `resident` of them, in blocks of up to `most` threads.
LaunchShape resident_shape(std::int64_t rows, std::int64_t packs, unsigned resident, unsigned most);

// Whether 2 vectors a thread leave many threads without a second one: 4 in fewer threads ask for more of memory at a time.
bool leaves_room(std::int64_t packs);

// Vectors a thread that leave few lanes without one where rows are a little longer than a power of two of vectors: 3, or 5 of
// more than 32 (on fewer lanes, 5 are slower, as measured); else 0.
unsigned odd_vectors(std::int64_t packs);

// The row from which on L2 is not to keep what it keeps longest (passing.cuh) beyond the kernel: what comes before, later
// rows have pushed out by then. kNoRow where all of it would have to be given back: nothing is kept then.
long long released_from(std::int64_t rows, std::int64_t row_bytes, const Hardware& hw);

}  // namespace cuops
