// What was converted from 16 bits, converted again rather than kept.
#pragma once

#include "device/numeric.cuh"

namespace cuops {

// convert<float>, once more: by instructions that the compiler does not take for those of the first time. kPermutes: for bfloat16
// by others that do as much, and not by one more. Four of float16 are few enough to keep.
template <bool kPermutes, class T, int kWidth>
__device__ Pack<float, kWidth> convert_again(const Pack<T, kWidth>& in, unsigned zero) {
  if constexpr (kPermutes && kSame<T, __nv_bfloat16>) {
    const unsigned* const pairs = reinterpret_cast<const unsigned*>(in.at);
    Pack<float, kWidth> out;
#pragma unroll
    for (int j = 0; j < kWidth; j += 2) {
      asm("prmt.b32 %0, %1, 0, 0x1044;" : "=f"(out.at[j]) : "r"(pairs[j / 2]));
      asm("prmt.b32 %0, %1, 0, 0x3244;" : "=f"(out.at[j + 1]) : "r"(pairs[j / 2]));
    }
    return out;
  } else if constexpr (sizeof(T) * kWidth < 16) {
    return convert<float>(in);
  } else if constexpr (sizeof(T) < sizeof(float)) {
    return convert<float>(forgotten(in, zero));
  } else {
    return in;
  }
}

}  // namespace cuops
