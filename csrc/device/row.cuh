// One row of a matrix in device memory, read and written in vectors of 16 bytes wherever its address allows.
#pragma once

#include "numeric.cuh"
#include "rows.h"

namespace cuops {

// Out of line, because the ends of rows are rare and code for them is long.
template <class T>
__device__ __noinline__ Vector<T> load_within(const T* data, long long start, long long n) {
  Vector<T> v;
#pragma unroll
  for (int j = 0; j < kVectorWidth<T>; ++j) {
    v.at[j] = 0 <= start + j && start + j < n ? data[start + j] : convert<T>(0.0f);
  }
  return v;
}
template <class T>
__device__ __noinline__ void store_within(T* data, long long start, long long n, Vector<T> v) {
#pragma unroll
  for (int j = 0; j < kVectorWidth<T>; ++j) {
    if (0 <= start + j && start + j < n) data[start + j] = v.at[j];
  }
}

// kAligned promises that every row starts at a multiple of 16 bytes and is a whole number of vectors. Otherwise the row
// is seen through aligned windows, of which the first and the last may reach beyond its ends.
template <class T, bool kAligned, class Index>
struct Row {
  static constexpr int kWidth = kVectorWidth<T>;

  T* data;
  Index n;
  int shift;  // elements that the first window reaches before the row

  __device__ Row(const Rows& rows, long long row, long long n) : n(n), shift(0) {
    const long long outer = row < rows.inner ? 0 : static_cast<unsigned>(row) / static_cast<unsigned>(rows.inner);
    data = static_cast<T*>(rows.data) + outer * rows.outer_stride + (row - outer * rows.inner) * rows.stride;
    if constexpr (!kAligned) shift = (reinterpret_cast<unsigned long long>(data) & 15) / sizeof(T);
  }

  __device__ Index windows() const { return (n + shift + kWidth - 1) / kWidth; }
  __device__ Index start(Index window) const { return window * kWidth - shift; }

  // Elements outside the row read as zero.
  __device__ Vector<T> load(Index start) const {
    return whole(start) ? *reinterpret_cast<const Vector<T>*>(data + start) : load_within(data, start, n);
  }
  __device__ void store(Index start, const Vector<T>& v) const {
    if (whole(start)) {
      *reinterpret_cast<Vector<T>*>(data + start) = v;
    } else {
      store_within(data, start, n, v);
    }
  }

 private:
  __device__ bool whole(Index start) const {
    return kAligned || (start >= 0 && start + kWidth <= n && !(reinterpret_cast<unsigned long long>(data + start) & 15));
  }
};

// Parameters (a weight, say) for the elements from `start` on; outside [0, n) anything. They have the row's dtype or that of its sums.
template <class T, bool kAligned, class Index>
__device__ Pack<Accumulator<T>, kVectorWidth<T>> load_parameters(const void* data, bool wide, Index start, Index n) {
  using Acc = Accumulator<T>;
  constexpr int kWidth = kVectorWidth<T>;
  auto load_as = [&](auto* source) {
    using U = typename Pointee<decltype(source)>::type;
    if constexpr (kAligned) {
      return convert<Acc>(*reinterpret_cast<const Pack<U, kWidth>*>(source + start));
    } else {
      Pack<Acc, kWidth> out;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const Index i = start + j;
        out.at[j] = convert<Acc>(source[i < 0 ? 0 : i < n ? i : n - 1]);
      }
      return out;
    }
  };
  if constexpr (!kSame<T, Acc>) {
    if (wide) return load_as(static_cast<const Acc*>(data));
  }
  return load_as(static_cast<const T*>(data));
}

}  // namespace cuops
