// Checks of the arrays that callers pass, and what kernels need to know of them; memory and the stream of the caller's framework.
// Every error names the argument.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/optional.h>

#include <optional>
#include <string>

#include "driver.h"
#include "dtype.h"
#include "rows.h"

namespace cuops {

using TensorView = tvm::ffi::TensorView;
using OptionalTensor = tvm::ffi::Optional<TensorView>;

DType dtype_of(TensorView t, const char* name);  // TypeError
DType dtype_at(std::int64_t number);             // as Python gives it; ValueError
const char* name_of(DType dtype);

// The sums' dtype: float32, and float64 for float64.
inline DType accumulator_of(DType dtype) { return dtype == kFloat64 ? kFloat64 : kFloat32; }

// The dtype of a sum of two.
inline DType promoted(DType a, DType b) { return a == b ? a : a == kFloat64 || b == kFloat64 ? kFloat64 : kFloat32; }

void expect_same_shape(TensorView t, const char* name, TensorView as, const char* as_name);
void expect_like(TensorView t, const char* name, TensorView as, const char* as_name,
                 DType dtype);  // its shape and device, and this dtype
void expect_device(TensorView t, const char* name, DLDevice device);
void expect_cuda(TensorView t, const char* name);
void expect_at_least_1d(TensorView t, const char* name);
void expect_matrix(TensorView t, const char* name, DType dtype, DLDevice device, std::int64_t rows,
                   std::int64_t columns);  // contiguous

// Contiguous, of the size of the last dimension of x, on its device.
void expect_vector(TensorView t, const char* name, TensorView x);

inline char* data_of(TensorView t) { return static_cast<char*>(t.data_ptr()) + t.byte_offset(); }

// The leading dimensions as rows; nothing where the last dimension has gaps or the rows need more than two strides.
std::optional<Rows> find_rows(TensorView t);
Rows rows_of(TensorView t, const char* name);  // ValueError instead
inline bool has_one_stride(const Rows& rows) { return rows.inner == INT64_MAX; }

// Whether every row starts where a vector of `width` elements may be read at once.
bool vectors_fit(const Rows& rows, int width, DType dtype);
inline bool aligned16(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

// Memory of the caller's framework, where it lends any: what comes later on its stream may use it once the tensor is gone.
bool can_allocate();
tvm::ffi::Tensor allocate(std::int64_t count, DType dtype, DLDevice device);

// The stream that the caller's framework works on.
CUstream current_stream(DLDevice device);

}  // namespace cuops
