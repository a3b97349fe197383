// Samples of 16 bits whose rows start anywhere, which no tensor map brings: bulk copies have them in shared memory as they lie in
// device memory, in whole vectors, and threads lay out their rows there as matrices of 128 bytes a row, for products.
#pragma once

#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "kron_linear/kron_shared.cuh"
#include "kron_wide_rows.h"

namespace cuops {

// The slots of shared memory, in turn: the one that is next, and the parity of its phase.
template <int kSlots>
struct WideSlots {
  int next = 0;
  unsigned parity = 0;

  __device__ void advance(int by) {
    next += by;
    if (next >= kSlots) {
      next -= kSlots;
      parity ^= 1;
    }
  }
};

// Matrices of `rows` by `columns`, one a sample, `stride` elements apart.
struct OddMatrices {
  const void* data;
  long long stride;
  int rows, columns;

  __device__ unsigned long long at(long long sample) const {
    return reinterpret_cast<unsigned long long>(data) + 2 * sample * stride;
  }
  __device__ int bytes() const { return raw_bytes(rows * columns); }

  // Begins to bring one of so many samples: the vectors that it is in, and of one that the array ends in no more than belongs to
  // it. One thread does so.
  __device__ void bring(char* to, long long sample, long long samples, unsigned long long* there) const {
    const unsigned long long from = at(sample), start = from / 16 * 16, end = from + rows * columns * 2;
    const unsigned long long array_end = at(samples - 1) + rows * columns * 2;
    const unsigned long long whole = max(min((end + 15) / 16 * 16, array_end / 16 * 16), start);
    for (unsigned long long rest = max(whole, from); rest < end; rest += 2)
      *reinterpret_cast<unsigned short*>(to + (rest - start)) = *reinterpret_cast<const unsigned short*>(rest);
    const int bytes = static_cast<int>(whole - start);
    arrive_expecting(there, bytes);
    if (bytes > 0) copy_bulk(to, reinterpret_cast<const void*>(start), bytes, there);
  }

  // Lays out a sample that has come to `raw`. What is around it in `to`, of kSize rows and columns, is left alone, but for a column
  // that shares the last one's word and becomes zero. kThreads threads do so, each with kBatch words at a time in registers.
  template <int kSize, int kThreads, int kBatch>
  __device__ __forceinline__ void lay(char* to, const char* raw, long long sample) const {
    constexpr int kMatrix = kSize * 128;
    const unsigned* const words = reinterpret_cast<const unsigned*>(raw);
    const int in_row = (columns + 1) / 2, lanes = in_row > 16 ? 32 : in_row > 8 ? 16 : in_row > 4 ? 8 : 4;  // neighbours of a row
    const int thread = threadIdx.x % kThreads, first = thread / lanes, step = kThreads / lanes;
    const int skipped = static_cast<int>(at(sample) % 16 / 2);
#pragma unroll 1
    for (int w = thread % lanes; w < in_row; w += lanes) {
      const unsigned kept = 2 * w + 1 == columns ? 0xffffu : ~0u;
      char* const column = to + w / 32 * kMatrix + w % 4 * 4;
#pragma unroll 1
      for (int row = first; row < rows; row += kBatch * step) {
        unsigned v[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int element = skipped + min(row + i * step, rows - 1) * columns + 2 * w;
          v[i] = __funnelshift_r(words[element / 2], words[element / 2 + 1], element % 2 * 16) & kept;
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (row + i * step < rows) *reinterpret_cast<unsigned*>(column + swizzled(row + i * step, w / 4 % 8)) = v[i];
        }
      }
    }
  }
};

constexpr int kLayThreads = 128, kLayBarrier = 2;  // which no others meet at

// What kLayThreads threads do in place of tensor maps: every sample, of kArrays matrices, is brought to one of the places of
// `room`, of kRoom bytes for each array, and laid out in a slot. A warp does so for one of 64, all of them for one of 128.
template <int kSize, int kSlots, int kArrays, int kRoom>
struct WideLayers {
  static constexpr int kGroups = kSize == 64 ? 4 : 1, kThreads = kLayThreads / kGroups, kTile = kSize * kSize * 2;
  static_assert(kSlots >= kGroups, "a slot for each that is laid out");
  OddMatrices of[kArrays];
  char *slots, *room;
  unsigned long long *there, *full, *empty;
  long long first, step, samples;  // of the block

  __device__ static void init(unsigned long long* there) {
#pragma unroll 1
    for (int i = 0; i < kMostRaw; ++i) init_arrivals(&there[i], kArrays);
  }

  __device__ char* raw(int array, int place) const { return room + array * kRoom + place * of[array].bytes(); }
  __device__ void bring(int place, long long sample) const {
    if (threadIdx.x % kThreads > 0 || sample >= samples) return;
#pragma unroll
    for (int a = 0; a < kArrays; ++a) of[a].bring(raw(a, place), sample, samples, &there[place]);
  }

  // before(n) is called before the block's sample of number n is brought, of those that are first.
  template <class Before>
  __device__ __forceinline__ void run(const Before& before) const {
    const int group = threadIdx.x % kLayThreads / kThreads;
    int places = kMostRaw;
#pragma unroll
    for (int a = 0; a < kArrays; ++a) places = min(places, kRoom / of[a].bytes());
    places /= kGroups;  // of a group
    const long long between = kGroups * step;
    long long sample = first + group * step;
#pragma unroll 1
    for (int i = 0; i < places; ++i) {
      before(i * kGroups + group);
      bring(group * places + i, sample + i * between);
    }
    for (int i = threadIdx.x % kLayThreads * 16; i < kSlots * kArrays * kTile; i += kLayThreads * 16)
      *reinterpret_cast<uint4*>(slots + i) = {};
    show_to_products();
    sync_warps(kLayBarrier, kLayThreads / 32);
    WideSlots<kSlots> slot;
    slot.advance(group);
    int place = 0;
    unsigned parity = 0;
#pragma unroll 1
    for (; sample < samples; sample += between) {
      const int from = group * places + place;
      wait_for_arrivals(&there[from], parity);
      wait_for_arrivals(&empty[slot.next], slot.parity ^ 1);
#pragma unroll
      for (int a = 0; a < kArrays; ++a)
        of[a].template lay<kSize, kThreads, kArrays == 1 ? 8 : 4>(slots + (slot.next * kArrays + a) * kTile, raw(a, from), sample);
      show_to_products();
      if constexpr (kGroups == 1) {
        sync_warps(kLayBarrier, kLayThreads / 32);
      } else {
        __syncwarp();
      }
      if (threadIdx.x % kThreads == 0) arrive(&full[slot.next]);
      bring(from, sample + places * between);
      slot.advance(kGroups);
      place = place + 1 == places ? 0 : place + 1;
      parity ^= place == 0;
    }
  }
};

}  // namespace cuops
