#include "tensor.h"

#include <tvm/ffi/extra/c_env_api.h>

#include <algorithm>

#include "error.h"

namespace cuops {
namespace {

std::string shape_text(TensorView t) {
  std::string text = "(";
  for (int i = 0; i < t.ndim(); ++i) text += (i ? ", " : "") + std::to_string(t.size(i));
  return text + (t.ndim() == 1 ? ",)" : ")");
}

}  // namespace

DType dtype_of(TensorView t, const char* name) {
  const DLDataType d = t.dtype();
  if (d.lanes == 1) {
    if (d.code == kDLFloat && d.bits == 64) return kFloat64;
    if (d.code == kDLFloat && d.bits == 32) return kFloat32;
    if (d.code == kDLFloat && d.bits == 16) return kFloat16;
    if (d.code == kDLBfloat && d.bits == 16) return kBFloat16;
  }
  raise("TypeError", std::string(name) + ": expected float64, float32, float16 or bfloat16, got " +
                         std::string(tvm::ffi::DLDataTypeToString(d)));
}

const char* name_of(DType dtype) {
  constexpr const char* names[] = {"f64", "f32", "f16", "bf16"};
  return names[dtype];
}

void expect_same_shape(TensorView t, const char* name, TensorView as, const char* as_name) {
  bool same = t.ndim() == as.ndim();
  for (int i = 0; same && i < t.ndim(); ++i) same = t.size(i) == as.size(i);
  if (!same) {
    raise("ValueError",
          std::string(name) + ": expected the shape of " + as_name + ", " + shape_text(as) + ", got " + shape_text(t));
  }
}

void expect_device(TensorView t, const char* name, DLDevice device) {
  const DLDevice d = t.device();
  if (d.device_type == device.device_type && d.device_id == device.device_id) return;
  auto text = [](DLDevice d) {
    return (d.device_type == kDLCUDA ? "cuda:" : "device type ") +
           std::to_string(d.device_type == kDLCUDA ? d.device_id : d.device_type);
  };
  raise("ValueError", std::string(name) + ": expected an array on " + text(device) + ", got one on " + text(d));
}

void expect_cuda(TensorView t, const char* name) {
  if (t.device().device_type != kDLCUDA) raise("ValueError", std::string(name) + ": expected an array on a CUDA device");
}

DType dtype_at(std::int64_t number) {
  if (number < kFloat64 || number > kBFloat16) raise("ValueError", "dtype: expected 0 to 3");
  return static_cast<DType>(number);
}

void expect_matrix(TensorView t, const char* name, DType dtype, DLDevice device, std::int64_t rows, std::int64_t columns) {
  if (dtype_of(t, name) != dtype) raise("TypeError", std::string(name) + ": expected " + name_of(dtype));
  if (t.ndim() != 2 || t.size(0) != rows || t.size(1) != columns || !t.is_contiguous())
    raise("ValueError",
          std::string(name) + ": expected a contiguous matrix of " + std::to_string(rows) + " x " + std::to_string(columns));
  expect_device(t, name, device);
}

void expect_at_least_1d(TensorView t, const char* name) {
  if (t.ndim() == 0) raise("ValueError", std::string(name) + ": expected at least 1 dimension, got 0");
}

void expect_vector(TensorView t, const char* name, TensorView x) {
  const std::int64_t n = x.size(x.ndim() - 1);
  if (t.ndim() != 1 || t.size(0) != n || (n > 1 && t.stride(0) != 1)) {
    raise("ValueError", std::string(name) + ": expected a contiguous array of shape (" + std::to_string(n) + ",)");
  }
  expect_device(t, name, x.device());
}

void expect_like(TensorView t, const char* name, TensorView as, const char* as_name, DType dtype) {
  expect_same_shape(t, name, as, as_name);
  expect_device(t, name, as.device());
  const DType got = dtype_of(t, name);
  if (got != dtype) raise("TypeError", std::string(name) + ": expected " + name_of(dtype) + ", got " + name_of(got));
}

std::optional<Rows> find_rows(TensorView t) {
  const int leading = t.ndim() - 1;
  if (t.size(leading) > 1 && t.stride(leading) != 1) return std::nullopt;
  // Neighbouring dimensions that one stride walks count as one; from the innermost outwards.
  std::int64_t sizes[2] = {1, 1}, strides[2] = {0, 0};
  int level = -1;
  for (int i = leading - 1; i >= 0; --i) {
    if (t.size(i) == 1) continue;
    if (level >= 0 && t.stride(i) == sizes[level] * strides[level]) {
      sizes[level] *= t.size(i);
      continue;
    }
    if (++level == 2) return std::nullopt;
    sizes[level] = t.size(i);
    strides[level] = t.stride(i);
  }
  if (level < 1) return Rows{data_of(t), INT64_MAX, strides[0], 0};  // never reaches an outer stride
  if (sizes[0] * sizes[1] > UINT32_MAX) return std::nullopt;
  return Rows{data_of(t), sizes[0], strides[0], strides[1]};
}

Rows rows_of(TensorView t, const char* name) {
  if (const auto rows = find_rows(t)) return *rows;
  raise("ValueError",
        std::string(name) + ": expected a contiguous last dimension and rows of at most two strides; pass a contiguous copy");
}

bool vectors_fit(const Rows& rows, int width, DType dtype) {
  const std::uintptr_t alignment = std::min(16, width * size_of(dtype));
  return reinterpret_cast<std::uintptr_t>(rows.data) % alignment == 0 && rows.stride % width == 0 && rows.outer_stride % width == 0;
}

bool can_allocate() { return TVMFFIEnvGetDLPackManagedTensorAllocator() != nullptr; }

tvm::ffi::Tensor allocate(std::int64_t count, DType dtype, DLDevice device) {
  const DLDataType bytes{kDLUInt, 8, 1};
  try {
    return tvm::ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, {count * size_of(dtype)}, bytes, device);
  } catch (const tvm::ffi::Error& error) {  // a MemoryError, where PyTorch itself would have raised a RuntimeError
    raise("RuntimeError", error.message());
  }
}

CUstream current_stream(DLDevice device) { return static_cast<CUstream>(TVMFFIEnvGetStream(device.device_type, device.device_id)); }

}  // namespace cuops
