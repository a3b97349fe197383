// The plans of the kernels of kron_linear_half.cu and kron_linear_wide.cu.
#include <algorithm>
#include <cmath>

#include "kron_plan.h"

namespace cuops {
namespace {

// Microseconds of a multiprocessor.
constexpr double kStart = 7.8, kLargeStart = 9.9, kCubeRound = 1.2;  // large: all but two factors of up to 32
constexpr double kMma = 1.1e-3;                                      // for one m16n8k16, or m16n8k8 in TF32
constexpr double kAlone = 3.4e-3;                                    // for one that waits for those before it
constexpr double kBytes = 35e3;                                      // of device memory
constexpr double kHidden = 0.2;                                      // of the shorter of memory and arithmetic
// Of kron_linear_wide.cu, in 16 bits and as TF32: in all, and for the products of a sample.
struct KronWideTime {
  double start, products;
};
constexpr KronWideTime kWide64[] = {{7.7, 0.4}, {9, 0.45}}, kWide128[] = {{11.5, 2.05}, {13, 3.1}}, kWide96 = {11, 1.25};

}  // namespace

KronGroup plan_half(const KronProblem& problem, const KronDevice& device) {
  KronGroup group;
  const std::vector<KronSize>& sizes = problem.sizes;
  group.count = static_cast<int>(sizes.size());
  group.nanoseconds = INFINITY;
  if (device.tuned != 90 || size_of(problem.dtype) != 2 || problem.inner != 1 || group.count < 2 || group.count > 3) return group;
  const bool cube = group.count == 3;
  std::int64_t most = 0;
  double in = 1, out = 1;
  for (const KronSize& size : sizes) {
    most = std::max({most, size.in, size.out});
    in *= static_cast<double>(size.in);
    out *= static_cast<double>(size.out);
  }
  const int size = most <= 32 ? 32 : 64, units = cube ? kHalfCubeUnits : half_units(size);
  // Of up to 16, zeros would be most of the work.
  if (most <= 16 || most > (cube ? 32 : 64) || sizes.back().in % 8 != 0 || sizes.back().out % 8 != 0 ||
      16 * units > device.shared_bytes)
    return group;
  const std::int64_t blocks = std::min<std::int64_t>(problem.rows, device.multiprocessors), samples = cube ? 1 : half_samples(size);
  group.half_params.rows = problem.rows;
  group.half_params.by_units = kron_divisor(sizes.back().in / 8);
  group.tuned = static_cast<KronKernel>((problem.dtype == kBFloat16 ? kKronBFloat32 : kKronHalf32) + (cube ? 2 : size / 64));
  group.shape = {static_cast<unsigned>(blocks), 32u * kHalfWarps, 1, 1, static_cast<unsigned>(16 * units)};

  group.bytes = 2.0 * problem.rows * (in + out);
  group.operations = static_cast<double>(problem.rows) * operations_of(sizes.rbegin(), sizes.rend(), in);
  // Zeros are multiplied, too. Products of 16 bits take half as long as those in TF32.
  const double products = size * size / 128.0 * (size / 16.0) * (cube ? 5 * 32 : 3);
  const double memory = 2 * (in + out) / kBytes, compute = products * kMma;
  const double together = static_cast<double>(std::min(samples, ceil_div(problem.rows, blocks)));
  const double alone = cube ? kCubeRound + kAlone * products / kHalfWarps : kAlone * products;
  const double round = alone + together * (std::max(compute, memory) + kHidden * std::min(compute, memory));
  group.nanoseconds =
      1e3 * ((cube || size == 64 ? kLargeStart : kStart) + round * static_cast<double>(ceil_div(problem.rows, blocks * samples)));
  group.fused = true;
  return group;
}

KronGroup plan_wide(const KronProblem& problem, const KronDevice& device) {
  KronGroup group;
  const std::vector<KronSize>& sizes = problem.sizes;
  group.count = static_cast<int>(sizes.size());
  group.nanoseconds = INFINITY;
  const int element_size = size_of(problem.dtype), vector = 16 / element_size;
  if (device.capability != 90 || device.cuda < 120 || problem.inner != 1 || !problem.mapped || group.count != 2 ||
      problem.rows > INT32_MAX)
    return group;
  if (element_size != 2 && !problem.single) return group;
  const KronSize first = sizes[0], last = sizes[1];
  const std::int64_t most = std::max({first.in, first.out, last.in, last.out});
  const int size = most <= 64 ? 64 : 128;
  // Of up to 32, zeros would be most of the work. Rows of y are whole vectors where they follow one another, or others are taken.
  if (most <= 32 || most > kWideMost || last.in % vector != 0 || last.out % 2 != 0 ||
      (problem.rows > 1 && first.out * last.out % vector != 0) || wide_bytes(size, element_size) > device.shared_bytes)
    return group;
  const std::int64_t blocks = std::min<std::int64_t>(problem.rows, device.multiprocessors);
  const int type = element_size == 4 ? 0 : problem.dtype == kFloat16 ? 1 : 2;
  const bool is_96 = size > 64 && most <= 96 && element_size == 2;
  group.tuned = is_96 ? static_cast<KronKernel>(kKronWide96Half + type - 1)
                      : static_cast<KronKernel>((size == 64 ? kKronWide64 : kKronWide128) + type);
  group.shape = {static_cast<unsigned>(blocks), static_cast<unsigned>(wide_threads(size) + kWideCopyThreads), 1, 1,
                 static_cast<unsigned>(wide_bytes(size, element_size))};
  const double in = static_cast<double>(first.in * last.in), out = static_cast<double>(first.out * last.out);
  group.bytes = static_cast<double>(element_size * problem.rows) * (in + out);
  group.operations = static_cast<double>(problem.rows) * operations_of(sizes.rbegin(), sizes.rend(), in);
  const KronWideTime& time = is_96 ? kWide96 : (size == 64 ? kWide64 : kWide128)[element_size / 4];
  const double memory = element_size * (in + out) / kBytes;
  const double round = std::max(time.products, memory) + kHidden * std::min(time.products, memory);
  group.nanoseconds = 1e3 * (time.start + round * static_cast<double>(ceil_div(problem.rows, blocks)));
  group.fused = true;
  return group;
}

}  // namespace cuops
