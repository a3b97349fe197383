// Weights, biases and residuals of any of the usual dtypes, where registers hold a row.
#pragma once

#include "device/row.cuh"

namespace cuops {

// What lies beside the packs of a row and has T, or the dtype of the sums, or, beside float, 16 bits, as it comes from memory.
template <class T>
struct Beside {
  using Acc = Accumulator<T>;
  static constexpr int kWidth = kVectorWidth<T>;
  struct Raw {
    uint4 words[sizeof(Acc) / sizeof(T)];
  };
  const void* data;
  DType dtype;

  __device__ explicit operator bool() const { return data; }

  // Packs at(0), at(1), ... of the row, all at the same time.
  template <bool kPhased, int kCount, class At>
  __device__ void fetch(Raw (&raw)[kCount], const Division<T, kWidth, kPhased, int>& division, At&& at) const {
    if (!data) return;
    if (dtype == kDTypeOf<T>) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const auto v = load_beside(division, static_cast<const T*>(data), at(i));
        raw[i].words[0] = *reinterpret_cast<const uint4*>(&v);
      }
    } else if constexpr (sizeof(T) < sizeof(Acc)) {
      constexpr int kPart = kVectorWidth<Acc>;  // of which a pack that starts within one needs one more
      const int bytes = division.head % kPart * static_cast<int>(sizeof(Acc));
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const auto* const from = static_cast<const Vector<Acc>*>(data) + (division.head + at(i) * kWidth) / kPart;
        Vector<Acc> parts[3] = {load_constant(from), load_constant(from + 1)};
        if constexpr (kPhased) {
          parts[2] = bytes > 0 ? load_constant(from + 2) : parts[1];
          parts[0] = shifted(parts[0], parts[1], bytes);
          parts[1] = shifted(parts[1], parts[2], bytes);
        }
        raw[i] = *reinterpret_cast<const Raw*>(parts);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const uint2* const from = static_cast<const uint2*>(data) + at(i);
        uint2 v = __ldg(from);
        if constexpr (kPhased) {  // whose pack starts within one, as above
          const uint2 next = __ldg(from + (division.head > 0));
          const unsigned low = division.head & 2 ? v.y : v.x, middle = division.head & 2 ? next.x : v.y,
                         high = division.head & 2 ? next.y : next.x, bits = division.head & 1 ? 16 : 0;
          v = {__funnelshift_r(low, middle, bits), __funnelshift_r(middle, high, bits)};
        }
        raw[i].words[0] = {v.x, v.y, 0, 0};
      }
    }
  }

  __device__ Pack<Acc, kWidth> unpack(const Raw& raw) const {
    if (dtype == kDTypeOf<T>) return convert<Acc>(*reinterpret_cast<const Vector<T>*>(&raw));
    if constexpr (sizeof(T) < sizeof(Acc)) {
      return *reinterpret_cast<const Pack<Acc, kWidth>*>(&raw);
    } else {
      return dtype == kFloat16 ? convert<Acc>(*reinterpret_cast<const Pack<__half, kWidth>*>(&raw))
                               : convert<Acc>(*reinterpret_cast<const Pack<__nv_bfloat16, kWidth>*>(&raw));
    }
  }

  __device__ Acc element(long long at) const {
    if (dtype == kDTypeOf<T>) return convert<Acc>(static_cast<const T*>(data)[at]);
    if constexpr (sizeof(T) < sizeof(Acc)) {
      return static_cast<const Acc*>(data)[at];
    } else {
      return dtype == kFloat16 ? convert<Acc>(static_cast<const __half*>(data)[at])
                               : convert<Acc>(static_cast<const __nv_bfloat16*>(data)[at]);
    }
  }

  // Brings a pack to the caches.
  __device__ void prefetch(long long at) const {
    if (data) prefetch_constant(static_cast<const char*>(data) + at * size_of(dtype));
  }
};

}  // namespace cuops
