// The plan of the kernels of kron_linear_double.cu.
#include <algorithm>
#include <cmath>

#include "kron_linear/mma/kron_double.h"
#include "kron_plan.h"

namespace cuops {
namespace {

constexpr int kSizes[] = {16, 24, 32, 48, 64};
// Microseconds of a multiprocessor.
constexpr double kStart = 7.5;
constexpr double kMma = 5.2e-3;     // for one m16n8k8
constexpr double kAlone = 18.2e-3;  // for one by a warp alone
constexpr double kHalfIdle = 1.5;   // times as long, where less than half of the multiprocessors have a sample
constexpr double kBytes = 26e3;     // of device memory
constexpr double kHidden = 0.2;     // of the shorter of memory and arithmetic

}  // namespace

KronGroup plan_double(const KronProblem& problem, const KronDevice& device) {
  KronGroup group(problem);
  const std::vector<KronSize>& sizes = problem.sizes;
  if (device.tuned != 90 || problem.dtype != kFloat64 || problem.inner != 1 || group.count != 2) return group;
  const KronSize first = sizes[0], last = sizes[1];
  const std::int64_t most = std::max({first.in, first.out, last.in, last.out});
  if (most <= 8 || most > 64 || last.in % 2 != 0 || last.out % 2 != 0) return group;
  const int which = static_cast<int>(std::lower_bound(std::begin(kSizes), std::end(kSizes), most) - kSizes), size = kSizes[which];
  if (double_bytes(size) > device.shared_bytes) return group;
  const int samples = double_teams(size), warps = double_warps(size);
  const std::int64_t blocks = std::min<std::int64_t>(problem.rows, device.multiprocessors);
  group.params.emplace<KronHalfParams>().rows = problem.rows;
  static Kernel kernels[] = {{"kron_linear_double", "kron_double_16"},
                             {"kron_linear_double", "kron_double_24"},
                             {"kron_linear_double", "kron_double_32"},
                             {"kron_linear_double", "kron_double_48"},
                             {"kron_linear_double", "kron_double_64"}};
  group.kernel = &kernels[which];
  group.shape = {static_cast<unsigned>(blocks), 32u * samples * warps, 1, 1, static_cast<unsigned>(double_bytes(size))};
  set_costs(problem, &group);
  // Zeros are multiplied, too.
  const double products = 2.0 * ceil_div(size, 16) * (size / 8) * (size / 8);
  const double memory = group.bytes / problem.rows / kBytes, compute = products * kMma;
  const double turns = static_cast<double>(ceil_div(problem.rows, blocks));
  // The vendor's products have work for all multiprocessors.
  const double alone = kAlone * (2 * problem.rows < device.multiprocessors ? kHalfIdle : 1);
  group.nanoseconds =
      1e3 * (kStart + alone * products / warps + turns * (std::max(compute, memory) + kHidden * std::min(compute, memory)));
  group.fused = true;
  return group;
}

}  // namespace cuops
