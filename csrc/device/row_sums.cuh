// The sums over rows that the threads of a kernel have found, on their way to one row of partial sums for each block or cluster.
#pragma once

#include "reduce.cuh"
#include "rows.h"

namespace cuops {

template <class Acc>
__device__ void store_result(DType dtype, void* results, long long at, Acc v) {
  switch (dtype) {
    case kFloat64: static_cast<double*>(results)[at] = v; return;
    case kFloat32: static_cast<float*>(results)[at] = v; return;
    case kFloat16: static_cast<__half*>(results)[at] = convert<__half>(static_cast<float>(v)); return;
    case kBFloat16: static_cast<__nv_bfloat16*>(results)[at] = convert<__nv_bfloat16>(static_cast<float>(v)); return;
  }
}

// Where the sums of a block end up: a row of partial sums, or the result, of T or of Other, where there is nothing else to add.
template <class T, class Acc, class Other = T>
struct SumsTarget {
  void* data;
  long long partial_row;
  int n;
  bool is_result, is_other = false;

  // A vector's worth, of aligned rows.
  __device__ void store(int column, const Pack<Acc, kVectorWidth<T>>& sum) const {
    if (is_result) {
      with_result([&](auto* result) {
        using U = typename Pointee<decltype(result)>::type;
        store_pack(result + column, convert<U>(sum));
      });
    } else {
      *reinterpret_cast<Pack<Acc, kVectorWidth<T>>*>(partial() + column) = sum;
    }
  }
  // Four, fewer at the end of the row.
  __device__ void store_four(int column, const Pack<Acc, 4>& sum) const {
    if (!is_result) {
      *reinterpret_cast<Pack<Acc, 4>*>(partial() + column) = sum;
      return;
    }
    with_result([&](auto* result) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (column + j < n) result[column + j] = convert<typename Pointee<decltype(result)>::type>(sum.at[j]);
      }
    });
  }
  __device__ void store_one(int column, Acc sum) const {
    if (is_result) {
      with_result([&](auto* result) { result[column] = convert<typename Pointee<decltype(result)>::type>(sum); });
    } else {
      partial()[column] = sum;
    }
  }

 private:
  __device__ Acc* partial() const { return static_cast<Acc*>(data) + partial_row * sums_stride(n); }
  template <class Store>
  __device__ void with_result(Store&& store) const {
    if (!kSame<T, Other> && is_other) {
      store(static_cast<Other*>(data));
    } else {
      store(static_cast<T*>(data));
    }
  }
};

// The sum of `count` rows, `stride` apart, in their order.
__device__ inline Pack<float, 4> sum_of_rows(const Pack<float, 4>* rows, int count, int stride) {
  Pack<float, 4> total = rows[0];
#pragma unroll 4
  for (int row = 1; row < count; ++row) {
    const Pack<float, 4> more = rows[row * stride];
#pragma unroll
    for (int j = 0; j < 4; ++j) total.at[j] += more.at[j];
  }
  return total;
}

}  // namespace cuops
