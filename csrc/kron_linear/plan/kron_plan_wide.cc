// The plan of the kernels of kron_linear_wide.cu and kron_linear_wide_f32.cu.
#include <algorithm>
#include <string>

#include "kron_linear/wgmma/kron_wide_f32.h"
#include "kron_plan.h"

namespace cuops {
namespace {

// Microseconds of a multiprocessor: before the first results, and for the products of a sample.
struct Times {
  double start, products;
};
// By the size of tiles; in 16 bits and as TF32; in float32.
constexpr Times k64[] = {{6.2, 0.4}, {6.8, 0.45}}, k128[] = {{10, 1.75}, {13, 3.1}}, k96 = {6.8, 1.2};
constexpr Times kHalves[] = {{8.2, 1}, {9.4, 1.5}};  // of samples that two blocks share
// Where rows are no whole vectors, in 16 bits, by the size of tiles; and for an element of such a factor, by that size, and of a
// sample's results, in words or alone.
constexpr Times kOdd[] = {{8.6, 0.4}, {12.4, 1.75}};
constexpr double kOddFactor[] = {0.03e-3, 0.2e-3}, kInWords = 0.14e-3, kAlone = 0.31e-3;
constexpr Times kF32[] = {{6.4, 0.9}, {10.2, 3.3}, {12, 5.4}}, kColumnsF32 = {7.7, 0.6};
constexpr Times kHalvesF32 = {7.5, 4.5}, kQuartersF32 = {7.3, 3.6};  // of samples that blocks share
constexpr double kBytes = 35e3;                                      // of device memory
constexpr double kHidden = 0.2;                                      // of the shorter of memory and arithmetic

// A kernel for all calls whose rows are whole vectors, one for plain ones, and one, if there is any, for rows that are not.
struct WideKernels {
  Kernel any, plain, odd;

  WideKernels(const char* source, const std::string& name)
      : any(source, "kron_wide_" + name),
        plain(source, "kron_wide_" + name + "_plain"),
        odd(source, "kron_wide_" + name + "_odd") {}
  void set(KronGroup* group, bool is_odd = false) {
    group->kernel = is_odd ? &odd : &any;
    group->plain = is_odd ? nullptr : &plain;
  }
};

// `blocks` have so many samples, or parts of such, each.
KronGroup finish(KronGroup group, const KronProblem& problem, const Times& time, std::int64_t samples, std::int64_t blocks) {
  set_costs(problem, &group);
  const double memory = group.bytes / static_cast<double>(samples) / kBytes;
  const double round = std::max(time.products, memory) + kHidden * std::min(time.products, memory);
  group.nanoseconds = 1e3 * (time.start + round * static_cast<double>(ceil_div(samples, blocks)));
  group.fused = true;
  return group;
}

// In 16 bits, or as TF32.
KronGroup plan_short(const KronProblem& problem, std::int64_t most, std::int64_t blocks, const KronDevice& device) {
  KronGroup group(problem);
  const int element_size = size_of(problem.dtype), size = most <= 64 ? 64 : kWideMost;
  if (wide_bytes(size, element_size) > device.shared_bytes) return group;
  const bool is_96 = size > 64 && most <= 96 && element_size == 2;
  constexpr const char* kSource = "kron_linear_wide";
  static WideKernels tf32[] = {{kSource, "64_tf32"}, {kSource, "128_tf32"}},
                     f16[] = {{kSource, "64_f16"}, {kSource, "128_f16"}, {kSource, "96_f16"}},
                     bf16[] = {{kSource, "64_bf16"}, {kSource, "128_bf16"}, {kSource, "96_bf16"}};
  static Kernel halves[] = {
      {kSource, "kron_wide_halves_tf32"}, {kSource, "kron_wide_halves_f16"}, {kSource, "kron_wide_halves_bf16"}};
  const int number = element_size == 4 ? 0 : problem.dtype == kFloat16 ? 1 : 2;  // of the dtype
  Times time = is_96 ? k96 : (size == 64 ? k64 : k128)[element_size / 4];
  // Few samples, of which each block has 64 rows of the results.
  if (problem.sizes[0].out > 64 && !is_96 && 2 * problem.rows <= device.multiprocessors) {
    group.kernel = &halves[number];
    group.slices = 2;
    time = kHalves[element_size / 4];
  } else {
    WideKernels* const of_dtype[] = {tf32, f16, bf16};
    of_dtype[number][size == 64 ? 0 : is_96 ? 2 : 1].set(&group);
  }
  KronWideParams& p = group.params.emplace<KronWideParams>();
  p.rows = problem.rows;
  p.box_rows = wide_rows(size, element_size);
  p.as_tf32 = problem.tf32;
  group.shape = {static_cast<unsigned>(blocks * group.slices), static_cast<unsigned>(wide_threads(size) + kWideCopyThreads), 1, 1,
                 static_cast<unsigned>(wide_bytes(size, element_size))};
  return finish(group, problem, time, problem.rows * group.slices, blocks * group.slices);
}

// In 16 bits, where rows of x or y are no whole vectors.
KronGroup plan_odd(const KronProblem& problem, std::int64_t most, std::int64_t blocks, const KronDevice& device) {
  KronGroup group(problem);
  const bool is_128 = most > 64;
  const int size = is_128 ? kWideMost : 64;
  if (wide_odd_bytes(size) > device.shared_bytes) return group;
  constexpr const char* kSource = "kron_linear_wide";
  static Kernel f16[] = {{kSource, "kron_wide_64_f16_odd"}, {kSource, "kron_wide_128_f16_odd"}},
                bf16[] = {{kSource, "kron_wide_64_bf16_odd"}, {kSource, "kron_wide_128_bf16_odd"}};
  group.kernel = &(problem.dtype == kFloat16 ? f16 : bf16)[is_128];
  KronWideParams& p = group.params.emplace<KronWideParams>();
  p.rows = problem.rows;
  group.shape = {static_cast<unsigned>(blocks), static_cast<unsigned>(wide_threads(size) + kWideCopyThreads), 1, 1,
                 static_cast<unsigned>(wide_odd_bytes(size))};
  Times time = kOdd[is_128];
  for (const KronSize& factor : problem.sizes)
    if (factor.in % 8 != 0) time.start += kOddFactor[is_128] * static_cast<double>(factor.out * factor.in);
  time.products += (problem.sizes[1].out % 2 ? kAlone : kInWords) * problem.out();
  return finish(group, problem, time, problem.rows, blocks);
}

KronGroup plan_f32(const KronProblem& problem, std::int64_t most, std::int64_t blocks, bool is_odd, const KronDevice& device) {
  KronGroup group(problem);
  const int size = most <= 64 ? 64 : 128;
  if (wide_f32_bytes(size) > device.shared_bytes) return group;
  constexpr const char* kSource = "kron_linear_wide_f32";
  static Kernel of_64[] = {{kSource, "kron_wide_64_f32"}, {kSource, "kron_wide_64_f32_odd"}},
                halves[] = {{kSource, "kron_wide_halves_f32"}, {kSource, "kron_wide_halves_f32_odd"}},
                quarters[] = {{kSource, "kron_wide_quarters_f32"}, {kSource, "kron_wide_quarters_f32_odd"}};
  static WideKernels of_96(kSource, "96_f32"), of_128(kSource, "128_f32");
  // Odd rows take up to twice as long. So do GEMMs of them, whose times do not say so either, and which they are faster than.
  Times time = kF32[most <= 64 ? 0 : most <= 96 ? 1 : 2];
  // Few samples, of which each block has 64 rows of the results, or 64 columns of these.
  const bool tall = problem.sizes[0].out > 64, large = tall && problem.sizes[1].out > 64;
  if (large && 4 * problem.rows <= device.multiprocessors) {
    group.kernel = &quarters[is_odd];
    group.slices = 4;
    time = kQuartersF32;
  } else if (tall && 2 * problem.rows <= device.multiprocessors) {
    group.kernel = &halves[is_odd];
    group.slices = 2;
    time = kHalvesF32;
  } else if (most > 64) {
    (most <= 96 ? of_96 : of_128).set(&group, is_odd);
  } else {
    group.kernel = &of_64[is_odd];
  }
  KronWideParams& p = group.params.emplace<KronWideParams>();
  p.rows = problem.rows;
  p.box_rows = is_odd ? 0 : kWideF32Rows;
  group.shape = {static_cast<unsigned>(blocks * group.slices), static_cast<unsigned>(wide_f32_threads(size)), 1, 1,
                 static_cast<unsigned>(wide_f32_bytes(size))};
  return finish(group, problem, time, problem.rows * group.slices, blocks * group.slices);
}

// One factor, with columns beyond it.
KronGroup plan_columns(const KronProblem& problem, const KronDevice& device) {
  constexpr int kSize = 64;
  KronGroup group(problem);
  const KronSize size = problem.sizes[0];
  const std::int64_t most = std::max(size.in, size.out), parts = problem.rows * ceil_div(problem.inner, kSize);
  if (most <= 32 || most > kSize || problem.inner % 4 != 0 || problem.inner > INT32_MAX || parts > INT32_MAX ||
      wide_f32_bytes(kSize) > device.shared_bytes)
    return group;
  static Kernel kernel("kron_linear_wide_f32", "kron_wide_columns_64_f32");
  group.kernel = &kernel;
  group.columns = kSize;
  KronWideParams& p = group.params.emplace<KronWideParams>();
  p.rows = problem.rows;
  p.columns = static_cast<int>(problem.inner);
  p.box_rows = kWideF32Rows;
  const std::int64_t blocks = std::min<std::int64_t>(parts, device.multiprocessors);
  group.shape = {static_cast<unsigned>(blocks), static_cast<unsigned>(wide_f32_threads(kSize)), 1, 1,
                 static_cast<unsigned>(wide_f32_bytes(kSize))};
  return finish(group, problem, kColumnsF32, parts, blocks);
}

}  // namespace

KronGroup plan_wide(const KronProblem& problem, const KronDevice& device) {
  const KronGroup none(problem);
  if (device.capability != 90 || device.cuda < 120 || problem.dtype == kFloat64 || !problem.mapped || problem.rows > INT32_MAX)
    return none;
  if (none.count == 1 && problem.inner > 1 && problem.dtype == kFloat32 && problem.aligned) return plan_columns(problem, device);
  if (none.count != 2 || problem.inner != 1) return none;
  const bool is_f32 = problem.dtype == kFloat32 && !problem.tf32;
  const KronSize first = problem.sizes[0], last = problem.sizes[1];
  const std::int64_t most = std::max({first.in, first.out, last.in, last.out}), vector = width_of(problem.dtype);
  if (most <= 32 || most > kWideMost) return none;  // of up to 32, zeros would be most of the work
  const std::int64_t blocks = std::min<std::int64_t>(problem.rows, device.multiprocessors);
  // Rows of y are whole vectors where they follow one another; in float32, those of a sample, too.
  const bool is_odd =
      last.in % vector != 0 || last.out % (is_f32 ? vector : 2) != 0 || (problem.rows > 1 && first.out * last.out % vector != 0);
  if (is_f32) return plan_f32(problem, most, blocks, is_odd || !problem.aligned, device);
  if (is_odd || !problem.aligned) return size_of(problem.dtype) == 2 ? plan_odd(problem, most, blocks, device) : none;
  return plan_short(problem, most, blocks, device);
}

}  // namespace cuops
