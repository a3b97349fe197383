// Kronecker-factored linear layers on the host: checks, the plan, the launch.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include "host/error.h"
#include "host/plan_cache.h"
#include "host/tensor.h"
#include "kron_linear/kron_factors.h"
#include "kron_linear/kron_linear_fwd.h"
#include "kron_linear/plan/kron_fibers_layout.h"
#include "kron_linear/plan/kron_plan.h"
#include "kron_linear/plan/kron_plan_dots.h"
#include "kron_linear/plan/kron_plan_product.h"

namespace cuops {
namespace {

using OptionalTensor = tvm::ffi::Optional<TensorView>;
using Tensors = tvm::ffi::Array<tvm::ffi::Tensor>;

Kernel& fwd_kernel(DType dtype) {
  static Kernel kernels[] = {{"kron_linear", "kron_linear_fwd_f64"}, {"kron_linear", "kron_linear_fwd_f32"}};
  return kernels[dtype != kFloat64];
}
Kernel& tuned_kernel(KronKernel which) {
  static Kernel kernels[] = {{"kron_linear_tuned", "kron_tuned_single"},
                             {"kron_linear_tuned", "kron_tuned_pairs"},
                             {"kron_linear_tuned", "kron_tuned_pairs_128"},
                             {"kron_linear_small", "kron_small"},
                             {"kron_linear_sixteens", "kron_sixteens_two"},
                             {"kron_linear_sixteens", "kron_sixteens_columns"},
                             {"kron_linear_sixteens", "kron_sixteens_three"},
                             {"kron_linear_direct", "kron_direct_32"},
                             {"kron_linear_direct", "kron_direct_64"},
                             {"kron_linear_direct", "kron_direct_128"},
                             {"kron_linear_direct", "kron_direct_columns_64"},
                             {"kron_linear_direct", "kron_direct_columns_128"},
                             {"kron_linear_cube", "kron_cube"},
                             {"kron_linear_cube_f64", "kron_cube_f64"},
                             {"kron_linear_half", "kron_half_32_f16"},
                             {"kron_linear_half", "kron_half_64_f16"},
                             {"kron_linear_half", "kron_half_cube_f16"},
                             {"kron_linear_half", "kron_half_32_bf16"},
                             {"kron_linear_half", "kron_half_64_bf16"},
                             {"kron_linear_half", "kron_half_cube_bf16"},
                             {"kron_linear_double", "kron_double_16"},
                             {"kron_linear_double", "kron_double_24"},
                             {"kron_linear_double", "kron_double_32"},
                             {"kron_linear_double", "kron_double_48"},
                             {"kron_linear_double", "kron_double_64"},
                             {"kron_linear_wide", "kron_wide_64_tf32"},
                             {"kron_linear_wide", "kron_wide_64_f16"},
                             {"kron_linear_wide", "kron_wide_64_bf16"},
                             {"kron_linear_wide", "kron_wide_96_f16"},
                             {"kron_linear_wide", "kron_wide_96_bf16"},
                             {"kron_linear_wide", "kron_wide_128_tf32"},
                             {"kron_linear_wide", "kron_wide_128_f16"},
                             {"kron_linear_wide", "kron_wide_128_bf16"},
                             {"kron_linear_bits", "kron_bits_f64"},
                             {"kron_linear_bits", "kron_bits_f32"},
                             {"kron_linear_twos", "kron_twos_f64"},
                             {"kron_linear_twos", "kron_twos_f32"},
                             {"kron_linear_twos", "kron_twos_f16"},
                             {"kron_linear_twos", "kron_twos_bf16"},
                             {"kron_linear_fibers", "kron_fibers_f64"},
                             {"kron_linear_fibers", "kron_fibers_f32"},
                             {"kron_linear_slices", "kron_slices_f64_1"},
                             {"kron_linear_slices", "kron_slices_f64_4"},
                             {"kron_linear_slices", "kron_slices_f32_1"},
                             {"kron_linear_slices", "kron_slices_f32_4"},
                             {"kron_linear_slices", "kron_slices_f16_1"},
                             {"kron_linear_slices", "kron_slices_f16_4"},
                             {"kron_linear_slices", "kron_slices_bf16_1"},
                             {"kron_linear_slices", "kron_slices_bf16_4"}};
  return kernels[which - kKronTunedSingle];
}

// Plans are made once for each problem on each device.
std::shared_ptr<const KronGroup> cached_group(const KronProblem& problem, int device) {
  static PlanCache<KronGroup> known;
  auto key = plan_key({device, problem.dtype, problem.single, problem.aligned, problem.linear, problem.mapped, problem.near,
                       problem.rows, problem.inner},
                      problem.sizes);
  return known.find(std::move(key), [&] { return plan_group(problem, kron_device(device)); });
}

// Rows that are all one short stride apart, which some kernels ask for.
bool has_one_stride(const Rows& rows, std::int64_t count) {
  return rows.inner >= count && (count == 1 || (0 <= rows.stride && rows.stride <= kKronMostStride));
}

std::int64_t last_size(TensorView t) { return t.size(t.ndim() - 1); }

}  // namespace

void kron_linear_fwd(TensorView y, TensorView x, Tensors factors, int64_t inner, OptionalTensor bias, bool allow_tf32) {
  expect_at_least_1d(x, "x");
  expect_at_least_1d(y, "y");
  const DType dtype = dtype_of(x, "x");
  if (x.device().device_type != kDLCUDA) raise("ValueError", "x: expected an array on a CUDA device");
  if (dtype_of(y, "y") != dtype) raise("TypeError", "y: expected x's dtype");
  expect_device(y, "y", x.device());
  if (inner < 1) raise("ValueError", "inner: expected at least 1, got " + std::to_string(inner));
  const int device = x.device().device_id;

  KronProblem problem;
  problem.dtype = dtype;
  problem.arithmetic = kron_arithmetic(dtype, kron_device(device));
  problem.single = allow_tf32 && dtype == kFloat32;
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

  const int width = 16 / size_of(dtype);
  const Rows x_rows = rows_of(x, "x"), y_rows = rows_of(y, "y");
  problem.aligned = vectors_fit(x_rows, width, dtype) && vectors_fit(y_rows, width, dtype);
  problem.linear = has_one_stride(x_rows, problem.rows) && has_one_stride(y_rows, problem.rows);
  problem.near = std::all_of(factors.begin(), factors.end(), [](const tvm::ffi::Tensor& w) { return has_small_strides(w); });
  problem.mapped = problem.linear && (problem.rows == 1 || x_rows.stride >= in);
  const std::shared_ptr<const KronGroup> plan = cached_group(problem, device);
  const KronGroup& group = *plan;
  if (!group.fused) raise("ValueError", "factors: too large for one kernel; ask kron_linear_plan");
  const void* bias_data = nullptr;
  std::int64_t bias_lead = 1;
  if (bias.has_value()) {
    const std::int64_t n = (*bias).numel();
    if (inner != 1 || n % out != 0 || !(*bias).is_contiguous())
      raise("ValueError", "bias: expected one contiguous element an output");
    if (dtype_of(*bias, "bias") != dtype) raise("TypeError", "bias: expected x's dtype");
    expect_device(*bias, "bias", x.device());
    bias_data = data_of(*bias);
    bias_lead = n / out;
  }
  const ContextGuard context(device);
  auto fill = [&](auto p) {
    fill_factors(p.factors, factors, dtype);
    p.x = x_rows;
    p.y = y_rows;
    p.bias = bias_data;
    p.bias_lead = bias_lead;
    return p;
  };
  auto run = [&](Kernel& kernel, auto* p) {
    LaunchShape shape = group.shape;
    shape.overlaps = true;
    launch(kernel, device, current_stream(x.device()), shape, p);
  };
  if (group.tuned == kKronProduct) {
    const KronProductProblem product{dtype, problem.rows, inner, problem.sizes[0].out, problem.sizes[0].in};
    KronFactor factor[1];
    fill_factors(factor, factors, dtype);
    KronProductParams p{};
    p.product[0] = product_of_y(product, {y_rows.data, y_rows.stride}, {x_rows.data, x_rows.stride}, factor[0]);
    p.product[0].bias = bias_data;
    p.product[0].bias_lead = static_cast<int>(bias_lead);
    set_tiles(&p.product[0], 1);
    return run(product_kernel(dtype), &p);
  }
  if (group.tuned == kKronDots) {
    const KronProductArray y_array{y_rows.data, y_rows.stride}, x_array{x_rows.data, x_rows.stride};
    KronFactor factor[kTermsFactors];
    fill_factors(factor, factors, dtype);
    if (group.count > 1) {
      KronTermsParams p = terms_of(group.terms_params, y_array, x_array, factor);
      p.bias = bias_data;
      p.bias_lead = static_cast<int>(bias_lead);
      return run(terms_kernel(dtype, group.count), &p);
    }
    KronDotsParams p{};
    p.dots[0] = dots_of_y({dtype, problem.rows, inner, problem.sizes[0].out, problem.sizes[0].in}, y_array, x_array, factor[0]);
    p.dots[0].bias = bias_data;
    p.dots[0].bias_lead = static_cast<int>(bias_lead);
    LaunchShape shape{static_cast<unsigned>(p.dots[0].blocks), kDotsThreads};
    shape.overlaps = true;
    return launch(dots_kernel(dtype), device, current_stream(x.device()), shape, &p);
  }
  if (group.tuned >= kKronSlices) {
    KronSlicesParams p = group.slices_params;
    KronFactor factor[kSlicesSteps + 1];
    fill_factors(factor, factors, dtype);
    p.x = x_rows.data;
    p.y = y_rows.data;
    p.x_stride = x_rows.stride;
    p.y_stride = y_rows.stride;
    p.first = factor[0].data;
    p.row_stride = factor[0].row_stride;
    p.column_stride = factor[0].column_stride;
    for (int i = 0; i < p.steps; ++i) {
      p.step[i].data = factor[i + 1].data;
      p.step[i].row_stride = factor[i + 1].row_stride;
      p.step[i].column_stride = factor[i + 1].column_stride;
    }
    p.bias = bias_data;
    p.bias_lead = static_cast<int>(bias_lead);
    return run(tuned_kernel(group.tuned), &p);
  }
  if (group.tuned == kKronSmall) {
    KronSmallParams p = fill(group.small_params);
    set_sample_strides(&p);
    return run(tuned_kernel(group.tuned), &p);
  }
  if (group.tuned >= kKronFibersF64) {
    KronFibersParams p = group.fibers_params;
    fill_factors(p.chain.factors, factors, dtype);
    p.x = fibers_array(p.x, p.chain, x_rows);
    p.y = fibers_array(p.y, p.chain, y_rows);
    p.bias = bias_data;
    p.bias_lead = bias_lead;
    return run(tuned_kernel(group.tuned), &p);
  }
  if (group.tuned >= kKronBitsF64) {
    KronBitsParams p = fill(group.bits_params);
    return run(tuned_kernel(group.tuned), &p);
  }
  if (group.tuned >= kKronWide64) {
    KronWideParams p = fill(KronWideParams{});
    p.rows = problem.rows;
    p.matrices = matrices_map(x_rows, dtype, problem.rows, p.factors[0].in, p.factors[1].in,
                              wide_rows(group.tuned < kKronWide96Half ? 64 : kWideMost, size_of(dtype)));
    return run(tuned_kernel(group.tuned), &p);
  }
  if (group.tuned >= kKronHalf32) {
    KronHalfParams p = fill(group.half_params);
    return run(tuned_kernel(group.tuned), &p);
  }
  if (group.tuned >= kKronDirect32) {
    KronDirectParams p = fill(group.direct_params);
    return run(tuned_kernel(group.tuned), &p);
  }
  if (group.tuned >= kKronSixteensTwo) {
    KronSixteensParams p = fill(group.sixteens_params);
    return run(tuned_kernel(group.tuned), &p);
  }
  const bool x_dense = x_rows.inner >= problem.rows && x_rows.stride == in;
  if (group.tuned != kKronGeneral) {
    KronTunedParams p = fill(group.tuned_params);
    p.x_linear = x_dense;
    return run(tuned_kernel(group.tuned), &p);
  }
  KronFwdParams p = fill(group.params);
  p.dtype = dtype;
  const int last = p.axes - 1;
  const bool by_columns = p.columns > 0;
  auto moves = [&](const Rows& rows, std::int64_t row, int together) {
    return row % together == 0 && vectors_fit(rows, together, dtype);
  };
  const std::int64_t x_row = by_columns ? inner : p.in[last], y_row = by_columns ? inner : p.out[last];
  const bool fours = width == 8 && problem.arithmetic == kKronScaled;
  p.x_piece = static_cast<unsigned char>(moves(p.x, x_row, width) ? width : fours && moves(p.x, x_row, 4) ? 4 : 1);
  p.y_piece = static_cast<unsigned char>(moves(p.y, y_row, width) ? 8 : fours && moves(p.y, y_row, 4) ? 4 : 1);
  p.direct = p.step[p.steps - 1].innermost && p.bias == nullptr && vectors_fit(p.y, 2, dtype) && p.out[last] % 2 == 0 &&
             problem.arithmetic == kKronScaled && dtype == kFloat32;
  p.x_linear = !by_columns && x_dense && p.in[last] % 8 == 0;
  p.by_in_pieces = kron_divisor(p.in_chunks * 8 / p.x_piece);
  p.by_out_pieces = kron_divisor(p.y_piece == 1 ? p.out[last] : p.out_chunks * 8 / p.y_piece);
  run(fwd_kernel(dtype), &p);
}

}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kron_linear_fwd, cuops::kron_linear_fwd);
