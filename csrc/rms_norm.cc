// RMSNorm on the host: checks, and the launch of what rms_norm_plan.cc chooses.
#include "rms_norm.h"

#include <tvm/ffi/function.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "host/error.h"
#include "host/kernel.h"
#include "host/staging.h"
#include "host/tensor.h"
#include "rms_norm/rms_norm_plan.h"
#include "rms_norm/rms_norm_scalars.h"

namespace cuops {
namespace {

void launch_fwd(RmsNormFwdParams& p, DType dtype, int device, CUstream stream, bool may_allocate) {
  const RmsNormFwdPlan plan = plan_rms_norm_fwd(&p, dtype, device, may_allocate);
  std::optional<tvm::ffi::Tensor> found;
  if (plan.sums != nullptr) {
    p.found = data_of(found.emplace(allocate(2 * plan.shape.blocks, accumulator_of(dtype), {kDLCUDA, device})));
    launch(*plan.sums, device, stream, plan.shape, &p);
  }
  launch(plan.kernel, device, stream, plan.shape, &p);
}

// The part of the parameters that does not depend on where the rows are.
RmsNormFwdParams fwd_params(TensorView x, double eps, double weight_offset) {
  expect_at_least_1d(x, "x");
  RmsNormFwdParams p{};
  p.n = x.size(x.ndim() - 1);
  p.rows = p.n > 0 ? x.numel() / p.n : 0;
  set_scalars(&p, p.n, eps, weight_offset);
  return p;
}

void expect_rstd(TensorView rstd, TensorView x, std::int64_t rows, DType dtype) {
  if (rstd.numel() != rows || !rstd.is_contiguous() || dtype_of(rstd, "rstd") != accumulator_of(dtype)) {
    raise("ValueError", "rstd: expected a contiguous array of one value a row, in the dtype of the sums");
  }
  expect_device(rstd, "rstd", x.device());
}

// A weight or bias, of any dtype.
const void* parameter_of(TensorView t, const char* name, TensorView x, DType* dtype) {
  expect_vector(t, name, x);
  *dtype = dtype_of(t, name);
  return data_of(t);
}

// Arrays on one GPU. y = norm(x), or h = x + residual and y = norm(h); y and h may be x or residual. One of these two has h's
// dtype, the other any.
void rms_norm_fwd(TensorView y, OptionalTensor h, OptionalTensor rstd, TensorView x, OptionalTensor residual, OptionalTensor weight,
                  OptionalTensor bias, double eps, double weight_offset) {
  RmsNormFwdParams p = fwd_params(x, eps, weight_offset);
  const DType x_dtype = dtype_of(x, "x"), dtype = h.has_value() ? dtype_of(*h, "h") : x_dtype;
  expect_cuda(x, "x");
  p.y_dtype = dtype_of(y, "y");
  expect_like(y, "y", x, "x", p.y_dtype);
  if (weight.has_value()) p.weight = parameter_of(*weight, "weight", x, &p.weight_dtype);
  if (bias.has_value()) p.bias = parameter_of(*bias, "bias", x, &p.bias_dtype);
  if (residual.has_value() != h.has_value()) raise("ValueError", "h: expected together with residual");
  if (residual.has_value()) {
    p.residual_dtype = dtype_of(*residual, "residual");
    if (dtype != promoted(x_dtype, p.residual_dtype) || (dtype != x_dtype && dtype != p.residual_dtype))
      raise("TypeError", "h: expected the wider of the dtypes of x and residual");
    expect_like(*residual, "residual", x, "x", p.residual_dtype);
    expect_like(*h, "h", x, "x", dtype);
    p.residual = rows_of(*residual, "residual");
    p.h = rows_of(*h, "h");
  }
  if (rstd.has_value()) {
    expect_rstd(*rstd, x, p.rows, dtype);
    p.rstd = data_of(*rstd);
  }
  if (p.rows == 0) return;
  if (p.rows > INT32_MAX) raise("ValueError", "x: expected at most 2147483647 rows, got " + std::to_string(p.rows));
  p.x = rows_of(x, "x");
  p.y = rows_of(y, "y");
  if (x_dtype != dtype) {
    std::swap(p.x, p.residual);
    p.residual_dtype = x_dtype;
  }
  const int device = x.device().device_id;
  const ContextGuard context(device);
  launch_fwd(p, dtype, device, current_stream(x.device()), can_allocate());
}

// Host arrays, through the GPU `device`; y may be x. Returns when y is written.
void rms_norm_fwd_host(TensorView y, OptionalTensor rstd, TensorView x, OptionalTensor weight, OptionalTensor bias, double eps,
                       double weight_offset, int64_t device) {
  const int gpu = static_cast<int>(device);
  RmsNormFwdParams p = fwd_params(x, eps, weight_offset);
  const DType dtype = dtype_of(x, "x");
  expect_device(x, "x", {kDLCPU, 0});
  p.y_dtype = dtype_of(y, "y");
  expect_like(y, "y", x, "x", p.y_dtype);
  if (p.rows == 0) return;
  const Rows in = rows_of(x, "x"), out = rows_of(y, "y");
  if (!has_one_stride(in) || !has_one_stride(out))
    raise("ValueError", "x: its rows need more than one stride; pass a contiguous copy");
  const ContextGuard context(gpu);
  DeviceMemory weight_memory, bias_memory;
  if (weight.has_value()) {
    const void* const data = parameter_of(*weight, "weight", x, &p.weight_dtype);
    p.weight = weight_memory.upload(data, p.n * size_of(p.weight_dtype), gpu);
  }
  if (bias.has_value()) {
    const void* const data = parameter_of(*bias, "bias", x, &p.bias_dtype);
    p.bias = bias_memory.upload(data, p.n * size_of(p.bias_dtype), gpu);
  }
  const HostRows host_in{static_cast<char*>(in.data), in.stride * size_of(dtype), p.n * size_of(dtype)};
  const HostRows host_out{static_cast<char*>(out.data), out.stride * size_of(p.y_dtype), p.n * size_of(p.y_dtype)};
  std::vector<HostRows> outputs{host_out};
  if (rstd.has_value()) {
    expect_rstd(*rstd, x, p.rows, dtype);
    const std::int64_t rstd_size = size_of(accumulator_of(dtype));
    outputs.push_back({data_of(*rstd), rstd_size, rstd_size});
  }
  stream_rows(gpu, p.rows, {host_in}, outputs,
              [&](const CUdeviceptr* from, const CUdeviceptr* to, std::int64_t, std::int64_t rows, CUstream stream) {
                RmsNormFwdParams chunk = p;
                chunk.rows = rows;
                chunk.x = {reinterpret_cast<void*>(from[0]), INT64_MAX, p.n, 0};
                chunk.y = {reinterpret_cast<void*>(to[0]), INT64_MAX, p.n, 0};
                if (rstd.has_value()) chunk.rstd = reinterpret_cast<void*>(to[1]);
                launch_fwd(chunk, dtype, gpu, stream, false);
              });
}

}  // namespace
}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_fwd, cuops::rms_norm_fwd);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_fwd_host, cuops::rms_norm_fwd_host);
