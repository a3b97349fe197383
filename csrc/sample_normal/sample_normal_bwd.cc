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

// Vectors of four columns a thread, where rows have whole ones and the host knows the seed.
Variant variant_for(const SampleNormalParams& p, DType dtype, const Hardware& hw) {
  if (p.along_columns) return kColumns;
  const bool whole = p.dim % 4 == 0 && reinterpret_cast<std::uintptr_t>(p.samples) % (4 * size_of(dtype)) == 0;
  return whole && hw.tuned >= 80 && dtype != kFloat64 && p.state == nullptr ? kRows4 : kRows1;
}

// In how many chunks of the samples the backward adds up such gradients.
int64_t sample_normal_bwd_chunks(TensorView grad, int64_t start, int64_t sample_dim, bool antithetic) {
  const SampleNormalParams p = params_of(grad, {std::nullopt, 0, 0, 0, start, sample_dim, false, antithetic});
  if (p.columns == 0) return 0;
  const Hardware& hw = hardware("sample_normal_bwd", grad.device().device_id);
  const std::int64_t lanes = p.along_columns ? kSampleThreads : 1, groups = p.end_group - p.group;
  const std::int64_t at_once = variant_for(p, dtype_of(grad, "grad"), hw) == kRows4 ? 4 * kRows4Blocks * kSampleThreads : 2048;
  const std::int64_t wanted = ceil_div(hw.multiprocessors * at_once, p.columns * lanes);
  return ceil_div(groups, std::max<std::int64_t>(ceil_div(groups, wanted), 8 * lanes));
}

// Sums of the gradients, and of their products with the noise, over chunks of the samples: (chunks, 2, columns).
void sample_normal_bwd(TensorView partial, TensorView grad, OptionalTensor state, int64_t seed, int64_t stream, int64_t start,
                       int64_t sample_dim, bool shared, bool antithetic) {
  SampleNormalParams p = params_of(grad, {state, 0, seed, stream, start, sample_dim, shared, antithetic});
  if (grad.device().device_type != kDLCUDA) raise("ValueError", "grad: expected an array on a CUDA device");
  const DType dtype = dtype_of(grad, "grad");
  const std::int64_t chunks = partial.ndim() == 3 ? partial.size(0) : 0;
  if (chunks < 1 || partial.numel() != chunks * 2 * p.columns || !partial.is_contiguous() ||
      dtype_of(partial, "partial") != accumulator_of(dtype)) {
    raise("ValueError", "partial: expected a contiguous array (chunks, 2, columns) in the dtype of the sums");
  }
  expect_device(partial, "partial", grad.device());
  p.partial = data_of(partial);
  p.step = ceil_div(p.end_group - p.group, chunks);
  const int device = grad.device().device_id;
  const ContextGuard context(device);
  const Variant variant = variant_for(p, dtype, hardware("sample_normal_bwd", device));
  Kernel& kernel = kernel_for(dtype, variant);
  const CUstream queue = current_stream(grad.device());
  std::int64_t blocks = chunks * p.columns;
  if (variant == kColumns) {
    for (; chunks == 1 && blocks > kMostBlocks; blocks -= kMostBlocks) {  // of more columns than a launch has blocks
      launch(kernel, device, queue, {kMostBlocks, kSampleThreads}, &p);
      p.first_column += kMostBlocks;
      p.samples = static_cast<char*>(p.samples) + kMostBlocks * p.num_samples * size_of(dtype);
      p.partial = static_cast<char*>(p.partial) + std::int64_t{kMostBlocks} * size_of(accumulator_of(dtype));
    }
    blocks *= kSampleThreads;
  }
  launch(kernel, device, queue, {sample_blocks(blocks / (variant == kRows4 ? 4 : 1)), kSampleThreads}, &p);
}

}  // namespace
}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sample_normal_bwd_chunks, cuops::sample_normal_bwd_chunks);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sample_normal_bwd, cuops::sample_normal_bwd);
