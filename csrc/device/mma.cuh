// Tensor cores, for compute capability 8.0 and newer.
#pragma once

#include "async_copy.cuh"
#include "numeric.cuh"

namespace cuops {

// Four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void load_matrices(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ inline void load_matrices_transposed(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// c += a b, where a is 16 x 16 and b 16 x 8, of float16 or bfloat16.
template <class Half>
__device__ void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (kSame<Half, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// c += a b, where a is 16 x 8 and b 8 x 8, in TF32.
__device__ inline void mma_tf32(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// To the nearest that TF32 holds, once the tensor cores have cut it off: half a unit in the last place is added. Their NaN, which
// would overflow, is the larger one without.
__device__ inline float near_tf32(float v) {
  const int bits = __float_as_int(v);
  return __int_as_float(max(static_cast<int>(bits + 0x1000u), bits));
}

// float32 as the sum of two TF32, the nearest and what is left. The largest numbers, which would overflow, are cut off, as is NaN.
__device__ inline void split_tf32(unsigned v, unsigned& high, unsigned& low) {
  const bool rounds = fabsf(__uint_as_float(v)) < __uint_as_float(0x7f7ff000u);
  high = (rounds ? v + 0x1000u : v) & 0xffffe000u;
  low = __float_as_uint(__uint_as_float(v) - __uint_as_float(high));
}

// c += a b, where a is 16 x 8 and b 8 x 8, in float64. One instruction at compute capability 9.0, with twice the rate of those for
// 8 x 4 and 4 x 8.
__device__ inline void mma(double (&c)[4], const double (&a)[4], double b0, double b1) {
#if __CUDA_ARCH__ >= 900
  asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b0), "d"(b1));
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+d"(c[i % 2 * 2]), "+d"(c[i % 2 * 2 + 1])
        : "d"(a[i]), "d"(i < 2 ? b0 : b1));
  }
#endif
}

// Two float32 rounded to 16 bits.
template <class T>
__device__ unsigned pack(float a, float b) {
  if constexpr (kSame<T, __half>) {
    const __half2 h = __floats2half2_rn(a, b);
    return *reinterpret_cast<const unsigned*>(&h);
  } else {
    const __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const unsigned*>(&h);
  }
}

// Two float32 as the sums of two 16-bit numbers each, to twice the precision.
template <class Half>
__device__ void split(float a, float b, unsigned& high, unsigned& low) {
  if constexpr (kSame<Half, __half>) {
    const __half2 h = __floats2half2_rn(a, b);
    const float2 back = __half22float2(h);
    const __half2 l = __floats2half2_rn(a - back.x, b - back.y);
    high = *reinterpret_cast<const unsigned*>(&h);
    low = *reinterpret_cast<const unsigned*>(&l);
  } else {
    const __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
    high = *reinterpret_cast<const unsigned*>(&h);
    const __nv_bfloat162 l = __floats2bfloat162_rn(a - __uint_as_float(high << 16), b - __uint_as_float(high & 0xffff0000u));
    low = *reinterpret_cast<const unsigned*>(&l);
  }
}

// A barrier of some whole warps of the block, of which some may go on at once.
__device__ inline void sync_warps(int barrier, int warps) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(warps * 32) : "memory");
}

}  // namespace cuops
