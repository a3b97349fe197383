// The dtypes of cuops, as the host passes them to kernels.
#pragma once

namespace cuops {

enum DType : unsigned char { kFloat64, kFloat32, kFloat16, kBFloat16 };

constexpr int size_of(DType dtype) { return dtype == kFloat64 ? 8 : dtype == kFloat32 ? 4 : 2; }

}  // namespace cuops
