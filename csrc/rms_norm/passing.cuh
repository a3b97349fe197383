// What a kernel reads once, on its way through L2.
#pragma once

#include "device/numeric.cuh"
#include "rows.h"

namespace cuops {

// Lines that L2 keeps longest let memory serve reads and writes side by side a few percent faster on Hopper
// (docs/design/rms_norm.md). They would outlive the kernel and take room from those after it, so what may still be there at the end
// is to be released.
class Passing {
 public:
  __device__ explicit Passing(bool lasts) : policy_(lasts ? kEvictLast : kEvictNormal) {}

  template <class Vector>
  __device__ Vector load(const Vector* from) const {
#if __CUDA_ARCH__ >= 900
    if constexpr (sizeof(Vector) == 16) {
      uint4 v;
      asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                   : "l"(from), "l"(policy_));
      return *reinterpret_cast<const Vector*>(&v);
    } else {
      static_assert(sizeof(Vector) == 8);
      uint2 v;
      asm volatile("ld.global.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;" : "=r"(v.x), "=r"(v.y) : "l"(from), "l"(policy_));
      return *reinterpret_cast<const Vector*>(&v);
    }
#else
    return *from;
#endif
  }

  // Gives back line `at` of a row of n elements, if all of it is within its matrix of `count` rows. Threads that share a row have
  // at most 128 bytes of it each, so that a line each is enough.
  template <class T>
  static __device__ void release(const Rows& rows, long long count, long long n, long long row, int at) {
#if __CUDA_ARCH__ >= 900
    constexpr int kLine = 128;
    const T *const begin = static_cast<const T*>(rows.data), *const from = begin + row * rows.stride;
    const char* const line = reinterpret_cast<const char*>((reinterpret_cast<unsigned long long>(from) & -kLine) + at * kLine);
    if (line < reinterpret_cast<const char*>(from + n) && line >= reinterpret_cast<const char*>(begin) &&
        line + kLine <= reinterpret_cast<const char*>(begin + (count - 1) * rows.stride + n))
      asm volatile("applypriority.global.L2::evict_normal [%0], 128;" ::"l"(line) : "memory");
#endif
  }

 private:
  // What createpolicy.fractional makes of a fraction of 1, in a dozen instructions: libcu++'s cuda::access_property has them, too.
  static constexpr unsigned long long kEvictLast = 0x14f0000000000000, kEvictNormal = 0x16f0000000000000;

  unsigned long long policy_;
};

}  // namespace cuops
