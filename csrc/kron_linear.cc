// Kronecker-factored linear layers on the host: checks, the plan, the launch.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include <algorithm>

#include "host/error.h"
#include "host/integers.h"
#include "host/plan_cache.h"
#include "host/tensor.h"
#include "kron_linear/kron_factors.h"
#include "kron_linear/kron_linear_launch.h"

namespace cuops {
namespace {

using Tensors = tvm::ffi::Array<tvm::ffi::Tensor>;

// Plans are made once for each problem on each device.
std::shared_ptr<const KronGroup> cached_group(const KronProblem& problem, int device) {
  static auto& known = *new PlanCache<KronGroup>;
  auto key = plan_key({device, problem.dtype, problem.tf32, problem.aligned, problem.linear, problem.mapped, problem.near,
                       problem.rows, problem.inner},
                      problem.sizes);
  return known.find(std::move(key), [&] { return plan_group(problem, kron_device(device)); });
}

// Rows that are all one short stride apart, which some kernels ask for.
bool has_one_short_stride(const Rows& rows, std::int64_t count) {
  return has_one_stride(rows) && (count == 1 || (0 <= rows.stride && rows.stride <= kKronMostStride));
}

std::int64_t last_size(TensorView t) { return t.size(t.ndim() - 1); }

}  // namespace

void kron_linear_fwd(TensorView y, TensorView x, Tensors factors, int64_t inner, OptionalTensor bias, bool allow_tf32) {
  expect_at_least_1d(x, "x");
  expect_at_least_1d(y, "y");
  const DType dtype = dtype_of(x, "x");
  expect_cuda(x, "x");
  if (dtype_of(y, "y") != dtype) raise("TypeError", "y: expected x's dtype");
  expect_device(y, "y", x.device());
  if (inner < 1) raise("ValueError", "inner: expected at least 1, got " + std::to_string(inner));
  const int device = x.device().device_id;

  KronProblem problem;
  problem.dtype = dtype;
  problem.arithmetic = kron_arithmetic(dtype, kron_device(device));
  problem.tf32 = allow_tf32 && dtype == kFloat32;
  problem.inner = inner;
  std::int64_t in = inner, out = inner;
  problem.sizes = sizes_of(factors, dtype, x.device());
  for (const KronSize& size : problem.sizes) {
    out *= size.out;
    in *= size.in;
  }
  if (last_size(x) != in || last_size(y) != out) raise("ValueError", "factors: expected sizes whose products are those of x and y");
  problem.rows = in > 0 ? x.numel() / in : 0;
  if (x.ndim() != y.ndim() || (out > 0 && y.numel() / out != problem.rows))
    raise("ValueError", "y: expected x's leading dimensions");
  if (problem.rows == 0 || in == 0 || out == 0) raise("ValueError", "x: expected no empty array");

  const int width = width_of(dtype);
  const Rows x_rows = rows_of(x, "x"), y_rows = rows_of(y, "y");
  problem.aligned = vectors_fit(x_rows, width, dtype) && vectors_fit(y_rows, width, dtype);
  problem.linear = has_one_short_stride(x_rows, problem.rows) && has_one_short_stride(y_rows, problem.rows);
  problem.near = std::all_of(factors.begin(), factors.end(), [](const tvm::ffi::Tensor& w) { return has_small_strides(w); });
  problem.mapped = problem.linear && (problem.rows == 1 || x_rows.stride >= in);
  const std::shared_ptr<const KronGroup> plan = cached_group(problem, device);
  if (!plan->fused) raise("NotImplementedError", "factors: too large for one kernel; ask kron_linear_plan");
  const void* bias_data = nullptr;
  std::int64_t bias_lead = 1;
  if (bias.has_value()) {
    const std::int64_t n = (*bias).numel();
    if (inner != 1 || n == 0 || n % out != 0 || !(*bias).is_contiguous())
      raise("ValueError", "bias: expected one contiguous element an output");
    if (dtype_of(*bias, "bias") != dtype) raise("TypeError", "bias: expected x's dtype");
    expect_device(*bias, "bias", x.device());
    bias_data = data_of(*bias);
    bias_lead = n / out;
  }
  const ContextGuard context(device);
  launch_group(*plan, {problem, factors, x_rows, y_rows, in, bias_data, bias_lead}, device, current_stream(x.device()));
}

}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kron_linear_fwd, cuops::kron_linear_fwd);
