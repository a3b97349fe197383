// The plan of the kernels of kron_linear_sixteens.cu.
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

}  // namespace

KronGroup plan_sixteens(const KronProblem& problem, const KronDevice& device) {
  static Kernel two{"kron_linear_sixteens", "kron_sixteens_two"}, beside{"kron_linear_sixteens", "kron_sixteens_columns"},
      three{"kron_linear_sixteens", "kron_sixteens_three"};
  KronGroup group(problem);
  const bool by_columns = problem.inner > 1;
  if (device.tuned != 90 || problem.dtype != kFloat32 || !problem.linear || group.count > kSixteensFactors ||
      (by_columns && problem.inner % kColumns != 0))
    return group;
  KronSixteensParams& p = group.params.emplace<KronSixteensParams>();
  std::int64_t size = 1;
  int axes = 0;
  for (int i = 0; i < group.count; ++i) {
    const KronSize& s = problem.sizes[i];
    if (s.in != s.out || (s.in != 2 && s.in != 4 && s.in != 8 && s.in != 16)) return group;
    size *= s.in;
    if (size < 16) continue;
    if (size > 16 || axes == 3) return group;
    p.ends[axes++] = i + 1;
    size = 1;
  }
  if (size != 1 || axes < 2 || (axes == 3 && by_columns)) return group;
  p.rows = problem.rows;
  p.inner = problem.inner;
  group.kernel = by_columns ? &beside : axes == 2 ? &two : &three;
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
