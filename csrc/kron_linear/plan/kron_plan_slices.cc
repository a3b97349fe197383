// The plan of the kernels of kron_linear_slices.cu: of how many factors a slice has one row each.
#include <algorithm>

#include "kron_plan.h"

namespace cuops {
namespace {

constexpr std::int64_t kMostSample = 1 << 13, kMostBlocks = 1 << 12;  // elements of x or y
constexpr int kTogether = 4, kSingles = 2048;  // neighbours that move together; elements of x up to which they move one by one

// Microseconds of a thread: a launch, a factor after the first, a product, loads that wait for others, and an element of a factor
// on its way to shared memory, where it is converted and where not.
constexpr double kStart = 4.5, kStep = 0.46, kProduct = 0.03, kLoad = 0.4, kConverted = 0.3, kCopied = 0.12;
// Of a multiprocessor: a block, and its elements of x and of factors.
constexpr double kBlock = 0.4, kElement = 0.2e-3, kElementF64 = 0.4e-3, kWeight = 0.4e-3;
constexpr double kSum = 0.4e-3, kTerm = 0.04e-3;  // of factors after the first, and of these each product

KronGroup evaluate(const KronProblem& problem, const KronDevice& device, bool of_two) {
  KronGroup group(problem);
  const std::vector<KronSize>& sizes = problem.sizes;
  const int count = group.count;
  KronSlicesParams& p = group.params.emplace<KronSlicesParams>();
  std::int64_t in = 1, out = 1, most = 1, weights = 0, elements = 0;
  for (const KronSize& size : sizes) {
    in *= size.in;
    out *= size.out;
    if (std::max(in, out) > kMostSample) return group;
  }
  const std::int64_t seconds = of_two ? sizes[1].out : 1, slices = sizes[0].out * seconds, blocks = problem.rows * slices;
  if (blocks > kMostBlocks) return group;
  std::int64_t before = 1, after = in / sizes[0].in;
  p.in = static_cast<int>(sizes[0].in);
  p.rest = static_cast<int>(after);
  p.slices = static_cast<int>(slices);
  p.seconds = static_cast<int>(seconds);
  p.by_slices = kron_divisor(slices);
  p.by_seconds = kron_divisor(seconds);
  p.steps = count - 1;
  p.slice_out = static_cast<int>(out / slices);
  const int together = problem.aligned && p.rest % kTogether == 0 && in > kSingles ? kTogether : 1;
  std::int64_t state[2] = {after, 0};
  for (int i = 1; i < count; ++i) {
    KronSlicesStep& s = p.step[i - 1];
    after /= sizes[i].in;
    s.in = static_cast<int>(sizes[i].in);
    s.out = static_cast<int>(i == 1 && of_two ? 1 : sizes[i].out);
    s.before = static_cast<int>(before);
    s.after = static_cast<int>(after);
    s.weight = static_cast<int>(weights);
    s.by_in = kron_divisor(s.in);
    s.by_out = kron_divisor(s.out);
    s.by_after = kron_divisor(after);
    s.pitch = s.in | 1;
    weights += round_up(1LL * s.pitch * s.out, 4);
    elements += 1LL * s.in * s.out;
    before *= s.out;
    if (i < count - 1) state[i % 2] = std::max(state[i % 2], before * after);
    most = std::max(most, before * after);
  }
  const std::int64_t pieces = p.rest / together;
  const int threads_log = std::clamp(log_from(std::max({most, pieces * p.in / 2, elements / 2})), 6, kSlicesMostLog);
  const int threads = 1 << threads_log;
  p.parts_log = std::clamp(threads_log - log_from(pieces), 0, std::min(5, log_from(p.in)));
  double us = kStart, steps = kStep * p.steps, sums_of_block = 0;
  for (int i = 0; i < p.steps; ++i) {
    KronSlicesStep& s = p.step[i];
    const std::int64_t sums = 1LL * s.before * s.out * s.after;
    s.ways_log = std::clamp(threads_log - log_from(sums), 0, std::clamp(log_from(s.in) - 2, 0, 5));
    steps += kProduct * static_cast<double>(ceil_div(sums << s.ways_log, threads) * ceil_div(s.in, 1 << s.ways_log));
    sums_of_block += static_cast<double>(sums) * (kSum + kTerm * s.in);
    us += (size_of(problem.dtype) == 2 ? kConverted : kCopied) * static_cast<double>(ceil_div(1LL * s.in * s.out, threads));
  }
  const int ahead = problem.dtype == kFloat64 && together > 1 ? kSlicesAhead / 2 : kSlicesAhead;
  const std::int64_t loads = ceil_div(pieces, threads >> p.parts_log) * ceil_div(ceil_div(p.in, 1 << p.parts_log), ahead);
  us += kLoad * static_cast<double>(loads - 1);
  const double turns = static_cast<double>(blocks) / device.multiprocessors;
  us += std::max(steps, turns * sums_of_block) +
        turns * (kBlock + (problem.dtype == kFloat64 ? kElementF64 : kElement) * static_cast<double>(in) +
                 kWeight * static_cast<double>(elements));
  p.state[0] = static_cast<int>(weights);
  p.state[1] = static_cast<int>(p.state[0] + round_up(state[0], 4));
  const std::int64_t bytes = (p.state[1] + state[1]) * (problem.dtype == kFloat64 ? 8 : 4);
  if (bytes > device.shared_bytes) return group;
  static const KernelTable table("kron_slices_", {{"kron_linear_slices", {"_1", "_4"}}});
  group.kernel = &table.at(problem.dtype, together > 1);
  group.slices = p.slices;
  group.shape = {static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 1, 1, static_cast<unsigned>(bytes)};
  set_costs(problem, &group);
  group.nanoseconds = 1e3 * us;
  group.fused = true;
  return group;
}

}  // namespace

KronGroup plan_slices(const KronProblem& problem, const KronDevice& device) {
  KronGroup best(problem);
  if (device.tuned != 90 || !problem.linear || problem.inner != 1 || best.count < 2 || best.count > kSlicesSteps + 1) return best;
  for (const bool of_two : {false, true}) {
    if (of_two && best.count < 3) continue;
    KronGroup group = evaluate(problem, device, of_two);
    if (group.nanoseconds < best.nanoseconds) best = std::move(group);
  }
  return best;
}

}  // namespace cuops
