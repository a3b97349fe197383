// The gradient of normal samples on the host.
#include <tvm/ffi/function.h>

#include "host/error.h"
#include "sample_normal_launch.h"

namespace cuops {
namespace {

enum Variant { kRows1, kRows4, kColumns };

Kernel& kernel_for(DType dtype, Variant variant) {
  static const KernelTable table("sample_normal_bwd_", {{"sample_normal_bwd", {"_rows_1", "_rows_4", "_columns"}}});
  return table.at(dtype, variant);
}

std::int64_t tiles_of(std::int64_t dim) { return ceil_div(dim, std::int64_t{4}); }

// Four columns a thread, unless that leaves too many without a number, and where the host knows the seed. Numbers of a thread's
// columns have their upper 32 bits in common.
Variant variant_for(const SampleNormalParams& p, DType dtype, const Hardware& hw) {
  if (p.along_columns) return kColumns;
  const bool full = 16 * tiles_of(p.dim) <= 5 * p.dim, alike = p.dim % 4 == 0 || p.columns <= std::int64_t{1} << 32;
  return full && alike && hw.tuned >= 80 && dtype != kFloat64 && p.state == nullptr && !p.antithetic ? kRows4 : kRows1;
}

// Threads for a chunk along rows.
std::int64_t lines_of(const SampleNormalParams& p, Variant variant) {
  return variant == kRows4 ? p.columns / p.dim * tiles_of(p.dim) : p.columns;
}

// How many chunks take the least time. Blocks come in waves of kGradientBlocks a multiprocessor; a last one that is not full takes
// as long, and as blocks do not end together, a block's time comes on top. What comes before a thread's first group takes as long
// as a group. The sums of chunks are written and read.
std::int64_t chunks_of_rows(std::int64_t groups, std::int64_t columns, std::int64_t lines, std::int64_t multiprocessors) {
  constexpr std::int64_t kMostWaves = 8, kSumsABlock = 100'000;
  const std::int64_t wave = multiprocessors * kGradientBlocks * kSampleThreads;
  std::int64_t best = 1, least = INT64_MAX;
  for (std::int64_t waves = 1; waves <= kMostWaves; ++waves) {
    const std::int64_t step = ceil_div(groups, std::clamp<std::int64_t>(waves * wave / lines, 1, groups));
    const std::int64_t chunks = ceil_div(groups, step), blocks = kGradientBlocks * ceil_div(chunks * lines, wave) + 1;
    const std::int64_t time = (step + 1) * blocks + chunks * columns / kSumsABlock;
    if (time < least - least / 32) {
      best = chunks;
      least = time;
    }
  }
  return best;
}

// In how many chunks of the samples the backward adds up such gradients.
int64_t sample_normal_bwd_chunks(TensorView grad, OptionalTensor state, int64_t start, int64_t sample_dim, bool antithetic) {
  const SampleNormalParams p = params_of(grad, {state, 0, 0, 0, start, sample_dim, false, antithetic});
  if (p.columns == 0) return 0;
  const Hardware& hw = hardware("sample_normal_bwd", grad.device().device_id);
  const std::int64_t groups = p.end_group - p.group;
  const Variant variant = variant_for(p, dtype_of(grad, "grad"), hw);
  if (variant == kColumns) {
    const std::int64_t wanted = ceil_div(std::int64_t{hw.multiprocessors} * 2048, p.columns * kSampleThreads);
    return ceil_div(groups, std::max<std::int64_t>(ceil_div(groups, wanted), 8 * kSampleThreads));
  }
  return chunks_of_rows(groups, p.columns, lines_of(p, variant), hw.multiprocessors);
}

// Sums over chunks of the samples, by launches of as many blocks as there may be.
void launch_partial(SampleNormalParams& p, DType dtype, std::int64_t chunks, int device, CUstream stream) {
  const Variant variant = variant_for(p, dtype, hardware("sample_normal_bwd", device));
  Kernel& kernel = kernel_for(dtype, variant);
  if (variant != kColumns) {
    const auto at = reinterpret_cast<std::uintptr_t>(p.samples);
    auto fits = [&](unsigned width) { return p.dim % width == 0 && at % (width * size_of(dtype)) == 0; };
    p.lanes = variant == kRows1 ? 1 : fits(4) ? 4 : fits(2) ? 2 : 1;
    return launch(kernel, device, stream, {sample_blocks(chunks * lines_of(p, variant)), kSampleThreads}, &p);
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

// dmu and dsigma, of any dtypes; partial: (chunks, 2, columns), what chunks of the samples add up to.
void sample_normal_bwd(TensorView dmu, TensorView dsigma, TensorView partial, TensorView grad, OptionalTensor state, int64_t seed,
                       int64_t stream, int64_t start, int64_t sample_dim, bool shared, bool antithetic) {
  SampleNormalParams p = params_of(grad, {state, 0, seed, stream, start, sample_dim, shared, antithetic});
  const DLDevice on = grad.device();
  if (on.device_type != kDLCUDA) raise("ValueError", "grad: expected an array on a CUDA device");
  const DType dtype = dtype_of(grad, "grad"), sums = accumulator_of(dtype);
  const std::int64_t chunks = partial.ndim() == 3 ? partial.size(0) : 0;
  if (chunks < 1 || partial.numel() != chunks * 2 * p.columns || !partial.is_contiguous() || dtype_of(partial, "partial") != sums)
    raise("ValueError", "partial: expected a contiguous array (chunks, 2, columns) in the dtype of the sums");
  expect_device(partial, "partial", on);
  if (p.columns == 0) return;
  SampleSumParams all{};
  all.dmu = gradient_of(dmu, "dmu", p.columns, on, &all.dmu_dtype);
  all.dsigma = gradient_of(dsigma, "dsigma", p.columns, on, &all.dsigma_dtype);
  all.partial = p.partial = data_of(partial);
  all.chunks = chunks;
  all.columns = p.columns;
  p.step = ceil_div(p.end_group - p.group, chunks);
  if ((chunks - 1) * p.step >= p.end_group - p.group) raise("ValueError", "partial: expected no chunk without a sample");
  const ContextGuard context(on.device_id);
  const CUstream queue = current_stream(on);
  launch_partial(p, dtype, chunks, on.device_id, queue);
  launch_sums(all, sums, on.device_id, queue);
}

}  // namespace
}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sample_normal_bwd_chunks, cuops::sample_normal_bwd_chunks);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sample_normal_bwd, cuops::sample_normal_bwd);
