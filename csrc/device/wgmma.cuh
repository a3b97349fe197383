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

// Results, 64 rows of a warpgroup in 4, 8, 10, 12 or 16 tiles of 8 columns: each with a thread's 2 of a row, and 2 of the row 8
// further on.
#define CUOPS_TILE(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define CUOPS_TILES_FROM(d, i) CUOPS_TILE(d, i), CUOPS_TILE(d, i + 1), CUOPS_TILE(d, i + 2), CUOPS_TILE(d, i + 3)
#define CUOPS_4_TILES(d) CUOPS_TILES_FROM(d, 0)
#define CUOPS_8_TILES(d) CUOPS_4_TILES(d), CUOPS_TILES_FROM(d, 4)
#define CUOPS_10_TILES(d) CUOPS_8_TILES(d), CUOPS_TILE(d, 8), CUOPS_TILE(d, 9)
#define CUOPS_12_TILES(d) CUOPS_8_TILES(d), CUOPS_TILES_FROM(d, 8)
#define CUOPS_16_TILES(d) CUOPS_12_TILES(d), CUOPS_TILES_FROM(d, 12)
#define CUOPS_16_NAMES "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define CUOPS_32_NAMES CUOPS_16_NAMES ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define CUOPS_40_NAMES CUOPS_32_NAMES ", %32, %33, %34, %35, %36, %37, %38, %39"
#define CUOPS_48_NAMES CUOPS_40_NAMES ", %40, %41, %42, %43, %44, %45, %46, %47"
#define CUOPS_64_NAMES CUOPS_48_NAMES ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// Where a piece of 16 bytes of a row is, from the start of the matrix.
__device__ inline int swizzled(int row, int piece) { return row * 128 + (piece ^ row % 8) * 16; }

// A matrix as products find it: groups of 8 rows are 1024 bytes apart. It begins at a multiple of 1024 bytes, or at a row's
// multiple of 32 bytes after that, and is said by its place, in units of 16 bytes. Where products take it across, its columns from
// the 64th on are `next` bytes further on.
__device__ inline unsigned long long matrix(unsigned place) { return 1ull << 62 | 1024ull / 16 << 32 | place; }
__device__ inline unsigned long long matrix_at(unsigned shared) { return matrix(shared / 16); }
__device__ inline unsigned place_across(unsigned shared, int next) { return shared / 16 | next / 16 << 16; }

// What this thread wrote to shared memory is there for products that begin after the next barrier.
__device__ inline void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Registers of results, and of first operands, have what they should have: before products begin.
template <int kTiles>
__device__ __forceinline__ void begin_products(float (&d)[kTiles][4]) {
  static_assert(kTiles == 4 || kTiles == 8 || kTiles == 10 || kTiles == 12 || kTiles == 16);
  if constexpr (kTiles == 4) asm volatile("wgmma.fence.sync.aligned;" : CUOPS_4_TILES(d)::"memory");
  if constexpr (kTiles == 8) asm volatile("wgmma.fence.sync.aligned;" : CUOPS_8_TILES(d)::"memory");
  if constexpr (kTiles == 10) asm volatile("wgmma.fence.sync.aligned;" : CUOPS_10_TILES(d)::"memory");
  if constexpr (kTiles == 12) asm volatile("wgmma.fence.sync.aligned;" : CUOPS_12_TILES(d)::"memory");
  if constexpr (kTiles == 16) asm volatile("wgmma.fence.sync.aligned;" : CUOPS_16_TILES(d)::"memory");
}
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until those that began before the last kLeft groups did are over: a group ends with end_products().
template <int kLeft = 0, int kTiles>
__device__ __forceinline__ void wait_for_products(float (&d)[kTiles][4]) {
  if constexpr (kTiles == 4) asm volatile("wgmma.wait_group.sync.aligned %16;" : CUOPS_4_TILES(d) : "n"(kLeft) : "memory");
  if constexpr (kTiles == 8) asm volatile("wgmma.wait_group.sync.aligned %32;" : CUOPS_8_TILES(d) : "n"(kLeft) : "memory");
  if constexpr (kTiles == 10) asm volatile("wgmma.wait_group.sync.aligned %40;" : CUOPS_10_TILES(d) : "n"(kLeft) : "memory");
  if constexpr (kTiles == 12) asm volatile("wgmma.wait_group.sync.aligned %48;" : CUOPS_12_TILES(d) : "n"(kLeft) : "memory");
  if constexpr (kTiles == 16) asm volatile("wgmma.wait_group.sync.aligned %64;" : CUOPS_16_TILES(d) : "n"(kLeft) : "memory");
}

// d = a b^T, plus d where there is `more`: 32 bytes of 64 rows of a, and of as many rows of b as d has columns. Of 16 bits a or b
// may lie across: these are then 64 columns, or as many as d has, of 16 rows.
#define CUOPS_MULTIPLY(shape_and_types, registers, tiles, a, b_at, more_at, tail, ...)                            \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" more_at ", 0;\nwgmma.mma_async.sync.aligned." shape_and_types \
               " {" CUOPS_##registers##_NAMES "}, " a ", %" b_at ", p, 1, 1" tail ";\n}"                          \
               : CUOPS_##tiles##_TILES(d)                                                                         \
               : __VA_ARGS__)
#define CUOPS_MULTIPLY_TYPE(width, registers, tiles, a, b_at, more_at, across, ...)                            \
  if constexpr (kSame<T, float>) {                                                                             \
    CUOPS_MULTIPLY("m64n" width "k8.f32.tf32.tf32", registers, tiles, a, b_at, more_at, "", __VA_ARGS__);      \
  } else if constexpr (kSame<T, __half>) {                                                                     \
    CUOPS_MULTIPLY("m64n" width "k16.f32.f16.f16", registers, tiles, a, b_at, more_at, across, __VA_ARGS__);   \
  } else {                                                                                                     \
    CUOPS_MULTIPLY("m64n" width "k16.f32.bf16.bf16", registers, tiles, a, b_at, more_at, across, __VA_ARGS__); \
  }
template <class T, bool kAcrossA = false, bool kAcrossB = false, int kTiles>
__device__ __forceinline__ void multiply(float (&d)[kTiles][4], unsigned long long a, unsigned long long b, bool more) {
#define CUOPS_OPERANDS "l"(a), "l"(b), "r"(static_cast<int>(more)), "n"(static_cast<int>(kAcrossA)), "n"(static_cast<int>(kAcrossB))
  if constexpr (kTiles == 4) {
    CUOPS_MULTIPLY_TYPE("32", 16, 4, "%16", "17", "18", ", %19, %20", CUOPS_OPERANDS)
  } else if constexpr (kTiles == 8) {
    CUOPS_MULTIPLY_TYPE("64", 32, 8, "%32", "33", "34", ", %35, %36", CUOPS_OPERANDS)
  } else if constexpr (kTiles == 10) {
    CUOPS_MULTIPLY_TYPE("80", 40, 10, "%40", "41", "42", ", %43, %44", CUOPS_OPERANDS)
  } else if constexpr (kTiles == 12) {
    CUOPS_MULTIPLY_TYPE("96", 48, 12, "%48", "49", "50", ", %51, %52", CUOPS_OPERANDS)
  } else {
    CUOPS_MULTIPLY_TYPE("128", 64, 16, "%64", "65", "66", ", %67, %68", CUOPS_OPERANDS)
  }
#undef CUOPS_OPERANDS
}

// The same where threads have a in registers, as mma and mma_tf32 want it.
template <class T, bool kAcrossB = false, int kTiles>
__device__ __forceinline__ void multiply(float (&d)[kTiles][4], const unsigned (&a)[4], unsigned long long b, bool more) {
#define CUOPS_OPERANDS \
  "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(more)), "n"(static_cast<int>(kAcrossB))
  if constexpr (kTiles == 4) {
    CUOPS_MULTIPLY_TYPE("32", 16, 4, "{%16, %17, %18, %19}", "20", "21", ", %22", CUOPS_OPERANDS)
  } else if constexpr (kTiles == 8) {
    CUOPS_MULTIPLY_TYPE("64", 32, 8, "{%32, %33, %34, %35}", "36", "37", ", %38", CUOPS_OPERANDS)
  } else if constexpr (kTiles == 10) {
    CUOPS_MULTIPLY_TYPE("80", 40, 10, "{%40, %41, %42, %43}", "44", "45", ", %46", CUOPS_OPERANDS)
  } else if constexpr (kTiles == 12) {
    CUOPS_MULTIPLY_TYPE("96", 48, 12, "{%48, %49, %50, %51}", "52", "53", ", %54", CUOPS_OPERANDS)
  } else {
    CUOPS_MULTIPLY_TYPE("128", 64, 16, "{%64, %65, %66, %67}", "68", "69", ", %70", CUOPS_OPERANDS)
  }
#undef CUOPS_OPERANDS
}
#undef CUOPS_MULTIPLY
#undef CUOPS_MULTIPLY_TYPE
#undef CUOPS_64_NAMES
#undef CUOPS_48_NAMES
#undef CUOPS_40_NAMES
#undef CUOPS_32_NAMES
#undef CUOPS_16_NAMES
#undef CUOPS_16_TILES
#undef CUOPS_12_TILES
#undef CUOPS_10_TILES
#undef CUOPS_8_TILES
#undef CUOPS_4_TILES
#undef CUOPS_TILES_FROM
#undef CUOPS_TILE

}  // namespace cuops
