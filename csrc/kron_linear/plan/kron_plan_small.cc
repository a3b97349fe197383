// The plan of the kernel of kron_linear_small.cu: which axes small factors make, in which order it takes them, how large a tile is.
#include <algorithm>
#include <cmath>

#include "kron_small_layout.h"

namespace cuops {
namespace {

constexpr double kStart = 9500;         // cycles
constexpr double kSeveral = 3000;       // where there are several passes
constexpr double kCopyStart = 1500;     // where results go to shared memory first
constexpr double kWeight = 40;          // cycles of a thread, for an element of a factor's product
constexpr double kProductsACycle = 90;  // of a multiprocessor
constexpr double kSharedACycle = 22;    // elements moved in or out of shared memory
constexpr double kStage = 700;          // cycles
constexpr double kFewWarps = 8;
// Of the shorter of memory and arithmetic, with and without another tile to turn to.
constexpr double kHidden = 0.4, kExposed = 0.8;
constexpr int kWarps = 12;    // that a multiprocessor has registers for
constexpr int kColumns = 32;  // at least, of a tile

KronGroup evaluate(const KronProblem& problem, const KronDevice& device, const std::vector<KronAxis>& axes, int log_samples,
                   int columns) {
  static Kernel kernel{"kron_linear_small", "kron_small"};
  KronGroup group(problem);
  group.kernel = &kernel;
  KronSmallParams& p = group.params.emplace<KronSmallParams>();
  const bool by_columns = problem.inner > 1;
  KronTileSize tile_size;
  if (!lay_out(axes, problem.inner, log_samples, columns, &p, &tile_size)) return group;
  const double elements = static_cast<double>(tile_size.elements);

  p.factor_count = group.count;
  p.rows = problem.rows;
  p.samples = 1 << log_samples;
  p.items = static_cast<int>(tile_size.elements / 64);
  p.columns = by_columns ? columns : 0;
  group.samples = p.samples;
  group.columns = p.columns;
  p.column_tiles = by_columns ? static_cast<int>(problem.inner / columns) : 1;
  p.tiles = (p.rows + p.samples - 1) / p.samples * p.column_tiles;
  p.sample_out = static_cast<int>(tile_size.sample);
  int at = (sizeof(KronSmallParams) + 15) / 16;
  auto reserve = [&](int floats) {
    at += (floats + 3) / 4;
    return at - (floats + 3) / 4;
  };
  for (int i = 0; i < p.stages; ++i)
    for (int j = 0; j < 2; ++j) p.stage[i].weight[j] = reserve(1 << 2 * p.stage[i].log_size);
  int weight_elements = 0;
  for (int j = 0; j < group.count; ++j) {
    p.factors[j].raw = p.raw_count;
    p.raw_count += static_cast<int>(problem.sizes[j].out * problem.sizes[j].in);
  }
  for (int i = 0; i < p.stages; ++i)
    for (int j = 0; j < 1 + p.stage[i].pair; ++j) weight_elements += p.stage[i].count[j] << 2 * p.stage[i].log_size;
  p.raw = reserve(p.raw_count);
  p.state = reserve(tile_size.shared);
  const int bytes = 16 * at, threads = std::min(256, std::max(32, p.items));
  if (bytes > device.shared_bytes || p.rows < p.samples) return group;
  const int resident = std::max(1, std::min(device.shared_bytes_a_multiprocessor / (bytes + 1024), 32 * kWarps / threads));
  const std::int64_t blocks = std::min<std::int64_t>(p.tiles, 1LL * device.multiprocessors * resident);
  group.shape = {static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 1, 1, static_cast<unsigned>(bytes)};

  const double active = std::min<double>(blocks, device.multiprocessors), together = blocks / active;
  const double idle = threads / static_cast<double>(std::min(threads, p.items));    // lanes without an item
  const double busy = idle * std::max(1.0, kFewWarps / (threads / 32 * together));  // few warps wait for one another
  const double moved = 2.0 * (p.stages - 1 + 6 * p.copies_out) * elements;
  const double compute =
      (elements * tile_size.products / kProductsACycle + moved / kSharedACycle) * busy + kStage * p.stages / together;
  const double share = std::min(kMostBytesACycle, kBytesACycle * device.multiprocessors / active);
  const double transfer = 8.0 * elements / share;
  const double waves = std::ceil(static_cast<double>(p.tiles) / active);
  const double tile = std::max(compute, transfer) + (together > 1 ? kHidden : kExposed) * std::min(compute, transfer);
  const double start =
      kStart + kSeveral * (p.stages > 1) + kCopyStart * p.copies_out + kWeight * weight_elements / threads * together;
  group.nanoseconds = kLaunch + (start + waves * tile) / kClock;
  group.fused = true;
  group.bytes = 8.0 * problem.rows * tile_size.sample;
  group.operations = 2.0 * problem.rows * tile_size.sample * tile_size.products;
  return group;
}

}  // namespace

KronGroup plan_small(const KronProblem& problem, const KronDevice& device) {
  KronGroup best(problem);
  const bool fits = std::all_of(problem.sizes.begin(), problem.sizes.end(), is_small_power);
  if (device.tuned != 90 || problem.dtype != kFloat32 || !problem.linear || !fits || best.count > kKronFactors ||
      (problem.inner > 1 && problem.inner % kColumns != 0))
    return best;
  for (const std::vector<KronAxis>& some : small_axes(problem.sizes)) {
    for (int log_samples = 0; log_samples <= (problem.inner > 1 ? 0 : 8); ++log_samples) {
      for (int columns = kColumns; columns <= 8 * kColumns; columns *= 2) {
        if (problem.inner > 1 ? problem.inner % columns != 0 : columns != kColumns) continue;
        KronGroup group = evaluate(problem, device, some, log_samples, columns);
        if (group.nanoseconds < best.nanoseconds) best = std::move(group);
      }
    }
  }
  return best;
}

}  // namespace cuops
