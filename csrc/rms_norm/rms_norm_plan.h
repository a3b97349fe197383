// Which kernel the forward of RMSNorm runs in, and in which shape.
#pragma once

#include "host/integers.h"
#include "host/kernel.h"
#include "rms_norm.h"

namespace cuops {

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
