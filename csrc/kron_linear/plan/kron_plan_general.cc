// The plan of the kernel of kron_linear.cu, which takes any sizes: a search for the tile that the model likes best.
#include <algorithm>
#include <cmath>

#include "kron_plan.h"

namespace cuops {
namespace {

// What the model assumes, measured on an H200 and scaled by multiprocessors elsewhere (docs/design/kron_linear.md).
constexpr double kBandwidth = 30.0;              // bytes a nanosecond a multiprocessor, at most
constexpr double kPrologue = 8000;               // ns, for weights and tables
constexpr double kOverhead[] = {1.0, 1.6, 1.7};  // of what surrounds the products, by KronArithmetic
constexpr double kDoubleMmaCycles = 8.5;         // for one m16n8k8
constexpr double kSharedBytesACycle = 110;       // of a multiprocessor
constexpr double kSingle = 1.0;  // cycles of an element that moves by itself (of 16 bits: or of four together), not in a vector

// The factors of a step: `count` neighbours, merged.
struct Merged {
  int first, count;
  std::int64_t out, in;
};

// Small neighbours merge, from the innermost outwards, as long as their product stays within `limit`.
std::vector<Merged> merge(const std::vector<KronSize>& sizes, std::int64_t limit) {
  std::vector<Merged> merged;
  for (int i = static_cast<int>(sizes.size()) - 1; i >= 0; --i) {
    if (!merged.empty() && std::max(merged.back().out * sizes[i].out, merged.back().in * sizes[i].in) <= limit) {
      Merged& m = merged.back();
      m = {i, m.count + 1, m.out * sizes[i].out, m.in * sizes[i].in};
    } else {
      merged.push_back({i, 1, sizes[i].out, sizes[i].in});
    }
  }
  std::reverse(merged.begin(), merged.end());
  return merged;
}

struct Choice {
  std::vector<Merged> merged;
  int samples, slices, columns, buffers, warps;
};

// Bytes and cycles of a step's work in shared memory and in the tensor cores, for one tile.
struct StepCost {
  double cycles, operations;
};

// A warp's tile for a step, and what the step takes; shapes are those that kron_linear.cu has.
StepCost shape_step(KronStep* step, std::int64_t fibers, KronArithmetic arithmetic, int warps) {
  const double operations = 2.0 * fibers * step->in * step->out;
  if (arithmetic == kKronPlain) {
    step->team = 1;
    step->weight_rows = step->out;
    return {operations / 2 / 64 * 3, operations};
  }
  constexpr int kM = 2, kN = 4;  // products of 16 rows and 8 columns
  const bool doubles = arithmetic == kKronDouble;
  const int products = doubles ? 1 : 1 + step->split_state + step->split_weight;
  const int outs = step->innermost ? kN * 8 : kM * 16;
  const int team = 1 << log_from(ceil_div(step->out, outs));
  if (team > warps) return {INFINITY, operations};
  const std::int64_t fibers_a_warp = step->innermost ? kM * 16 : kN * 8;
  const double rounds = static_cast<double>(ceil_div(fibers, fibers_a_warp * (warps / team)));
  const double k = static_cast<double>(ceil_div(step->in, doubles ? 8 : 16));
  const double mma = warps * kM * kN * k * (doubles ? kDoubleMmaCycles : products * kMmaCycles);
  double bytes;
  if (doubles) {
    bytes = warps * (k * 1024 * (kM + kN / 2) + kM * kN * 1024.0);
  } else {
    const double weight = (1.0 + step->split_weight) * (step->innermost ? kN * 256 : kM * 512);
    const double state = (1.0 + step->split_state) * (step->innermost ? kM * 512 : kN * 256);
    bytes = warps * (k * (weight + state) + kM * kN * 512.0);
  }
  step->team = team;
  step->weight_rows = team * outs;
  return {rounds * (std::max(mma, bytes / kSharedBytesACycle) + 250), operations};
}

Kernel& kernel_of(DType dtype) {
  static Kernel kernels[] = {{"kron_linear", "kron_linear_fwd_f64"}, {"kron_linear", "kron_linear_fwd_f32"}};
  return kernels[dtype != kFloat64];
}

// The parameters and the predicted time of one choice; infinite where it does not fit.
KronGroup evaluate(const KronProblem& problem, const KronDevice& device, const Choice& choice) {
  KronGroup group(problem);
  KronFwdParams& p = group.params.emplace<KronFwdParams>();
  const KronArithmetic arithmetic = problem.arithmetic;
  const bool halves = size_of(problem.dtype) == 2 && arithmetic != kKronPlain;
  const bool pairs = problem.dtype == kFloat32 && arithmetic == kKronScaled && !problem.tf32;
  const int units = problem.dtype == kFloat64 ? 4 : 2, steps = static_cast<int>(choice.merged.size());
  const std::int64_t element = size_of(problem.dtype);
  p.steps = steps;
  p.axes = steps + (choice.columns > 0);
  p.samples = choice.samples;
  p.columns = choice.columns;
  p.column_tiles = choice.columns ? static_cast<int>(ceil_div(problem.inner, choice.columns)) : 1;
  p.slices = choice.slices;
  p.buffers = choice.buffers;
  p.rows = problem.rows;
  p.inner = problem.inner;
  const int last = p.axes - 1;
  for (int axis = 0; axis < kKronAxes; ++axis) p.in[axis] = p.out[axis] = 1;
  for (int i = 0; i < steps; ++i) {
    p.in[i] = static_cast<int>(choice.merged[i].in);
    p.out[i] = static_cast<int>(choice.merged[i].out);
  }
  if (choice.columns) p.in[last] = p.out[last] = choice.columns;
  p.sliced_out = p.out[0];
  p.out[0] = static_cast<int>(ceil_div(p.out[0], choice.slices));
  // Rows in shared memory are an odd multiple of so many units of 16 bytes apart, which keeps what a warp reads in different banks:
  // 8 rows of 16 bytes, or in float64 4 of 32.
  const int gap = problem.dtype == kFloat64 ? 2 : 1;
  std::int64_t stride = units * ceil_div(std::max(p.in[last], p.out[last]), 8) + gap;
  for (int axis = last - 1; axis >= 0; --axis) {
    p.stride[axis] = static_cast<int>(stride);
    stride = round_up(stride * std::max(p.in[axis], p.out[axis]) - gap, 2 * gap) + gap;
    if (stride > 16384) return group;
  }
  p.sample_stride = static_cast<int>(stride);
  p.in_rows = p.out_rows = 1;
  p.all_out_rows = last > 0 ? p.sliced_out : 1;
  for (int axis = 0; axis < last; ++axis) {
    p.in_rows *= p.in[axis];
    p.out_rows *= p.out[axis];
    if (axis > 0) p.all_out_rows *= p.out[axis];
  }
  p.in_chunks = static_cast<int>(ceil_div(p.in[last], 8));
  p.out_chunks = static_cast<int>(ceil_div(p.out[last], 8));
  p.in_pitch = choice.columns ? problem.inner : p.in[last];
  p.out_pitch = choice.columns ? problem.inner : p.out[last];
  for (int axis = 0; axis < kKronAxes; ++axis) {
    p.by_in[axis] = kron_divisor(p.in[axis]);
    p.by_out[axis] = kron_divisor(p.out[axis]);
  }
  p.by_in_rows = kron_divisor(p.in_rows);
  p.scale_lanes = 2;
  while (p.scale_lanes < 32 && (p.scale_lanes * 4 < p.in_rows * p.in_chunks || 32 * choice.warps / p.scale_lanes > p.samples))
    p.scale_lanes *= 2;
  p.by_in_chunks = kron_divisor(p.in_chunks);
  p.by_out_rows = kron_divisor(p.out_rows);

  std::int64_t at = 0;  // in shared memory
  auto reserve = [&](std::int64_t bytes) {
    const std::int64_t start = at;
    at += ceil_div(bytes, 16);
    return static_cast<int>(start);
  };
  p.zero = reserve(32);
  p.scales = reserve((kKronSteps + 2 * p.samples) * 4);
  p.in_table = reserve(2 * p.samples * p.in_rows);
  p.out_table = reserve(2 * p.samples * p.out_rows);

  p.factor_count = group.count;
  for (KronFactor& factor : p.factors) factor.raw = -1;
  for (const Merged& m : choice.merged) {
    for (int i = m.first; m.count > 1 && i < m.first + m.count; ++i) {
      p.factors[i].raw = reserve(problem.sizes[i].out * problem.sizes[i].in * (problem.dtype == kFloat64 ? 8 : 4));
    }
  }
  // Steps that shrink the tile most come first; that of a sliced axis before all others.
  std::vector<int> order(steps);
  for (int i = 0; i < steps; ++i) order[i] = i;
  std::stable_sort(order.begin() + (choice.slices > 1), order.end(), [&](int a, int b) {
    return static_cast<std::int64_t>(p.out[a]) * p.in[b] < static_cast<std::int64_t>(p.out[b]) * p.in[a];
  });
  int size[kKronAxes];
  std::copy(p.in, p.in + kKronAxes, size);
  double cycles = 0, weight_elements = 0, tile_operations = 0;
  for (int i = 0; i < steps; ++i) {
    KronStep& step = p.step[i];
    const Merged& merged = choice.merged[order[i]];
    step.first = merged.first;
    step.count = merged.count;
    step.axis = order[i];
    step.in = p.in[step.axis];
    step.out = p.out[step.axis];
    step.innermost = step.axis == last;
    for (int axis = 0; axis < kKronAxes; ++axis) step.by_size[axis] = kron_divisor(size[axis]);
    step.by_chunks = kron_divisor(step.innermost ? 1 : ceil_div(size[last], 8));
    step.split_weight = pairs || (halves && step.count > 1);
    step.split_state = pairs || (halves && i > 0);
    std::int64_t others = p.samples;  // rows of fibers
    for (int axis = 0; axis < last; ++axis)
      if (axis != step.axis) others *= size[axis];
    const std::int64_t entries = step.innermost ? others : others * ceil_div(size[last], 8);
    if (entries > 32768) return group;
    step.entries = static_cast<int>(entries);
    const StepCost cost = shape_step(&step, step.innermost ? entries : entries * 8, arithmetic, choice.warps);
    if (std::isinf(cost.cycles)) return group;
    cycles += cost.cycles + 100;
    tile_operations += cost.operations;
    const int depth = static_cast<int>(round_up(step.in, arithmetic == kKronPlain || arithmetic == kKronDouble ? 8 : 16));
    step.weight_units = halves && step.count == 1 ? 1 : units;
    step.weight_pitch = depth / 8 * step.weight_units + gap;
    step.by_columns = kron_divisor(depth);
    step.by_pieces = kron_divisor(depth * element / 16);
    step.table = reserve(2 * entries);
    step.row_scale = reserve(4 * step.weight_rows);
    step.weight = reserve(16LL * step.weight_rows * step.weight_pitch);
    weight_elements += static_cast<double>(step.weight_rows) * depth * step.count;
    size[step.axis] = step.out;
  }
  for (int i = 0; i < choice.buffers; ++i) p.state[i] = reserve(16LL * p.samples * p.sample_stride);
  if (choice.buffers == 1) p.state[1] = p.state[0];
  const std::int64_t shared = 16 * at;
  if (shared > device.shared_bytes || at > 65535) return group;

  const std::int64_t tiles = ceil_div(p.rows, p.samples) * p.column_tiles;
  const int by_shared = static_cast<int>(device.shared_bytes_a_multiprocessor / (shared + 1024));
  const int resident = std::max(1, std::min(by_shared, 16 / choice.warps));
  const std::int64_t most_blocks = std::max<std::int64_t>(1, device.multiprocessors * resident / p.slices);
  const std::int64_t waves = ceil_div(tiles, most_blocks), blocks = std::min(tiles, most_blocks);
  group.shape = {static_cast<unsigned>(blocks * p.slices), static_cast<unsigned>(32 * choice.warps), 1, 1,
                 static_cast<unsigned>(shared)};

  const double in_elements = 1.0 * p.samples * p.in_rows * p.in[last], out_elements = 1.0 * p.samples * p.out_rows * p.out[last];
  cycles += in_elements * 0.1 + out_elements * 0.06 + 40.0 * p.samples + 400;
  auto singles = [&](double elements, std::int64_t row) {
    if (problem.aligned && row * element % 16 == 0) return 0.0;
    return elements * kSingle / (problem.aligned && element == 2 && row % 4 == 0 ? 4 : 1);
  };
  const double single =
      singles(in_elements, choice.columns ? p.inner : p.in[last]) + singles(out_elements, choice.columns ? p.inner : p.out[last]);
  // The blocks of a multiprocessor take turns; what one waits for, another may hide.
  const double active = std::min<double>(blocks * p.slices, device.multiprocessors);
  const double residents = std::max(1.0, static_cast<double>(blocks * p.slices) / device.multiprocessors);
  const bool unpaired = arithmetic == kKronScaled && !pairs;
  const double compute = ((unpaired ? 2.8 : kOverhead[arithmetic]) * cycles + single) / kClock * residents;
  const double share = kBandwidth * std::min(2.0, device.multiprocessors / active);
  const double scattered = choice.columns > 0 && choice.columns * element < 128 ? 2.0 : 1.0;  // short rows
  const double memory = scattered * (in_elements + out_elements) * element / share * residents + 700;
  const double overlap = choice.buffers == 2 || resident > 1 ? 0.4 : 1;
  const double wave = std::max(compute, memory) + overlap * std::min(compute, memory);
  const double weights = kPrologue + weight_elements * 0.25 + 1500.0 * steps;
  group.fused = true;
  group.kernel = &kernel_of(problem.dtype);
  group.samples = p.samples;
  group.slices = p.slices;
  group.columns = p.columns;
  group.nanoseconds = kLaunch + weights + waves * wave;
  group.bytes = static_cast<double>(element) * problem.rows * problem.inner *
                (1.0 * p.in_rows * (choice.columns ? 1 : p.in[last]) + 1.0 * p.all_out_rows * (choice.columns ? 1 : p.out[last]));
  group.operations = tile_operations * tiles * p.slices;
  return group;
}

}  // namespace

KronGroup plan_general(const KronProblem& problem, const KronDevice& device) {
  KronGroup best(problem);
  if (best.count > kKronFactors) return best;
  std::size_t steps_before = 0;
  for (const std::int64_t limit : {1, 8, 16, 32, 64}) {
    Choice choice;
    choice.merged = merge(problem.sizes, limit);
    if (choice.merged.size() > kKronSteps || choice.merged.size() == steps_before) continue;
    steps_before = choice.merged.size();
    bool fits = true;
    const int most = problem.arithmetic == kKronPlain ? 128 : 256;
    for (const Merged& m : choice.merged) fits = fits && m.in <= most && m.out <= most;
    if (!fits) continue;
    for (const int columns : {0, 8, 16, 32, 64, 128}) {
      if ((columns == 0) != (problem.inner == 1) || columns >= 2 * round_up(problem.inner, 8)) continue;
      for (const int slices : {1, 2, 4, 8}) {
        if (slices > 1 &&
            (choice.merged[0].out % slices || choice.merged[0].out / slices < 8 || (columns == 0 && choice.merged.size() < 2)))
          continue;
        for (int samples = 1; samples <= 256 && (samples == 1 || samples < 2 * problem.rows); samples *= 2) {
          for (const int buffers : {1, 2}) {
            for (const int warps : {4, 8, 16}) {
              choice.samples = samples;
              choice.slices = slices;
              choice.columns = columns;
              choice.buffers = buffers;
              choice.warps = warps;
              KronGroup group = evaluate(problem, device, choice);
              if (group.nanoseconds < best.nanoseconds) best = std::move(group);
            }
          }
        }
      }
    }
  }
  return best;
}

}  // namespace cuops
