// The plan of the kernel of kron_linear_fibers.cu.
#include <algorithm>
#include <cmath>

#include "kron_fibers_layout.h"

namespace cuops {
namespace {

constexpr double kStart = 4300;          // ns
constexpr double kLoad = 1000;           // cycles until a tile is there
constexpr double kSixF64 = 0.72;         // of the instructions of a step of 6, which in float64 are not twice as many as in float32
constexpr double kLargeOf16Bits = 1.35;  // as much longer as expected: factors beyond 12 of 16 bits with columns beyond them

int state_of(const KronFibersLayout& layout) {
  return static_cast<int>(round_up(*std::max_element(layout.states.begin(), layout.states.end()), 4));
}

int shared_elements(const KronFibersLayout& layout, int) {
  return layout.chain.weights + state_of(layout) * (layout.in_place ? 1 : 2);
}

void add_steps(const KronFibersLayout& layout, KronFibersCost* cost) {
  const KronFibersChain& chain = layout.chain;
  for (int s = 0; s < chain.steps; ++s) {
    const KronFibersStep& step = chain.step[s];
    const int size = step.weight.size;
    const bool small = size <= kFibersSmall;
    const double many = (size <= 9 ? 4 : 2) / cost->words, fibers = 1.0 * chain.samples * step.fibers;
    const double together = small ? 2 : 2 * fibers > many * cost->threads ? many : 1;
    const double weights = small ? 0 : step.weight.count / together, products = size * (small ? size : step.out);
    const double part = size == kFibersSmall && cost->words == 2 ? kSixF64 : 1;
    cost->add(fibers / 32, together, part * (products + 3 * (step.in + step.out) + weights / 4 + 25), step.in + step.out + weights);
  }
}

}  // namespace

KronGroup plan_fibers(const KronProblem& problem, const KronDevice& device) {
  KronGroup group(problem);
  const bool is_double = problem.dtype == kFloat64;
  const KronFibersPlan plan = plan_tiles(
      problem, device, {false, is_double ? kFibersThreadsF64 : kFibersThreads, 0, 1, kStart, kLoad, shared_elements, add_steps});
  if (std::isinf(plan.nanoseconds)) return group;
  group.fused = true;
  static Kernel kernels[] = {{"kron_linear_fibers", "kron_fibers_f64"}, {"kron_linear_fibers", "kron_fibers_f32"}};
  group.kernel = &kernels[!is_double];
  group.shape = plan.shape;
  const bool wide =
      std::any_of(problem.sizes.begin(), problem.sizes.end(), [](const KronSize& s) { return std::max(s.in, s.out) > 12; });
  group.nanoseconds = plan.nanoseconds;
  if (wide && problem.inner > 1 && size_of(problem.dtype) == 2)
    group.nanoseconds += (kLargeOf16Bits - 1) * (plan.nanoseconds - kStart);
  group.bytes = plan.bytes;
  group.operations = plan.operations;
  KronFibersParams& p =
      group.params.emplace<KronFibersParams>(KronFibersParams{plan.layout.chain, plan.layout.in, plan.layout.out, nullptr, 1, 0});
  group.samples = p.chain.samples;
  group.columns = p.chain.columns;
  // Two states take turns, where one is not enough.
  for (int s = 0; s <= p.chain.steps; ++s) {
    const int at = p.chain.weights + (plan.layout.in_place ? 0 : s % 2 * state_of(plan.layout));
    (s < p.chain.steps ? p.chain.step[s].state : p.result) = at;
  }
  return group;
}

}  // namespace cuops
