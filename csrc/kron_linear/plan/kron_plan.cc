#include "kron_plan.h"

#include <algorithm>
#include <cmath>

namespace cuops {
namespace {

constexpr double kLaunch = 2500;  // ns
// ns that two kernels in a row share, as the second starts while the first one ends; of 16 bits, where GEMMs in a row share some
// too.
constexpr double kOverlap = 3400, kOverlapHalves = 3000;
// ns that it takes longer, rather, where kron_linear_bits, _tuned or _small starts behind kron_linear_fibers, but for float64.
constexpr double kBehindFibers = 3000;
// And, behind any fused kernel, kron_linear_eights, as measured, and kron_linear_four_sixteens, which start likewise: of the
// kernels of KronAxesParams those that have more bytes of shared memory than these.
constexpr double kBehindAny = 11500;
constexpr unsigned kAlmostAll = 200 << 10;
constexpr double kDepth = 7, kDepthF64 = 12;         // ns of an element of a sum, of a batch of small products
constexpr int kAcross = 32, kLeastAcross = 16;       // rows of the second of two, from which on nothing is rearranged
constexpr int kFew = 32;                             // columns beyond a factor's own, from which on products are batched
constexpr double kMerge = 2500;                      // ns of a launch that multiplies two factors out
constexpr double kRearrange = 1500;                  // ns of a launch that copies
constexpr int kLeastMerged = 64, kMostMerged = 576;  // rows and columns of their product
constexpr double kEnough = 1 << 20;                  // elements that it is worth it for
constexpr double kFewProducts = 3 << 19, kFewElements = 1 << 15, kFewRows = 1024;
// By which the fused kernels must be faster to be chosen: where their time is known well, in float32, and else.
constexpr double kTunedMargin = 1.05, kMargin = 1.1;
constexpr double kMixedMargin = 1.02;  // and chains of fused kernels and GEMMs
constexpr double kGemmsMargin = 1.3;   // and GEMMs alone, of two factors or of larger ones than this
constexpr int kLargeGemms = 64;

// How _kron_linear_gemm.py has a factor by the vendor's matrix product: by one, by one and a copy that rearranges, or by a batch.
enum Gemm { kOne, kCopied, kBatched };

// What that takes, fitted to 13,000 of them on an H200 (2 to 128 rows and columns, 2^14 to 2^25 elements), within 15 to 30 %: ns;
// ps of a vector of columns, for each row and column that it has, for itself, and for each product; ns of a matrix of a batch. Most
// starts are 800 ns more than that: GEMMs do not start while what comes before them ends, as fused kernels do.
struct GemmTimes {
  double start, in, out, vector, product, matrix;
};
constexpr GemmTimes kGemmTimes[][6] = {
    // float32; float64 of multiples of 16, and other; 16 bits of rows in whole vectors, of an even number of elements, and other
    {{6400, 1.39, 0.70, 33.9, 0.0427, 0},
     {4200, 1.50, 2.42, 41.0, 0.0194, 0},
     {4200, 1.15, 1.57, 83.1, 0.0305, 0},
     {4500, 0.29, 0.34, 30.5, 0.0029, 0},
     {4600, 0.07, 0.18, 68.0, 0.0193, 0},
     {5600, 1.16, 0.49, 60.1, 0.0050, 0}},
    {{8500, 1.20, 2.85, 38.6, 0.0523, 0},
     {6700, 1.25, 6.83, 31.3, 0.0228, 0},
     {7100, 1.45, 5.90, 72.5, 0.0240, 0},
     {6900, 1.57, 1.44, 18.3, 0.0029, 0},
     {7000, 0.55, 1.80, 65.0, 0.0055, 0},
     {7300, 0.06, 1.57, 73.4, 0.0149, 0}},
    {{5400, 1.51, 1.03, 27.0, 0.0471, 0.62},
     {4400, 1.41, 2.03, 33.2, 0.0330, 0.43},
     {4400, 1.50, 1.95, 66.0, 0.0420, 0.91},
     {4400, 0.17, 0.92, 14.0, 0.0029, 3.78},
     {4500, 0.80, 1.30, 25.5, 0.0085, 1.10},
     {4800, 1.62, 0.98, 46.3, 0.0118, 1.52}},
};
constexpr double kMeasured = 132;              // multiprocessors
constexpr double kProductTf32 = 0.0054;        // ps
constexpr double kHides = 256, kHidden = 0.4;  // rows and columns in 16 bits, from which the state comes meanwhile

// Up to how many products of a layer's only factor _kron_linear_gemm.py takes a batch.
double few_alone(DType dtype) { return dtype == kFloat32 ? 3 << 20 : dtype == kFloat64 ? 3 << 19 : 1 << 20; }

// Whether _kron_linear_gemm.py takes a batch of small products, one for each row. `alone`: whether the layer has no other factor.
bool is_few(const KronProblem& problem, const KronSize& size, double rows, double columns, bool alone) {
  const double elements = rows * columns * static_cast<double>(size.in);
  const bool whole = size_of(problem.dtype) == 2 && size.in % 8 == 0 && size.out % 8 == 0;
  return rows <= kFewRows && elements < kFewElements && elements * size.out <= (alone ? few_alone(problem.dtype) : kFewProducts) &&
         !(alone && whole);
}

// Whether it has nothing to rearrange between two factors.
bool are_two(const KronProblem& problem) {
  if (problem.sizes.size() != 2 || problem.inner > 1 || problem.rows == 1) return false;
  const KronSize &first = problem.sizes[0], &second = problem.sizes[1];
  const int least = std::max(first.out, first.in) <= second.out ? kLeastAcross : kAcross;
  return second.out >= least && !is_few(problem, second, static_cast<double>(problem.rows), first.in, false);
}

// A factor through the vendor's matrix product.
KronGroup plan_gemm(const KronProblem& problem, Gemm gemm, bool alone, const KronDevice& device) {
  KronGroup group(problem);
  const KronSize& size = problem.sizes[0];
  const double rows = static_cast<double>(problem.rows), vectors = rows * problem.inner, in = size.in, out = size.out;
  const bool halves = size_of(problem.dtype) == 2;
  const std::int64_t lengths = size.in | (gemm == kOne ? size.out : problem.inner);  // of rows: what all are multiples of
  group.bytes = vectors * (in + out) * size_of(problem.dtype);
  group.operations = 2 * vectors * in * out;
  if (is_few(problem, size, rows, problem.inner, alone)) {
    group.nanoseconds = 3300 + (problem.dtype == kFloat64 ? kDepthF64 : kDepth) * in;
    return group;
  }
  const bool sixteens = (size.in | size.out) % 16 == 0 && (gemm == kOne || problem.inner % 2 == 0);
  const int kind = problem.dtype == kFloat32   ? 0
                   : problem.dtype == kFloat64 ? (sixteens ? 1 : 2)
                   : lengths % 8 == 0          ? 3
                   : lengths % 2 == 0          ? 4
                                               : 5;
  const GemmTimes& times = kGemmTimes[gemm][kind];
  const double hidden = halves && std::min(in, out) >= kHides ? kHidden : 1;
  const double product = hidden * (problem.tf32 ? kProductTf32 : times.product);
  group.nanoseconds = times.start + (vectors * (times.in * in + times.out * out + times.vector + product * in * out) * 1e-3 +
                                     (gemm == kBatched ? rows * times.matrix : 0)) *
                                        kMeasured / device.multiprocessors;
  return group;
}

// Elements of x's or y's rows, whichever has more.
std::int64_t longest_row(const KronProblem& problem) {
  std::int64_t in = problem.inner, out = problem.inner;
  for (const KronSize& size : problem.sizes) {
    in *= size.in;
    out *= size.out;
  }
  return std::max(in, out);
}

// Factors `begin` to `end`: what those before have made, and those after will make, counts as rows and columns.
KronProblem part_of(const KronProblem& problem, int begin, int end) {
  KronProblem part = problem;
  double rows = static_cast<double>(problem.rows), inner = static_cast<double>(problem.inner);
  for (int k = 0; k < begin; ++k) rows *= problem.sizes[k].out;
  for (std::size_t k = end; k < problem.sizes.size(); ++k) inner *= problem.sizes[k].in;
  part.rows = static_cast<std::int64_t>(rows);
  part.inner = static_cast<std::int64_t>(inner);
  part.sizes.assign(problem.sizes.begin() + begin, problem.sizes.begin() + end);
  part.linear = problem.linear && (part.rows == 1 || longest_row(part) <= kKronMostStride);
  return part;
}

// Nanoseconds that two fused kernels in a row share, or lose, where negative.
double overlap(const KronGroup& group, const KronGroup& next, DType dtype) {
  if (next.has<KronAxesParams>() && next.shape.shared_bytes > kAlmostAll) return -kBehindAny;
  const bool is_short = next.has<KronBitsParams>() || next.has<KronTunedParams>() || next.has<KronSmallParams>();
  if (is_short && group.has<KronFibersParams>() && dtype != kFloat64) return -kBehindFibers;
  return size_of(dtype) == 2 ? kOverlapHalves : kOverlap;
}

struct Chain {
  std::vector<KronGroup> groups;
  double nanoseconds = INFINITY;
};

// The cheapest two chains of all factors: where a GEMM takes the factors alone that no fused kernel is good for, and any factor.
struct Chains {
  Chain plain, mixed;
};
Chains cheapest_chains(const KronProblem& problem, const KronDevice& device) {
  const int n = static_cast<int>(problem.sizes.size());
  // best[i]: for factors i and later, by what precedes them.
  std::vector<Chain> best[2] = {std::vector<Chain>(n + 1), std::vector<Chain>(n + 1)};
  for (std::vector<Chain>& chains : best) chains[n].nanoseconds = 0;
  for (int i = n - 1; i >= 0; --i) {
    for (int end = i + 1; end <= n; ++end) {
      const KronProblem part = part_of(problem, i, end);
      const Gemm how = part.inner < kFew ? kOne : kBatched;
      std::vector<KronGroup> candidates = {plan_group(part, device)};
      const bool fused = candidates[0].fused;
      // The vendor's float64 products are often faster than the general kernel for one factor with columns beyond it.
      const bool slow = !fused || candidates[0].has<KronOneProduct>() || candidates[0].has<KronOneDots>() ||
                        (candidates[0].has<KronFwdParams>() && problem.dtype == kFloat64);
      if (end == i + 1) {
        KronGroup gemm = plan_gemm(part, how, n == 1, device);
        candidates.push_back(std::move(gemm));
      }
      if (end == i + 2 && problem.dtype == kBFloat16) {
        // One product with both takes less than two passes over memory. Of float16, products of elements may leave its range.
        KronProblem merged = part;
        const KronSize size = {part.sizes[0].out * part.sizes[1].out, part.sizes[0].in * part.sizes[1].in};
        merged.sizes = {size};
        if (std::min(size.out, size.in) >= kLeastMerged && std::max(size.out, size.in) <= kMostMerged &&
            static_cast<double>(part.rows) * part.inner * std::max(size.out, size.in) >= kEnough) {
          KronGroup gemm = plan_gemm(merged, how, false, device);
          gemm.count = 2;
          gemm.nanoseconds += kMerge;
          candidates.push_back(std::move(gemm));
        }
      }
      for (KronGroup& group : candidates) {
        group.first = i;
        if (!group.fused && group.count == 1 && end == n) group.nanoseconds += kLaunch;  // as that of a fused kernel has it
        // apply_along() rearranges the state before and after.
        if (!group.fused && part.inner > 1 && part.inner < kFew)
          group.nanoseconds += 2 * (kRearrange + group.bytes / 31 / device.multiprocessors);
      }
      for (bool mixes : {false, true}) {
        Chain& chain = best[mixes][i];
        const Chain& rest = best[mixes][end];
        for (std::size_t k = 0; k < candidates.size(); ++k) {
          KronGroup group = candidates[k];
          if (k > 0 && end == i + 1 && !slow && !mixes) continue;
          if (group.fused && end < n && rest.groups[0].fused) group.nanoseconds -= overlap(group, rest.groups[0], problem.dtype);
          if (!(group.nanoseconds + rest.nanoseconds < chain.nanoseconds)) continue;
          chain.nanoseconds = group.nanoseconds + rest.nanoseconds;
          chain.groups = {group};
          chain.groups.insert(chain.groups.end(), rest.groups.begin(), rest.groups.end());
        }
      }
    }
  }
  return {std::move(best[false][0]), std::move(best[true][0])};
}

}  // namespace

double KronProblem::in() const {
  double elements = static_cast<double>(inner);
  for (const KronSize& size : sizes) elements *= static_cast<double>(size.in);
  return elements;
}

double KronProblem::out() const {
  double elements = static_cast<double>(inner);
  for (const KronSize& size : sizes) elements *= static_cast<double>(size.out);
  return elements;
}

void set_costs(const KronProblem& problem, KronGroup* group) {
  const double rows = static_cast<double>(problem.rows), in = problem.in();
  group->bytes = rows * (size_of(problem.dtype) * (in + problem.out()));
  group->operations = rows * operations_of(problem.sizes.rbegin(), problem.sizes.rend(), in);
}

KronDivisor kron_divisor(std::int64_t d) {
  return {static_cast<unsigned>(d), d == 1 ? 0 : static_cast<unsigned>((std::uint64_t{1} << 32) / d + 1)};
}

KronArithmetic kron_arithmetic(DType dtype, const KronDevice& device) {
  if (dtype == kFloat64) return device.tuned >= 80 ? kKronDouble : kKronPlain;  // others have hardly any float64
  return device.capability >= 80 ? kKronScaled : kKronPlain;
}

KronGroup plan_group(const KronProblem& problem, const KronDevice& device) {
  KronGroup best = plan_general(problem, device);
  KronGroup fibers = plan_fibers(problem, device), product = plan_product(problem, device);
  KronGroup slices = plan_slices(problem, device), dots = plan_dots(problem, device);
  // Rows of two strides, which the plan of a chain does not know of, have the general kernel instead.
  if (best.fused && product.nanoseconds < best.nanoseconds) best = std::move(product);
  if (best.fused && dots.nanoseconds < best.nanoseconds) best = std::move(dots);
  if (best.fused && slices.nanoseconds < best.nanoseconds) best = std::move(slices);
  if (fibers.nanoseconds < best.nanoseconds || (fibers.fused && !best.fused)) best = std::move(fibers);
  if (!problem.aligned) return best;
  for (KronGroup& group :
       std::vector<KronGroup>{plan_tuned(problem, device), plan_small(problem, device), plan_sixteens(problem, device),
                              plan_four_sixteens(problem, device), plan_eights(problem, device), plan_direct(problem, device),
                              plan_cube(problem, device), plan_half(problem, device), plan_double(problem, device),
                              plan_wide(problem, device), plan_bits(problem, device)})
    if (group.nanoseconds < best.nanoseconds) best = std::move(group);
  return best;
}

std::vector<KronGroup> plan_chain(const KronProblem& problem, const KronDevice& device) {
  auto [plain, mixed] = cheapest_chains(problem, device);
  // The vendor's alone, the last factor first.
  Chain gemms{{}, problem.inner == 1 ? 0 : INFINITY};
  const bool two = are_two(problem);
  KronProblem part = problem;
  for (int i = static_cast<int>(problem.sizes.size()) - 1; i >= 0; --i) {
    part.sizes = {problem.sizes[i]};
    part.rows = problem.rows;
    part.inner = 1;  // of what all other factors have made, or will take
    for (int k = 0; k < static_cast<int>(problem.sizes.size()); ++k)
      if (k != i) (two && k < i ? part.rows : part.inner) *= k < i ? problem.sizes[k].in : problem.sizes[k].out;
    const Gemm how = part.inner == 1 ? kOne : part.inner < kFew && !two ? kCopied : kBatched;
    gemms.groups.push_back(plan_gemm(part, how, problem.sizes.size() == 1, device));
    gemms.groups.back().first = i;
    if (i == 0) gemms.groups.back().nanoseconds += kLaunch;  // as that of a fused kernel has it
    gemms.nanoseconds += gemms.groups.back().nanoseconds;
  }
  const bool tuned =
      std::all_of(plain.groups.begin(), plain.groups.end(), [](const KronGroup& g) { return !g.fused || !g.has<KronFwdParams>(); });
  if (mixed.nanoseconds * kMixedMargin < plain.nanoseconds) plain = std::move(mixed);
  const bool large = problem.sizes.size() == 2 || std::all_of(problem.sizes.begin(), problem.sizes.end(), [](const KronSize& s) {
                       return std::min(s.out, s.in) > kLargeGemms;
                     });
  const bool gemms_alone =
      std::none_of(plain.groups.begin(), plain.groups.end(), [](const KronGroup& g) { return g.fused || g.count > 1; });
  const double margin = gemms_alone && large ? kGemmsMargin : tuned && size_of(problem.dtype) != 2 ? kTunedMargin : kMargin;
  return plain.nanoseconds * margin < gemms.nanoseconds ? plain.groups : gemms.groups;
}

}  // namespace cuops
