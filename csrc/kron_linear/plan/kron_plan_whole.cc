// The plan of the kernels of kron_linear_whole.cu: which axes the factors make, and how large a tile is.
#include <algorithm>
#include <cmath>

#include "kron_plan.h"

namespace cuops {
namespace {

constexpr double kStart = 7500;     // cycles
constexpr double kWeight = 0.2;     // cycles, for an element of a factor
constexpr double kOverhead = 1.45;  // of what surrounds the products
constexpr double kElement = 0.12;   // cycles, for an element of a tile; as much again for an outer axis
constexpr double kTile = 3000;      // cycles, that blocks of a multiprocessor share in part but for pairs
// Of the shorter of memory and arithmetic, with and without another tile to turn to.
constexpr double kHidden = 0.3, kExposed = 0.8;

struct Choice {
  int count[3];  // factors of the outer axis, the rows, and the columns
  int samples, buffers, warps;
};

KronGroup evaluate(const KronProblem& problem, const KronDevice& device, const Choice& choice) {
  KronGroup group(problem);
  const bool pairs = problem.dtype == kFloat32 && !problem.tf32, has_outer = choice.count[0] > 0;
  const bool bfloat = problem.dtype == kBFloat16;
  const std::int64_t element = size_of(problem.dtype);
  KronWholeParams& p = group.params.emplace<KronWholeParams>();
  std::int64_t at = 0, in = 1, out = 1;
  auto reserve = [&](std::int64_t units) {
    at += units;
    return static_cast<int>(at - units);
  };
  p.zero = reserve(2);
  p.factors_at = reserve(ceil_div(sizeof(KronFactor) * kKronFactors, 16));
  p.scales = reserve(ceil_div(4 * (kKronFactors + 2 * choice.samples), 16));
  double weight_elements = 0;
  std::int64_t last_in = 1;
  for (int j = choice.count[0] + choice.count[1]; j < group.count; ++j) last_in *= problem.sizes[j].in;
  const int row_tiles = !pairs && last_in >= 64 ? 2 : 1;  // of 16 rows, that a warp multiplies; as kron_linear_whole.cu has them
  for (int i = 0, first = 0; i < 3; ++i) {
    KronWholeStep& s = p.step[i];
    s.first = first;
    s.count = choice.count[i];
    std::int64_t step_out = 1, step_in = 1;
    for (int j = 0; j < s.count; ++j) {
      step_out *= problem.sizes[first + j].out;
      step_in *= problem.sizes[first + j].in;
    }
    if (std::max(step_out, step_in) > 128) return group;
    first += s.count;
    in *= step_in;
    out *= step_out;
    s.out = static_cast<int>(step_out);
    s.in = static_cast<int>(step_in);
    s.rows = static_cast<int>(round_up(s.out, i == 1 ? 16 * row_tiles : 16));
    s.columns = static_cast<int>(round_up(s.in, 16));
    s.pitch = s.columns / 8 + 1;
    s.by_columns = kron_divisor(s.columns);
    if (s.count == 0) continue;
    s.weight = reserve(s.rows * s.pitch);
    s.weight_low = pairs || (bfloat && i == 1 && s.count > 1) ? reserve(s.rows * s.pitch) : s.weight;
    weight_elements += static_cast<double>(s.rows) * s.columns * (s.count == 1 ? 3 : 2 + 5 * s.count);
  }
  const KronWholeStep &outer = p.step[0], &rows = p.step[1], &columns = p.step[2];
  p.columns_log = log_from(columns.in);
  if (columns.in < 16 || columns.in != 1 << p.columns_log || columns.out % 16 != 0 || rows.in % 16 != 0) return group;
  p.groups = rows.rows / (16 * row_tiles);
  // Where results replace the state, all warps of a slice work on it at the same time.
  if (has_outer && (choice.samples > 1 || choice.warps % p.groups != 0 || rows.out > rows.in || columns.out > columns.in ||
                    rows.out * columns.out % 32 != 0))
    return group;
  p.factor_count = group.count;
  p.rows = problem.rows;
  p.samples = choice.samples;
  p.tiles = ceil_div(p.rows, p.samples);
  p.buffers = choice.buffers;
  p.units = element == 4 ? 2 : 1;
  p.pitch = columns.in / 8 * p.units + 1;
  p.slice_gap = has_outer ? 1 - rows.in * p.pitch % 2 : 0;
  p.slice_pitch = rows.in * p.pitch + p.slice_gap;
  const std::int64_t state = 1LL * p.samples * outer.in * p.slice_pitch;
  for (int i = 0; i < 2; ++i) p.state[i] = i < p.buffers ? reserve(state) : p.state[0];
  const std::int64_t shared = 16 * at;
  if (shared > device.shared_bytes || in % 256 != 0) return group;
  p.sample_out = static_cast<int>(out);
  p.sample_chunks = static_cast<int>(in / 8);
  p.sample_pieces = static_cast<int>(in * element / 16);
  p.slice_units = rows.out * columns.out / 16;
  p.by_sample_chunks = kron_divisor(p.sample_chunks);
  p.by_sample_pieces = kron_divisor(p.sample_pieces);
  p.by_groups = kron_divisor(p.groups);
  p.by_in_rows = kron_divisor(rows.in);
  p.by_row_units = kron_divisor(columns.out / 16);
  // x is held below 2^15 and every weight below 2^15, so sums of n products stay below n 2^30.
  p.shift = (bfloat ? kBFloatWeightTop : kWeightTop) + log_from(rows.in);
  p.outer_shift = kWeightTop + log_from(columns.in);
  p.last_shift = kWeightTop + log_from(rows.in) + (has_outer ? p.outer_shift : 0) - 14;
  for (const KronWholeStep& s : p.step) p.last_shift += s.count > 0 ? s.count - kWeightTop : 0;
  p.dtype = problem.dtype;

  static Kernel kernels[] = {{"kron_linear_whole", "kron_whole_single"},
                             {"kron_linear_whole", "kron_whole_pairs"},
                             {"kron_linear_whole", "kron_whole_pairs_128"}};
  const int which = !pairs ? 0 : columns.in == 128 ? 2 : 1, most_warps = which == 2 ? 8 : 16;
  group.kernel = &kernels[which];
  group.samples = p.samples;
  // Two large factors in one product each are the vendor's, whose tiles are larger.
  if (choice.warps > most_warps || (!pairs && columns.in == 128)) return group;
  const int by_shared = static_cast<int>(device.shared_bytes_a_multiprocessor / (shared + 1024));
  const int resident = std::max(1, std::min(by_shared, most_warps / choice.warps));
  const std::int64_t blocks = std::min<std::int64_t>(p.tiles, 1LL * device.multiprocessors * resident);
  group.shape = {static_cast<unsigned>(blocks), static_cast<unsigned>(32 * choice.warps), 1, 1, static_cast<unsigned>(shared)};

  const double slices = 1.0 * p.samples * outer.in, rounds = std::ceil(slices * p.groups / choice.warps);
  const double own =
      rounds * choice.warps * (1.0 * rows.columns / 16 * columns.in / 8 + 1.0 * columns.columns / 16 * columns.out / 8);
  const double later = has_outer ? outer.rows / 16.0 * outer.columns / 16 * p.slice_units * 2 : 0;
  const double products = pairs ? 3 : 1, elements = 1.0 * p.samples * in;
  const double active = std::min<double>(blocks, device.multiprocessors), together = blocks / active;
  const double busy = std::max(1.0, (pairs ? 8 : 16) / (choice.warps * together));  // few warps do not fill the tensor cores
  const double compute = ((own + later) * products * kMmaCycles * busy * kOverhead +
                          elements * kElement * ((pairs ? 1 : 1.7) + has_outer) + kTile / (pairs ? 1 : std::sqrt(together))) *
                         (device.cuda < 120 ? kOldCompiler : 1);
  const double share = std::min(kMostBytesACycle, kBytesACycle * device.multiprocessors / active);
  const double memory = 1.0 * p.samples * (in + out) * element / share;
  const double waves = std::ceil(static_cast<double>(p.tiles) / active);
  const double overlap = p.buffers * together > 1 ? kHidden : kExposed;
  const double tile = std::max(compute, memory) + overlap * std::min(compute, memory);
  group.fused = true;
  group.nanoseconds = kLaunch + (kStart + weight_elements * kWeight + waves * tile) / kClock;
  group.bytes = static_cast<double>(element) * problem.rows * (in + out);
  group.operations = 2.0 * problem.rows * (in * rows.out + in / rows.in * rows.out * columns.out);
  if (has_outer) group.operations += 2.0 * problem.rows * outer.in * out;
  return group;
}

}  // namespace

KronGroup plan_whole(const KronProblem& problem, const KronDevice& device) {
  KronGroup best(problem);
  if (device.tuned != 90 || problem.dtype == kFloat64 || problem.inner != 1 || best.count > kKronFactors || best.count < 2)
    return best;
  for (int outer = 0; outer < best.count - 1; ++outer) {
    for (int rows = 1; outer + rows < best.count; ++rows) {
      for (int samples = 1; samples <= 32 && (samples == 1 || samples < 2 * problem.rows); samples *= 2) {
        for (const int buffers : {1, 2}) {
          for (const int warps : {4, 8, 16}) {
            KronGroup group = evaluate(problem, device, {{outer, rows, best.count - outer - rows}, samples, buffers, warps});
            if (group.nanoseconds < best.nanoseconds) best = std::move(group);
          }
        }
      }
    }
  }
  return best;
}

}  // namespace cuops
