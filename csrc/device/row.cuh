// One row of a matrix in device memory, moved in vectors of 16 bytes.
#pragma once

#include "async_copy.cuh"
#include "numeric.cuh"
#include "rows.h"

namespace cuops {

// Where a row starts, in elements. Rows of two strides number less than 2^32.
__device__ inline long long offset_of(const Rows& rows, long long row) {
  const long long outer = row < rows.inner ? 0 : static_cast<unsigned>(row) / static_cast<unsigned>(rows.inner);
  return outer * rows.outer_stride + (row - outer * rows.inner) * rows.stride;
}

// A row of one stride in packs of kWidth elements.
template <int kWidth, class T>
__device__ Pack<T, kWidth>* packs_of(const Rows& rows, long long row) {
  return reinterpret_cast<Pack<T, kWidth>*>(static_cast<T*>(rows.data) + row * rows.stride);
}

// How a row divides into packs of kWidth elements, and edges: single elements before the first and after the last pack.
// Without kPhased there are no edges: every row starts at a multiple of a pack's size and is a whole number of packs.
template <class T, int kWidth, bool kPhased, class Index>
struct Division {
  int head = 0;  // edges before the first pack; all others follow the last
  Index packs;
  int edges = 0;

  __device__ Division(const T* row, long long n) : packs(static_cast<Index>(n / kWidth)) {
    if constexpr (kPhased) {
      const int before = static_cast<int>(-reinterpret_cast<long long>(row) & 15) / static_cast<int>(sizeof(T));
      head = static_cast<int>(min(static_cast<long long>(before), n));
      // A shifted parameter reads one pack ahead.
      packs = static_cast<Index>(max((n - head) / kWidth - (head > 0), 0ll));
      edges = static_cast<int>(n - static_cast<long long>(packs) * kWidth);
    }
  }
  __device__ long long edge(int e) const { return e < head ? e : e + static_cast<long long>(packs) * kWidth; }
};

// The pack of 16 bytes that starts `bytes` (less than 16) into two neighbours.
template <class T, int kWidth>
__device__ Pack<T, kWidth> shifted(const Pack<T, kWidth>& low, const Pack<T, kWidth>& high, int bytes) {
  alignas(16) unsigned w[8];
  *reinterpret_cast<Pack<T, kWidth>*>(w) = low;
  *reinterpret_cast<Pack<T, kWidth>*>(w + 4) = high;
#pragma unroll
  for (int j = 0; j < 6; ++j) w[j] = bytes & 8 ? w[j + 2] : w[j];
#pragma unroll
  for (int j = 0; j < 5; ++j) w[j] = bytes & 4 ? w[j + 1] : w[j];
#pragma unroll
  for (int j = 0; sizeof(T) == 2 && j < 4; ++j) w[j] = __funnelshift_r(w[j], w[j + 1], bytes & 2 ? 16 : 0);
  return *reinterpret_cast<const Pack<T, kWidth>*>(w);
}

// From an array that the kernel does not write, so that stores before it need not be waited for.
template <class T, int kWidth>
__device__ Pack<T, kWidth> load_constant(const Pack<T, kWidth>* from) {
  Pack<T, kWidth> out;
  constexpr int kBytes = sizeof(T) * kWidth;
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int j = 0; j < kBytes / 16; ++j) reinterpret_cast<uint4*>(&out)[j] = __ldg(reinterpret_cast<const uint4*>(from) + j);
  } else {
    static_assert(kWidth == 1);
    out.at[0] = from->at[0];
  }
  return out;
}

// The same where it is written: the compiler would put it much earlier, and its registers are wanted for other things by then.
template <class T>
__device__ Vector<T> load_constant_here(const T* from) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return *reinterpret_cast<const Vector<T>*>(&v);
}

// Where it is written, too, from an array that the kernel writes later.
template <class T, int kWidth>
__device__ Pack<T, kWidth> load_here(const Pack<T, kWidth>* from) {
  static_assert(sizeof(T) * kWidth == 16);
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return *reinterpret_cast<const Pack<T, kWidth>*>(&v);
}

// Brings what is there to L2, and to L1 where the GPU does.
template <class T>
__device__ void prefetch_constant(const T* from) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(from));
}

// Pack `i` of a parameter (a weight, say), which starts at a multiple of 16 bytes, beside pack `i` of the row.
template <class T, int kWidth, bool kPhased, class Index>
__device__ Pack<T, kWidth> load_beside(const Division<T, kWidth, kPhased, Index>& division, const T* parameter, Index i) {
  const auto* packs = reinterpret_cast<const Pack<T, kWidth>*>(parameter);
  if constexpr (!kPhased) {
    return load_constant(packs + i);
  } else {
    const auto low = load_constant(packs + i), high = load_constant(packs + (division.head > 0 ? i + 1 : i));
    return shifted(low, high, division.head * static_cast<int>(sizeof(T)));
  }
}

// Loads pack `at` of a row of any dtype. Out of line, because it is rare and long.
template <class Acc, int kWidth>
__device__ __noinline__ Pack<Acc, kWidth> load_as(DType dtype, const void* data, long long at) {
  auto load = [&](const auto* from) {
    using U = typename Pointee<decltype(from)>::type;
    return convert<Acc>(reinterpret_cast<const Pack<U, kWidth>*>(from)[at]);
  };
  switch (dtype) {
    case kFloat64: return load(static_cast<const double*>(data));
    case kFloat32: return load(static_cast<const float*>(data));
    case kFloat16: return load(static_cast<const __half*>(data));
    case kBFloat16: return load(static_cast<const __nv_bfloat16*>(data));
  }
  __builtin_unreachable();
}

// Stores pack `at` of a row of any dtype, likewise.
template <class Acc, int kWidth>
__device__ __noinline__ void store_as(DType dtype, void* data, long long at, Pack<Acc, kWidth> v) {
  auto store = [&](auto* to) {
    using U = typename Pointee<decltype(to)>::type;
    reinterpret_cast<Pack<U, kWidth>*>(to)[at] = convert<U>(v);
  };
  switch (dtype) {
    case kFloat64: return store(static_cast<double*>(data));
    case kFloat32: return store(static_cast<float*>(data));
    case kFloat16: return store(static_cast<__half*>(data));
    case kBFloat16: return store(static_cast<__nv_bfloat16*>(data));
  }
}

}  // namespace cuops
