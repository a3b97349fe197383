// Transposed copies of matrices: checks, the launch.
#include <tvm/ffi/function.h>

#include <algorithm>

#include "host/error.h"
#include "host/integers.h"
#include "host/kernel.h"
#include "host/tensor.h"
#include "kron_transpose.h"

namespace cuops {
namespace {

// y (matrices, columns, rows) = the transposes of x (matrices, rows, columns), both without gaps.
void kron_linear_transpose(TensorView y, TensorView x) {
  const DType dtype = dtype_of(x, "x");
  expect_cuda(x, "x");
  if (dtype_of(y, "y") != dtype) raise("TypeError", "y: expected x's dtype");
  expect_device(y, "y", x.device());
  if (x.ndim() != 3 || !x.is_contiguous()) raise("ValueError", "x: expected a contiguous array of matrices");
  if (y.ndim() != 3 || !y.is_contiguous() || y.size(0) != x.size(0) || y.size(1) != x.size(2) || y.size(2) != x.size(1))
    raise("ValueError", "y: expected a contiguous array of the shapes of x's transposes");
  const std::int64_t matrices = x.size(0), rows = x.size(1), columns = x.size(2);
  if (x.numel() == 0) return;
  const int bytes = size_of(dtype);
  const std::int64_t tiles_down = ceil_div(rows, kTransposeRows), tiles_across = ceil_div(columns, transpose_columns(bytes));
  const std::int64_t blocks = matrices * tiles_down * tiles_across;
  if (std::max({rows, columns, blocks}) > INT32_MAX) raise("ValueError", "x: too large for one launch");
  KronTransposeParams p{data_of(x),
                        data_of(y),
                        static_cast<int>(rows),
                        static_cast<int>(columns),
                        static_cast<int>(tiles_down),
                        static_cast<int>(tiles_across)};
  LaunchShape shape{static_cast<unsigned>(blocks), kTransposeThreads};
  shape.overlaps = true;
  static Kernel kernels[] = {{"kron_linear_transpose", "kron_transpose_16"},
                             {"kron_linear_transpose", "kron_transpose_32"},
                             {"kron_linear_transpose", "kron_transpose_64"}};
  const int device = x.device().device_id;
  const ContextGuard context(device);
  launch(kernels[bytes == 2 ? 0 : bytes == 4 ? 1 : 2], device, current_stream(x.device()), shape, &p);
}

}  // namespace
}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kron_linear_transpose, cuops::kron_linear_transpose);
