// The factors of kron_linear as its kernels read them.
#pragma once

#include <tvm/ffi/container/array.h>

#include <algorithm>

#include "host/error.h"
#include "host/integers.h"
#include "host/tensor.h"
#include "kron_linear/plan/kron_plan.h"

namespace cuops {

// The sizes of matrices of this dtype on one device.
inline std::vector<KronSize> sizes_of(const tvm::ffi::Array<tvm::ffi::Tensor>& factors, DType dtype, DLDevice device) {
  if (factors.empty()) raise("ValueError", "factors: expected at least one");
  std::vector<KronSize> sizes;
  for (const tvm::ffi::Tensor& factor : factors) {
    if (factor.ndim() != 2) raise("ValueError", "factors: expected matrices");
    if (dtype_of(factor, "factors") != dtype) raise("TypeError", "factors: expected x's dtype");
    expect_device(factor, "factors", device);
    sizes.push_back({factor.size(0), factor.size(1)});
  }
  return sizes;
}

// The same from pairs of numbers.
inline std::vector<KronSize> sizes_of(const tvm::ffi::Array<int64_t>& pairs) {
  if (pairs.size() % 2 != 0) raise("ValueError", "sizes: expected pairs");
  std::vector<KronSize> sizes;
  for (std::size_t i = 0; i < pairs.size(); i += 2) {
    if (std::min(pairs[i], pairs[i + 1]) < 1) raise("ValueError", "sizes: expected at least 1");
    sizes.push_back({pairs[i], pairs[i + 1]});
  }
  return sizes;
}

// Whether kernels of small problems may count a factor's elements in 32 bits.
inline bool has_small_strides(TensorView factor) {
  constexpr std::int64_t most = 1 << 16;
  auto is_small = [&](int axis) { return factor.size(axis) == 1 || (0 <= factor.stride(axis) && factor.stride(axis) <= most); };
  return is_small(0) && is_small(1);
}

inline void fill_factors(KronFactor* to, const tvm::ffi::Array<tvm::ffi::Tensor>& factors, DType dtype) {
  const int width = width_of(dtype);
  for (std::size_t i = 0; i < factors.size(); ++i) {
    const tvm::ffi::Tensor factor = factors[i];
    KronFactor& f = to[i];
    f.data = data_of(TensorView(factor));
    f.row_stride = factor.stride(0);
    f.column_stride = factor.stride(1);
    f.out = static_cast<int>(factor.size(0));
    f.in = static_cast<int>(factor.size(1));
    f.by_out = kron_divisor(f.out);
    f.by_in = kron_divisor(f.in);
    f.vectors = aligned16(f.data) && f.column_stride == 1 && f.row_stride % width == 0 && f.in % width == 0;
  }
}

}  // namespace cuops
