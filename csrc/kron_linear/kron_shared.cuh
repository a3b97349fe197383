// What kernels of kron_linear share: shared memory, divisions, exponents, and elements whose dtype is known at run time only.
#pragma once

#include "device/mma.cuh"
#include "device/row.cuh"
#include "kron_linear.h"

namespace cuops {

extern __shared__ uint4 kron_shared[];

template <class T>
__device__ T* shared_at(int unit) {
  return reinterpret_cast<T*>(kron_shared + unit);
}

__device__ inline int divide(int n, KronDivisor by) { return by.divisor == 1 ? n : __umulhi(n, by.magic); }

// At least 14 - 127: the power of two that brings it to 14 is a float.
__device__ inline int exponent_of(int bits) { return max(((bits >> 23) & 255) - 127, 14 - 127); }
__device__ inline float power_of_two(int exponent) { return __int_as_float(max(0, min(exponent + 127, 254)) << 23); }

// A power of two as the product of two, which overflows only if what it multiplies does.
struct PowerOfTwo {
  float first, second;

  PowerOfTwo() = default;
  __device__ explicit PowerOfTwo(int exponent) : first(power_of_two(exponent / 2)), second(power_of_two(exponent - exponent / 2)) {}
  __device__ float of(float v) const { return v * first * second; }
};

// Loaded again where it is needed again: registers that keep all weights would be too many.
template <int kWidth>
__device__ Pack<float, kWidth> load_anew(const float* shared) {
  static_assert(kWidth == 2 || kWidth == 4);
  Pack<float, kWidth> v;
  if constexpr (kWidth == 2) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.at[0]), "=f"(v.at[1]) : "r"(shared_address(shared)));
  } else {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.at[0]), "=f"(v.at[1]), "=f"(v.at[2]), "=f"(v.at[3])
                 : "r"(shared_address(shared)));
  }
  return v;
}
template <int kWidth>
__device__ Pack<double, kWidth> load_anew(const double* shared) {
  Pack<double, kWidth> v;
#pragma unroll
  for (int i = 0; i < kWidth; i += 2) {
    asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(v.at[i]), "=d"(v.at[i + 1]) : "r"(shared_address(shared + i)));
  }
  return v;
}

// acc[o][j] = the sum over i of weight[o][i] v[i][j].
template <int kN, int kFibers, int kOuts>
__device__ void multiply(const float* weight, const float (&v)[kN][kFibers], float (&acc)[kOuts][kFibers]) {
#pragma unroll
  for (int o = 0; o < kOuts; ++o) {
#pragma unroll
    for (int i = 0; i < kN; i += 4) {
      const auto w = load_anew<4>(weight + o * kN + i);
#pragma unroll
      for (int j = 0; j < kFibers; ++j) {
        acc[o][j] = i == 0 ? w.at[0] * v[i][j] : fmaf(w.at[0], v[i][j], acc[o][j]);
        acc[o][j] = fmaf(w.at[3], v[i + 3][j], fmaf(w.at[2], v[i + 2][j], fmaf(w.at[1], v[i + 1][j], acc[o][j])));
      }
    }
  }
}

// Calls visit with an element of the dtype, whose sums are in Acc: what surrounds it is the same code for all.
template <class Acc, class Visit>
__device__ __forceinline__ void with_element(DType dtype, const Visit& visit) {
  if constexpr (kSame<Acc, double>) {
    visit(double());
  } else if (dtype == kFloat32) {
    visit(float());
  } else if (dtype == kFloat16) {
    visit(__half());
  } else {
    visit(__nv_bfloat16());
  }
}

// Elements whose dtype is known at run time only, in the precision of the sums.
template <class Acc>
__device__ Acc load_element(DType dtype, const void* data, long long i) {
  if constexpr (kSame<Acc, double>) {
    return static_cast<const double*>(data)[i];
  } else if (dtype == kFloat32) {
    return static_cast<const float*>(data)[i];
  } else if (dtype == kFloat16) {
    return convert<float>(static_cast<const __half*>(data)[i]);
  } else {
    return convert<float>(static_cast<const __nv_bfloat16*>(data)[i]);
  }
}
template <class Acc>
__device__ Pack<Acc, 8> load_chunk(DType dtype, const void* data) {
  if constexpr (kSame<Acc, double>) {
    return *static_cast<const Pack<double, 8>*>(data);
  } else if (dtype == kFloat32) {
    return *static_cast<const Pack<float, 8>*>(data);
  } else if (dtype == kFloat16) {
    return convert<float>(*static_cast<const Pack<__half, 8>*>(data));
  } else {
    return convert<float>(*static_cast<const Pack<__nv_bfloat16, 8>*>(data));
  }
}
template <class Acc, int kWidth>
__device__ void store_chunk(DType dtype, void* data, long long i, const Pack<Acc, kWidth>& v) {
  if constexpr (kSame<Acc, double>) {
    *reinterpret_cast<Pack<double, kWidth>*>(static_cast<double*>(data) + i) = v;
  } else if (dtype == kFloat32) {
    *reinterpret_cast<Pack<float, kWidth>*>(static_cast<float*>(data) + i) = v;
  } else if (dtype == kFloat16) {
    *reinterpret_cast<Pack<__half, kWidth>*>(static_cast<__half*>(data) + i) = convert<__half>(v);
  } else {
    *reinterpret_cast<Pack<__nv_bfloat16, kWidth>*>(static_cast<__nv_bfloat16*>(data) + i) = convert<__nv_bfloat16>(v);
  }
}

__device__ inline void split_chunk(const Pack<float, 8>& v, float scale, uint4& high, uint4& low) {
  split<__half>(v.at[0] * scale, v.at[1] * scale, high.x, low.x);
  split<__half>(v.at[2] * scale, v.at[3] * scale, high.y, low.y);
  split<__half>(v.at[4] * scale, v.at[5] * scale, high.z, low.z);
  split<__half>(v.at[6] * scale, v.at[7] * scale, high.w, low.w);
}

// The exponent of the power of two that brings a number with these bits to [2^14, 2^15), or as near as a float can; 0 where there
// is none.
__device__ inline int exponent_to_top(int bits) {
  const int exponent = bits >> 23;
  return exponent == 255 ? 0 : min(141 - exponent, 127);
}

template <class Acc>
constexpr int kChunkUnits = sizeof(Acc) / 2;

}  // namespace cuops
