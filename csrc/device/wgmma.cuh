// Products of a warpgroup, 128 threads, on the tensor cores of compute capability 9.0: they begin, and go on while the threads do
// something else. Matrices in shared memory have 128 bytes a row, whose pieces of 16 bytes are in another order in each of 8 rows.
#pragma once

#include "mma.cuh"

namespace cuops {

// How many registers each thread of a warpgroup has from here on: what some give up, others may take.
template <int kCount>
__device__ inline void keep_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Results, 64 rows of a warpgroup in tiles of 8 columns: each with a thread's 2 of a row, and 2 of the row 8 further on.
#define CUOPS_TILE(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define CUOPS_8_TILES(d)                                                                                                        \
  CUOPS_TILE(d, 0), CUOPS_TILE(d, 1), CUOPS_TILE(d, 2), CUOPS_TILE(d, 3), CUOPS_TILE(d, 4), CUOPS_TILE(d, 5), CUOPS_TILE(d, 6), \
      CUOPS_TILE(d, 7)
#define CUOPS_32_NAMES                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define CUOPS_64_NAMES                                                                 \
  CUOPS_32_NAMES                                                                       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// Where a piece of 16 bytes of a row is, from the start of the matrix.
__device__ inline int swizzled(int row, int piece) { return row * 128 + (piece ^ row % 8) * 16; }

// A matrix as products find it: groups of 8 rows are 1024 bytes apart. It begins at a multiple of 1024 bytes, or at a row's
// multiple of 32 bytes after that.
__device__ inline unsigned long long matrix_at(unsigned shared) { return 1ull << 62 | 1024ull / 16 << 32 | shared / 16; }

// What this thread wrote to shared memory is there for products that begin after the next barrier.
__device__ inline void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Registers of results, and of first operands, have what they should have: before products begin.
__device__ __forceinline__ void begin_products(float (&d)[1][8][4]) {
  asm volatile("wgmma.fence.sync.aligned;" : CUOPS_8_TILES(d[0])::"memory");
}
__device__ __forceinline__ void begin_products(float (&d)[2][8][4]) {
  asm volatile("wgmma.fence.sync.aligned;" : CUOPS_8_TILES(d[0]), CUOPS_8_TILES(d[1])::"memory");
}
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_for_products(float (&d)[1][8][4]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : CUOPS_8_TILES(d[0])::"memory");
}
__device__ __forceinline__ void wait_for_products(float (&d)[2][8][4]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : CUOPS_8_TILES(d[0]), CUOPS_8_TILES(d[1])::"memory");
}

// d = a b^T, plus d where there is `more`: 32 bytes of 64 rows of a, and of 64 or 128 rows of b.
#define CUOPS_MULTIPLY_TYPE(WIDTH)                              \
  if constexpr (kSame<T, float>) {                              \
    CUOPS_MULTIPLY("m64n" WIDTH "k8.f32.tf32.tf32", "");        \
  } else if constexpr (kSame<T, __half>) {                      \
    CUOPS_MULTIPLY("m64n" WIDTH "k16.f32.f16.f16", ", 0, 0");   \
  } else {                                                      \
    CUOPS_MULTIPLY("m64n" WIDTH "k16.f32.bf16.bf16", ", 0, 0"); \
  }
template <class T>
__device__ __forceinline__ void multiply(float (&d)[8][4], unsigned long long a, unsigned long long b, bool more) {
#define CUOPS_MULTIPLY(instruction, tail)                                                                                \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned." instruction " {" CUOPS_32_NAMES \
               "}, %32, %33, p, 1, 1" tail ";\n}"                                                                        \
               : CUOPS_8_TILES(d)                                                                                        \
               : "l"(a), "l"(b), "r"(static_cast<int>(more)))
  CUOPS_MULTIPLY_TYPE("64");
#undef CUOPS_MULTIPLY
}
template <class T>
__device__ __forceinline__ void multiply(float (&d)[2][8][4], unsigned long long a, unsigned long long b, bool more) {
#define CUOPS_MULTIPLY(instruction, tail)                                                                                \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned." instruction " {" CUOPS_64_NAMES \
               "}, %64, %65, p, 1, 1" tail ";\n}"                                                                        \
               : CUOPS_8_TILES(d[0]), CUOPS_8_TILES(d[1])                                                                \
               : "l"(a), "l"(b), "r"(static_cast<int>(more)))
  CUOPS_MULTIPLY_TYPE("128");
#undef CUOPS_MULTIPLY
}

// The same in TF32, where threads have a in registers as mma_tf32 wants it.
__device__ __forceinline__ void multiply_tf32(float (&d)[1][8][4], const unsigned (&a)[4], unsigned long long b, bool more) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {" CUOPS_32_NAMES
               "}, {%32, %33, %34, %35}, %36, p, 1, 1;\n}"
               : CUOPS_8_TILES(d[0])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(more)));
}
__device__ __forceinline__ void multiply_tf32(float (&d)[2][8][4], const unsigned (&a)[4], unsigned long long b, bool more) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 {" CUOPS_64_NAMES
               "}, {%64, %65, %66, %67}, %68, p, 1, 1;\n}"
               : CUOPS_8_TILES(d[0]), CUOPS_8_TILES(d[1])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(more)));
}

#undef CUOPS_MULTIPLY_TYPE
#undef CUOPS_64_NAMES
#undef CUOPS_TILE
#undef CUOPS_8_TILES
#undef CUOPS_32_NAMES

}  // namespace cuops
