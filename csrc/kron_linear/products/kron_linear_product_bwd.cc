// Gradients of one factor of kron_linear and of its input in a launch, where these are small: checks, the plans, the launch.
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cmath>

#include "host/error.h"
#include "host/tensor.h"
#include "kron_linear/kron_factors.h"
#include "kron_linear/plan/kron_plan_dots.h"
#include "kron_linear/plan/kron_plan_product.h"

namespace cuops {
namespace {

struct Plans {
  KronProductPlan product;
  double dots;

  double nanoseconds() const { return std::min(product.nanoseconds, dots); }
};
Plans plan_bwd(const KronProductProblem& problem, bool needs_dx, bool needs_dw, int device) {
  LaunchShape most{1, kProductThreads, 1, hardware("kron_linear_product", device).largest_cluster};
  if (!has_room(product_kernel(problem.dtype), device, most)) most.cluster = 8;
  return {plan_product_bwd(problem, needs_dx, needs_dw, most.cluster, kron_device(device)),
          plan_dots_bwd(problem, needs_dx, needs_dw, kron_device(device))};
}

// The predicted nanoseconds of both gradients for these sizes; 0 where there is no kernel.
int64_t kron_linear_product_bwd_time(int64_t dtype, int64_t rows, int64_t inner, int64_t out, int64_t in, int64_t device) {
  if (std::min({rows, inner, out, in}) < 1) raise("ValueError", "rows, inner, out, in: expected at least 1 each");
  const KronProductProblem problem{dtype_at(dtype), rows, inner, out, in};
  const double nanoseconds = plan_bwd(problem, true, true, static_cast<int>(device)).nanoseconds();
  return std::isinf(nanoseconds) ? 0 : static_cast<int64_t>(nanoseconds);
}

// The gradients of y (rows, out, inner) = w (out, in) times x (rows, in, inner): of x, of w, or both; contiguous arrays on one GPU,
// but w may have any strides.
void kron_linear_product_bwd(OptionalTensor dx, OptionalTensor dw, TensorView dy, TensorView x, tvm::ffi::Tensor w) {
  const DType dtype = dtype_of(x, "x");
  expect_cuda(x, "x");
  if (x.ndim() != 3 || dy.ndim() != 3) raise("ValueError", "x: expected (rows, in, inner), and dy (rows, out, inner)");
  const std::vector<KronSize> sizes = sizes_of(tvm::ffi::Array<tvm::ffi::Tensor>{w}, dtype, x.device());
  const KronProductProblem problem{dtype, x.size(0), x.size(2), sizes[0].out, sizes[0].in};
  if (x.numel() == 0 || dy.numel() == 0) raise("ValueError", "x: expected no empty array");
  auto check = [&](TensorView t, const char* name, std::int64_t size) {
    if (dtype_of(t, name) != dtype) raise("TypeError", std::string(name) + ": expected x's dtype");
    expect_device(t, name, x.device());
    if (!t.is_contiguous() || t.ndim() != 3 || t.size(0) != problem.rows || t.size(1) != size || t.size(2) != problem.inner)
      raise("ValueError", std::string(name) + ": expected a contiguous array (rows, size, inner)");
    return KronProductArray{data_of(t), size * problem.inner};
  };
  const KronProductArray x_array = check(x, "x", problem.in), dy_array = check(dy, "dy", problem.out);
  const int device = x.device().device_id;
  if (!dx.has_value() && !dw.has_value()) return;
  const Plans plans = plan_bwd(problem, dx.has_value(), dw.has_value(), device);
  if (std::isinf(plans.nanoseconds())) raise("ValueError", "x: no kernel; ask kron_linear_product_bwd_time");
  KronFactor factor[1];
  fill_factors(factor, {w}, dtype);
  if (plans.dots < plans.product.nanoseconds && has_small_strides(w)) {
    KronDotsParams p{};
    KronDots* next = p.dots;
    if (dw.has_value()) {
      expect_matrix(*dw, "dw", dtype, x.device(), problem.out, problem.in);
      *next++ = dots_of_dw(problem, data_of(*dw), dy_array, x_array);
    }
    if (dx.has_value()) *next++ = dots_of_dx(problem, check(*dx, "dx", problem.in), dy_array, factor[0]);
    LaunchShape shape{static_cast<unsigned>(p.dots[0].blocks + p.dots[1].blocks), kDotsThreads};
    shape.overlaps = true;
    const ContextGuard context(device);
    return launch(dots_kernel(dtype), device, current_stream(x.device()), shape, &p);
  }
  KronProductParams p{};
  KronProduct* next = p.product;
  if (dw.has_value()) {
    expect_matrix(*dw, "dw", dtype, x.device(), problem.out, problem.in);
    *next = product_of_dw(problem, data_of(*dw), dy_array, x_array);
    set_tiles(next++, plans.product.splits);
  }
  if (dx.has_value()) {
    *next = product_of_dx(problem, check(*dx, "dx", problem.in), dy_array, factor[0]);
    set_tiles(next++, 1);
  }
  const unsigned cluster = static_cast<unsigned>(plans.product.splits);
  LaunchShape shape{static_cast<unsigned>(round_up(p.product[0].blocks + p.product[1].blocks, cluster)), kProductThreads};
  shape.cluster = cluster;
  shape.overlaps = true;
  const ContextGuard context(device);
  launch(product_kernel(dtype), device, current_stream(x.device()), shape, &p);
}

}  // namespace
}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kron_linear_product_bwd_time, cuops::kron_linear_product_bwd_time);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kron_linear_product_bwd, cuops::kron_linear_product_bwd);
