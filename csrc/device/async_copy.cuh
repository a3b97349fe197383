// Asynchronous copies from device memory to shared memory (compute capability 8.0); each thread waits for its own.
#pragma once

#include "numeric.cuh"

#define CUOPS_ASYNC_COPIES (__CUDA_ARCH__ >= 800)

namespace cuops {

// 16 or 8 bytes.
template <class Packed>
__device__ void copy_async(Packed* shared, const Packed* from) {
#if CUOPS_ASYNC_COPIES
  const unsigned to = shared_address(shared);
  if constexpr (sizeof(Packed) == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    return;
  } else if constexpr (sizeof(Packed) == 8) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
    return;
  }
#endif
  *shared = *from;
}
__device__ inline void commit_copies() {
#if CUOPS_ASYNC_COPIES
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// For all but the last kPending groups.
template <int kPending>
__device__ void wait_for_copies() {
#if CUOPS_ASYNC_COPIES
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// 16 bytes, or zeros in their place.
__device__ inline void copy_or_zero(char* to, const void* from, bool valid) {
#if CUOPS_ASYNC_COPIES
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
#else
  *reinterpret_cast<uint4*>(to) = valid ? *static_cast<const uint4*>(from) : uint4{};
#endif
}

// kBytes, 4 to 16, the first `existing` ones of them, and zeros behind these.
template <int kBytes>
__device__ inline void copy_bytes(unsigned to, const void* from, int existing) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes), "r"(existing) : "memory");
}

// A number of 4 or 8 bytes.
template <class T>
__device__ void copy_number(T* to, const T* from) {
#if CUOPS_ASYNC_COPIES
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(sizeof(T)) : "memory");
#else
  *to = *from;
#endif
}

// 16 bytes, or zeros, which nobody has to wait for.
__device__ inline void copy_vector(unsigned to, const char* from, bool exists) {
  if (exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
  }
}

}  // namespace cuops
