// A factor in the registers of some threads, which bring it from device memory all at once.
#pragma once

#include "kron_linear/kron_shared.cuh"

namespace cuops {

// Of kRows rows and kSize columns, with zeros around it, in pieces of 8 columns. kVectors: rows are known to be whole vectors.
// Where they are not, and columns are contiguous, threads have neighbours of a column.
template <class T, int kSize, int kThreads, bool kVectors = false, int kRows = kSize>
struct FactorPieces {
  static constexpr int kUnits = kSize / 8, kCount = kRows * kUnits / kThreads;
  static_assert(kThreads % kUnits == 0 && kThreads % kRows == 0);
  const int thread = threadIdx.x % kThreads;
  int first_row, first_column, row_step, column_step;
  Fetched<T, 8> v[kCount];

  __device__ int row(int i) const { return first_row + i * row_step; }
  __device__ int column(int i) const { return first_column + i * column_step; }

  // Of its rows from `from` on.
  __device__ __forceinline__ void load(const KronFactor& f, int from = 0) {
    const bool vectors = kVectors || f.vectors, down = !vectors && f.row_stride == 1;
    first_row = down ? thread % kRows : thread / kUnits;
    first_column = (down ? thread / kRows : thread % kUnits) * 8;
    row_step = down ? 0 : kThreads / kUnits;
    column_step = down ? kThreads / kRows * 8 : 0;
    const T* const data = static_cast<const T*>(f.data) + from * f.row_stride;
    const auto columns = [&](int i) { return row(i) < f.out - from ? f.in - column(i) : 0; };
    if (vectors) {
      constexpr int kVector = 16 / sizeof(T);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const uint4* const at = reinterpret_cast<const uint4*>(data + row(i) * f.row_stride + column(i));
        uint4 words[8 / kVector];
#pragma unroll
        for (int e = 0; e < 8 / kVector; ++e) words[e] = e * kVector < columns(i) ? at[e] : uint4{};
        v[i] = *reinterpret_cast<const Fetched<T, 8>*>(words);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const T* const at = data + row(i) * f.row_stride + column(i) * f.column_stride;
        Pack<T, 8> some = {};
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (e < columns(i)) some.at[e] = at[e * f.column_stride];
        v[i] = fetch<T, 8>(&some);
      }
    }
  }

  __device__ Pack<float, 8> piece(int i) const { return convert<float>(v[i].pack()); }

  // The largest magnitude of a warp's, as bits.
  __device__ int magnitude() const {
    float most = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Pack<float, 8> elements = piece(i);
#pragma unroll
      for (int e = 0; e < 8; ++e) most = fmaxf(most, fabsf(elements.at[e]));
    }
    return __reduce_max_sync(~0u, __float_as_int(most));
  }
};

}  // namespace cuops
