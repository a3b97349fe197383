// Unaligned rows, in aligned vectors of 16 bytes: the first and the last may be partly the neighbours'.
#pragma once

#include "device/row.cuh"

namespace cuops {

// A vector of elements from..to - 1, and zeros. Out of line, because it is rare and long.
template <class T, int kWidth = kVectorWidth<T>>
__device__ __noinline__ Word<T, kWidth> gather(const T* start, int from, int to) {
  alignas(16) T v[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) v[j] = j >= from && j < to ? start[j] : convert<T>(0.0f);
  return *reinterpret_cast<const Word<T, kWidth>*>(v);
}

// Zeros for all but elements from..to - 1 of a vector.
template <class T, class Words>
__device__ Words trimmed(Words v, int from, int to) {
  constexpr int kBits = 8 * sizeof(T);
  auto bits_from = [](int bit) { return bit >= 32 ? 0u : ~0u << max(bit, 0); };
  unsigned* const words = &v.x;
#pragma unroll
  for (int k = 0; k < static_cast<int>(sizeof(Words) / 4); ++k)
    words[k] &= bits_from(from * kBits - 32 * k) & ~bits_from(to * kBits - 32 * k);
  return v;
}

// Stores elements from..to - 1 of a vector.
template <class T>
__device__ __noinline__ void scatter(T* start, uint4 v, int from, int to) {
#pragma unroll
  for (int j = 0; j < kVectorWidth<T>; ++j) {
    if (j >= from && j < to) start[j] = reinterpret_cast<const T*>(&v)[j];
  }
}

// The vectors that a row touches. Without kPhased every row starts at one and is a whole number of them. With it, all rows that a
// thread works on start equally far behind one, so that each of its vectors has the same columns in every row. U is the dtype of
// another array whose rows start as many elements behind.
template <class T, bool kPhased>
struct Windows {
  static constexpr int kWidth = kVectorWidth<T>;
  int phase, n, count;

  __device__ Windows(const Rows& rows, long long row, int n) : phase(0), n(n) {
    if constexpr (kPhased) {
      const auto start = reinterpret_cast<unsigned long long>(static_cast<const T*>(rows.data) + row * rows.stride);
      phase = static_cast<int>(start & 15) / static_cast<int>(sizeof(T));
    }
    count = (phase + n + kWidth - 1) / kWidth;
  }
  template <class U = T>
  __device__ Word<U, kWidth>* of(const Rows& rows, long long row) const {
    return reinterpret_cast<Word<U, kWidth>*>(static_cast<U*>(rows.data) + row * rows.stride - phase);
  }
  // The column of the first element, and which elements are the row's.
  __device__ int column(int at) const { return at * kWidth - phase; }
  __device__ int from(int at) const { return at == 0 ? phase : 0; }
  __device__ int to(int at) const { return min(kWidth, n - column(at)); }
  __device__ bool is_shared(int at) const {
    if constexpr (!kPhased) return false;
    return (at == 0 && phase > 0) || to(at) < kWidth;
  }
  // A vector with zeros for what is not the row's.
  template <class U = T>
  __device__ Word<U, kWidth> trimmed(Word<U, kWidth> v, int at) const {
    return cuops::trimmed<U>(v, from(at), to(at));
  }
  // The same of a row that starts anywhere, in an array that may end within the vector.
  template <class U = T>
  __device__ Word<U, kWidth> gathered(const void* row, int at) const {
    return gather<U, kWidth>(static_cast<const U*>(row) + column(at), from(at), to(at));
  }
  template <class U = T>
  __device__ Word<U, kWidth> gathered(const Rows& rows, long long row, int at) const {
    return gathered<U>(static_cast<const U*>(rows.data) + row * rows.stride, at);
  }
};

}  // namespace cuops
