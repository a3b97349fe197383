// The plan of the kernels of kron_linear_bits.cu and kron_linear_twos.cu.
#include <algorithm>

#include "kron_plan.h"

namespace cuops {
namespace {

constexpr double kStart = 5600, kPass = 500, kLargePass = 1000;  // ns; large: of factors of 8 and 16
constexpr double kBytes = 28.5;                                  // a nanosecond of a multiprocessor, of device memory
constexpr double kTwos = 5, kTwosF64 = 2;                        // elements a nanosecond of a multiprocessor
constexpr double kProducts = 190, kProductsF64 = 75;             // likewise
constexpr double kMove = 14;  // products that take as long as an element's way through shared memory
constexpr double kLarge = 2;  // the time that one for a factor of 16 takes, in those of others

}  // namespace

KronGroup plan_bits(const KronProblem& problem, const KronDevice& device) {
  KronGroup group(problem);
  const bool fits = std::all_of(problem.sizes.begin(), problem.sizes.end(), is_small_power);
  if (device.tuned != 90 || !fits || group.count > kBitsFactors || problem.inner != 1 || !problem.linear) return group;
  KronBitsParams& p = group.params.emplace<KronBitsParams>();
  p.count = group.count;
  p.rows = problem.rows;
  double products = 0;
  for (int j = 0; j < group.count; ++j) {
    const int size = static_cast<int>(problem.sizes[j].in);
    p.factors[j].raw = p.elements;
    p.elements += size * size;
    products += size;
  }
  // From the last factor, whose bits are the lowest.
  for (int j = group.count - 1; j >= 0; --j) {
    const int log = log_from(problem.sizes[j].in);
    KronBitsPass* const last = p.passes > 0 ? &p.pass[p.passes - 1] : nullptr;
    if (last != nullptr && last->log == log && (last->count + 1) * log <= 5) {
      ++last->count;
    } else if (p.passes < kBitsPasses) {
      p.pass[p.passes++] = {p.log_sample, log, 1, p.factors[j].raw};
    } else {
      return group;
    }
    p.log_sample += log;
  }
  if (p.log_sample < 2 || p.log_sample > 10 || p.elements > kBitsElements) return group;
  const std::int64_t elements = problem.rows << p.log_sample, tiles = ceil_div(elements, 1024);
  const bool twos = p.elements == 4 * group.count, is_double = problem.dtype == kFloat64;
  p.dtype = problem.dtype;
  static const KernelTable of_bits("kron_bits_", {{"kron_linear_bits", {""}}});
  static const KernelTable of_twos("kron_twos_", {{"kron_linear_twos", {""}}});
  group.kernel = twos ? &of_twos.at(problem.dtype, 0) : &of_bits.at(is_double ? kFloat64 : kFloat32, 0);
  group.samples = 1024 >> p.log_sample;
  // A few tiles have a multiprocessor each.
  const std::int64_t warps = std::max<std::int64_t>(1, std::min<std::int64_t>(tiles / device.multiprocessors, kBitsWarps));
  p.warps = static_cast<int>(warps);
  group.shape = {static_cast<unsigned>(ceil_div(tiles, warps)), static_cast<unsigned>(32 * (twos ? warps : kBitsWarps))};
  group.bytes = 2.0 * static_cast<double>(elements) * size_of(problem.dtype);
  group.operations = 2.0 * static_cast<double>(elements) * products;
  double start = kStart, work = kMove * (p.passes + 1);
  for (const KronSize& size : problem.sizes) work += static_cast<double>(size.in) * (size.in == 16 ? kLarge : 1);
  for (int i = 0; !twos && i < p.passes; ++i) start += p.pass[i].log >= 3 ? kLargePass : kPass;
  const double compute =
      static_cast<double>(elements) * (twos ? 1 / (is_double ? kTwosF64 : kTwos) : work / (is_double ? kProductsF64 : kProducts));
  group.nanoseconds = start + std::max(group.bytes / kBytes, compute) / device.multiprocessors;
  group.fused = true;
  return group;
}

}  // namespace cuops
