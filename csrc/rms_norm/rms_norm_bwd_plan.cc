#include "rms_norm_bwd_plan.h"

#include <algorithm>
#include <numeric>
#include <optional>

namespace cuops {
namespace {

using Problem = RmsNormBwdProblem;
using Plan = RmsNormBwdPlan;

// The constants of the instances: vectors a thread, threads a block.
constexpr std::int64_t kRowThreads = 256, kMostRowThreads = 512, kMostRowBlocks = 8;
constexpr std::int64_t kShort = 64;                                   // elements of a row that are faster one by one
constexpr std::int64_t kLeastInParts = 8192, kMostInParts = 1 << 22;  // vectors of a row, elements
constexpr int kWideOwnBytes = 3 << 10;                                // of shared memory, at most
constexpr unsigned kMostWidePhased = 384;  // threads of a block, where rows are unaligned: longer ones are read twice

// So many rows side by side in a block of up to `threads`: fewer where the multiprocessors have fewer rows each, but at least four
// where rows are many enough for the sums over blocks to take longer than those within. Whole warps.
unsigned side_by_side(std::int64_t rows, unsigned block_x, unsigned threads, const Hardware& hw) {
  const unsigned in_warp = std::max(32 / block_x, 1u);
  const std::int64_t each = std::max<std::int64_t>((rows + hw.multiprocessors - 1) / hw.multiprocessors, rows >= 128 ? 4 : 1);
  return std::max(static_cast<unsigned>(std::min<std::int64_t>(threads / block_x, (each + in_warp - 1) / in_warp * in_warp)), 1u);
}

// As many blocks or clusters as the GPU runs at once, or fewer: where a thread has several rows, all of them start alike. Where
// these are few, the next ones take turns with them, if that leaves less of the GPU idle.
std::int64_t teams_of(const Problem& p, std::int64_t at_once, unsigned side_by_side) {
  const std::int64_t width = width_of(p.dtype), period = width / std::gcd(p.n, width);
  if (p.starts == kAligned || at_once * side_by_side >= p.rows) return at_once;
  const std::int64_t step = period / std::gcd<std::int64_t>(period, side_by_side);
  std::int64_t best = 0, least = INT64_MAX;
  for (std::int64_t teams = step; teams <= std::max<std::int64_t>(at_once, 64); teams += step) {
    const std::int64_t turns = (teams + at_once - 1) / at_once, rows = (p.rows + teams * side_by_side - 1) / (teams * side_by_side);
    const std::int64_t time = turns * (rows + 3);  // to start and to end takes about as long as three rows
    if (time < least) best = teams, least = time;
  }
  return best;
}

// How a row lies in a block that has several: in how many threads, of up to how many.
struct HeldRow {
  std::int64_t vectors;
  bool is_long;
  unsigned across, threads;

  explicit HeldRow(const Problem& p)
      : vectors(vectors_of(p)),
        // 2 vectors in many threads were faster than 4 in fewer, but around 4096 columns of 16 bits.
        is_long(p.starts == kAligned && p.dtype != kFloat32 && vectors > 320 && vectors <= 512),
        across(threads_across(vectors, is_long ? kHeldLongVectors : kHeldVectors)),
        threads(is_long ? kHeldLongThreads : kHeldThreads) {}

  // Blocks that have all rows, one or a cluster, and so find the results by themselves: another kernel for the sums would take
  // longer. 0, where that would take longer still.
  unsigned blocks_for_all(const Problem& p, const Hardware& hw) const {
    const bool aligned = p.starts == kAligned;
    if (!p.common && !(aligned && hw.clusters() && hw.tuned == 90)) return 0;
    if (!hw.clusters() || hw.tuned != 90) return p.rows <= (aligned ? 64 : 32) && p.rows * across <= threads ? 1 : 0;
    const std::int64_t all = p.rows * (aligned ? vectors : vectors + 14);  // single elements take about as long as so many vectors
    if (p.rows <= 64 && all <= 576) return 1;
    if (is_long || all > 9 << 10) return 0;
    return all <= 3 << 10 ? 8 : hw.largest_cluster >= 16 ? 16 : 0;
  }
};

// Of shared memory for the weight, where threads have `each` vectors of a row.
unsigned factor_bytes(DType dtype, unsigned threads, unsigned each) { return threads * (each * width_of(dtype) / 4 + 1) * 16; }

// One row, in a block or a cluster.
Plan plan_row(RmsNormBwdKernel kernel, std::int64_t packs, bool halves) {
  LaunchShape shape{0, 0, 1, 1, 0, true};
  const bool in_one = kernel == kRow && halves && packs <= kMostRowThreads;
  while (!in_one && packs > kRowThreads * shape.cluster) shape.cluster *= 2;
  shape.blocks = shape.cluster;
  shape.block_x = threads_for(packs, shape.cluster);
  return {kernel, shape, 1, true};
}

// Of kernels for dy of 16 bits, in their order, the one for such rows and that dtype.
RmsNormBwdKernel kernel_of_dy(const Problem& p, RmsNormBwdKernel of_float16) {
  constexpr int kApart = kHeldDyBF16 - kHeldDyF16;
  return static_cast<RmsNormBwdKernel>(of_float16 + (p.dy_dtype == kBFloat16 ? kApart : 0) + (p.starts == kAligned ? 0 : 1));
}

Plan plan_held(const Problem& p, int device, const Hardware& hw) {
  const HeldRow row(p);
  const bool phased = p.starts != kAligned;
  const RmsNormBwdKernel kernel = is_mixed(p)   ? kernel_of_dy(p, kHeldDyF16)
                                  : row.is_long ? kHeldLong
                                  : p.common    ? (phased ? kHeldPhased : kHeld)
                                                : (phased ? kHeldSharedPhased : kHeldShared);
  const unsigned in_warp = std::max(32 / row.across, 1u), fours = static_cast<unsigned>((p.n + 3) / 4);
  LaunchShape shape{0, row.across, 1, 1, 0, true};
  auto shared_bytes = [&] {
    const bool has_factors = row.is_long || !p.common;
    const unsigned each = row.is_long ? kHeldLongVectors : kHeldVectors;
    const unsigned factors = has_factors ? factor_bytes(p.dtype, row.across * (phased ? shape.block_y : 1), each) : 0;
    const unsigned sums = phased ? shape.block_y : shape.block_y / in_warp;
    const unsigned sent = shape.cluster > 1 ? (fours + shape.cluster - 1) / shape.cluster * shape.cluster : 0;
    return factors + dh_bytes(p, shape, each) + (sums * shape.cluster > 1 ? (sums * fours + sent) * 16 : 0);
  };
  if (const unsigned all = row.blocks_for_all(p, hw)) {
    shape.blocks = shape.cluster = all;
    const unsigned each = (static_cast<unsigned>(p.rows) + all - 1) / all;
    shape.block_y = (each + in_warp - 1) / in_warp * in_warp;
    shape.shared_bytes = shared_bytes();
    if (all == 1) return {kernel, shape, 1, true};
    const RmsNormBwdKernel in_cluster = is_mixed(p) ? kernel_of_dy(p, kHeldDyF16Cluster)
                                        : !p.common ? kHeldSharedCluster
                                        : phased    ? kHeldClusterPhased
                                                    : kHeldCluster;
    if (has_room(rms_norm_bwd_kernel(p.dtype, in_cluster), device, shape)) return {in_cluster, shape, 1, true};
    shape = {0, row.across, 1, 1, 0, true};
  }
  // One block a multiprocessor, or two, which wait less for each other, where that leaves no thread out.
  const bool shares = row.across == 32 || (row.across == 64 && !phased);
  const unsigned blocks_each = !row.is_long && shares && p.rows >= 4096 ? 2 : 1;
  shape.block_y = side_by_side(p.rows, row.across, row.threads / blocks_each, hw);
  shape.shared_bytes = shared_bytes();
  const std::int64_t all = (p.rows + shape.block_y - 1) / shape.block_y;
  const std::int64_t blocks = teams_of(p, std::min<std::int64_t>(blocks_each * hw.multiprocessors, all), shape.block_y);
  shape.blocks = static_cast<unsigned>(blocks);
  return {kernel, shape, blocks, blocks == 1, kept_until(p, hw)};
}

// A row a cluster; nothing where the GPU, or the part of it that there is, has no room for one.
std::optional<Plan> plan_wide(const Problem& p, std::int64_t vectors, int device, const Hardware& hw) {
  // Blocks that have many rows are best alone. Else several blocks a multiprocessor hide each other's sums, up to clusters of 8,
  // or, where rows are unaligned, 16; more blocks than that where rows are few.
  const bool phased = p.starts != kAligned;
  const std::int64_t vectors_each = kWideVectors * 160, most = hw.largest_cluster;
  const bool leaves_room = 1024 < vectors && vectors <= 1344;  // for a third of the threads that a multiprocessor runs
  const bool alone = !phased && vectors <= kWideVectors * kWideThreads && !leaves_room && p.rows >= 16 * hw.multiprocessors;
  LaunchShape shape{0, 1, 1, 1, 0, true};
  while (shape.cluster < most && ((shape.cluster < 8 && !alone && vectors > vectors_each * shape.cluster) ||
                                  vectors > (phased ? vectors_each : kWideVectors * kWideThreads) * shape.cluster ||
                                  (vectors > 256 * shape.cluster && 2 * p.rows * shape.cluster <= hw.multiprocessors))) {
    shape.cluster *= 2;
  }
  shape.block_x = threads_for(vectors, kWideVectors * shape.cluster);
  shape.shared_bytes = factor_bytes(p.dtype, shape.block_x, kWideVectors) + dh_bytes(p, shape, kWideVectors);
  if (static_cast<int>(shape.shared_bytes) + kWideOwnBytes > hw.shared_bytes) return {};
  const RmsNormBwdKernel kernel = is_mixed(p) ? kernel_of_dy(p, kWideDyF16) : phased ? kWidePhased : kWide;
  const std::int64_t at_once = shape.cluster > 1 ? clusters_at_once(rms_norm_bwd_kernel(p.dtype, kernel), device, shape)
                                                 : hw.multiprocessors * (kWideThreads / shape.block_x);
  if (at_once == 0) return {};
  const std::int64_t teams = teams_of(p, std::min(at_once, p.rows), 1);
  shape.blocks = static_cast<unsigned>(teams * shape.cluster);
  return Plan{kernel, shape, teams, teams == 1, shape.cluster == 1 ? kept_until(p, hw) : kNoRow};
}

// Whether the rows are better on their way all at once: limits as measured with 132 multiprocessors, of vectors of 16 bytes.
bool better_at_once(const Problem& p, const Hardware& hw) {
  const std::int64_t across = (p.n + width_of(p.dtype) - 1) / width_of(p.dtype), all = p.rows * across * 132 / hw.multiprocessors;
  const bool halves = size_of(p.dtype) == 2, aligned = p.starts == kAligned;
  if (aligned && p.rows <= 16)
    return p.rows > 1 && across >= (halves ? 321 : 512) && across <= 8192 &&
           p.rows * across <= (halves ? 16 : 24) << 10;  // in one cluster
  if (p.rows < 32) return false;
  if (across >= 640) {
    const std::int64_t least_phased = halves ? 641 : 1024, most = halves ? 2048 : 4096;
    return across <= most && (aligned || across >= least_phased) && all <= (across <= 2048 ? 512 : 336) << 10;
  }
  // Shorter rows have others beside them in a block otherwise, which leaves few partial sums too.
  if (!aligned) return false;
  if (across >= 256) return all >= (halves ? 32 : across >= 512 ? 64 : 128) << 10 && all <= (p.rows < 1024 ? 336 : 200) << 10;
  return halves && across >= 64 && 512 <= p.rows && p.rows <= 1024 && all >= 64 << 10;
}

// Short blocks, because their warps exchange what they find.
Plan plan_at_once(const Problem& p) {
  const bool phased = p.starts != kAligned, in_one_cluster = p.rows <= 16;
  const unsigned width = width_of(p.dtype);
  auto blocks_of = [&](unsigned threads) {
    const unsigned own = threads - phased;  // vectors
    return static_cast<unsigned>(((p.n + width - 1) / width + own - 1) / own);
  };
  LaunchShape shape{0, 64, 1, 0, 0, true};
  if (in_one_cluster) {
    shape.block_y = static_cast<unsigned>((p.rows + kRowsAtOnce - 1) / kRowsAtOnce);
  } else if (p.rows > 64 && blocks_of(64) <= 16) {
    shape.block_y = p.rows >= (size_of(p.dtype) == 2 && p.n < 640 * width ? 512 : 1024) ? 4 : 2;
  } else {
    shape.block_x = 128;
  }
  while (blocks_of(shape.block_x) > 16) shape.block_x += 32;
  shape.cluster = blocks_of(shape.block_x);
  // For the sums of the cluster's warps, and then for those of rows side by side.
  shape.shared_bytes = kRowsAtOnce * shape.block_y * (shape.block_x / 32 * shape.cluster) * 8;
  if (phased || shape.block_y > 1) shape.shared_bytes = std::max(shape.shared_bytes, shape.block_x * shape.block_y * width * 4);
  shape.shared_bytes += dh_bytes(p, shape, kRowsAtOnce);
  // Phased, a thread has every `width`-th row, which start alike, and other clusters those between.
  const std::int64_t apart = phased ? width : shape.block_y, together = kRowsAtOnce * apart;
  const std::int64_t teams = (p.rows + together - 1) / together * (apart / shape.block_y);
  shape.blocks = static_cast<unsigned>(teams * shape.cluster);
  return Plan{phased ? kAtOncePhased : kAtOnce, shape, teams, teams == 1};
}

// As `plan_wide`, for any call.
std::optional<Plan> plan_general(const Problem& p, int device, const Hardware& hw) {
  const std::int64_t vectors = vectors_of(p);
  const unsigned bytes = (kGeneralStages * 2 * 16 + width_of(p.dtype) * 4) * kGeneralVectors * kGeneralThreads;
  const unsigned own_bytes = hw.tuned >= 90 ? 15 << 10 : 4 << 10;
  const bool fits = static_cast<int>(bytes + own_bytes) <= hw.shared_bytes &&
                    vectors <= kGeneralVectors * kGeneralThreads * std::int64_t{hw.largest_cluster};
  if (!hw.tuned || size_of(p.dy_dtype) > 4 || p.starts != kAligned || !fits) return {};
  const RmsNormBwdKernel kernel = p.dy_dtype == p.dtype ? kGeneral : p.dy_dtype == kFloat16 ? kGeneralDyF16 : kGeneralDyBF16;
  LaunchShape shape{0, 4, 1, 1, bytes, true};
  while (vectors > static_cast<std::int64_t>(kGeneralVectors) * kGeneralThreads * shape.cluster) shape.cluster *= 2;
  shape.block_x = std::max(4u, threads_across((vectors + shape.cluster - 1) / shape.cluster, kGeneralVectors));
  if (shape.cluster == 1) shape.block_y = side_by_side(p.rows, shape.block_x, kGeneralThreads, hw);
  const std::int64_t at_once =
      shape.cluster == 1 ? hw.multiprocessors : clusters_at_once(rms_norm_bwd_kernel(p.dtype, kernel), device, shape);
  if (at_once == 0) return {};
  const std::int64_t teams = std::min(at_once, (p.rows + shape.block_y - 1) / shape.block_y);
  shape.blocks = static_cast<unsigned>(teams * shape.cluster);
  return Plan{kernel, shape, teams};
}

// One row that L2 holds, in parts on all multiprocessors.
Plan plan_parts(std::int64_t vectors, const Hardware& hw) {
  const std::int64_t share = (vectors + hw.multiprocessors - 1) / hw.multiprocessors;
  const unsigned threads = std::clamp(threads_for(share, kPartVectors), 128u, 512u);
  const unsigned parts = static_cast<unsigned>((vectors + threads * kPartVectors - 1) / (threads * kPartVectors));
  Plan plan{kParts, {parts, threads, 1, 1, 0, true}, 1, true};
  plan.rows_shape = plan.shape;
  plan.parts = parts;
  return plan;
}

}  // namespace

std::int64_t vectors_of(const RmsNormBwdProblem& p) {
  const std::int64_t width = width_of(p.dtype), lead = p.starts == kAligned ? 0 : width - std::gcd(p.n, width);
  return (p.n + lead + width - 1) / width;
}

unsigned threads_across(std::int64_t vectors, unsigned each) {
  unsigned threads = 1;
  while (threads < 32 && threads * each < vectors) threads *= 2;
  return vectors > 32 * each ? threads_for(std::min<std::int64_t>(vectors, 1024 * each), each) : threads;  // no block has more
}

Kernel& rms_norm_bwd_kernel(DType dtype, RmsNormBwdKernel kernel) {
  static const KernelTable table(
      "rms_norm_bwd_",
      {{"rms_norm_bwd_row", {"_row", "_row_any"}},
       {"rms_norm_bwd_held",
        {"_held", "_held_long", "_held_cluster", "_wide", "_held_phased", "_held_cluster_phased", "_wide_phased"}},
       {"rms_norm_bwd_held_shared",
        {"_held_shared", "_held_shared_phased", "_held_shared_cluster", "_held_dy_f16", "_held_dy_f16_phased", "_wide_dy_f16",
         "_wide_dy_f16_phased", "_held_dy_f16_cluster", "_held_dy_bf16", "_held_dy_bf16_phased", "_wide_dy_bf16",
         "_wide_dy_bf16_phased", "_held_dy_bf16_cluster"}},
       {"rms_norm_bwd_at_once", {"_at_once", "_at_once_phased"}},
       {"rms_norm_bwd", {"_general", "_general_dy_f16", "_general_dy_bf16"}},
       {"rms_norm_bwd_dx",
        {"_dx_short", "_dx_three", "_dx_five", "_dx", "_dx_phased", "_dx_no_weight_short", "_dx_no_weight_three", "_dx_no_weight",
         "_dx_wide_weight_short", "_dx_wide_weight_three", "_dx_wide_weight", "_dx_wide_weight_long", "_dx_wide_weight_phased"}},
       {"rms_norm_bwd_any", {"_rows_any", "_rows_vectors"}},
       {"rms_norm_bwd_phased", {"_rows_phased"}},
       {"rms_norm_parts", {"_sums"}},
       {"rms_norm_bwd_any", {"_columns_any", "_columns_vectors"}},
       {"rms_norm_bwd_phased", {"_columns_phased"}},
       {"rms_norm_parts", {"_parts"}}});
  return table.at(dtype, kernel);
}

std::optional<RmsNormBwdPlan> plan_rms_norm_bwd(const RmsNormBwdProblem& p, int device) {
  const Hardware& hw = hardware("rms_norm_bwd_any", device);  // the source that every GPU has code of
  const std::int64_t vectors = vectors_of(p), clusters = hw.largest_cluster;
  const std::int64_t most_wide = kWideVectors * (p.starts == kAligned ? kWideThreads : kMostWidePhased) * clusters;
  const bool few_enough = p.rows < 1 << 30 && (p.starts == kAligned || (p.starts == kTogether && hw.capability == 90));
  const bool fits_block = vectors <= kHeldVectors * kHeldThreads / 2;
  if (is_mixed(p)) {
    if (p.dtype != kFloat32 || size_of(p.dy_dtype) != 2) return {};
    // Of aligned rows that one or two blocks hold, `general` was 2 % faster.
    const bool stays = hw.tuned == 90 && few_enough && !p.dbias && (p.starts != kAligned || fits_block || vectors > 2048);
    std::optional<Plan> found;
    if (stays && fits_block) return plan_held(p, device, hw);
    if (stays && vectors <= most_wide) found = plan_wide(p, vectors, device, hw);
    return found ? found : plan_general(p, device, hw);
  }
  if (!hw.tuned || p.dtype == kFloat64) return plan_columns(p, false, device, hw);
  const bool in_one = p.common && few_enough;
  if (p.common && p.rows == 1) {
    const std::int64_t most = kRowThreads * std::min(clusters, kMostRowBlocks);
    const bool halves = size_of(p.dtype) == 2;
    if ((p.starts != kAligned || p.n <= kShort) && p.n <= most) return plan_row(kRowAny, p.n, halves);
    if (p.starts != kAnywhere && vectors <= most) return plan_row(kRow, vectors, halves);
    if (p.starts != kAnywhere && p.vector_weight && vectors > kLeastInParts && p.n <= kMostInParts) return plan_parts(vectors, hw);
  }
  if (p.dx_alone) {
    if (const auto found = plan_dx(p, device, hw)) return found;
  }
  const bool stays = few_enough && (p.common || p.similar), held = stays && fits_block;
  if (in_one && hw.tuned == 90 && hw.largest_cluster >= 16 && better_at_once(p, hw)) {
    const Plan found = plan_at_once(p);
    if (has_room(rms_norm_bwd_kernel(p.dtype, found.kernel), device, found.shape)) return found;
  }
  if (held && HeldRow(p).blocks_for_all(p, hw) > 0) return plan_held(p, device, hw);
  // Partial sums of few long rows would be as many as the rows' elements; caches still have the rows when they are read again.
  std::int64_t most_few = vectors > 640 ? 256 : vectors >= 256 ? 32 : 0;  // rows
  if (stays && hw.clusters() && vectors > 640 && vectors <= most_wide)
    most_few = size_of(p.dtype) == 4 ? 16 : p.starts == kAligned ? 128 : 64;
  const bool few = p.rows > 1 && p.rows <= most_few && (p.rows * p.n <= 1 << 22 || vectors > most_wide);
  // Rows that no cluster holds have parts on all multiprocessors.
  const bool in_parts = hw.tuned == 90 && (p.starts == kTogether || (p.starts == kAligned && p.rows == 1 && vectors > most_wide));
  const auto plan_in_two = in_parts ? plan_phased : plan_columns;
  if (few) return plan_in_two(p, true, device, hw);
  if (held) return plan_held(p, device, hw);
  std::optional<Plan> found;
  if (stays && vectors <= most_wide) found = plan_wide(p, vectors, device, hw);
  if (!found) found = plan_general(p, device, hw);
  return found ? found : plan_in_two(p, false, device, hw);
}

// Each thread adds up six rows or so, and blocks have as few columns as that takes.
LaunchShape sum_rows_shape(std::int64_t rows, std::int64_t n) {
  const unsigned threads = rows <= 192 ? 128 : rows <= 384 ? 256 : 512;
  unsigned across = threads;
  while (across > 4 && threads / across * 6 < rows) across /= 2;
  return {static_cast<unsigned>((n + 4 * across - 1) / (4 * across)), across, threads / across, 1, 0, true};
}

}  // namespace cuops
