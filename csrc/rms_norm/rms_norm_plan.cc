#include "rms_norm_plan.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "host/tensor.h"
#include "rms_norm_fwd_kernels.h"

namespace cuops {
namespace {

// What calls ask for. But for the last ones, rows have one stride and there is no bias.
enum Calls {
  kCommon,        // a weight of x's dtype, as y
  kWithResidual,  // the same and a residual
  kWithoutWeight,
  kWithWideWeight,  // of float32 beside 16 bits
  kWithMixedF16,    // h of float32, beside it a residual and y of 16 bits; a weight of one of these or none
  kWithMixedBF16,
  kOthers
};

// What a plan depends on.
struct Problem {
  std::int64_t rows, n;
  DType dtype;
  Calls calls;
  bool aligned;  // all arrays can be moved in vectors
  bool alike;    // or all rows start alike, so that unaligned ones can be
  bool usual;    // what has not the dtype of x is float32 beside 16 bits, or 16 bits beside float32

  int width() const { return width_of(dtype); }
  std::int64_t packs() const { return n / width(); }
  bool is_large() const { return rows * n > 1 << 22; }
  // Whether it counts that lanes without a vector ask for nothing of memory.
  bool wants_lanes_full() const { return aligned && rows * n > 1 << 21 && dtype != kFloat64; }
  // Vectors a thread, 3 or 5, where these leave fewer lanes without one and there are kernels for them; else 0.
  unsigned odd_vectors(const Hardware& hw) const { return hw.tuned == 90 && wants_lanes_full() ? cuops::odd_vectors(packs()) : 0; }
};

// Whether all rows of two arrays start as many elements after a multiple of a pack's, so that packs start side by side.
bool start_alike(const Rows& a, DType a_dtype, const Rows& b, DType b_dtype, int width) {
  auto first = [](const Rows& rows, DType dtype) { return reinterpret_cast<std::intptr_t>(rows.data) / size_of(dtype); };
  return (first(a, a_dtype) - first(b, b_dtype)) % width == 0 && (a.stride - b.stride) % width == 0;
}

Calls calls_of(const RmsNormFwdParams& p, DType dtype) {
  const bool residual = p.residual.data != nullptr;
  const bool one_stride =
      has_one_stride(p.x) && has_one_stride(p.y) && (!residual || (has_one_stride(p.residual) && has_one_stride(p.h)));
  if (!one_stride || p.bias != nullptr) return kOthers;
  const DType weight = p.weight ? p.weight_dtype : dtype;
  if (residual && dtype == kFloat32 && size_of(p.y_dtype) == 2 && p.residual_dtype == p.y_dtype &&
      (weight == dtype || weight == p.y_dtype))
    return p.y_dtype == kFloat16 ? kWithMixedF16 : kWithMixedBF16;
  if (p.y_dtype != dtype || (residual && p.residual_dtype != dtype)) return kOthers;
  if (residual) return p.weight && weight == dtype ? kWithResidual : kOthers;
  if (weight == dtype) return p.weight ? kCommon : kWithoutWeight;
  return weight == kFloat32 && size_of(dtype) == 2 ? kWithWideWeight : kOthers;
}

Problem problem_of(const RmsNormFwdParams& p, DType dtype) {
  Problem problem{p.rows, p.n, dtype};
  const int width = problem.width();
  const bool fits = problem.packs() <= 1 << 30;  // indices of vectors, and what threads add to them
  problem.calls = calls_of(p, dtype);
  problem.aligned = fits && p.n % width == 0 && vectors_fit(p.x, width, dtype) &&
                    vectors_fit(p.residual, width, p.residual_dtype) && vectors_fit(p.h, width, dtype) &&
                    vectors_fit(p.y, width, p.y_dtype) && aligned16(p.weight) && aligned16(p.bias);
  auto is_alike = [&](const Rows& rows, DType of) { return has_one_stride(rows) && start_alike(p.x, dtype, rows, of, width); };
  problem.alike = fits && aligned16(p.weight) && aligned16(p.bias) && is_alike(p.x, dtype) && is_alike(p.y, p.y_dtype) &&
                  (p.residual.data == nullptr || (is_alike(p.residual, p.residual_dtype) && is_alike(p.h, dtype)));
  auto is_usual = [&](const void* data, DType of) {
    const bool is_wide = size_of(dtype) == 2 && of == kFloat32, is_narrow = dtype == kFloat32 && size_of(of) == 2;
    return data == nullptr || of == dtype || is_wide || is_narrow;
  };
  problem.usual = is_usual(p.weight, p.weight_dtype) && is_usual(p.bias, p.bias_dtype) && is_usual(p.y.data, p.y_dtype) &&
                  is_usual(p.residual.data, p.residual_dtype);
  return problem;
}

unsigned power_of_two_from(std::int64_t least) { return 1u << log_from(least); }

// For wide rows, 8 vectors a thread: clusters that stay until all rows are done, and how many the GPU runs at once. That may be
// none, of a part of a GPU.
std::pair<LaunchShape, int> stay_shape(const Problem& problem, int device) {
  const unsigned cluster = problem.packs() <= 3072 ? 2 : problem.packs() <= 32768 ? 8 : 16;
  LaunchShape shape{0, threads_for(problem.packs(), 8 * cluster), 1, cluster};
  const int at_once = clusters_at_once(kernel_of(problem.dtype, kStay), device, shape);
  shape.blocks = cluster * static_cast<unsigned>(std::min<std::int64_t>(problem.rows, at_once));
  return {shape, at_once};
}

using Planned = std::pair<Variant, LaunchShape>;

// Rows that fill their threads, and these their blocks.
std::optional<Planned> plan_filled(const Problem& problem, const Hardware& hw) {
  const std::int64_t rows = problem.rows, packs = problem.packs();
  if (!problem.aligned || problem.dtype == kFloat64 || problem.calls > kWithWideWeight || !hw.tuned) return {};
  auto fills = [&](std::int64_t vectors, const LaunchShape& shape) {
    return packs == vectors * shape.block_x && rows % shape.block_y == 0;
  };
  static_assert(kFull + 4 * kWithResidual == kFullResidual && kFull + 4 * kWithoutWeight == kFullNoWeight &&
                kFull + 4 * kWithWideWeight == kFullWideWeight);
  const Variant full = static_cast<Variant>(kFull + 4 * problem.calls);
  const bool passes = released_from(rows, problem.n * size_of(problem.dtype), hw) != kNoRow;  // L2 is smaller than x
  // Vectors in all from which on 4 a thread are faster. Of fewer, multiprocessors have few threads; and beside a weight of float32
  // these have registers for fewer vectors.
  auto least = [&]() -> long long {
    if (packs == 128) return 1 << 18;
    if (problem.calls == kWithWideWeight) return kNoRow;
    return packs < 128 || problem.dtype == kFloat32 || problem.calls == kWithResidual ? 1 << 19 : 3 << 16;
  };
  const bool in_block = packs > 128;
  if (hw.tuned == 90 && !passes && rows * packs >= least() && (in_block ? 384 <= packs && packs <= 1024 : 32 <= packs)) {
    const LaunchShape shape = resident_shape(rows, packs, 4, 256);
    if (fills(4, shape)) return Planned(static_cast<Variant>(full + (in_block ? 3 : 1)), shape);
  }
  const LaunchShape shape = resident_shape(rows, packs, 2, 256);
  if (packs > (problem.is_large() ? 256 : 512) || !fills(2, shape)) return {};
  if (hw.tuned == 90 && !passes) return Planned(static_cast<Variant>(full + (shape.block_x > 32 ? 2 : 0)), shape);
  if (problem.calls == kCommon && shape.block_x <= 32) return Planned(hw.tuned == 90 ? kFullPassing : kFull, shape);
  return {};
}

// Kernels of rows in registers with options. kAny where there is none.
struct WithOptions {
  Variant two, three, five, four, eight;  // vectors a thread
};

WithOptions with_options(Calls calls, const Hardware& hw) {
  if (calls == kWithoutWeight) return {kShortNoWeight, kThreeNoWeight, kThreeNoWeight, kMiddleNoWeight, kWideNoWeight};
  if (hw.tuned == 90) {
    if (calls == kWithWideWeight) return {kShortWideWeight, kThreeWideWeight, kFiveWideWeight, kMiddleWideWeight, kWideWideWeight};
    if (calls == kWithMixedF16) return {kShortMixedF16, kThreeMixedF16, kFiveMixedF16, kMiddleMixedF16, kWideMixedF16};
    if (calls == kWithMixedBF16) return {kShortMixedBF16, kThreeMixedBF16, kFiveMixedBF16, kMiddleMixedBF16, kWideMixedBF16};
  }
  return {kShortOptions, kAny, kAny, kMiddleOptions, kWideOptions};
}

// Of unaligned rows, where two vectors a thread are enough for them: short ones, and longer ones of which there are few.
std::optional<LaunchShape> short_phased_shape(const Problem& problem) {
  const std::int64_t rows = problem.rows, packs = problem.packs();
  const bool few = rows <= 1024 && rows * problem.n <= 1 << 21;
  if (packs > (few ? 512 : 32)) return {};
  return resident_shape(rows, std::max<std::int64_t>(packs, few ? 64 : packs < 8 ? 16 : 8), 2, 256);
}

// Of rows in registers, those of calls that are not common.
std::optional<Planned> plan_with_options(const Problem& problem, const Hardware& hw, int device) {
  auto if_room = [&](Variant variant, LaunchShape shape) {
    const bool has = has_room(kernel_of(problem.dtype, variant), device, shape);
    return has ? std::optional(Planned(variant, shape)) : std::nullopt;
  };
  const std::int64_t rows = problem.rows, packs = problem.packs();
  if (!hw.tuned || problem.dtype == kFloat64 || !problem.usual) return {};
  const WithOptions kernels = with_options(problem.calls, hw);
  const bool no_weight = problem.calls == kWithoutWeight, wide_weight = problem.calls == kWithWideWeight && hw.tuned == 90;
  const unsigned odd = kernels.three != kAny ? problem.odd_vectors(hw) : 0;
  if (odd == 3 || (odd == 5 && no_weight)) return Planned(kernels.three, resident_shape(rows, packs, 3, 128));
  if (odd == 5) return Planned(kernels.five, resident_shape(rows, packs, 5, 128));
  if (problem.aligned) {
    const std::int64_t most = !problem.is_large() ? 512 : no_weight ? 256 : 64;
    if (packs <= most && !(problem.wants_lanes_full() && leaves_room(packs)))
      return if_room(kernels.two, resident_shape(rows, packs, 2, 256));
    // A few rows have several multiprocessors each.
    const bool few = hw.clusters() && rows <= 16 && 1024 < packs && packs <= 4096;
    if (few || packs <= (wide_weight ? 768 : 1536)) return if_room(kernels.four, resident_shape(rows, packs, 4, few ? 128 : 384));
    if (packs <= 2048 * hw.largest_cluster) return if_room(kernels.eight, resident_shape(rows, packs, 8, 256));
  } else if (problem.alike) {
    if (const auto shape = short_phased_shape(problem)) return if_room(kPhasedShortOptions, *shape);
    if (wide_weight && packs <= 1024 * hw.largest_cluster)
      return if_room(kPhasedWideWeight, resident_shape(rows, std::max<std::int64_t>(packs, 8), 4, 256));
    if (packs <= 2048 * hw.largest_cluster) return if_room(kPhasedOptions, resident_shape(rows, packs, 8, 256));
  }
  return {};
}

// The kernels whose rows stay in registers, where one of them is for the problem: what is fastest where, as measured
// (docs/design/rms_norm.md).
std::optional<Planned> plan_in_registers(const Problem& problem, const Hardware& hw, int device) {
  const std::int64_t rows = problem.rows, packs = problem.packs();
  const bool is_double = problem.dtype == kFloat64, is_float32 = problem.dtype == kFloat32;
  const bool in_vectors = problem.aligned && !is_double;
  const unsigned odd = problem.odd_vectors(hw);
  if (const auto filled = plan_filled(problem, hw)) return filled;
  if (problem.calls == kWithResidual && in_vectors && packs <= 1024 && hw.tuned) {
    if (odd && 32 < packs && packs <= 96) return Planned(kResidualThree, resident_shape(rows, packs, 3, 128));
    // More blocks a multiprocessor, for rows that do not fill a second turn of blocks; in float32 fewer rows are faster so, too.
    if (hw.tuned == 90 && 512 < packs && !problem.is_large() && (is_float32 || rows > 2 * hw.multiprocessors))
      return Planned(kResidualFew, is_float32 ? resident_shape(rows, packs, 4, 256) : resident_shape(rows, packs, 2, 512));
    return Planned(kResidual, resident_shape(rows, packs, 2, 512));
  }
  if (problem.calls == kWithResidual && in_vectors && hw.tuned == 90 && hw.clusters()) {
    const bool few = rows <= 16 && packs <= 4096;
    const unsigned most = few ? 128 : packs <= 1216 || packs > 1024 * hw.largest_cluster ? 384 : 256;
    const LaunchShape shape = resident_shape(rows, packs, 4, most);
    if (shape.cluster <= hw.largest_cluster && has_room(kernel_of(problem.dtype, kResidualFour), device, shape))
      return Planned(kResidualFour, shape);
  }
  if (problem.calls != kCommon) return plan_with_options(problem, hw, device);
  if (!hw.tuned) return {};
  if (odd) return Planned(odd == 3 ? kThree : kFive, resident_shape(rows, packs, odd, 128));
  // Where caches hold x, the time is that of starting blocks, of which this leaves a quarter or half.
  const bool many_blocks = 32 < packs && packs <= 128 && rows >= (packs > 64 ? 2048 : 16384) && rows * packs <= 1 << 20;
  if ((problem.wants_lanes_full() && leaves_room(packs)) || (in_vectors && many_blocks))
    return Planned(kMiddle, resident_shape(rows, packs, 4, 384));
  if (in_vectors && packs <= (problem.is_large() ? 256 : 512)) return Planned(kShort, resident_shape(rows, packs, 2, 256));
  if (in_vectors && problem.is_large() && packs <= 1024) return Planned(kMiddle, resident_shape(rows, packs, 4, 384));
  if (problem.wants_lanes_full() && 1024 < packs && packs <= (is_float32 || !hw.clusters() ? 1536 : 1792)) {
    // Two blocks of 4 vectors a thread, rather than one, where more of their threads are on a multiprocessor at once.
    const bool in_two = hw.clusters() && (is_float32 ? packs > 1280 : 1216 < packs && packs <= 1280);
    return Planned(kMiddle, resident_shape(rows, packs, 4, in_two ? 256 : 384));
  }
  // A few rows have several multiprocessors each.
  if (in_vectors && hw.clusters() && rows <= 16 && 1024 < packs && packs <= 4096)
    return Planned(kMiddle, resident_shape(rows, packs, 4, 128));
  // Blocks that have a row alone are faster than clusters once there are many for each multiprocessor.
  if (in_vectors && hw.capability == 90 && 2048 < packs && packs <= 4096 && (rows >= 20 * hw.multiprocessors || !hw.clusters())) {
    if (hw.clusters() && problem.dtype == kBFloat16 && 3000 < packs && packs <= 3072)
      return Planned(kMiddle, resident_shape(rows, packs, 4, 384));
    return Planned(kLate, resident_shape(rows, packs, 8, 512));
  }
  if (problem.aligned && packs <= 2048 * (is_double ? hw.largest_cluster : std::min(hw.largest_cluster, 2u))) {
    // Between, its blocks have fewer threads, and no room for more blocks.
    const LaunchShape shape = resident_shape(rows, packs, 8, 256);
    const bool better = is_double || packs <= 2048 || packs > 3840 || rows <= 256;
    if (better && has_room(kernel_of(problem.dtype, kWide), device, shape)) return Planned(kWide, shape);
  }
  if (in_vectors && hw.clusters() && packs <= 4096 * hw.largest_cluster) {
    const auto [stay, at_once] = stay_shape(problem, device);
    // A few more rows than that do not wait for those.
    if (hw.capability == 90 && 16384 < packs && packs <= 32768 && at_once < rows && 3 * rows <= 4 * at_once) {
      LaunchShape shape = resident_shape(rows, packs, 8, 512);
      if (rows <= clusters_at_once(kernel_of(problem.dtype, kLate), device, shape)) return Planned(kLate, shape);
    }
    if (at_once > 0) return Planned(kStay, stay);
  }
  if (problem.alike && packs <= 2048 && !is_double) {
    if (const auto shape = short_phased_shape(problem)) return Planned(kPhasedShort, *shape);
    return Planned(kPhased, resident_shape(rows, packs, 8, 256));
  }
  return {};
}

// Few long rows that L2 holds, in parts on all multiprocessors: where that is faster than a cluster a row, as measured.
std::optional<LaunchShape> plan_in_parts(const Problem& problem, const Hardware& hw) {
  if (problem.calls != kCommon || !problem.alike || !hw.tuned || problem.dtype == kFloat64) return {};
  const bool registers_hold = problem.aligned && problem.packs() <= 65536;
  if (problem.packs() < (registers_hold ? 32768 : 16384) || problem.rows > (registers_hold ? 3 : 8)) return {};
  if (problem.rows * problem.n * size_of(problem.dtype) > 32 << 20) return {};
  // One block a multiprocessor, or several that are smaller.
  const std::int64_t share = (problem.rows * problem.packs() + hw.multiprocessors - 1) / hw.multiprocessors;
  const unsigned threads = share <= 512 * kPartVectors ? std::max(threads_for(share, kPartVectors), 128u) : 256;
  const std::int64_t parts = (problem.packs() + threads * kPartVectors - 1) / (threads * kPartVectors);
  return LaunchShape{static_cast<unsigned>(problem.rows * parts), threads, 1, 1, 0, true};
}

// The others bring rows to shared memory: 64 KiB a block, and more where clusters end.
Planned plan_in_shared_memory(const Problem& problem, const Hardware& hw, unsigned largest_cluster, RmsNormFwdParams* p) {
  const bool is_long = problem.calls == kCommon && problem.alike && hw.tuned && problem.dtype != kFloat64;
  const Variant variant = is_long ? kLong : problem.aligned ? kVectors : kAny;
  const std::int64_t items = variant == kAny ? problem.n : problem.packs();
  unsigned cluster = std::min(power_of_two_from(ceil_div(items, 4608)), largest_cluster);
  // A few rows have several multiprocessors each, and very few all of their shared memory: of clusters with one block a
  // multiprocessor, the GPU runs few at once.
  while (is_long && cluster < largest_cluster && items > 1024 * cluster && 2 * problem.rows * cluster <= hw.multiprocessors)
    cluster *= 2;
  const bool few = is_long && hw.clusters() && problem.rows * cluster <= hw.multiprocessors;
  const unsigned threads = std::max(32u, std::min(threads_for(items, (few ? 2 : 8) * cluster), 512u));
  const std::int64_t each = std::max<std::int64_t>((items + threads * cluster - 1) / (threads * cluster), 1);
  const std::int64_t most = std::min(hw.shared_bytes - 4096, few && problem.rows <= 4 ? 220 << 10 : 72 << 10) / (16 * threads);
  p->chunk = static_cast<int>(std::min(each, most));
  p->chunks = static_cast<int>((each + p->chunk - 1) / p->chunk);
  p->first_chunk = static_cast<int>(each - static_cast<std::int64_t>(p->chunks - 1) * p->chunk);
  const unsigned shared_bytes = variant == kAny ? 0 : p->chunk * threads * 16;
  return {variant, {static_cast<unsigned>(problem.rows) * cluster, threads, 1, cluster, shared_bytes}};
}

}  // namespace

LaunchShape resident_shape(std::int64_t rows, std::int64_t packs, unsigned resident, unsigned most) {
  const unsigned blocks = static_cast<unsigned>(rows);
  if (packs <= 32 * resident) {  // parts of warps
    const unsigned lanes = power_of_two_from(ceil_div(packs, resident));
    const unsigned side_by_side = 128 / lanes;
    return {(blocks + side_by_side - 1) / side_by_side, lanes, side_by_side};
  }
  const unsigned cluster = power_of_two_from(ceil_div(packs, most * resident));
  return {blocks * cluster, threads_for(packs, resident * cluster), 1, cluster};
}

unsigned odd_vectors(std::int64_t packs) {
  for (std::int64_t lanes : {8, 16, 32, 64, 128}) {
    if (32 <= lanes && lanes < packs && 4 * packs <= 5 * lanes) return 5;
    if (lanes <= 64 && lanes < packs && 2 * packs <= 3 * lanes) return 3;
  }
  return 0;
}

bool leaves_room(std::int64_t packs) {
  for (std::int64_t full = 16; full <= 128; full *= 2) {
    if (full / 2 < packs && 1.3 * packs <= full) return true;
  }
  return false;
}

long long released_from(std::int64_t rows, std::int64_t row_bytes, const Hardware& hw) {
  const std::int64_t l2 = (hw.capability >= 100 ? 128 : 48) << 20;
  return rows * row_bytes <= l2 ? kNoRow : rows - l2 / row_bytes;
}

RmsNormFwdPlan plan_rms_norm_fwd(RmsNormFwdParams* p, DType dtype, int device, bool may_allocate) {
  const Problem problem = problem_of(*p, dtype);
  const Hardware& hw = hardware("rms_norm_any", device);  // the source that every GPU has code of
  if (may_allocate) {
    if (const auto shape = plan_in_parts(problem, hw)) {
      p->parts = shape->blocks / problem.rows;
      return {kernel_of(dtype, kParts), *shape, &kernel_of(dtype, kSums)};
    }
  }
  const auto in_registers = plan_in_registers(problem, hw, device);
  auto in_shared_memory = [&] {
    const auto found = plan_in_shared_memory(problem, hw, hw.largest_cluster, p);
    return has_room(kernel_of(dtype, found.first), device, found.second) ? found : plan_in_shared_memory(problem, hw, 8, p);
  };
  auto [variant, shape] = in_registers ? *in_registers : in_shared_memory();
  // Short unaligned rows: to give lines back would cost more than it gains, unless x is much larger than L2.
  const bool keeps = has_one_stride(p->x) && (!p->residual.data || has_one_stride(p->residual)) &&
                     (variant != kPhasedShort || problem.rows * problem.n * size_of(dtype) > 96 << 20);
  p->released_from = keeps ? released_from(problem.rows, problem.n * size_of(dtype), hw) : kNoRow;
  // The start of a launch counts in short kernels; where blocks are many or small, asking costs them more than it gains.
  const bool few_blocks = shape.blocks <= 8192 && shape.block_x * shape.block_y >= 128;
  shape.overlaps = p->overlaps = !problem.is_large() || (few_blocks && problem.rows * problem.n <= 1 << 24);
  return {kernel_of(dtype, variant), shape};
}

}  // namespace cuops
