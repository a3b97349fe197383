// Tensor maps, as the host passes them to kernels.
#pragma once

namespace cuops {

// What the copies of compute capability 9.0 between device memory and shared memory want to know of an array: the driver's
// CUtensorMap.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

}  // namespace cuops
