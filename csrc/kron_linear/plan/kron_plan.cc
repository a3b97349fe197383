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
constexpr double kBatch = 580;                       // ns of a multiprocessor
constexpr double kDepth = 7, kDepthF64 = 12;         // ns of an element of a sum, of a batch of small products
constexpr int kFew = 32;                             // columns beyond a factor's own, from which on products are batched
constexpr double kMerge = 2500;                      // ns of a launch that multiplies two factors out
constexpr double kMergedMargin = 1.15;               // by which that must be faster
constexpr double kRearrange = 1500;                  // ns of a launch that copies
constexpr int kLeastMerged = 64, kMostMerged = 576;  // rows and columns of their product
constexpr double kEnough = 1 << 20;                  // elements that it is worth it for
constexpr double kFewProducts = 3 << 19, kFewAlone = 1 << 20, kFewElements = 1 << 15, kFewRows = 1024;
// By which the fused kernels must be faster to be chosen: where their time is known well, in float32, and else.
constexpr double kTunedMargin = 1.05, kMargin = 1.1;
// And chains of fused kernels and GEMMs: of bfloat16, two factors in one GEMM take less than expected where they are small.
constexpr double kMixedMargin = 1.02, kMixedMarginBFloat16 = 1.1;

// A factor through the vendor's matrix product, as measured: small factors and short rows of columns cost more, and of 16 bits each
// of the batched products costs at least kBatch. `batches`: how many, where _kron_linear_gemm.py takes the batched product, else 0.
// `alone`: whether the layer has no other factor.
KronGroup plan_gemm(const KronProblem& problem, double batches, bool alone, const KronDevice& device) {
  KronGroup group(problem);
  const KronSize& size = problem.sizes[0];
  const double vectors = static_cast<double>(problem.rows) * problem.inner,
               smallest = static_cast<double>(std::min(size.in, size.out));
  const bool halves = size_of(problem.dtype) == 2;
  group.bytes = vectors * (size.in + size.out) * size_of(problem.dtype);
  group.operations = 2 * vectors * size.in * size.out;
  // Operations a nanosecond a multiprocessor.
  const double rate_f64 = smallest >= 112 ? 620 : smallest >= 96 ? 450 : 380;
  const double rate = halves ? 6800 : problem.tf32 ? 3000 : problem.dtype == kFloat64 ? rate_f64 : 380;
  const double hidden = halves && smallest >= 256 ? 0.4 : 1.0;  // the state comes meanwhile
  double penalty = smallest >= 32 ? 1.0 : smallest >= 16 ? 1.8 : smallest >= 8 ? 2.8 : 4.5;
  if (halves && (size.in % 8 || size.out % 8)) penalty *= 2.5;
  const double moved = penalty * group.bytes / 31;
  // As _kron_linear_gemm.py has it: a batch of small products.
  const bool few = group.operations <= 2 * (alone ? kFewAlone : kFewProducts) && vectors * size.in < kFewElements &&
                   problem.rows <= kFewRows && (!alone || !halves || size.in % 8 || size.out % 8);
  group.nanoseconds = (few ? 3300 + (problem.dtype == kFloat64 ? kDepthF64 : kDepth) * static_cast<double>(size.in)
                       : problem.inner > 1 && problem.inner < kFew  ? 6000
                       : problem.dtype == kFloat32 && !problem.tf32 ? 6500
                                                                    : 4500) +
                      (halves ? std::max(moved, batches * kBatch) : moved) / device.multiprocessors +
                      hidden * group.operations / (rate * device.multiprocessors);
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
      const double batches = part.inner < kFew ? 0 : static_cast<double>(part.rows);
      std::vector<KronGroup> candidates = {plan_group(part, device)};
      const bool fused = candidates[0].fused;
      // The vendor's float64 products are often faster than the general kernel for one factor with columns beyond it.
      const bool slow = !fused || candidates[0].has<KronOneProduct>() || candidates[0].has<KronOneDots>() ||
                        (candidates[0].has<KronFwdParams>() && problem.dtype == kFloat64);
      if (end == i + 1) {
        KronGroup gemm = plan_gemm(part, batches, n == 1, device);
        if (fused && end == n) gemm.nanoseconds += kLaunch;  // as that of a fused kernel has it
        candidates.push_back(std::move(gemm));
      }
      if (end == i + 2 && problem.dtype == kBFloat16) {
        // One product with both takes less than two passes over memory. Of float16, products of elements may leave its range.
        KronProblem merged = part;
        const KronSize size = {part.sizes[0].out * part.sizes[1].out, part.sizes[0].in * part.sizes[1].in};
        merged.sizes = {size};
        if (std::min(size.out, size.in) >= kLeastMerged && std::max(size.out, size.in) <= kMostMerged &&
            static_cast<double>(part.rows) * part.inner * std::max(size.out, size.in) >= kEnough) {
          KronGroup gemm = plan_gemm(merged, batches, false, device);
          gemm.count = 2;
          gemm.nanoseconds = kMergedMargin * (gemm.nanoseconds + kMerge);
          candidates.push_back(std::move(gemm));
        }
      }
      for (KronGroup& group : candidates) {
        group.first = i;
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

std::vector<KronGroup> plan_chain(const KronProblem& problem, bool mixes, const KronDevice& device) {
  auto [plain, mixed] = cheapest_chains(problem, device);
  // The vendor's alone, the last factor first.
  Chain gemms{{}, 0};
  for (int i = 0; i < static_cast<int>(problem.sizes.size()); ++i) {
    KronProblem part = part_of(problem, i, i + 1);
    for (int k = 0; k < i; ++k) part.rows = part.rows / problem.sizes[k].out * problem.sizes[k].in;
    for (std::size_t k = i + 1; k < problem.sizes.size(); ++k) part.inner = part.inner / problem.sizes[k].in * problem.sizes[k].out;
    const bool in_batch = static_cast<double>(part.rows) / problem.rows * part.inner >= kFew;
    gemms.groups.push_back(plan_gemm(part, in_batch ? static_cast<double>(problem.rows) : 0, problem.sizes.size() == 1, device));
    gemms.groups.back().first = i;
    if (i == 0) gemms.groups[0].nanoseconds += kLaunch;  // as that of a fused kernel has it
    gemms.nanoseconds += gemms.groups.back().nanoseconds;
  }
  const bool tuned =
      std::all_of(plain.groups.begin(), plain.groups.end(), [](const KronGroup& g) { return !g.fused || !g.has<KronFwdParams>(); });
  const double margin = tuned && size_of(problem.dtype) != 2 ? kTunedMargin : kMargin;
  const double mixed_margin = problem.dtype == kBFloat16 ? kMixedMarginBFloat16 : kMixedMargin;
  if (mixes && mixed.nanoseconds * mixed_margin < plain.nanoseconds) plain = std::move(mixed);
  return plain.nanoseconds * margin < gemms.nanoseconds ? plain.groups : gemms.groups;
}

}  // namespace cuops
