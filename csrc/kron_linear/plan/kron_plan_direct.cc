// The plan of the kernels of kron_linear_direct.cu: how many samples a block has at a time, and how many
// blocks share one.
#include <algorithm>

#include "kron_plan.h"

namespace cuops {
namespace {

constexpr int kMost = 128;             // rows and columns of a factor
constexpr int kRows = 32;              // that a warp multiplies at a time
constexpr int kMostColumns = 1 << 22;  // columns beyond a factor
// Microseconds of a multiprocessor.
constexpr double kStart = 6, kRound = 1;
constexpr double kRowWeight = 0.077, kColumnWeight = 0.031;  // for an element of a factor, shared by the threads
constexpr double kElement = 7.5e-5;                          // of x
constexpr double kStep = 0.019;                              // for 32 rows, 16 columns and 16 products each
constexpr double kBytes = 31e3;                              // of device memory
constexpr double kHidden = 0.2;                              // of the shorter of memory and arithmetic

// Bytes of shared memory, one after the other, from multiples of 16.
struct Shared {
  int units = 0;
  int reserve(std::int64_t bytes) {
    units += static_cast<int>(ceil_div(bytes, 16));
    return units - static_cast<int>(ceil_div(bytes, 16));
  }
};

void finish(const KronProblem& problem, const KronDevice& device, double start, double compute, KronGroup* group) {
  set_costs(problem, group);
  group->operations = static_cast<double>(problem.rows) * operations_of(problem.sizes.begin(), problem.sizes.end(), problem.in());
  const double memory = group->bytes / kBytes / device.multiprocessors;
  if (device.cuda < 120) compute *= kOldCompiler;
  group->nanoseconds = 1e3 * (start + std::max(compute, memory) + kHidden * std::min(compute, memory));
  group->fused = true;
}

// One factor with columns beyond it, or two.
KronGroup evaluate(const KronProblem& problem, const KronDevice& device, int slices, int groups) {
  KronGroup group(problem);
  KronDirectParams& p = group.params.emplace<KronDirectParams>();
  const bool pair = group.count == 2;
  const KronSize first = problem.sizes[0], last = pair ? problem.sizes[1] : KronSize{1, 1};
  const std::int64_t most = std::max({first.in, last.in, last.out}), size = most <= 32 && pair ? 32 : most <= 64 ? 64 : 128;
  const int warps = !pair ? (size == 128 ? 12 : 16) : size == 128 ? 8 : size == 64 ? 12 : 16;  // as kron_linear_direct.cu has them
  p.rows = problem.rows;
  p.groups = groups;
  p.group_warps = static_cast<int>(ceil_div(std::max(last.in, last.out), 16));
  p.slices = slices;
  p.slice_rows = static_cast<int>(round_up(ceil_div(first.out, slices), kRows));
  if (p.group_warps * groups > warps || (slices - 1) * p.slice_rows >= first.out) return group;
  p.columns = pair ? 0 : static_cast<int>(problem.inner);
  p.column_tiles = static_cast<int>(ceil_div(problem.inner, 16));
  Shared shared;
  p.weight_pitch = p.state_pitch = static_cast<int>(2 * size + 16);
  p.weight_bytes = p.weight_pitch * p.slice_rows;
  p.weight = shared.reserve(2 * p.weight_bytes);
  p.state_bytes = p.state_pitch * kRows;
  if (pair) p.state = shared.reserve(4LL * p.state_bytes * groups);
  p.exponents = shared.reserve(4LL * p.slice_rows);
  p.maxima = shared.reserve(64LL * groups);
  if (16 * shared.units > device.shared_bytes) return group;
  // x and both factors are held 14 above their exponents, so sums of n products stay below n 2^30.
  p.shift = 15 + log_from(first.in);
  p.last_shift = (pair ? p.shift - 14 : 0) - 2 * 14;
  static Kernel pairs[] = {{"kron_linear_direct", "kron_direct_32"},
                           {"kron_linear_direct", "kron_direct_64"},
                           {"kron_linear_direct", "kron_direct_128"}};
  static Kernel singles[] = {{"kron_linear_direct", "kron_direct_columns_64"}, {"kron_linear_direct", "kron_direct_columns_128"}};
  group.kernel = pair ? &pairs[log_from(size / 32)] : &singles[size / 128];
  group.samples = groups;
  group.slices = slices;
  group.columns = pair ? 0 : 16;

  const std::int64_t threads = 32LL * groups * p.group_warps, items = problem.rows * p.column_tiles;
  const std::int64_t most_blocks =
      std::max<std::int64_t>(1, 1LL * device.multiprocessors * (!pair && 2 * groups <= warps ? 2 : 1) / slices);
  const std::int64_t blocks = std::min(ceil_div(items, groups), most_blocks);
  group.shape = {static_cast<unsigned>(blocks * slices), static_cast<unsigned>(threads), 1, 1,
                 static_cast<unsigned>(16 * shared.units)};

  const double together = std::max(1.0, static_cast<double>(blocks * slices) / device.multiprocessors);
  const double elements = static_cast<double>(first.in) * (pair ? static_cast<double>(last.in) : 16);
  const double steps = static_cast<double>(ceil_div(first.in, 16) + (pair ? ceil_div(last.in, 16) : 0));
  const double sample = elements * kElement + kStep * p.group_warps * p.slice_rows / kRows * steps;
  const double rounds = static_cast<double>(ceil_div(items, blocks * groups));
  const double weights = kRowWeight * p.slice_rows * static_cast<double>(first.in) +
                         (pair ? kColumnWeight * static_cast<double>(last.out * last.in) : 0);
  finish(problem, device, kStart + weights / static_cast<double>(threads), rounds * (kRound + groups * together * sample), &group);
  return group;
}

}  // namespace

KronGroup plan_direct(const KronProblem& problem, const KronDevice& device) {
  KronGroup best(problem);
  const std::vector<KronSize>& sizes = problem.sizes;
  if (device.tuned != 90 || problem.dtype != kFloat32 || best.count > 2 || (best.count > 1) != (problem.inner == 1) ||
      problem.inner > kMostColumns)
    return best;
  if (problem.inner % 4 != 0 && problem.inner > 1) return best;
  for (std::size_t k = 0; k < sizes.size(); ++k) {
    // Rows of x come in pairs, and what is beside them in eights.
    if (sizes[k].out > kMost || sizes[k].in > kMost || sizes[k].in % (k == 0 ? 2 : 8) != 0) return best;
  }
  if (best.count > 1 && sizes.back().out % 4 != 0) return best;
  for (const int slices : {1, 2, 4}) {
    for (const int groups : {1, 2, 3, 4, 6, 8, 12, 16}) {
      if (best.count == 1 && (slices > 1 || groups < 4)) continue;
      KronGroup group = evaluate(problem, device, slices, groups);
      if (group.nanoseconds < best.nanoseconds) best = std::move(group);
    }
  }
  return best;
}

}  // namespace cuops
