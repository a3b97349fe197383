// The dtypes of cuops, as the host passes them to kernels.
#pragma once

namespace cuops {

enum DType : unsigned char { kFloat64, kFloat32, kFloat16, kBFloat16 };

}  // namespace cuops
