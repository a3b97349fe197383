// The plan of the kernels of kron_linear_half.cu.
#include <algorithm>

#include "kron_plan.h"

namespace cuops {
namespace {

// Microseconds of a multiprocessor.
constexpr double kStart = 7.8, kLargeStart = 9.9, kCubeRound = 1.2;  // large: all but two factors of up to 32
constexpr double kMma = 1.1e-3;                                      // for one m16n8k16, or m16n8k8 in TF32
constexpr double kAlone = 3.4e-3;                                    // for one that waits for those before it
constexpr double kBytes = 35e3;                                      // of device memory
constexpr double kHidden = 0.2;                                      // of the shorter of memory and arithmetic

}  // namespace

KronGroup plan_half(const KronProblem& problem, const KronDevice& device) {
  KronGroup group(problem);
  const std::vector<KronSize>& sizes = problem.sizes;
  if (device.tuned != 90 || size_of(problem.dtype) != 2 || problem.inner != 1 || group.count < 2 || group.count > 3) return group;
  const bool cube = group.count == 3;
  std::int64_t most = 0;
  for (const KronSize& size : sizes) most = std::max({most, size.in, size.out});
  const int size = most <= 32 ? 32 : 64, units = cube ? kHalfCubeUnits : half_units(size);
  // Of up to 16, zeros would be most of the work.
  if (most <= 16 || most > (cube ? 32 : 64) || sizes.back().in % 8 != 0 || sizes.back().out % 8 != 0 ||
      16 * units > device.shared_bytes)
    return group;
  const std::int64_t blocks = std::min<std::int64_t>(problem.rows, device.multiprocessors), samples = cube ? 1 : half_samples(size);
  KronInRegistersParams& p = group.params.emplace<KronInRegistersParams>();
  p.rows = problem.rows;
  p.by_units = kron_divisor(sizes.back().in / 8);
  static Kernel kernels[][3] = {{{"kron_linear_half", "kron_half_32_f16"},
                                 {"kron_linear_half", "kron_half_64_f16"},
                                 {"kron_linear_half", "kron_half_cube_f16"}},
                                {{"kron_linear_half", "kron_half_32_bf16"},
                                 {"kron_linear_half", "kron_half_64_bf16"},
                                 {"kron_linear_half", "kron_half_cube_bf16"}}};
  group.kernel = &kernels[problem.dtype == kBFloat16][cube ? 2 : size / 64];
  group.shape = {static_cast<unsigned>(blocks), 32u * kHalfWarps, 1, 1, static_cast<unsigned>(16 * units)};
  set_costs(problem, &group);
  // Zeros are multiplied, too. Products of 16 bits take half as long as those in TF32.
  const double products = size * size / 128.0 * (size / 16.0) * (cube ? 5 * 32 : 3);
  const double memory = group.bytes / problem.rows / kBytes, compute = products * kMma;
  const double together = static_cast<double>(std::min(samples, ceil_div(problem.rows, blocks)));
  const double alone = cube ? kCubeRound + kAlone * products / kHalfWarps : kAlone * products;
  const double round = alone + together * (std::max(compute, memory) + kHidden * std::min(compute, memory));
  group.nanoseconds =
      1e3 * ((cube || size == 64 ? kLargeStart : kStart) + round * static_cast<double>(ceil_div(problem.rows, blocks * samples)));
  group.fused = true;
  return group;
}

}  // namespace cuops
