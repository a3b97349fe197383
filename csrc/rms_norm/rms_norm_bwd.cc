// The gradient of RMSNorm on the host: checks and launches.
#include <tvm/ffi/function.h>

#include <utility>

#include "host/error.h"
#include "host/kernel.h"
#include "host/tensor.h"
#include "rms_norm.h"
#include "rms_norm_bwd_plan.h"
#include "rms_norm_scalars.h"

namespace cuops {
namespace {

Rows single_stride(TensorView t, const char* name) {
  const Rows rows = rows_of(t, name);
  if (!has_one_stride(rows))
    raise("ValueError", std::string(name) + ": its rows need more than one stride; pass a contiguous copy");
  return rows;
}

// What the choice of a kernel depends on. The results are contiguous.
RmsNormBwdProblem problem_of(TensorView dy, OptionalTensor dh, TensorView h, OptionalTensor weight, double weight_offset,
                             bool dweight, bool dbias) {
  expect_at_least_1d(h, "h");
  RmsNormBwdProblem problem{};
  problem.n = h.size(h.ndim() - 1);
  if (h.numel() == 0) raise("ValueError", "h: expected no empty array");
  problem.rows = h.numel() / problem.n;
  problem.dtype = dtype_of(h, "h");
  problem.dy_dtype = dtype_of(dy, "dy");
  const int width = width_of(problem.dtype);
  bool aligned = problem.n % width == 0 && (!weight.has_value() || aligned16(data_of(*weight)));
  bool together = true;  // they start as the result does, and a vector reaches into one other row at most
  const std::pair<OptionalTensor, const char*> arrays[] = {{h, "h"}, {dy, "dy"}, {dh, "dh"}};
  for (const auto& [array, name] : arrays) {
    if (!array.has_value()) continue;
    const Rows rows = rows_of(*array, name);
    aligned = aligned && vectors_fit(rows, width, dtype_of(*array, name));
    together =
        together && aligned16(rows.data) && (problem.rows == 1 || (rows.stride >= width && (rows.stride - problem.n) % width == 0));
  }
  problem.vector_weight = !weight.has_value() || aligned16(data_of(*weight));
  problem.starts = aligned ? kAligned : together ? kTogether : kAnywhere;
  problem.weighted = weight.has_value();
  problem.wide_weight = problem.weighted && size_of(dtype_of(*weight, "weight")) > size_of(problem.dtype);
  const bool plain = problem.weighted && !dbias && problem.dtype != kFloat64 && problem.dy_dtype == problem.dtype;
  problem.common = plain && !problem.wide_weight && weight_offset == 0;
  problem.similar = plain && !problem.common;
  problem.dh = dh.has_value();
  problem.dbias = dbias;
  problem.dx_alone = !dweight && !dbias;
  return problem;
}

std::int64_t scratch_of(const RmsNormBwdPlan& plan, const RmsNormBwdProblem& problem, bool dweight, bool dbias) {
  const std::int64_t partial = plan.finds_results ? 0 : plan.partial_rows * sums_stride(problem.n);
  return partial * (dweight + dbias) + 3 * problem.rows * plan.parts;
}

// How many elements of scratch the gradient needs, in the dtype of the sums; -1 where dy has to have h's dtype.
int64_t rms_norm_bwd_scratch(TensorView dy, OptionalTensor dh, TensorView h, OptionalTensor weight, bool dweight, bool dbias,
                             double weight_offset) {
  const RmsNormBwdProblem problem = problem_of(dy, dh, h, weight, weight_offset, dweight, dbias);
  const auto plan = plan_rms_norm_bwd(problem, h.device().device_id);
  return plan ? scratch_of(*plan, problem, dweight, dbias) : -1;
}

void sum_rows(void* sum, DType dtype, void* partial, const RmsNormBwdPlan& plan, const RmsNormBwdProblem& problem, int device,
              CUstream stream) {
  static Kernel kernels[] = {{"rms_norm_bwd_any", "rms_norm_sum_rows_f64"}, {"rms_norm_bwd_any", "rms_norm_sum_rows_f32"}};
  SumRowsParams p{partial, sum, plan.partial_rows, problem.n, dtype};
  launch(kernels[problem.dtype == kFloat64 ? 0 : 1], device, stream, sum_rows_shape(plan.partial_rows, problem.n), &p);
}

// Gradients on one GPU, from those for y and h (none: zero). `scratch` has as many elements as
// rms_norm_bwd_scratch says. `rounded_dx` is dx in the dtype of dy, where that is another than h's.
void rms_norm_bwd(TensorView dx, OptionalTensor rounded_dx, OptionalTensor dweight, OptionalTensor dbias, TensorView scratch,
                  TensorView dy, OptionalTensor dh, TensorView h, OptionalTensor weight, double eps, double weight_offset) {
  const RmsNormBwdProblem problem = problem_of(dy, dh, h, weight, weight_offset, dweight.has_value(), dbias.has_value());
  const DType dtype = problem.dtype, sums = accumulator_of(dtype);
  expect_cuda(h, "h");
  RmsNormBwdParams p{};
  p.rows = problem.rows;
  p.n = problem.n;
  set_scalars(&p, problem.n, eps, weight_offset);
  expect_like(dx, "dx", h, "h", dtype);
  expect_like(dy, "dy", h, "h", problem.dy_dtype);
  const std::pair<OptionalTensor, const char*> results[] = {{dx, "dx"}, {rounded_dx, "rounded_dx"}};
  for (const auto& [result, name] : results) {
    if (result.has_value() && (!(*result).is_contiguous() || !aligned16(data_of(*result))))
      raise("ValueError", std::string(name) + ": expected a contiguous array at a multiple of 16 bytes");
  }
  p.h = single_stride(h, "h");
  p.dy = single_stride(dy, "dy");
  p.dx = single_stride(dx, "dx");
  if (rounded_dx.has_value()) {
    if (problem.dy_dtype == dtype) raise("TypeError", "rounded_dx: expected none, as dx has the dtype of dy");
    expect_like(*rounded_dx, "rounded_dx", h, "h", problem.dy_dtype);
    p.rounded_dx = single_stride(*rounded_dx, "rounded_dx");
  }
  if (dh.has_value()) {
    expect_like(*dh, "dh", h, "h", dtype);
    p.dh = single_stride(*dh, "dh");
  }
  if (weight.has_value()) {
    expect_vector(*weight, "weight", h);
    const DType got = dtype_of(*weight, "weight");
    p.weight_narrow = got != dtype && got == problem.dy_dtype;
    p.weight_wide = got != dtype && !p.weight_narrow;
    if (p.weight_wide && got != sums) raise("TypeError", "weight: expected the dtype of h, of its sums or of dy");
    p.weight = data_of(*weight);
  }
  const int device = h.device().device_id;
  const auto found = plan_rms_norm_bwd(problem, device);
  if (!found) raise("TypeError", "dy: expected the dtype of h");
  const RmsNormBwdPlan& plan = *found;
  const std::int64_t needed = scratch_of(plan, problem, dweight.has_value(), dbias.has_value());
  if (dtype_of(scratch, "scratch") != sums || !scratch.is_contiguous() || scratch.numel() < needed) {
    raise("ValueError", "scratch: expected a contiguous array of " + std::to_string(needed) + " elements in the dtype of the sums");
  }
  expect_device(scratch, "scratch", h.device());

  // Sums go to the results, or to rows of the scratch.
  char* free = data_of(scratch);
  const std::int64_t bytes = plan.partial_rows * sums_stride(problem.n) * size_of(sums);
  struct Sum {
    void* result = nullptr;
    DType dtype = kFloat32;
    void* partial = nullptr;
  } sums_of[2];
  const std::pair<const OptionalTensor*, const char*> wanted[] = {{&dweight, "dweight"}, {&dbias, "dbias"}};
  for (int k = 0; k < 2; ++k) {
    const OptionalTensor& tensor = *wanted[k].first;
    if (!tensor.has_value()) continue;
    expect_vector(*tensor, wanted[k].second, h);
    sums_of[k] = {data_of(*tensor), dtype_of(*tensor, wanted[k].second), data_of(*tensor)};
    if (k == 0 && weight.has_value() && sums_of[k].dtype != dtype_of(*weight, "weight"))
      raise("TypeError", "dweight: expected the dtype of the weight");
    if (plan.finds_results && !aligned16(sums_of[k].result))
      raise("ValueError", std::string(wanted[k].second) + ": expected an array at a multiple of 16 bytes");
    if (!plan.finds_results) sums_of[k].partial = std::exchange(free, free + bytes);
  }
  p.dweight = sums_of[0].partial;
  p.dbias = sums_of[1].partial;
  p.dweight_dtype = sums_of[0].dtype;
  p.dbias_dtype = sums_of[1].dtype;
  p.finds_results = plan.finds_results;
  p.released_from = plan.released_from;
  p.found = free;
  p.parts = plan.parts;

  const ContextGuard context(device);
  const CUstream stream = current_stream(h.device());
  if (plan.kernel >= kColumnsAny) {
    launch(rms_norm_bwd_kernel(dtype, rows_kernel(plan.kernel)), device, stream, plan.rows_shape, &p);
  }
  launch(rms_norm_bwd_kernel(dtype, plan.kernel), device, stream, plan.shape, &p);
  for (const Sum& sum : sums_of) {
    if (sum.result != sum.partial) sum_rows(sum.result, sum.dtype, sum.partial, plan, problem, device, stream);
  }
}

}  // namespace
}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_bwd_scratch, cuops::rms_norm_bwd_scratch);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_bwd, cuops::rms_norm_bwd);
