// RMSNorm on the host: checks, the choice of a kernel, the launch.
#include "rms_norm.h"

#include <tvm/ffi/function.h>

#include <cmath>

#include "host/error.h"
#include "host/kernel.h"
#include "host/staging.h"
#include "host/tensor.h"

namespace cuops {
namespace {

using OptionalTensor = tvm::ffi::Optional<TensorView>;

Kernel& fwd_kernel(DType dtype, bool aligned, int resident) {
  struct Table {
    Kernel* at[4][2][9];  // for the life of the process
    Table() {
      for (DType t : {kFloat64, kFloat32, kFloat16, kBFloat16})
        for (bool a : {false, true})
          for (int k = 0; k < 9; ++k) {
            const std::string layout = a ? "_aligned" : "_unaligned";
            at[t][a][k] = new Kernel("rms_norm", std::string("rms_norm_fwd_") + name_of(t) + "_" + std::to_string(k) + layout);
          }
    }
  };
  static const Table table;
  return *table.at[dtype][aligned][resident];
}

// `resident` is how many vectors a thread keeps in registers; 0 reads the row twice.
struct Plan {
  int resident;
  LaunchShape shape;
};

Plan plan_fwd(std::int64_t rows, std::int64_t n, DType dtype, bool aligned, bool clusters) {
  const std::int64_t width = 16 / size_of(dtype), windows = (n + width - 1) / width + (aligned ? 0 : 1);
  if (windows <= 32 && aligned) {  // a part of a warp a row
    unsigned lanes = 1;
    while (lanes < windows) lanes *= 2;
    const unsigned rows_a_block = 128 / lanes;
    return {1, {static_cast<unsigned>((rows + rows_a_block - 1) / rows_a_block), lanes, rows_a_block}};
  }
  const unsigned blocks = static_cast<unsigned>(rows);
  for (unsigned cluster = 1; cluster <= (clusters ? 8 : 1); cluster *= 2) {
    const std::int64_t threads = (windows + 4 * cluster - 1) / (4 * cluster);
    if (threads <= 1024) return {4, {blocks * cluster, static_cast<unsigned>((threads + 31) / 32 * 32), 1, cluster}};
  }
  const unsigned cluster = clusters ? 8 : 1;
  return {0, {blocks * cluster, 1024, 1, cluster}};
}

void launch_fwd(RmsNormFwdParams& p, DType dtype, int device, CUstream stream) {
  const int width = 16 / size_of(dtype);
  const bool aligned = p.n % width == 0 && vectors_fit(p.x, width, dtype) && vectors_fit(p.residual, width, dtype) &&
                       vectors_fit(p.h, width, dtype) && vectors_fit(p.y, width, p.y_dtype) && aligned16(p.weight) && aligned16(p.bias);
  const Plan plan = plan_fwd(p.rows, p.n, dtype, aligned, clusters_available(device));
  launch(fwd_kernel(dtype, aligned, plan.resident), device, stream, plan.shape, &p);
}

// The part of the parameters that does not depend on where the rows are.
RmsNormFwdParams fwd_params(TensorView x, double eps, double weight_offset) {
  expect_at_least_1d(x, "x");
  if (!(eps >= 0) || std::isinf(eps)) raise("ValueError", "eps: expected a finite number of at least 0, got " + std::to_string(eps));
  RmsNormFwdParams p{};
  p.n = x.size(x.ndim() - 1);
  p.rows = p.n > 0 ? x.numel() / p.n : 0;
  const double inverse_n = 1.0 / p.n;
  const float rounded = static_cast<float>(inverse_n);
  p.float64 = {inverse_n, 0, eps, std::sqrt(eps), weight_offset};
  p.float32 = {rounded, static_cast<float>(inverse_n - rounded), static_cast<float>(eps), static_cast<float>(std::sqrt(eps)),
               static_cast<float>(weight_offset)};
  return p;
}

// A weight or bias has the dtype of x or that of its sums. Returns whether it is the latter, and they differ.
bool expect_parameter(TensorView t, const char* name, TensorView x, DType dtype) {
  const DType got = dtype_of(t, name);
  const std::int64_t n = x.size(x.ndim() - 1);
  if (t.ndim() != 1 || t.size(0) != n || (n > 1 && t.stride(0) != 1)) {
    raise("ValueError", std::string(name) + ": expected a contiguous array of shape (" + std::to_string(n) + ",)");
  }
  if (got != dtype && got != accumulator_of(dtype)) {
    raise("TypeError", std::string(name) + ": expected the dtype of x or of its sums, got " + name_of(got));
  }
  expect_device(t, name, x.device());
  return got != dtype;
}

void expect_like(TensorView t, const char* name, TensorView x, DType dtype) {
  expect_same_shape(t, name, x, "x");
  expect_device(t, name, x.device());
  const DType got = dtype_of(t, name);
  if (got != dtype) raise("TypeError", std::string(name) + ": expected " + name_of(dtype) + ", got " + name_of(got));
}

void expect_rstd(TensorView rstd, TensorView x, std::int64_t rows, DType dtype) {
  if (rstd.numel() != rows || !rstd.is_contiguous() || dtype_of(rstd, "rstd") != accumulator_of(dtype)) {
    raise("ValueError", "rstd: expected a contiguous array of one value a row, in the dtype of the sums");
  }
  expect_device(rstd, "rstd", x.device());
}

// Arrays on one GPU. y = norm(x), or h = x + residual and y = norm(h); y and h may be x or residual.
void rms_norm_fwd(TensorView y, OptionalTensor h, OptionalTensor rstd, TensorView x, OptionalTensor residual, OptionalTensor weight,
                  OptionalTensor bias, double eps, double weight_offset) {
  RmsNormFwdParams p = fwd_params(x, eps, weight_offset);
  const DType dtype = dtype_of(x, "x");
  if (x.device().device_type != kDLCUDA) raise("ValueError", "x: expected an array on a CUDA device");
  p.y_dtype = dtype_of(y, "y");
  expect_like(y, "y", x, p.y_dtype);
  if (weight.has_value()) {
    p.weight_wide = expect_parameter(*weight, "weight", x, dtype);
    p.weight = data_of(*weight);
  }
  if (bias.has_value()) {
    p.bias_wide = expect_parameter(*bias, "bias", x, dtype);
    p.bias = data_of(*bias);
  }
  if (residual.has_value() != h.has_value()) raise("ValueError", "h: expected together with residual");
  if (residual.has_value()) {
    expect_like(*residual, "residual", x, dtype);
    expect_like(*h, "h", x, dtype);
    p.residual = rows_of(*residual, "residual");
    p.h = rows_of(*h, "h");
  }
  if (rstd.has_value()) {
    expect_rstd(*rstd, x, p.rows, dtype);
    p.rstd = data_of(*rstd);
  }
  if (p.rows == 0) return;
  p.x = rows_of(x, "x");
  p.y = rows_of(y, "y");
  const int device = x.device().device_id;
  const ContextGuard context(device);
  launch_fwd(p, dtype, device, current_stream(x.device()));
}

// Host arrays, through the GPU `device`; y may be x. Returns when y is written.
void rms_norm_fwd_host(TensorView y, TensorView rstd, TensorView x, OptionalTensor weight, OptionalTensor bias, double eps,
                       double weight_offset, int64_t device) {
  RmsNormFwdParams p = fwd_params(x, eps, weight_offset);
  const DType dtype = dtype_of(x, "x");
  expect_device(x, "x", {kDLCPU, 0});
  p.y_dtype = dtype_of(y, "y");
  expect_like(y, "y", x, p.y_dtype);
  if (p.rows == 0) return;
  const Rows in = rows_of(x, "x"), out = rows_of(y, "y");
  if (in.inner < p.rows || out.inner < p.rows) raise("ValueError", "x: its rows need more than one stride; pass a contiguous copy");
  const ContextGuard context(device);
  DeviceMemory weight_memory, bias_memory;
  if (weight.has_value()) {
    p.weight_wide = expect_parameter(*weight, "weight", x, dtype);
    p.weight = weight_memory.upload(data_of(*weight), p.n * size_of(dtype_of(*weight, "weight")));
  }
  if (bias.has_value()) {
    p.bias_wide = expect_parameter(*bias, "bias", x, dtype);
    p.bias = bias_memory.upload(data_of(*bias), p.n * size_of(dtype_of(*bias, "bias")));
  }
  expect_rstd(rstd, x, p.rows, dtype);
  const HostRows host_in{static_cast<char*>(in.data), in.stride * size_of(dtype), p.n * size_of(dtype)};
  const HostRows host_out{static_cast<char*>(out.data), out.stride * size_of(p.y_dtype), p.n * size_of(p.y_dtype)};
  const std::int64_t rstd_size = size_of(accumulator_of(dtype));
  const HostRows host_rstd{data_of(rstd), rstd_size, rstd_size};
  stream_rows(static_cast<int>(device), p.rows, {host_in}, {host_out, host_rstd},
              [&](const CUdeviceptr* from, const CUdeviceptr* to, std::int64_t rows, CUstream stream) {
                RmsNormFwdParams chunk = p;
                chunk.rows = rows;
                chunk.x = {reinterpret_cast<void*>(from[0]), INT64_MAX, p.n, 0};
                chunk.y = {reinterpret_cast<void*>(to[0]), INT64_MAX, p.n, 0};
                chunk.rstd = reinterpret_cast<void*>(to[1]);
                launch_fwd(chunk, dtype, static_cast<int>(device), stream);
              });
}

}  // namespace
}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_fwd, cuops::rms_norm_fwd);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_fwd_host, cuops::rms_norm_fwd_host);
