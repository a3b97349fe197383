// Numbers on the device: conversions, accumulator types, vectors of 16 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "dtype.h"

namespace cuops {

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

template <bool, class A, class>
struct SelectOf {
  using type = A;
};
template <class A, class B>
struct SelectOf<false, A, B> {
  using type = B;
};
template <bool kFirst, class A, class B>
using Select = typename SelectOf<kFirst, A, B>::type;

template <class T>
struct Pointee;
template <class T>
struct Pointee<T*> {
  using type = T;
};
template <class T>
struct Pointee<const T*> {
  using type = T;
};

template <class T>
constexpr DType kDTypeOf = kSame<T, double>   ? kFloat64
                           : kSame<T, float>  ? kFloat32
                           : kSame<T, __half> ? kFloat16
                                              : kBFloat16;

// Sums run in float32, and in float64 for float64.
template <class T>
using Accumulator = Select<kSame<T, double>, double, float>;

template <class To, class From>
__device__ To convert(From v) {
  if constexpr (kSame<From, __half>) {
    return static_cast<To>(__half2float(v));
  } else if constexpr (kSame<From, __nv_bfloat16>) {
    return static_cast<To>(__bfloat162float(v));
  } else if constexpr (kSame<To, __half>) {
    return __float2half_rn(v);
  } else if constexpr (kSame<To, __nv_bfloat16>) {
    return __float2bfloat16_rn(v);
  } else {
    return static_cast<To>(v);
  }
}

// 1 / sqrt(v) for finite v > 0, within 0.6 units in the last place: the hardware's own is 2 units off.
__device__ inline float rsqrt_rn(float v) {
  const float r = rsqrtf(v), vr = v * r;
  const float residual = fmaf(-vr, r, 1.0f) - fmaf(v, r, -vr) * r;
  return fmaf(0.5f * r, residual, r);
}
__device__ inline double rsqrt_rn(double v) { return rsqrt(v); }

// The power of two that brings v, finite and not negative, to [1, 2), or as near as a finite factor can.
__device__ inline float power_of_two_to_one(float v) { return __int_as_float(max(254 - (__float_as_int(v) >> 23), 1) << 23); }
__device__ inline double power_of_two_to_one(double v) {
  return __hiloint2double(max(2046 - (__double2hiint(v) >> 20), 1) << 20, 0);
}

__device__ inline unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// kWidth neighbours in memory, moved with as few and as wide instructions as their size allows.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth < 16 ? sizeof(T) * kWidth : 16) Pack {
  T at[kWidth];
};

template <class T>
constexpr int kVectorWidth = 16 / sizeof(T);
template <class T>
using Vector = Pack<T, kVectorWidth<T>>;

// A vector as one instruction moves it: compilers take structs of 16-bit elements apart.
template <class T, int kWidth>
__device__ Pack<T, kWidth> load(const Pack<T, kWidth>* from) {
  static_assert(sizeof(T) * kWidth == 16);
  Pack<T, kWidth> out;
  *reinterpret_cast<uint4*>(&out) = *reinterpret_cast<const uint4*>(from);
  return out;
}
template <class T, int kWidth>
__device__ void store(Pack<T, kWidth>* to, const Pack<T, kWidth>& v) {
  static_assert(sizeof(T) * kWidth == 16);
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&v);
}

// Neighbours of any number, likewise, as wide as can be.
template <class T, int kWidth>
using Word = Select<sizeof(T) * kWidth % 16 == 0, uint4,
                    Select<sizeof(T) * kWidth == 8, uint2, Select<sizeof(T) * kWidth == 4, unsigned, unsigned short>>>;
template <class T, int kWidth>
__device__ void store_pack(void* to, const Pack<T, kWidth>& v) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(v) / sizeof(Word<T, kWidth>)); ++i) {
    static_cast<Word<T, kWidth>*>(to)[i] = reinterpret_cast<const Word<T, kWidth>*>(&v)[i];
  }
}

// Neighbours on their way from memory. Those of 16 bits stay in words: where control flow meets, compilers take packs of them
// apart, which waits for them.
template <class T, int kWidth, bool kInWords = sizeof(T) == 2>
struct Fetched {
  Pack<T, kWidth> all;

  __device__ Pack<T, kWidth> pack() const { return all; }
};
template <class T, int kWidth>
struct Fetched<T, kWidth, true> {
  static constexpr int kWords = sizeof(Pack<T, kWidth>) / sizeof(Word<T, kWidth>);
  Word<T, kWidth> words[kWords];

  __device__ Pack<T, kWidth> pack() const {
    Pack<T, kWidth> v;
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<Word<T, kWidth>*>(&v)[i] = words[i];
    return v;
  }
};
template <class T, int kWidth>
__device__ Fetched<T, kWidth> fetch(const void* from) {
  Fetched<T, kWidth> v;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(v) / sizeof(Word<T, kWidth>)); ++i) {
    reinterpret_cast<Word<T, kWidth>*>(&v)[i] = static_cast<const Word<T, kWidth>*>(from)[i];
  }
  return v;
}
template <class T, int kWidth>
__device__ Pack<T, kWidth> load_pack(const void* from) {
  return fetch<T, kWidth>(from).pack();
}

// The same bits, of which the compiler knows nothing, as it does not know that `zero` is 0: converting again is cheaper than
// registers that keep what was converted.
__device__ inline uint4 forgotten(const uint4& v, unsigned zero) { return {v.x ^ zero, v.y ^ zero, v.z ^ zero, v.w ^ zero}; }
template <class T, int kWidth>
__device__ Pack<T, kWidth> forgotten(const Pack<T, kWidth>& v, unsigned zero) {
  static_assert(sizeof(T) * kWidth == 16);
  Pack<T, kWidth> out;
  *reinterpret_cast<uint4*>(&out) = forgotten(*reinterpret_cast<const uint4*>(&v), zero);
  return out;
}

// Likewise: what depends on it is found in each round of a loop, rather than before and kept in registers.
template <class T>
__device__ T found_anew(T v) {
  static_assert(sizeof(T) == 4);
  asm volatile("" : "+r"(v));
  return v;
}

template <class To, class T, int kWidth>
__device__ Pack<To, kWidth> convert(const Pack<T, kWidth>& in) {
  Pack<To, kWidth> out;
  if constexpr (kSame<T, __nv_bfloat16> && kSame<To, float> && kWidth % 2 == 0) {
    // A bfloat16 is the upper half of a float32: one operation an element, where taking halves apart costs two.
    const unsigned* pairs = reinterpret_cast<const unsigned*>(in.at);
#pragma unroll
    for (int j = 0; j < kWidth; j += 2) {
      out.at[j] = __uint_as_float(pairs[j / 2] << 16);
      out.at[j + 1] = __uint_as_float(pairs[j / 2] & 0xffff0000u);
    }
  } else if constexpr (kSame<T, float> && sizeof(To) == 2 && kWidth % 2 == 0) {
    // Pairs share an instruction.
#pragma unroll
    for (int j = 0; j < kWidth; j += 2) {
      if constexpr (kSame<To, __half>) {
        *reinterpret_cast<__half2*>(out.at + j) = __floats2half2_rn(in.at[j], in.at[j + 1]);
      } else {
        *reinterpret_cast<__nv_bfloat162*>(out.at + j) = __floats2bfloat162_rn(in.at[j], in.at[j + 1]);
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) out.at[j] = convert<To>(in.at[j]);
  }
  return out;
}

}  // namespace cuops
