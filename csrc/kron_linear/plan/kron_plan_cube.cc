// The plan of the kernels of kron_linear_cube.cu and kron_linear_cube_f64.cu.
#include <algorithm>

#include "kron_linear/mma/kron_cube.h"
#include "kron_plan.h"

namespace cuops {
namespace {

// Microseconds of a multiprocessor: before the first results, and for 16 x 8 products of 8 each, in float32 and as TF32.
constexpr double kStart = 8, kProduct[] = {3.7e-3, 2.4e-3};
// In float64: for 16 columns of x, and for 16 rows of 32, a warp.
constexpr double kStartF64 = 10.8, kColumnsF64 = 1.3, kMatrixF64 = 1.45;
constexpr double kBytes = 31e3;   // of device memory
constexpr double kHidden = 0.25;  // of the shorter of memory and arithmetic

// `products`: the time of a sample's.
KronGroup finish(KronGroup group, const KronProblem& problem, double start, double products, std::int64_t blocks) {
  set_costs(problem, &group);
  const double memory = group.bytes / static_cast<double>(problem.rows) / (kBytes * group.slices),
               round = std::max(products, memory) + kHidden * std::min(products, memory);
  group.nanoseconds = 1e3 * (start + round * static_cast<double>(ceil_div(problem.rows, blocks)));
  group.fused = true;
  return group;
}

KronGroup plan_f32(KronGroup group, const KronProblem& problem, const KronDevice& device) {
  const KronSize &first = problem.sizes[0], &second = problem.sizes[1], &last = problem.sizes[2];
  if (kCubeBytes > device.shared_bytes || last.in % 4 != 0 || last.out % 4 != 0) return group;
  static Kernel kernels[] = {{"kron_linear_cube", "kron_cube_f32"}, {"kron_linear_cube", "kron_cube_tf32"}};
  group.kernel = &kernels[problem.tf32];
  group.params.emplace<KronCubeParams>().rows = problem.rows;
  const std::int64_t blocks = std::min<std::int64_t>(problem.rows, device.multiprocessors);
  group.shape = {static_cast<unsigned>(blocks), kCubeThreads, 1, 1, kCubeBytes};
  const std::int64_t slab = 16 * ceil_div(last.in, 16) + 2 * ceil_div(second.out, 8) * ceil_div(second.in, 8),
                     products = first.in * slab + 8 * second.out * ceil_div(first.in, 8);
  return finish(std::move(group), problem, kStart, kProduct[problem.tf32] * static_cast<double>(products), blocks);
}

KronGroup plan_f64(KronGroup group, const KronProblem& problem, const KronDevice& device) {
  const KronSize &first = problem.sizes[0], &second = problem.sizes[1], &last = problem.sizes[2];
  if (kCubeBytesF64 > device.shared_bytes || last.in % 4 != 0 || last.out % 2 != 0) return group;
  static Kernel kernel{"kron_linear_cube_f64", "kron_cube_f64"};
  group.kernel = &kernel;
  KronCubeParams& p = group.params.emplace<KronCubeParams>();
  p.rows = problem.rows;
  p.by_columns = kron_divisor(last.in);
  p.slices = group.slices = static_cast<int>(ceil_div(first.out, kCubeRows));
  const std::int64_t blocks = std::min<std::int64_t>(p.rows, std::max(1, device.multiprocessors / p.slices));
  group.shape = {static_cast<unsigned>(blocks * p.slices), kCubeThreadsF64, 1, 1, kCubeBytesF64};
  constexpr int kWarps = kCubeThreadsF64 / 32;
  const std::int64_t columns = ceil_div(ceil_div(second.in * last.in, 16), kWarps),
                     matrices = ceil_div(std::min<std::int64_t>(first.out, kCubeRows) * ceil_div(second.out, 16), kWarps);
  const double products = kColumnsF64 * static_cast<double>(columns) + kMatrixF64 * static_cast<double>(matrices);
  return finish(std::move(group), problem, kStartF64, products, blocks);
}

}  // namespace

KronGroup plan_cube(const KronProblem& problem, const KronDevice& device) {
  KronGroup group(problem);
  if (device.tuned != 90 || (problem.dtype != kFloat32 && problem.dtype != kFloat64) || group.count != 3 || problem.inner != 1)
    return group;
  for (const KronSize& size : problem.sizes)
    if (std::max(size.out, size.in) > kCubeSize) return group;
  return problem.dtype == kFloat32 ? plan_f32(std::move(group), problem, device) : plan_f64(std::move(group), problem, device);
}

}  // namespace cuops
