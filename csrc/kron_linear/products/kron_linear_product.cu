// Products of small matrices, each a factor along one axis or a gradient of that, without tensor cores: as many blocks as there are
// tiles of the result, or more that share the sums, so that little else takes time than the way to memory and back.
#include "device/cluster.cuh"
#include "device/overlap.cuh"
#include "device/tuned.cuh"
#include "kron_linear/kron_shared.cuh"
#include "kron_product.h"

CUOPS_ONLY_FOR(90)

namespace cuops {

__device__ inline long long place(const KronPlaces& p, int split, int other) {
  const int outer = divide(split, p.by_inner);
  return outer * p.outer + (split - outer * static_cast<int>(p.by_inner.divisor)) + other * p.step;
}

// A thread's part of an operand's tile, in fours of neighbours; zeros around it.
template <class T, int kDepth, int kPitch>
struct ProductPart {
  static constexpr int kCount = kProductTile * kDepth / 4 / kProductThreads, kAcross = kProductTile / 4;
  const T* from[kCount];  // nullptr: zeros
  int count[kCount];      // that exist
  Fetched<T, 4> together[kCount];
  Pack<T, 4> beside[kCount];  // of 16 bits, where they come one by one

  // The first row and element of the sum of a four, and whether the tile has it.
  __device__ static bool find(const KronOperand& q, int j, int depth, int& row, int& k) {
    const int four = threadIdx.x + j * kProductThreads, log = 32 - __clz((depth - 1) / 4);  // fours of a row: a power of two
    row = q.along_sum ? four >> log : four % kAcross * 4;
    k = q.along_sum ? (four & ((1 << log) - 1)) * 4 : four / kAcross;
    return row < kProductTile && k < (depth + 3) / 4 * 4;
  }
  __device__ static const T* at(const KronOperand& q, int row, int k) {
    return static_cast<const T*>(q.data) + place(q.places, q.splits_sum ? k : row, q.splits_sum ? row : k);
  }
  template <class Acc>
  __device__ static void put(const KronOperand& q, int row, int k, const Pack<Acc, 4>& wide, Acc (*tile)[kPitch]) {
    if (q.along_sum) {
      store_pack(&tile[row][k], wide);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) tile[row + e][k] = wide.at[e];
    }
  }

  // Of rows first.. of `rows`, and `depth` elements from `begin` on. What can be found out without reading memory comes first,
  // since the kernel before may still write there.
  __device__ void prepare(const KronOperand& q, int first, int rows, int begin, int depth) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      int row, k;
      const bool exists = find(q, j, depth, row, k) && first + row < rows && k < depth && q.fours != kScattered4;
      from[j] = exists ? at(q, first + row, begin + k) : nullptr;
      count[j] = q.along_sum ? depth - k : rows - first - row;
      asm volatile("" : "+l"(from[j]), "+r"(count[j]));
    }
  }
  __device__ void load(const KronOperand& q) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      together[j] = {};
      if (q.fours == kTogether4) {
        if (from[j]) together[j] = fetch<T, 4>(from[j]);
      } else {
        Pack<T, 4> v = {};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (from[j] && e < count[j]) v.at[e] = from[j][e];
        }
        if constexpr (sizeof(T) == 2) {
          beside[j] = v;
        } else {
          together[j].all = v;
        }
      }
    }
  }
  template <class Acc>
  __device__ void store(const KronOperand& q, int first, int rows, int begin, int depth, Acc (*tile)[kPitch]) const {
    if (q.fours != kScattered4) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        int row, k;
        if (!find(q, j, depth, row, k)) continue;
        const bool apart = sizeof(T) == 2 && q.fours == kBeside4;
        put(q, row, k, convert<Acc>(apart ? beside[j] : together[j].pack()), tile);
      }
      return;
    }
#pragma unroll 1
    for (int j = 0; j < kCount; ++j) {
      int row, k;
      if (!find(q, j, depth, row, k)) break;
      Pack<Acc, 4> wide;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row_of = row + (q.along_sum ? 0 : e), k_of = k + (q.along_sum ? e : 0);
        const bool exists = first + row_of < rows && k_of < depth;
        wide.at[e] = exists ? convert<Acc>(*at(q, first + row_of, begin + k_of)) : Acc(0);
      }
      put(q, row, k, wide, tile);
    }
  }
};

// Four groups of threads share the elements of the sum, each a tile of the result, of which a thread has the elements 8 apart.
template <class T>
__device__ void kron_product(const KronProductParams& p) {
  using Acc = Accumulator<T>;
  constexpr int kGroups = 4, kEach = kProductTile / 8, kVector = 16 / sizeof(Acc), kDepth = product_depth(kDTypeOf<T>);
  constexpr int kPitch = kDepth + kVector, kFours = kProductTile * kProductTile / 4;
  static_assert(kGroups * kProductTile <= 2 * kPitch, "the groups' results lie where the operands were");
  __shared__ alignas(16) Acc shared[2][kProductTile][kPitch];
  const bool second = blockIdx.x >= p.product[0].blocks;
  const KronProduct& q = p.product[second];
  const int index = blockIdx.x - (second ? p.product[0].blocks : 0), tile = index >> q.splits_log;
  const int splits = 1 << q.splits_log, split = index - tile * splits;
  const int tile_row = divide(tile, q.by_column_tiles), first_row = tile_row * kProductTile;
  const int first_column = (tile - tile_row * static_cast<int>(q.by_column_tiles.divisor)) * kProductTile;
  const int thread = threadIdx.x, group = thread / 64, y = thread / 8 % 8, x = thread % 8;
  const int begin = split * q.depth, end = min(q.k, begin + q.depth);
  ProductPart<T, kDepth, kPitch> a, b;
  auto prepare = [&](int from) {
    a.prepare(q.a, first_row, q.m, from, min(kDepth, end - from));
    b.prepare(q.b, first_column, q.n, from, min(kDepth, end - from));
  };
  prepare(begin);
  wait_for_previous();
  if (first_row >= q.m) return;

  Acc sum[kEach][kEach] = {};
#pragma unroll 1
  for (int from = begin; from < end; from += kDepth) {
    const int depth = min(kDepth, end - from);
    if (from > begin) prepare(from);
    a.load(q.a);
    b.load(q.b);
    if (from > begin) __syncthreads();
    a.store(q.a, first_row, q.m, from, depth, shared[0]);
    b.store(q.b, first_column, q.n, from, depth, shared[1]);
    __syncthreads();
#pragma unroll 1
    for (int k = group * kVector; k < depth; k += kGroups * kVector) {
      Pack<Acc, kVector> u[kEach], v[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        u[i] = load_pack<Acc, kVector>(&shared[0][y + 8 * i][k]);
        v[i] = load_pack<Acc, kVector>(&shared[1][x + 8 * i][k]);
      }
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
#pragma unroll
          for (int j = 0; j < kEach; ++j) sum[i][j] += u[i].at[e] * v[j].at[e];
        }
      }
    }
  }

  __syncthreads();
  Acc* const found = &shared[0][0][0];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) found[(group * kProductTile + y + 8 * i) * kProductTile + x + 8 * j] = sum[i][j];
  }
  __syncthreads();
  int four = thread;
  Pack<Acc, 4> total = {};
  if (four < kFours) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const auto more = load_pack<Acc, 4>(found + 4 * (g * kFours + four));
#pragma unroll
      for (int e = 0; e < 4; ++e) total.at[e] += more.at[e];
    }
  }
  if (splits > 1) {
    if (four < kFours) store_pack(found + 4 * four, total);
    cluster_barrier();
    four = split + splits * thread;
    total = {};
#pragma unroll 2
    for (int block = 0; four < kFours && block < splits; ++block) {
#pragma unroll
      for (int e = 0; e < 4; ++e) total.at[e] += load_remote(found + 4 * four + e, block);
    }
  }
  const int row = first_row + four * 4 / kProductTile, column = first_column + four * 4 % kProductTile,
            count = min(4, q.n - column);
  if (four < kFours && row < q.m && count > 0) {
    auto at = [&](int column) {
      return static_cast<T*>(q.c) + place(q.places, q.splits_rows ? row : column, q.splits_rows ? column : row);
    };
    T* const c = at(column);
    if (q.bias) {
      const T* const bias = static_cast<const T*>(q.bias) + static_cast<long long>(row % q.bias_lead) * q.n + column;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (e < count) total.at[e] += convert<Acc>(bias[e]);
      }
    }
    const auto rounded = convert<T>(total);
    if (q.fours == kTogether4) {
      store_pack(c, rounded);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (e < count) *(q.fours == kBeside4 ? c + e : at(column + e)) = rounded.at[e];
      }
    }
  }
  if (splits > 1) cluster_barrier();  // a block that ended would take its sums with it
}

}  // namespace cuops

// An instance a dtype; with four blocks a multiprocessor, as 512 blocks of one with fewer take a second round.
#define KRON_PRODUCT(name, T)                                                   \
  extern "C" __global__ void __launch_bounds__(cuops::kProductThreads, 4)       \
      kron_product_##name(const __grid_constant__ cuops::KronProductParams p) { \
    cuops::kron_product<T>(p);                                                  \
  }
KRON_PRODUCT(f64, double)
KRON_PRODUCT(f32, float)
KRON_PRODUCT(f16, __half)
KRON_PRODUCT(bf16, __nv_bfloat16)
