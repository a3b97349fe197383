// The plan of the kernels of kron_linear_wide.cu.
#include <algorithm>
#include <cmath>

#include "kron_plan.h"

namespace cuops {
namespace {

// Microseconds of a multiprocessor, in 16 bits and as TF32: in all, and for the products of a sample.
struct Times {
  double start, products;
};
constexpr Times k64[] = {{7.7, 0.4}, {9, 0.45}}, k128[] = {{11.5, 2.05}, {13, 3.1}}, k96 = {11, 1.25};
constexpr double kBytes = 35e3;  // of device memory
constexpr double kHidden = 0.2;  // of the shorter of memory and arithmetic

}  // namespace

KronGroup plan_wide(const KronProblem& problem, const KronDevice& device) {
  KronGroup group(problem);
  const std::vector<KronSize>& sizes = problem.sizes;
  const int element_size = size_of(problem.dtype), vector = 16 / element_size;
  if (device.capability != 90 || device.cuda < 120 || problem.inner != 1 || !problem.mapped || group.count != 2 ||
      problem.rows > INT32_MAX)
    return group;
  if (element_size != 2 && !problem.tf32) return group;
  const KronSize first = sizes[0], last = sizes[1];
  const std::int64_t most = std::max({first.in, first.out, last.in, last.out});
  const int size = most <= 64 ? 64 : 128;
  // Of up to 32, zeros would be most of the work. Rows of y are whole vectors where they follow one another, or others are taken.
  if (most <= 32 || most > kWideMost || last.in % vector != 0 || last.out % 2 != 0 ||
      (problem.rows > 1 && first.out * last.out % vector != 0) || wide_bytes(size, element_size) > device.shared_bytes)
    return group;
  const std::int64_t blocks = std::min<std::int64_t>(problem.rows, device.multiprocessors);
  const bool is_96 = size > 64 && most <= 96 && element_size == 2;
  static Kernel kernels[][3] = {{{"kron_linear_wide", "kron_wide_64_tf32"},
                                 {"kron_linear_wide", "kron_wide_64_f16"},
                                 {"kron_linear_wide", "kron_wide_64_bf16"}},
                                {{"kron_linear_wide", "kron_wide_128_tf32"},
                                 {"kron_linear_wide", "kron_wide_128_f16"},
                                 {"kron_linear_wide", "kron_wide_128_bf16"}}};
  static Kernel kernels_96[] = {{"kron_linear_wide", "kron_wide_96_f16"}, {"kron_linear_wide", "kron_wide_96_bf16"}};
  const int type = element_size == 4 ? 0 : problem.dtype == kFloat16 ? 1 : 2;
  group.kernel = is_96 ? &kernels_96[type - 1] : &kernels[size / 128][type];
  group.params.emplace<KronWideParams>().rows = problem.rows;
  group.shape = {static_cast<unsigned>(blocks), static_cast<unsigned>(wide_threads(size) + kWideCopyThreads), 1, 1,
                 static_cast<unsigned>(wide_bytes(size, element_size))};
  const double in = static_cast<double>(first.in * last.in), out = static_cast<double>(first.out * last.out);
  group.bytes = static_cast<double>(element_size * problem.rows) * (in + out);
  group.operations = static_cast<double>(problem.rows) * operations_of(sizes.rbegin(), sizes.rend(), in);
  const Times& time = is_96 ? k96 : (size == 64 ? k64 : k128)[element_size / 4];
  const double memory = element_size * (in + out) / kBytes;
  const double round = std::max(time.products, memory) + kHidden * std::min(time.products, memory);
  group.nanoseconds = 1e3 * (time.start + round * static_cast<double>(ceil_div(problem.rows, blocks)));
  group.fused = true;
  return group;
}

}  // namespace cuops
