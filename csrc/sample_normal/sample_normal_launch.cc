// Which kernel draws normal samples, and by how many threads.
#include "sample_normal_launch.h"

namespace cuops {
namespace {

constexpr unsigned kBlocksThatCount = 8192;  // more blocks of shared noise take longer to count than a kernel does

enum Variant { kRows1, kColumns, kColumnsWhole };

Kernel& kernel_for(DType dtype, Variant variant) {
  static const KernelTable table("sample_normal_fwd_", {{"sample_normal", {"_rows_1", "_columns", "_columns_whole"}}});
  return table.at(dtype, variant);
}

// Enough turns a thread that its preparations do not count, as long as one wave of threads fills the GPU.
std::int64_t step_for(std::int64_t turns, std::int64_t lines, std::int64_t most, const Hardware& hw) {
  return std::clamp<std::int64_t>(ceil_div(turns * lines, std::int64_t{hw.multiprocessors} * 1024), 1, std::min(most, turns));
}

void launch_truncated(SampleNormalParams& p, int device, CUstream stream) {
  static Kernel kernel("sample_normal", "sample_normal_fwd_truncated");
  launch_threads(kernel, (p.end_group - p.group) * p.columns, device, stream, &p);
}

// Threads of a block side by side in a column, and blocks over columns and their parts.
void launch_columns(SampleNormalParams& p, DType dtype, bool tuned, int device, CUstream stream, const Hardware& hw) {
  const std::int64_t groups = p.end_group - p.group;
  p.lanes = 1;
  while (p.lanes < kSampleThreads && p.lanes < groups) p.lanes *= 2;
  const std::int64_t turns = ceil_div(groups, p.lanes), columns = ceil_div(p.columns, kSampleThreads / p.lanes);
  p.step = step_for(turns, columns * kSampleThreads, 32, hw);
  const bool whole = tuned && (dtype == kFloat32 || dtype == kBFloat16) && !p.antithetic && p.state == nullptr &&
                     p.num_samples % 4 == 0 && p.start % 4 == 0 &&
                     reinterpret_cast<std::uintptr_t>(p.samples) % std::min(16, 4 * size_of(dtype)) == 0;
  const std::int64_t threads = columns * ceil_div(turns, p.step) * kSampleThreads;
  launch_threads(kernel_for(dtype, whole ? kColumnsWhole : kColumns), threads, device, stream, &p);
}

void launch_rows(SampleNormalParams& p, DType dtype, bool tuned, int device, CUstream stream, const Hardware& hw) {
  if (tuned && (launch_shared(p, dtype, device, stream, hw) || launch_tiles(p, dtype, device, stream, hw))) return;
  const std::int64_t groups = p.end_group - p.group;
  p.step = step_for(groups, p.columns, 32, hw);
  launch_threads(kernel_for(dtype, kRows1), p.columns * ceil_div(groups, p.step), device, stream, &p);
}

}  // namespace

void launch_threads(Kernel& kernel, std::int64_t threads, int device, CUstream stream, SampleNormalParams* p, int threads_a_block,
                    unsigned shared_bytes) {
  LaunchShape shape{sample_blocks(threads, threads_a_block), static_cast<unsigned>(threads_a_block)};
  p->replays_shift = static_cast<unsigned>(log_from(ceil_div(shape.blocks, kReplaysParts)));
  p->replays_counted = p->replays != nullptr && p->shared && shape.blocks > kBlocksThatCount;
  if (p->replays_counted) {
    static Kernel count("sample_normal", "sample_normal_fwd_count");
    launch(count, device, stream, {1, 1}, p);
  }
  shape.shared_bytes = shared_bytes;
  shape.overlaps = true;
  launch(kernel, device, stream, shape, p);
}

void launch_fwd(SampleNormalParams& p, DType dtype, int device, CUstream stream) {
  if (p.low != nullptr) return launch_truncated(p, device, stream);
  const Hardware& hw = hardware("sample_normal", device);
  (p.along_columns ? launch_columns : launch_rows)(p, dtype, hw.tuned >= 80, device, stream, hw);
}

}  // namespace cuops
