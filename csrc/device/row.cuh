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
template <class T, int kWidth>
__device__ __noinline__ void store_within(T* data, long long start, long long n, Pack<T, kWidth> v) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    if (0 <= start + j && start + j < n) data[start + j] = v.at[j];
  }
}

// Where a row starts, in elements. Rows of two strides number less than 2^32.
__device__ inline long long offset_of(const Rows& rows, long long row) {
  const long long outer = row < rows.inner ? 0 : static_cast<unsigned>(row) / static_cast<unsigned>(rows.inner);
  return outer * rows.outer_stride + (row - outer * rows.inner) * rows.stride;
}

// kAligned promises that every row starts at a multiple of 16 bytes and is a whole number of vectors. Otherwise the row
// is seen through aligned windows, of which the first and the last may reach beyond its ends.
template <class T, bool kAligned, class Index>
struct Row {
  static constexpr int kWidth = kVectorWidth<T>;

  T* data = nullptr;
  Index n = 0;
  int shift = 0;  // elements that the first window reaches before the row

  __device__ Row(const Rows& rows, long long row, long long n) : Row(static_cast<T*>(rows.data) + offset_of(rows, row), n) {}
  __device__ Row(T* data, long long n) : data(data), n(n) {
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

// Stores to a row of any dtype; `data` is its first element.
template <bool kAligned, class Acc, int kWidth>
__device__ __noinline__ void store_as(DType dtype, void* data, long long start, long long n, Pack<Acc, kWidth> v) {
  auto store = [&](auto* to) {
    using U = typename Pointee<decltype(to)>::type;
    if constexpr (kAligned) {
      *reinterpret_cast<Pack<U, kWidth>*>(to + start) = convert<U>(v);
    } else {
      store_within(to, start, n, convert<U>(v));
    }
  };
  switch (dtype) {
    case kFloat64: return store(static_cast<double*>(data));
    case kFloat32: return store(static_cast<float*>(data));
    case kFloat16: return store(static_cast<__half*>(data));
    case kBFloat16: return store(static_cast<__nv_bfloat16*>(data));
  }
}

// Parameters (a weight, say) for the elements from `start` on; outside [0, n) anything. They have the row's dtype or its sums'.
template <class T, bool kAligned, class Index>
__device__ Pack<Accumulator<T>, kVectorWidth<T>> load_parameters(const void* data, bool wide, Index start, Index n) {
  using Acc = Accumulator<T>;
  constexpr int kWidth = kVectorWidth<T>;
  auto load_as = [&](auto* source) {
    using U = typename Pointee<decltype(source)>::type;
    const bool whole =
        start >= 0 && start + kWidth <= n && reinterpret_cast<unsigned long long>(source + start) % alignof(Pack<U, kWidth>) == 0;
    if (kAligned || whole) {
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
