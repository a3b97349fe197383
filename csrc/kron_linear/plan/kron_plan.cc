#include "kron_plan.h"

#include <algorithm>
#include <cmath>

#include "kron_plan_gemm.h"

namespace cuops {
namespace {

// ns that two kernels in a row share, as the second starts while the first one ends; of 16 bits, where GEMMs in a row share some
// too.
constexpr double kOverlap = 3400, kOverlapHalves = 3000;
// ns that it takes longer, rather, where kron_linear_bits, _whole or _small starts behind kron_linear_fibers, but for float64.
constexpr double kBehindFibers = 3000;
// And, behind any fused kernel, kron_linear_eights, as measured, and kron_linear_four_sixteens, which start likewise: of the
// kernels of KronAxesParams those that have more bytes of shared memory than these.
constexpr double kBehindAny = 11500;
constexpr unsigned kAlmostAll = 200 << 10;
constexpr double kMerge = 2500;     // ns of a launch that multiplies two factors out
constexpr double kMagnitude = 1.5;  // ns more for each element of such factors of float16, the largest of which it finds
constexpr int kLeastMerged = 64, kMostMerged = 576, kMostMergedF16 = 512;  // rows and columns of their product
constexpr std::int64_t kMostUndoing = 1 << 12;  // elements of a factor that has the power of two that undoes that of a product
constexpr double kEnough = 1 << 20;             // elements that it is worth it for
// By which a chain of groups must be faster than one of GEMMs, the last factor first, and one of both than fused kernels, to be
// chosen.
constexpr double kMargin = 1.05;

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
  const bool is_short = next.has<KronBitsParams>() || next.has<KronWholeParams>() || next.has<KronSmallParams>();
  if (is_short && group.has<KronFibersParams>() && dtype != kFloat64) return -kBehindFibers;
  return size_of(dtype) == 2 ? kOverlapHalves : kOverlap;
}

// Whether a factor other than `first` and the next one is small enough to undo the power of two of their product: of two that make
// a product as well, one always is.
bool has_undoing(const KronProblem& problem, int first) {
  for (int k = 0; k < static_cast<int>(problem.sizes.size()); ++k)
    if (k != first && k != first + 1 && problem.sizes[k].out * problem.sizes[k].in <= kMostUndoing) return true;
  return false;
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
      std::vector<KronGroup> candidates = {plan_group(part, device)};
      const bool fused = candidates[0].fused;
      // The vendor's float64 products are often faster than the general kernel for one factor with columns beyond it.
      const bool slow = !fused || candidates[0].has<KronOneProduct>() || candidates[0].has<KronOneDots>() ||
                        (candidates[0].has<KronFwdParams>() && problem.dtype == kFloat64);
      if (end == i + 1) candidates.push_back(plan_gemm(part, how_in_chain(part), device));
      if (end == i + 2 && (problem.dtype == kBFloat16 || (problem.dtype == kFloat16 && has_undoing(problem, i)))) {
        // One product with both takes less than two passes over memory. That of float16 may leave its range, and is multiplied by a
        // power of two that another factor undoes.
        KronProblem merged = part;
        const KronSize size = {part.sizes[0].out * part.sizes[1].out, part.sizes[0].in * part.sizes[1].in};
        merged.sizes = {size};
        const int most = problem.dtype == kFloat16 ? kMostMergedF16 : kMostMerged;
        if (std::min(size.out, size.in) >= kLeastMerged && std::max(size.out, size.in) <= most &&
            static_cast<double>(part.rows) * part.inner * std::max(size.out, size.in) >= kEnough) {
          KronGroup gemm = plan_gemm(merged, how_in_chain(merged), device);
          gemm.count = 2;
          gemm.nanoseconds += kMerge;
          for (const KronSize& one : part.sizes)
            if (problem.dtype == kFloat16) gemm.nanoseconds += kMagnitude * static_cast<double>(one.out * one.in);
          candidates.push_back(std::move(gemm));
        }
      }
      for (KronGroup& group : candidates) {
        group.first = i;
        if (!group.fused && group.count == 1 && end == n) group.nanoseconds += kLaunch;  // as that of a fused kernel has it
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

KronDevice kron_device(int device) {
  const Hardware& hw = hardware("kron_linear", device);
  // Of what a block may have, up to 1024 bytes are a kernel's own; a multiprocessor has as much more, which CUDA takes of a block.
  return {hw.capability, hw.tuned, hw.cuda, hw.multiprocessors, hw.shared_bytes - 1024, hw.shared_bytes + 1024, hw.clusters()};
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
  if (!problem.aligned) {
    KronGroup wide = plan_wide(problem, device);
    if (wide.nanoseconds < best.nanoseconds) best = std::move(wide);
    return best;
  }
  for (KronGroup& group :
       std::vector<KronGroup>{plan_whole(problem, device), plan_small(problem, device), plan_sixteens(problem, device),
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
    const Gemm how = two ? (i == 1 ? kOne : kBatched) : how_in_gemms(part);
    gemms.groups.push_back(plan_gemm(part, how, device));
    gemms.groups.back().first = i;
    if (i == 0) gemms.groups.back().nanoseconds += kLaunch;  // as that of a fused kernel has it
    gemms.nanoseconds += gemms.groups.back().nanoseconds;
  }
  if (mixed.nanoseconds * kMargin < plain.nanoseconds) plain = std::move(mixed);
  return plain.nanoseconds * kMargin < gemms.nanoseconds ? plain.groups : gemms.groups;
}

}  // namespace cuops
