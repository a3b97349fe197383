// Which kernels add up the gradient of normal samples, by how long they are going to take.
#include "sample_normal_bwd_plan.h"

namespace cuops {
namespace {

constexpr int kWarp = 32, kMostWarps = kAtOnceThreads / kWarp, kLeastWarps = kSampleThreads / kWarp, kMostTilesShift = 7;
constexpr int kSector = 32;  // bytes that come from memory at least

// What a multiprocessor takes, in cycles, about as on an H200: for the beginning and the end of a block and of a warp, and for a
// second launch. It fetches so many bytes a cycle, and fewer where all do.
constexpr std::int64_t kBlockCycles = 60, kWarpCycles = 40, kLaunchCycles = 3600, kFetchBytes = 56, kBusyFetchBytes = 20;

struct GroupCycles {
  std::int64_t busy;   // of a group of samples of a warp's tiles, beside other warps
  std::int64_t alone;  // from the address of a group to its sum
};

GroupCycles cycles_of(DType dtype, SampleNormalBwdKernel kernel, const Hardware& hw) {
  if (dtype == kFloat64)
    return hw.tuned < 80 ? GroupCycles{2000, 4000} : kernel == kBwdRows2 ? GroupCycles{220, 2000} : GroupCycles{130, 1200};
  return kernel == kBwdRows4 ? GroupCycles{180, 1100} : GroupCycles{60, 700};
}

// How many chunks take the least time. Blocks come in waves of kGradientBlocks a multiprocessor; a last one that is not full takes
// as long, and as blocks do not end together, a block's time comes on top. What comes before a thread's first group takes as long
// as a group. The sums of chunks are written and read.
std::int64_t chunks_of_rows(std::int64_t groups, std::int64_t columns, std::int64_t tiles, std::int64_t multiprocessors) {
  constexpr std::int64_t kMostWaves = 8, kSumsABlock = 100'000;
  const std::int64_t wave = multiprocessors * kGradientBlocks * kSampleThreads;
  std::int64_t best = 1, least = INT64_MAX;
  for (std::int64_t waves = 1; waves <= kMostWaves; ++waves) {
    const std::int64_t step = ceil_div(groups, std::clamp<std::int64_t>(waves * wave / tiles, 1, groups));
    const std::int64_t chunks = ceil_div(groups, step), blocks = kGradientBlocks * ceil_div(chunks * tiles, wave) + 1;
    const std::int64_t time = (step + 1) * blocks + chunks * columns / kSumsABlock;
    if (time < least - least / 32) {
      best = chunks;
      least = time;
    }
  }
  return best;
}

std::int64_t chunked_cycles(const SampleNormalParams& p, DType dtype, const SampleNormalBwdPlan& plan, const Hardware& hw) {
  const GroupCycles group = cycles_of(dtype, plan.kernel, hw);
  const std::int64_t step = ceil_div(p.end_group - p.group, plan.chunks);
  const std::int64_t blocks = ceil_div(ceil_div(plan.chunks * tiles_of(p, plan.kernel), kSampleThreads), hw.multiprocessors);
  const std::int64_t sums = 4 * plan.chunks * p.columns * size_of(accumulator_of(dtype));  // bytes written and read, of both
  return std::max(blocks * (kSampleThreads / kWarp * (step * group.busy + kWarpCycles) + kBlockCycles),
                  ceil_div(blocks, kGradientBlocks) * step * group.alone) +
         sums / (kBusyFetchBytes * hw.multiprocessors) + kLaunchCycles;
}

// With the fewest cycles for one launch, its blocks having as many threads as a multiprocessor with its share of blocks has room
// for. They all end at about the same time, which takes an eighth longer than many blocks one after the other.
SampleNormalBwdPlan plan_at_once(const SampleNormalParams& p, DType dtype, SampleNormalBwdKernel kernel, const Hardware& hw) {
  const std::int64_t groups = p.end_group - p.group, tiles = tiles_of(p, kernel), size = size_of(dtype);
  const std::int64_t tile_bytes = columns_of(kernel) * size;
  const std::int64_t place = p.dim * size | static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(p.samples));
  const GroupCycles group = cycles_of(dtype, kernel, hw);
  SampleNormalBwdPlan best{kernel, 0};
  best.cycles = INT64_MAX / 2;
  for (int shift = 0; shift <= kMostTilesShift; ++shift) {
    const std::int64_t width = std::int64_t{1} << shift, blocks = ceil_div(tiles, width);
    const std::int64_t busiest = ceil_div(blocks, hw.multiprocessors);
    const std::int64_t room = std::max<std::int64_t>(kMostWarps / busiest, kLeastWarps) * kWarp >> shift;
    const std::int64_t step = ceil_div(groups, room), warps = ceil_div(ceil_div(groups, step) << shift, kWarp);
    const std::int64_t together = ceil_div(busiest, kMostWarps / warps);
    const std::int64_t beside = std::min<std::int64_t>(width, kWarp), span = beside * tile_bytes;  // of a row
    const std::int64_t aligned = std::min<std::int64_t>({kSector, place & -place, span & -span});
    const std::int64_t bytes = warps * step * 4 * (kWarp / beside) * (span + kSector - aligned);
    const std::int64_t time =
        std::max({busiest * (warps * (step * group.busy + kWarpCycles) + kBlockCycles), together * step * group.alone,
                  busiest * bytes / kFetchBytes, blocks * bytes / (kBusyFetchBytes * hw.multiprocessors)});
    if (time <= best.cycles && blocks <= kMostBlocks)
      best = {kernel, 0, step, blocks, static_cast<int>(warps * kWarp), static_cast<unsigned>(shift), time};
    if (blocks == 1) break;
  }
  best.cycles += best.cycles / 8;
  return best;
}

}  // namespace

std::int64_t tiles_of(const SampleNormalParams& p, SampleNormalBwdKernel kernel) {
  return p.columns / p.dim * ceil_div(p.dim, std::int64_t{columns_of(kernel)});
}

// Four columns a thread, or two in float64, unless that leaves too many without a number, and where the host knows the seed.
// Numbers of a thread's columns have their upper 32 bits in common.
SampleNormalBwdKernel chunk_kernel_for(const SampleNormalParams& p, DType dtype, const Hardware& hw) {
  if (p.along_columns) return kBwdColumns;
  const SampleNormalBwdKernel wide = dtype == kFloat64 ? kBwdRows2 : kBwdRows4;
  const std::int64_t width = columns_of(wide);
  const bool full = 4 * width * ceil_div(p.dim, width) <= 5 * p.dim,
             alike = p.dim % width == 0 || p.columns <= std::int64_t{1} << 32;
  return full && alike && hw.tuned >= 80 && p.state == nullptr && !p.antithetic ? wide : kBwdRows1;
}

SampleNormalBwdPlan plan_bwd(const SampleNormalParams& p, DType dtype, const Hardware& hw) {
  const std::int64_t groups = p.end_group - p.group;
  const SampleNormalBwdKernel kernel = chunk_kernel_for(p, dtype, hw);
  SampleNormalBwdPlan plan{kernel, 1};
  if (kernel == kBwdColumns) {
    const std::int64_t wanted = ceil_div(std::int64_t{hw.multiprocessors} * 2048, p.columns * kSampleThreads);
    plan.chunks = ceil_div(groups, std::max<std::int64_t>(ceil_div(groups, wanted), 8 * kSampleThreads));
    return plan;
  }
  plan.chunks = chunks_of_rows(groups, p.columns, tiles_of(p, kernel), hw.multiprocessors);
  plan.cycles = chunked_cycles(p, dtype, plan, hw);
  const auto sooner = [](const SampleNormalBwdPlan& a, const SampleNormalBwdPlan& b) { return b.cycles < a.cycles ? b : a; };
  plan = sooner(plan, plan_at_once(p, dtype, kernel, hw));
  return kernel == kBwdRows1 ? plan : sooner(plan, plan_at_once(p, dtype, kBwdRows1, hw));
}

}  // namespace cuops
