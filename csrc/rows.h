// Rows of matrices, as the host passes them to kernels.
#pragma once

namespace cuops {

// A matrix in device memory whose rows are contiguous: row r starts (r / inner) * outer_stride + (r % inner) * stride
// elements after `data`. Two strides are enough for the slices and transposes that models make of their leading dimensions.
struct Rows {
  void* data;  // nullptr: the caller has no such array
  long long inner;
  long long stride;
  long long outer_stride;
};

// Elements between rows of partial sums, which start at multiples of 16 bytes.
constexpr long long sums_stride(long long n) { return (n + 3) / 4 * 4; }

}  // namespace cuops
