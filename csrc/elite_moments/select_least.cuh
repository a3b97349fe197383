// Selection: the k least of many scores, by one block.
#pragma once

#include "device/numeric.cuh"
#include "device/reduce.cuh"
#include "device/tuned.cuh"

namespace cuops {

// Scores as unsigned integers of the same order, the least best; what is not finite comes last.
template <class Acc>
using Key = Select<kSame<Acc, double>, unsigned long long, unsigned>;

__device__ inline unsigned key_of(float cost) {
  const unsigned bits = __float_as_uint(cost + 0.0f);  // -0 is 0
  return abs(cost) <= 3.402823466e38f ? bits ^ (bits >> 31 ? 0xffffffffu : 1u << 31) : 0xffffffffu;
}
__device__ inline unsigned long long key_of(double cost) {
  const unsigned long long bits = __double_as_longlong(cost + 0.0);
  return abs(cost) <= 1.7976931348623157e308 ? bits ^ (bits >> 63 ? ~0ull : 1ull << 63) : ~0ull;
}
__device__ inline double cost_of(unsigned key) { return __uint_as_float(key ^ (key >> 31 ? 1u << 31 : 0xffffffffu)); }
__device__ inline double cost_of(unsigned long long key) { return __longlong_as_double(key ^ (key >> 63 ? 1ull << 63 : ~0ull)); }

constexpr int kCached = 4096;  // keys that fit into shared memory beside the rest

template <class Acc>
struct Selection {
  Key<Acc> keys[kCached];
  unsigned histogram[2][256];
  unsigned digit, need, lesser[32], equal[32];
};

// Calls visit(i, key) for i from `first` on in steps, key by key_of_sample(i). Several loads are on their way at once.
template <class KeyOfSample, class Visit>
__device__ void for_each_key(unsigned first, unsigned end, unsigned step, KeyOfSample&& key_of_sample, Visit&& visit) {
  constexpr unsigned kAtOnce = CUOPS_TUNED ? 4 : 1;
  for (unsigned i = first; i < end; i += kAtOnce * step) {
    decltype(key_of_sample(i)) keys[kAtOnce];
#pragma unroll
    for (unsigned u = 0; u < kAtOnce; ++u) keys[u] = key_of_sample(min(i + u * step, end - 1));
#pragma unroll
    for (unsigned u = 0; u < kAtOnce; ++u) {
      if (i + u * step < end) visit(i + u * step, keys[u]);
    }
  }
}

__device__ inline int bits_of(unsigned v) { return 32 - __clz(v); }
__device__ inline int bits_of(unsigned long long v) { return 64 - __clzll(v); }

// Writes the indices of the k least of n keys, ascending, ties by index, and calls taken(index, key) for each. Returns the largest
// of these keys, which lies from `least` to `most` and is found digit by digit, of those in which the two differ.
template <class Acc, class KeyAt, class Taken>
__device__ Key<Acc> select_least(unsigned n, KeyAt&& key_at, unsigned k, Key<Acc> least, Key<Acc> most, int* indices,
                                 Selection<Acc>& shared, Taken&& taken) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  auto key_of_sample = [&](unsigned i) { return n <= kCached ? shared.keys[i] : key_at(i); };
  constexpr Key<Acc> kOne = 1;
  int open = bits_of(least ^ most);  // bits that are to be found
  Key<Acc> known = open < static_cast<int>(8 * sizeof(least)) ? ~((kOne << open) - 1) : 0, prefix = least & known;
  unsigned need = k, turn = 0;
  for (unsigned i = threadIdx.x; i < 256; i += blockDim.x) shared.histogram[0][i] = 0;
  __syncthreads();
#pragma unroll 1
  for (; open > 0; turn ^= 1) {
    const int shift = max(open - 8, 0);
    const Key<Acc> digits = (kOne << (open - shift)) - 1;
    for_each_key(threadIdx.x, n, blockDim.x, key_of_sample, [&](unsigned, Key<Acc> key) {
      if ((key & known) == prefix) atomicAdd(&shared.histogram[turn][key >> shift & digits], 1u);
    });
    __syncthreads();
    for (unsigned i = threadIdx.x; i < 256; i += blockDim.x) shared.histogram[turn ^ 1][i] = 0;
    if (warp == warps - 1) {  // the last one, which has nothing to zero in a large block
      unsigned bins[8], sum = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += bins[j] = shared.histogram[turn][8 * lane + j];
      unsigned before = sum;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const unsigned other = __shfl_up_sync(0xffffffffu, before, offset);
        if (lane >= offset) before += other;
      }
      before -= sum;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (before < need && need <= before + bins[j]) {
          shared.digit = 8 * lane + j;
          shared.need = need - before;
        }
        before += bins[j];
      }
    }
    __syncthreads();
    prefix |= static_cast<Key<Acc>>(shared.digit) << shift;
    known |= digits << shift;
    need = shared.need;
    open = shift;
  }
  // Each warp has neighbouring indices, and learns how many lesser and equal keys come before them.
  const unsigned each = (n + blockDim.x - 1) / blockDim.x * 32, first = warp * each, end = min(first + each, n);
  unsigned lesser = 0, equal = 0;
  for_each_key(first + lane, end, 32, key_of_sample, [&](unsigned, Key<Acc> key) {
    lesser += key < prefix;
    equal += key == prefix;
  });
  lesser = reduce_lanes(lesser, 32, Sum());
  equal = reduce_lanes(equal, 32, Sum());
  if (lane == 0) {
    shared.lesser[warp] = lesser;
    shared.equal[warp] = equal;
  }
  __syncthreads();
  lesser = reduce_lanes(lane < warp ? shared.lesser[lane] : 0u, 32, Sum());
  equal = reduce_lanes(lane < warp ? shared.equal[lane] : 0u, 32, Sum());
#pragma unroll 2
  for (unsigned i = first; i < end; i += 32) {
    const Key<Acc> key = i + lane < end ? key_of_sample(i + lane) : ~static_cast<Key<Acc>>(0);
    const unsigned less = __ballot_sync(0xffffffffu, key < prefix), same = __ballot_sync(0xffffffffu, key == prefix);
    const unsigned earlier = (1u << lane) - 1, place = equal + __popc(same & earlier);
    if (key < prefix || (key == prefix && place < need)) {
      indices[lesser + __popc(less & earlier) + min(place, need)] = i + lane;
      taken(i + lane, key);
    }
    lesser += __popc(less);
    equal += __popc(same);
  }
  __syncthreads();
  return prefix;
}

}  // namespace cuops
