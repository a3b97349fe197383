// The plan of the kernels of kron_linear_double.cu.
#include <algorithm>

#include "kron_linear/mma/kron_double.h"
#include "kron_plan.h"

namespace cuops {
namespace {

// Of what a kernel is for: both sides of the first factor, and of the second one, up to these.
struct Sizes {
  int first, last;
};
constexpr Sizes kSizes[] = {{16, 16}, {24, 24}, {32, 32}, {48, 48}, {64, 64}, {64, 80}, {80, 80}, {96, 96}};
// Microseconds of a multiprocessor.
constexpr double kStart = 5.3;
constexpr double kTeam = 0.037;     // of a block
constexpr double kMma = 5.2e-3;     // for one m16n8k8
constexpr double kOneTeam = 1.35;   // times as long, where it has no more
constexpr double kAlone = 18.2e-3;  // for one by a warp alone
constexpr double kFew = 1.8;        // times as long, where less than half of the multiprocessors have a large sample
constexpr double kBytes = 26e3;     // of device memory
constexpr double kHidden = 0.2;     // of the shorter of memory and arithmetic

}  // namespace

KronGroup plan_double(const KronProblem& problem, const KronDevice& device) {
  KronGroup group(problem);
  const std::vector<KronSize>& sizes = problem.sizes;
  if (device.tuned != 90 || problem.dtype != kFloat64 || problem.inner != 1 || group.count != 2) return group;
  const KronSize first = sizes[0], last = sizes[1];
  const std::int64_t most_first = std::max(first.in, first.out), most_last = std::max(last.in, last.out);
  if (std::max(most_first, most_last) <= 8 || last.in % 2 != 0 || last.out % 2 != 0) return group;
  const auto which = std::find_if(std::begin(kSizes), std::end(kSizes),
                                  [&](const Sizes& s) { return most_first <= s.first && most_last <= s.last; });
  if (which == std::end(kSizes)) return group;
  const auto [rows, size] = *which;
  if (double_bytes(rows, size) > device.shared_bytes) return group;
  const int teams = double_teams(rows), warps = double_warps(rows);
  const std::int64_t blocks = std::min<std::int64_t>(problem.rows, device.multiprocessors);
  group.params.emplace<KronInRegistersParams>().rows = problem.rows;
  static Kernel kernels[] = {{"kron_linear_double", "kron_double_16"}, {"kron_linear_double", "kron_double_24"},
                             {"kron_linear_double", "kron_double_32"}, {"kron_linear_double", "kron_double_48"},
                             {"kron_linear_double", "kron_double_64"}, {"kron_linear_double", "kron_double_64_80"},
                             {"kron_linear_double", "kron_double_80"}, {"kron_linear_double", "kron_double_96"}};
  group.kernel = &kernels[which - std::begin(kSizes)];
  group.shape = {static_cast<unsigned>(blocks), 32u * teams * warps, 1, 1, static_cast<unsigned>(double_bytes(rows, size))};
  set_costs(problem, &group);
  // Zeros are multiplied, too.
  const double products = 1.0 * warps * (size / 8) * (rows / 8 + size / 8);
  const double memory = group.bytes / problem.rows / kBytes, compute = products * kMma * (teams == 1 ? kOneTeam : 1);
  const double turns = static_cast<double>(ceil_div(problem.rows, blocks));
  // The first samples come while nothing is multiplied.
  const double begin = memory / 2 * std::min(1.0 * problem.rows / device.multiprocessors, 1.0 * teams);
  // The vendor's products have work for all multiprocessors, and take less than their plan says.
  const double alone = kAlone * (size > 48 && 2 * problem.rows < device.multiprocessors ? kFew : 1);
  group.nanoseconds = 1e3 * (kStart + kTeam * teams + begin + alone * products / warps +
                             turns * (std::max(compute, memory) + kHidden * std::min(compute, memory)));
  group.fused = true;
  return group;
}

}  // namespace cuops
