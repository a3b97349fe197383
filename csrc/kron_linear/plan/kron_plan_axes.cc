// The plans of the kernels whose factors, neighbours multiplied out, are axes of one size: kron_linear_sixteens.cu,
// kron_linear_four_sixteens.cu and kron_linear_eights.cu.
#include <algorithm>
#include <cmath>

#include "kron_plan.h"

namespace cuops {
namespace {

constexpr double kStart = 7000, kAxis = 800;  // ns
constexpr double kProducts = 125;             // a nanosecond of a multiprocessor
constexpr double kBytes = 31;                 // likewise
constexpr double kHidden = 0.15;              // of the shorter of memory and arithmetic
constexpr double kAlone = 0.35;               // of the time that 12 warps take, what one takes
constexpr int kColumns = 32;
// Where some warps go on to the next sample: ns before the first results, and of the products of a sample.
constexpr double kStartOfParts = 10000, kEights = 12800, kFour = 12900, kHiddenByParts = 0.25;

// How many axes of this size neighbours make, at most `most`; 0 where they do not. `ends`: the factor behind those of each.
int axes_of(const std::vector<KronSize>& sizes, std::int64_t size, int most, int* ends) {
  int axes = 0;
  std::int64_t product = 1;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const KronSize& s = sizes[i];
    if (!is_small_power(s)) return 0;
    product *= s.in;
    if (product < size) continue;
    if (product > size || axes == most) return 0;
    ends[axes++] = static_cast<int>(i) + 1;
    product = 1;
  }
  return product == 1 ? axes : 0;
}

// Blocks of a cluster have a sample of so many axes of a size.
KronGroup plan_in_parts(const KronProblem& problem, const KronDevice& device, Kernel* kernel, int axes, std::int64_t size,
                        const LaunchShape& shape, double compute) {
  KronGroup group(problem);
  if (device.tuned != 90 || problem.dtype != kFloat32 || problem.inner > 1 || group.count > kKronFactors) return group;
  if (device.multiprocessors < static_cast<int>(shape.cluster)) return group;  // of a part of a GPU
  KronAxesParams& p = group.params.emplace<KronAxesParams>();
  if (axes_of(problem.sizes, size, axes, p.ends) != axes) return group;
  group.kernel = kernel;
  p.rows = problem.rows;
  p.inner = 1;
  group.shape = shape;
  const std::int64_t together = shape.cluster, teams = std::min(problem.rows, device.multiprocessors / together);
  group.shape.blocks = static_cast<unsigned>(teams * together);
  group.slices = static_cast<int>(together);
  const double elements = std::pow(size, axes);
  group.bytes = 8 * elements * static_cast<double>(problem.rows);
  group.operations = 2.0 * static_cast<double>(size * axes) * elements * static_cast<double>(problem.rows);
  const double memory = 8 * elements / static_cast<double>(together) / kBytes;
  const double round = std::max(memory, compute) + kHiddenByParts * std::min(memory, compute);
  group.nanoseconds = kStartOfParts + round * static_cast<double>(ceil_div(problem.rows, teams));
  group.fused = true;
  return group;
}

}  // namespace

KronGroup plan_eights(const KronProblem& problem, const KronDevice& device) {
  static Kernel kernel{"kron_linear_eights", "kron_eights"};
  constexpr int kShared = kEightsPlaces * kEightsPart * 4, kStatic = 2048;  // kStatic: at most, of shared memory beside places
  if (kShared + kStatic > device.shared_bytes) return KronGroup(problem);
  return plan_in_parts(problem, device, &kernel, 5, 8, {0, 32 * (kEightsMakers + kEightsFinishers), 1, 1, kShared}, kEights);
}

KronGroup plan_four_sixteens(const KronProblem& problem, const KronDevice& device) {
  static Kernel kernel{"kron_linear_four_sixteens", "kron_four_sixteens"};
  constexpr int kShared = kFourPlaces * kFourPart * 4, kStatic = 5120;
  if (!device.clusters || kShared + kStatic > device.shared_bytes) return KronGroup(problem);
  return plan_in_parts(problem, device, &kernel, 4, 16, {0, 32 * (kFourMakers + kFourFinishers), 1, 2, kShared}, kFour);
}

KronGroup plan_sixteens(const KronProblem& problem, const KronDevice& device) {
  static Kernel two{"kron_linear_sixteens", "kron_sixteens_two"}, columns{"kron_linear_sixteens", "kron_sixteens_columns"},
      three{"kron_linear_sixteens", "kron_sixteens_three"};
  KronGroup group(problem);
  const bool by_columns = problem.inner > 1;
  if (device.tuned != 90 || problem.dtype != kFloat32 || !problem.linear || group.count > kKronFactors ||
      (by_columns && problem.inner % kColumns != 0))
    return group;
  KronAxesParams& p = group.params.emplace<KronAxesParams>();
  const int axes = axes_of(problem.sizes, 16, 3, p.ends);
  if (axes < 2 || (axes == 3 && by_columns)) return group;
  p.rows = problem.rows;
  p.inner = problem.inner;
  group.kernel = by_columns ? &columns : axes == 2 ? &two : &three;
  group.samples = axes == 2 && !by_columns ? 8 : 1;
  group.columns = by_columns ? kColumns : 0;
  const std::int64_t tiles = by_columns ? problem.rows * (problem.inner / kColumns) : ceil_div(problem.rows, group.samples);
  const std::int64_t teams = kSixteensWarps / (by_columns ? 4 : axes == 2 ? 1 : 2);
  const std::int64_t blocks = std::min<std::int64_t>(tiles, device.multiprocessors);
  group.shape = {static_cast<unsigned>(blocks), 32u * kSixteensWarps, 1, 1, 2u * kSixteensWarps * kSixteensTile * sizeof(float)};
  if (static_cast<int>(group.shape.shared_bytes) + kSixteensWeights > device.shared_bytes) return group;
  const double elements = (axes == 2 ? 256.0 : 4096.0) * static_cast<double>(problem.rows * problem.inner);
  group.bytes = 8 * elements;
  group.operations = 2 * 16 * axes * elements;
  // Of a tile of each team; fewer at a time take less.
  const double tile = 64.0 * 32 * kSixteensWarps, memory = 8 * tile / kBytes, compute = 16 * axes * tile / kProducts;
  const double round = std::max(memory, compute) + kHidden * std::min(memory, compute);
  const double turns = static_cast<double>(tiles) / static_cast<double>(blocks * teams);
  group.nanoseconds = kStart + kAxis * axes + round * std::max(kAlone, turns);
  group.fused = true;
  return group;
}

}  // namespace cuops
