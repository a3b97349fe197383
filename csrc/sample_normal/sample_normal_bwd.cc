// The gradient of normal samples on the host.
#include <tvm/ffi/function.h>

#include "host/error.h"
#include "sample_normal_bwd_plan.h"

namespace cuops {
namespace {

// In how many chunks of the samples the backward adds up such gradients; 0: in one launch, without sums of chunks.
int64_t sample_normal_bwd_chunks(TensorView grad, OptionalTensor state, int64_t start, int64_t sample_dim, bool antithetic) {
  const SampleNormalParams p = params_of(grad, "grad", {state, 0, 0, 0, start, sample_dim, false, antithetic});
  if (p.columns == 0) return 0;
  return plan_bwd(p, dtype_of(grad, "grad"), hardware("sample_normal_bwd", grad.device().device_id)).chunks;
}

// How many elements of a row a thread reads at a time.
unsigned at_once_for(const SampleNormalParams& p, DType dtype, SampleNormalBwdKernel kernel) {
  const auto at = reinterpret_cast<std::uintptr_t>(p.samples);
  auto fits = [&](unsigned width) { return p.dim % width == 0 && at % (width * size_of(dtype)) == 0; };
  unsigned width = columns_of(kernel);
  while (width > 1 && !fits(width)) width /= 2;
  return width;
}

void launch_at_once(SampleAtOnceParams& all, DType dtype, const SampleNormalBwdPlan& plan, int device, CUstream stream) {
  static const KernelTable table("sample_normal_bwd_",
                                 {{"sample_normal_bwd_at_once", {"_rows_1_at_once", "_rows_2_at_once", "_rows_4_at_once"}}});
  all.draw.step = plan.step;
  all.draw.at_once = at_once_for(all.draw, dtype, plan.kernel);
  all.tiles_shift = plan.tiles_shift;
  const int slices = plan.threads >> slice_shift_of(plan.tiles_shift), sums = 2 * columns_of(plan.kernel) << plan.tiles_shift;
  LaunchShape shape{static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.threads)};
  shape.shared_bytes = static_cast<unsigned>((slices - 1) * sums * size_of(accumulator_of(dtype)));  // one slice stays
  shape.overlaps = true;
  launch(table.at(dtype, plan.kernel), device, stream, shape, &all);
}

// Sums over chunks of the samples, by launches of as many blocks as there may be.
void launch_partial(SampleNormalParams& p, DType dtype, std::int64_t chunks, const Hardware& hw, int device, CUstream stream) {
  static const KernelTable table("sample_normal_bwd_", {{"sample_normal_bwd", {"_rows_1", "_rows_2", "_rows_4", "_columns"}}});
  const SampleNormalBwdKernel variant = chunk_kernel_for(p, dtype, hw);
  Kernel& kernel = table.at(dtype, variant);
  if (variant != kBwdColumns) {
    p.at_once = at_once_for(p, dtype, variant);
    return launch(kernel, device, stream, {sample_blocks(chunks * tiles_of(p, variant)), kSampleThreads}, &p);
  }
  std::int64_t blocks = chunks * p.columns;
  for (; chunks == 1 && blocks > kMostBlocks; blocks -= kMostBlocks) {  // of more columns than a launch has blocks
    launch(kernel, device, stream, {kMostBlocks, kSampleThreads}, &p);
    p.first_column += kMostBlocks;
    p.samples = static_cast<char*>(p.samples) + kMostBlocks * p.num_samples * size_of(dtype);
    p.partial = static_cast<char*>(p.partial) + std::int64_t{kMostBlocks} * size_of(accumulator_of(dtype));
  }
  launch(kernel, device, stream, {sample_blocks(blocks * kSampleThreads), kSampleThreads}, &p);
}

void launch_sums(SampleSumParams& p, DType sums, int device, CUstream stream) {
  static const KernelTable table("sample_normal_bwd_", {{"sample_normal_bwd", {"_sum"}}});
  const unsigned most = p.columns <= 32 ? kChunkSumThreads : 64;  // of few columns, blocks for each
  p.rows = 1;
  while (p.rows < most && 4 * p.rows < p.chunks) p.rows *= 2;
  LaunchShape shape{sample_blocks(2 * p.columns * p.rows, kChunkSumThreads), kChunkSumThreads};
  shape.overlaps = true;
  launch(table.at(sums, 0), device, stream, shape, &p);
}

void* gradient_of(TensorView t, const char* name, std::int64_t columns, DLDevice device, DType* dtype) {
  *dtype = dtype_of(t, name);
  expect_device(t, name, device);
  if (t.numel() != columns || !t.is_contiguous())
    raise("ValueError", std::string(name) + ": expected a contiguous array of " + std::to_string(columns) + " numbers");
  return data_of(t);
}

// dmu and dsigma, of any dtypes; partial: (chunks, 2, columns), what chunks of the samples add up to, or none in one launch.
void sample_normal_bwd(TensorView dmu, TensorView dsigma, TensorView partial, TensorView grad, OptionalTensor state, int64_t seed,
                       int64_t stream, int64_t start, int64_t sample_dim, bool shared, bool antithetic) {
  SampleNormalParams p = params_of(grad, "grad", {state, 0, seed, stream, start, sample_dim, shared, antithetic});
  const DLDevice on = grad.device();
  expect_cuda(grad, "grad");
  const DType dtype = dtype_of(grad, "grad"), sums = accumulator_of(dtype);
  const std::int64_t chunks = partial.ndim() == 3 ? partial.size(0) : -1;
  if (chunks < 0 || partial.numel() != chunks * 2 * p.columns || !partial.is_contiguous() || dtype_of(partial, "partial") != sums)
    raise("ValueError", "partial: expected a contiguous array (chunks, 2, columns) in the dtype of the sums");
  expect_device(partial, "partial", on);
  if (p.columns == 0) return;
  SampleAtOnceParams all{};
  all.dmu = gradient_of(dmu, "dmu", p.columns, on, &all.dmu_dtype);
  all.dsigma = gradient_of(dsigma, "dsigma", p.columns, on, &all.dsigma_dtype);
  const Hardware& hw = hardware("sample_normal_bwd", on.device_id);
  const ContextGuard context(on.device_id);
  const CUstream queue = current_stream(on);
  if (chunks == 0) {
    const SampleNormalBwdPlan plan = plan_bwd(p, dtype, hw);
    if (plan.chunks > 0) raise("ValueError", "partial: expected as many chunks as sample_normal_bwd_chunks says");
    all.draw = p;
    return launch_at_once(all, dtype, plan, on.device_id, queue);
  }
  p.partial = data_of(partial);
  p.step = ceil_div(p.end_group - p.group, chunks);
  if ((chunks - 1) * p.step >= p.end_group - p.group) raise("ValueError", "partial: expected no chunk without a sample");
  SampleSumParams of_chunks{p.partial, all.dmu, all.dsigma, chunks, p.columns, 0, all.dmu_dtype, all.dsigma_dtype};
  launch_partial(p, dtype, chunks, hw, on.device_id, queue);
  launch_sums(of_chunks, sums, on.device_id, queue);
}

}  // namespace
}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sample_normal_bwd_chunks, cuops::sample_normal_bwd_chunks);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sample_normal_bwd, cuops::sample_normal_bwd);
