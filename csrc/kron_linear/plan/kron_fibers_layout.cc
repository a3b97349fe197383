#include "kron_fibers_layout.h"

#include <algorithm>
#include <cmath>

#include "host/tensor.h"

namespace cuops {
namespace {

constexpr double kBytes = 28;      // a nanosecond of a multiprocessor, of device memory
constexpr double kHidden = 0.3;    // of the shorter of memory and arithmetic
constexpr double kBarrier = 100;   // cycles
constexpr double kWeight = 140;    // instructions for an element of a factor, at the start
constexpr double kWarp = 80;       // instructions of a warp at the start
constexpr double kIdle = 25;       // and of one that has nothing to do in a pass
constexpr double kFactor = 600;    // cycles until the elements of factors that threads ask for at a time are there
constexpr double kFull = 16;       // warps with which a multiprocessor issues half of what it can
constexpr double kLatency = 4.25;  // cycles from one instruction of a warp to its next, when it is alone
constexpr double kMore = 500;      // ns, where a multiprocessor has several blocks
constexpr double kSecond = 1800;   // ns of a second launch, for the sums of blocks
constexpr double kSumBytes = 40;   // a nanosecond, of partial sums
constexpr int kThreads[] = {32, 64, 96, 128, 192, 256, 384, 512, 768}, kMostSamples = 1024, kLeastColumns = 8;

// Instructions for an element of a step.
double instructions(const KronSize& size, bool gradient) {
  const double most = static_cast<double>(std::max(size.in, size.out));
  if (!gradient) return 20 / most + 4 + most;
  return most <= kFibersSmall ? 20 / most + 5 + 2 * most : 17 + 2.8 * most;
}

// Neighbours that are multiplied out, so that steps cost least: how many factors each step has.
std::vector<int> merge(const std::vector<KronSize>& sizes, bool gradient) {
  const int n = static_cast<int>(sizes.size());
  std::vector<double> cost(n + 1, 0);
  std::vector<int> count(n + 1, 0);
  for (int i = n - 1; i >= 0; --i) {
    KronSize product{1, 1};
    for (int end = i + 1; end <= std::min(n, i + kFibersMerged); ++end) {
      product = {product.out * sizes[end - 1].out, product.in * sizes[end - 1].in};
      if (std::max(product.out, product.in) > kFibersMost) break;
      const double with = instructions(product, gradient) + cost[end];
      if (count[i] == 0 || with < cost[i]) cost[i] = with, count[i] = end - i;
    }
  }
  std::vector<int> counts;
  for (int i = 0; i < n; i += count[i]) counts.push_back(count[i]);
  return counts;
}

// Whether there are kernels for these factors at all.
bool fit(const KronProblem& problem) {
  constexpr std::int64_t kMostElements = 1 << 16;  // what divisions are exact for
  if (problem.sizes.size() > kFibersFactors) return false;
  std::int64_t elements = 1;
  for (const KronSize& s : problem.sizes) {
    elements *= s.in;
    if (std::max(s.in, s.out) > kFibersMost || elements > kMostElements) return false;
  }
  for (const KronSize& s : problem.sizes) {
    elements = elements / s.in * s.out;
    if (elements > kMostElements) return false;
  }
  return true;
}

// The columns that tiles of about `wanted` have, such that all have about as many.
int even_columns(std::int64_t inner, std::int64_t wanted) {
  const std::int64_t columns = ceil_div(inner, std::max<std::int64_t>(1, inner / wanted));
  return static_cast<int>(inner % 4 == 0 ? round_up(columns, 4) : columns);
}

// For tiles of so many samples, or of columns of one.
KronFibersLayout lay_out(const KronProblem& problem, int samples, int columns, bool gradient) {
  KronFibersLayout layout;
  KronFibersChain& chain = layout.chain;
  chain.rows = problem.rows;
  chain.inner = problem.inner;
  chain.samples = columns > 0 ? 1 : samples;
  chain.columns = columns;
  chain.column_tiles = columns > 0 ? static_cast<int>(ceil_div(problem.inner, columns)) : 1;
  chain.tiles = columns > 0 ? problem.rows * chain.column_tiles : ceil_div(problem.rows, samples);
  chain.dtype = problem.dtype;

  int factor = 0;
  for (const int count : merge(problem.sizes, gradient)) {
    KronFibersStep& step = chain.step[chain.steps++];
    step.first = factor;
    step.count = count;
    step.out = step.in = 1;
    for (; factor < step.first + count; ++factor) {
      step.out *= static_cast<int>(problem.sizes[factor].out);
      step.in *= static_cast<int>(problem.sizes[factor].in);
    }
  }
  int before = 1, beyond = std::max(columns, 1);
  for (int s = 0; s < chain.steps; ++s) beyond *= chain.step[s].in;
  const int in_elements = beyond;
  for (int s = 0; s < chain.steps; ++s) {
    KronFibersStep& step = chain.step[s];
    layout.states.push_back(before * beyond * chain.samples);
    beyond /= step.in;
    step.inner = beyond;
    step.fibers = before * beyond;
    step.by_inner = kron_divisor(beyond);
    step.weight = fibers_matrix(chain.weights, step.out, step.in);
    step.sums = chain.sums;
    chain.weights += step.weight.count;
    chain.sums += step.out * step.in;
    layout.in_place &= step.out == step.in;
    layout.products += static_cast<double>(step.fibers) * step.out * step.in;
    before *= step.out;
  }
  const int out_elements = before * std::max(columns, 1);
  layout.states.push_back(out_elements * chain.samples);
  for (auto [array, elements] : {std::pair(&layout.in, in_elements), {&layout.out, out_elements}}) {
    array->run = columns > 0 ? columns : elements;
    array->runs = elements / array->run;
    array->by_run = kron_divisor(array->run);
  }
  return layout;
}

// Cycles of the end of a gradient's launch of so many blocks, or of the launch after it, which takes products of factors apart.
double finish(const KronFibersChain& chain, const std::vector<KronSize>& sizes, double warps, double blocks) {
  double all = 0, most = 0;
  for (int s = 0; s < chain.steps; ++s) {
    const KronFibersStep& step = chain.step[s];
    double cycles = kBarrier;
    for (int j = step.first; step.count > 1 && j < step.first + step.count; ++j) {
      const double size = static_cast<double>(sizes[j].out * sizes[j].in), others = step.out * step.in / size;
      const double each = 25 * step.count * std::ceil(others / 32) + 60;
      cycles += std::ceil(size * std::min(32.0, others) / 32 / warps) * each * kLatency;
    }
    all += cycles;
    most = std::max(most, cycles);
  }
  return blocks == 1 ? all : most * std::ceil(chain.steps / blocks);
}

// Instructions that move an element from or to device memory: four together where they can be, and else alone.
double moving(const KronFibersChain& chain) { return chain.columns > 0 && chain.inner % 4 != 0 ? 16 : 6; }

}  // namespace

KronFibersMatrix fibers_matrix(int at, int out, int in) {
  const int pitch = fibers_pitch(out, in);
  return {at, fibers_class(out, in), pitch, fibers_weight(out, in), kron_divisor(pitch)};
}

void KronFibersCost::add(double warps, double together, double each, double elements) {
  const double issued = words * each;  // float64 has half the rate
  active = std::max(active, std::min(std::ceil(warps / together), threads / 32.0));
  instructions += std::ceil(warps) * issued + kIdle * threads / 32;
  longest += std::ceil(std::ceil(warps / together) * 32 / threads) * together * issued;
  shared += std::ceil(warps) * words * elements;
  waits += kBarrier;
}

double KronFibersCost::round(double blocks) const {
  const double issuing = blocks * instructions * (1 + kFull / (blocks * active)) / 4;
  return std::max({issuing, longest * kLatency, blocks * shared}) + waits / blocks;
}

KronFibersPlan plan_tiles(const KronProblem& problem, const KronDevice& device, const KronFibersKernel& kernel) {
  KronFibersPlan best;
  if (device.tuned != 90 || problem.inner > INT32_MAX || !fit(problem)) return best;
  const bool by_columns = problem.inner > 1;
  const int size = problem.dtype == kFloat64 ? 8 : 4;
  const std::int64_t most = by_columns ? std::max<std::int64_t>(problem.inner, kLeastColumns) : problem.rows;
  int before = 0;
  for (int wanted = by_columns ? kLeastColumns : 1; wanted <= std::min<std::int64_t>(most, kMostSamples); wanted *= 2) {
    const int columns = by_columns ? even_columns(problem.inner, wanted) : 0;
    if (by_columns && columns == before) continue;
    before = columns;
    const KronFibersLayout layout = lay_out(problem, wanted, columns, kernel.gradient);
    const KronFibersChain& chain = layout.chain;
    const double vectors = static_cast<double>(problem.rows) * static_cast<double>(problem.inner) / std::max(columns, 1);
    const double elements = kernel.moved * layout.in_elements() + layout.out_elements();
    for (const int threads : kThreads) {
      const std::int64_t needed = round_up(std::int64_t{size} * kernel.shared_elements(layout, threads), 16);
      if (needed > device.shared_bytes) continue;
      const int bytes = static_cast<int>(needed);
      const int resident = std::min(device.shared_bytes_a_multiprocessor / (bytes + 1024), kernel.most_threads / threads);
      if (resident == 0) continue;
      KronFibersCost tile{threads, size / 4.0}, start{threads, 1};
      tile.waits = kernel.load;
      tile.add(chain.samples * elements / 32, 4, moving(chain), 1);
      kernel.add_steps(layout, &tile);
      start.waits = kFactor * std::ceil(1.0 * chain.weights / threads);
      start.instructions = kWarp * threads / 32;
      start.add(chain.weights / 32.0, 1, kWeight, 1);
      if (kernel.gradient) start.add(threads / 32 * chain.sums / 32.0, 1, 20, 2);
      const double each = std::ceil(static_cast<double>(chain.tiles) / device.multiprocessors);
      const double together = std::min<double>(resident, each);
      const double compute = (start.round(together) + std::ceil(each / together) * tile.round(together)) / kClock;
      const double bytes_moved = vectors * elements * size_of(problem.dtype);
      std::int64_t blocks = std::min<std::int64_t>(chain.tiles, 1LL * device.multiprocessors * resident);
      const double active = std::min<double>(device.multiprocessors, 2.0 * static_cast<double>(blocks));
      const double memory = bytes_moved / kBytes / active;
      double nanoseconds = kernel.start + std::max(compute, memory) + kHidden * std::min(compute, memory);
      if (together > 1) nanoseconds += kMore;
      unsigned cluster = 1;
      if (kernel.gradient) {
        nanoseconds += static_cast<double>(blocks) * std::min(chain.sums, kFibersMost * kFibersMost) * size / kSumBytes;
        if (blocks <= kernel.together) {
          blocks = std::int64_t{1} << log_from(blocks);
          cluster = static_cast<unsigned>(blocks);
          nanoseconds += finish(chain, problem.sizes, threads / 32, static_cast<double>(blocks)) / kClock - kSecond;
        } else {
          nanoseconds += finish(chain, problem.sizes, 16, chain.steps) / kClock;
        }
      }
      if (!(nanoseconds < best.nanoseconds)) continue;
      best = {layout,
              {static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 1, cluster, static_cast<unsigned>(bytes), true},
              nanoseconds,
              bytes_moved,
              2 * layout.products * vectors};
    }
  }
  return best;
}

KronFibersArray fibers_array(const KronFibersArray& array, const KronFibersChain& chain, const Rows& rows) {
  KronFibersArray found = array;
  found.rows = rows;
  found.dense = chain.columns == 0 && rows.inner >= chain.rows && rows.stride == found.run;
  // Without gaps between samples, four elements may belong to two of them.
  const bool whole_tiles = found.dense && vectors_fit({rows.data, 1, 0, 0}, 4, chain.dtype) && chain.samples * found.run % 4 == 0;
  const bool whole_runs = found.run % 4 == 0 && (chain.columns == 0 || chain.inner % 4 == 0) && vectors_fit(rows, 4, chain.dtype);
  found.together = whole_tiles || whole_runs ? 4 : 1;
  return found;
}

}  // namespace cuops
