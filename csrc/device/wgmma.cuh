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

// Results are 64 rows of a warpgroup in 4, 8, 10, 12 or 16 tiles of 8 columns: each with a thread's 2 of a row, and 2 of the row 8
// further on.
#define CUOPS_TILE(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define CUOPS_4_TILES(i) CUOPS_TILE(i), CUOPS_TILE(i + 1), CUOPS_TILE(i + 2), CUOPS_TILE(i + 3)
#define CUOPS_16_RESULTS CUOPS_4_TILES(0)
#define CUOPS_32_RESULTS CUOPS_16_RESULTS, CUOPS_4_TILES(4)
#define CUOPS_40_RESULTS CUOPS_32_RESULTS, CUOPS_TILE(8), CUOPS_TILE(9)
#define CUOPS_48_RESULTS CUOPS_32_RESULTS, CUOPS_4_TILES(8)
#define CUOPS_64_RESULTS CUOPS_48_RESULTS, CUOPS_4_TILES(12)
#define CUOPS_16_NAMES "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define CUOPS_32_NAMES CUOPS_16_NAMES ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define CUOPS_40_NAMES CUOPS_32_NAMES ", %32, %33, %34, %35, %36, %37, %38, %39"
#define CUOPS_48_NAMES CUOPS_40_NAMES ", %40, %41, %42, %43, %44, %45, %46, %47"
#define CUOPS_64_NAMES CUOPS_48_NAMES ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// Until those that began before the last kLeft groups did are over: each begin_products() begins one.
template <int kLeft = 0, int kTiles>
__device__ __forceinline__ void wait_for_products(float (&d)[kTiles][4]) {
  static_assert(kTiles == 4 || kTiles == 8 || kTiles == 10 || kTiles == 12 || kTiles == 16);
#define CUOPS_WAIT(tiles, registers) \
  if constexpr (kTiles == tiles)     \
    asm volatile("wgmma.wait_group.sync.aligned %" #registers ";" : CUOPS_##registers##_RESULTS : "n"(kLeft) : "memory");
  CUOPS_WAIT(4, 16) CUOPS_WAIT(8, 32) CUOPS_WAIT(10, 40) CUOPS_WAIT(12, 48) CUOPS_WAIT(16, 64)
#undef CUOPS_WAIT
}

// A statement that begins one to four products, whose sum is added to d where there is `more`. Their operands are in shared memory
// (SHARED), or a in registers (HELD), and have a name like %71 whatever the number of results before them. The first statement of a
// group has a fence: registers have what they should before it.
#define CUOPS_8_UNUSED "n"(0), "n"(0), "n"(0), "n"(0), "n"(0), "n"(0), "n"(0), "n"(0),
#define CUOPS_64_UNUSED
#define CUOPS_48_UNUSED CUOPS_8_UNUSED CUOPS_8_UNUSED
#define CUOPS_40_UNUSED CUOPS_48_UNUSED CUOPS_8_UNUSED
#define CUOPS_32_UNUSED CUOPS_40_UNUSED CUOPS_8_UNUSED
#define CUOPS_16_UNUSED CUOPS_32_UNUSED CUOPS_48_UNUSED
#define CUOPS_SHARED(s) "l"(a(s)), "l"(b(s))
#define CUOPS_SHARED_ACROSS ", %65, %66"
#define CUOPS_SHARED_0 "%67, %68"
#define CUOPS_SHARED_1 "%69, %70"
#define CUOPS_SHARED_2 "%71, %72"
#define CUOPS_SHARED_3 "%73, %74"
#define CUOPS_HELD(s) "r"(a(s)[0]), "r"(a(s)[1]), "r"(a(s)[2]), "r"(a(s)[3]), "l"(b(s))
#define CUOPS_HELD_ACROSS ", %66"
#define CUOPS_HELD_0 "{%67, %68, %69, %70}, %71"
#define CUOPS_HELD_1 "{%72, %73, %74, %75}, %76"
#define CUOPS_HELD_2 "{%77, %78, %79, %80}, %81"
#define CUOPS_HELD_3 "{%82, %83, %84, %85}, %86"
#define CUOPS_PRODUCT(i, more, where, shape, across, registers) \
  "wgmma.mma_async.sync.aligned." shape " {" CUOPS_##registers##_NAMES "}, " CUOPS_##where##_##i ", " more ", 1, 1" across ";\n"
#define CUOPS_PRODUCTS_1(...) CUOPS_PRODUCT(0, "more", __VA_ARGS__)
#define CUOPS_PRODUCTS_2(...) CUOPS_PRODUCTS_1(__VA_ARGS__) CUOPS_PRODUCT(1, "true", __VA_ARGS__)
#define CUOPS_PRODUCTS_3(...) CUOPS_PRODUCTS_2(__VA_ARGS__) CUOPS_PRODUCT(2, "true", __VA_ARGS__)
#define CUOPS_PRODUCTS_4(...) CUOPS_PRODUCTS_3(__VA_ARGS__) CUOPS_PRODUCT(3, "true", __VA_ARGS__)
#define CUOPS_OPERANDS_1(where) CUOPS_##where(kFrom)
#define CUOPS_OPERANDS_2(where) CUOPS_OPERANDS_1(where), CUOPS_##where(kFrom + 1)
#define CUOPS_OPERANDS_3(where) CUOPS_OPERANDS_2(where), CUOPS_##where(kFrom + 2)
#define CUOPS_OPERANDS_4(where) CUOPS_OPERANDS_3(where), CUOPS_##where(kFrom + 3)
#define CUOPS_BEGIN(fence, count, where, shape, across, registers)                                                             \
  asm volatile("{\n.reg .pred more, true;\nsetp.ne.b32 more, %64, 0;\nsetp.eq.b32 true, 0, 0;\n" fence CUOPS_PRODUCTS_##count( \
                   where, shape, across, registers) "}"                                                                        \
               : CUOPS_##registers##_RESULTS                                                                                   \
               : CUOPS_##registers##_UNUSED "r"(static_cast<int>(more)), "n"(static_cast<int>(kAcrossA)),                      \
                 "n"(static_cast<int>(kAcrossB)), CUOPS_OPERANDS_##count(where)                                                \
               : "memory")
#define CUOPS_OF_TILES(type, across, ...)                                          \
  if constexpr (kTiles == 4) CUOPS_BEGIN(__VA_ARGS__, "m64n32" type, across, 16);  \
  if constexpr (kTiles == 8) CUOPS_BEGIN(__VA_ARGS__, "m64n64" type, across, 32);  \
  if constexpr (kTiles == 10) CUOPS_BEGIN(__VA_ARGS__, "m64n80" type, across, 40); \
  if constexpr (kTiles == 12) CUOPS_BEGIN(__VA_ARGS__, "m64n96" type, across, 48); \
  if constexpr (kTiles == 16) CUOPS_BEGIN(__VA_ARGS__, "m64n128" type, across, 64);
#define CUOPS_OF_TYPE(fence, count, where)                                           \
  if constexpr (kSame<T, float>) {                                                   \
    CUOPS_OF_TILES("k8.f32.tf32.tf32", "", fence, count, where)                      \
  } else if constexpr (kSame<T, __half>) {                                           \
    CUOPS_OF_TILES("k16.f32.f16.f16", CUOPS_##where##_ACROSS, fence, count, where)   \
  } else {                                                                           \
    CUOPS_OF_TILES("k16.f32.bf16.bf16", CUOPS_##where##_ACROSS, fence, count, where) \
  }
#define CUOPS_OF_PLACE(count, where)                           \
  if constexpr (kFrom == 0) {                                  \
    CUOPS_OF_TYPE("wgmma.fence.sync.aligned;\n", count, where) \
  } else {                                                     \
    CUOPS_OF_TYPE("", count, where)                            \
  }
#define CUOPS_OF_COUNT(count)       \
  if constexpr (kCount == count) {  \
    if constexpr (kIsShared) {      \
      CUOPS_OF_PLACE(count, SHARED) \
    } else {                        \
      CUOPS_OF_PLACE(count, HELD)   \
    }                               \
  }

// Begins d = the sum of a(s) b(s)^T over kSteps, plus d where there is `more`. Each is of 32 bytes of 64 rows of a, and of as many
// rows of b as d has columns. Of 16 bits a or b may lie across: these are then 64 columns, or as many as d has, of 16 rows.
// Threads may have a(s) in registers, as mma and mma_tf32 want it. A statement begins up to four of the products: compilers take
// long for each, as it has all registers of the results.
template <class T, int kSteps, bool kAcrossA = false, bool kAcrossB = false, int kFrom = 0, int kTiles, class A, class B>
__device__ __forceinline__ void begin_products(float (&d)[kTiles][4], const A& a, const B& b, bool more = false) {
  constexpr int kCount = kSteps - kFrom < 4 ? kSteps - kFrom : 4;
  constexpr bool kIsShared = kSame<decltype(a(0)), unsigned long long>;
  CUOPS_OF_COUNT(1)
  CUOPS_OF_COUNT(2)
  CUOPS_OF_COUNT(3)
  CUOPS_OF_COUNT(4)
  if constexpr (kFrom + kCount < kSteps) {
    begin_products<T, kSteps, kAcrossA, kAcrossB, kFrom + kCount>(d, a, b, true);
  } else {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
}

}  // namespace cuops
