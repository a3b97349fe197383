// Which kernel the forward of RMSNorm runs in, and in which shape.
#pragma once

#include "host/kernel.h"
#include "rms_norm.h"

namespace cuops {

struct RmsNormFwdPlan {
  Kernel& kernel;
  LaunchShape shape;
};

// For a call whose arrays and scalars `p` has; completes `p` with what the kernel needs to know of the plan.
RmsNormFwdPlan plan_rms_norm_fwd(RmsNormFwdParams* p, DType dtype, int device);

}  // namespace cuops
