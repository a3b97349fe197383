// RMSNorm on the host: checks, the choice of a kernel, the launch.
#include "rms_norm.h"

#include <tvm/ffi/function.h>

#include <algorithm>
#include <cmath>

#include "host/error.h"
#include "host/kernel.h"
#include "host/staging.h"
#include "host/tensor.h"

namespace cuops {
namespace {

// How many vectors a thread keeps in registers, per instance in rms_norm.cu. 0 reads the row twice.
constexpr int kResident[] = {1, 2, 4, 8, 0};

Kernel& fwd_kernel(DType dtype, bool aligned, int resident) {
  struct Table {
    Kernel* at[4][2][9] = {};
    Table() {
      for (DType t : {kFloat64, kFloat32, kFloat16, kBFloat16})
        for (bool a : {false, true})
          for (int k : kResident)
            at[t][a][k] = new Kernel("rms_norm", std::string("rms_norm_fwd_") + name_of(t) + "_" + std::to_string(k) +
                                                     (a ? "_aligned" : "_unaligned"));
    }
  };
  static const Table table;
  return *table.at[dtype][aligned][resident];
}

struct Plan {
  int resident;
  LaunchShape shape;
};

Plan plan_fwd(std::int64_t rows, std::int64_t n, DType dtype, bool aligned, bool clusters) {
  const std::int64_t width = 16 / size_of(dtype), windows = (n + width - 1) / width + (aligned ? 0 : 1);
  auto threads_for = [&](std::int64_t per_thread) {
    const std::int64_t threads = (windows + per_thread - 1) / per_thread;
    return (threads + 31) / 32 * 32;
  };
  if (windows <= 32) {  // a part of a warp a row
    unsigned lanes = 1;
    while (lanes < windows) lanes *= 2;
    const unsigned rows_a_block = 128 / lanes;
    return {1, {static_cast<unsigned>((rows + rows_a_block - 1) / rows_a_block), lanes, rows_a_block}};
  }
  const unsigned blocks = static_cast<unsigned>(rows);
  for (int resident : kResident) {
    if (!aligned && resident != 1 && resident != 4) continue;
    const std::int64_t most = resident <= 2 ? 256 : resident == 4 ? 512 : 1024;
    if (resident != 0 && threads_for(resident) <= most) return {resident, {blocks, static_cast<unsigned>(threads_for(resident))}};
  }
  const int resident = aligned ? 8 : 4;
  for (unsigned cluster = 2; clusters && cluster <= 8; cluster *= 2) {
    const std::int64_t threads = threads_for(resident * cluster);
    if (threads <= 1024) return {resident, {blocks * cluster, static_cast<unsigned>(threads), 1, cluster}};
  }
  return {0, {clusters ? blocks * 8 : blocks, 1024, 1, clusters ? 8u : 1u}};
}

void launch_fwd(RmsNormFwdParams& p, DType dtype, int device, CUstream stream) {
  const bool aligned = vectors_fit(p.x, p.n, dtype) && vectors_fit(p.y, p.n, dtype) && aligned16(p.weight);
  const Plan plan = plan_fwd(p.rows, p.n, dtype, aligned, clusters_available(device));
  launch(fwd_kernel(dtype, aligned, plan.resident), device, stream, plan.shape, &p);
}

// The part of the parameters that does not depend on where the rows are.
RmsNormFwdParams fwd_params(TensorView x, double eps) {
  expect_at_least_1d(x, "x");
  if (!(eps >= 0) || std::isinf(eps)) raise("ValueError", "eps: expected a finite number of at least 0, got " + std::to_string(eps));
  RmsNormFwdParams p{};
  p.n = x.size(x.ndim() - 1);
  p.rows = p.n ? x.numel() / p.n : 0;
  p.inverse_n = 1.0 / p.n;
  p.eps = eps;
  p.sqrt_eps = std::sqrt(eps);
  return p;
}

// A weight has the dtype of x or that of its sums.
void expect_weight(TensorView weight, TensorView x, DType dtype, RmsNormFwdParams* p) {
  const DType got = dtype_of(weight, "weight");
  if (weight.ndim() != 1 || weight.size(0) != p->n || (p->n > 1 && weight.stride(0) != 1)) {
    raise("ValueError", "weight: expected a contiguous array of shape (" + std::to_string(p->n) + ",)");
  }
  if (got != dtype && got != accumulator_of(dtype)) {
    raise("TypeError", std::string("weight: expected the dtype of x or of its sums, got ") + name_of(got));
  }
  expect_device(weight, "weight", x.device());
  p->weight_wide = got != dtype;
}

void expect_output(TensorView y, TensorView x, DType dtype) {
  expect_same_shape(y, "y", x, "x");
  expect_device(y, "y", x.device());
  if (dtype_of(y, "y") != dtype) raise("TypeError", std::string("y: expected the dtype of x, got ") + name_of(dtype_of(y, "y")));
}

// y and x are on one GPU; y may be x.
void rms_norm_fwd(TensorView y, TensorView x, tvm::ffi::Optional<TensorView> weight, double eps) {
  RmsNormFwdParams p = fwd_params(x, eps);
  const DType dtype = dtype_of(x, "x");
  if (x.device().device_type != kDLCUDA) raise("ValueError", "x: expected an array on a CUDA device");
  expect_output(y, x, dtype);
  if (weight.has_value()) {
    expect_weight(*weight, x, dtype, &p);
    p.weight = data_of(*weight);
  }
  if (p.rows == 0) return;
  p.x = rows_of(x, "x");
  p.y = rows_of(y, "y");
  const int device = x.device().device_id;
  const ContextGuard context(device);
  launch_fwd(p, dtype, device, current_stream(x.device()));
}

// The same for host arrays, on the GPU `device`. Returns when y is written.
void rms_norm_fwd_host(TensorView y, TensorView x, tvm::ffi::Optional<TensorView> weight, double eps, int64_t device) {
  RmsNormFwdParams p = fwd_params(x, eps);
  const DType dtype = dtype_of(x, "x");
  expect_device(x, "x", {kDLCPU, 0});
  expect_output(y, x, dtype);
  if (p.rows == 0) return;
  const Rows in = rows_of(x, "x"), out = rows_of(y, "y");
  if (in.inner < p.rows || out.inner < p.rows) raise("ValueError", "x: its rows need more than one stride; pass a contiguous copy");
  const ContextGuard context(device);
  DeviceMemory weight_memory;
  if (weight.has_value()) {
    expect_weight(*weight, x, dtype, &p);
    p.weight = weight_memory.upload(data_of(*weight), p.n * size_of(dtype_of(*weight, "weight")));
  }
  const std::int64_t size = size_of(dtype), row_bytes = p.n * size;
  stream_rows(device, {static_cast<char*>(in.data), in.stride * size}, {static_cast<char*>(out.data), out.stride * size}, p.rows,
              row_bytes, row_bytes, [&](CUdeviceptr from, CUdeviceptr to, std::int64_t rows, CUstream stream) {
                RmsNormFwdParams chunk = p;
                chunk.rows = rows;
                chunk.x = {reinterpret_cast<void*>(from), INT64_MAX, p.n, 0};
                chunk.y = {reinterpret_cast<void*>(to), INT64_MAX, p.n, 0};
                launch_fwd(chunk, dtype, device, stream);
              });
}

}  // namespace
}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_fwd, cuops::rms_norm_fwd);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_fwd_host, cuops::rms_norm_fwd_host);
