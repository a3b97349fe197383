#include "rms_norm_plan.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "host/tensor.h"

namespace cuops {
namespace {

// Those whose rows stay in registers are in rms_norm.cu and, those with options, in rms_norm_options.cu; the pair of
// rms_norm_parts.cu comes after them, and the last three are in rms_norm_any.cu. All but those with options and the last two are
// for the common case, kResidual and kResidualThree with a residual.
enum Variant {
  kShort,
  kFull,
  kFullFour,
  kFullPassing,
  kBlock,
  kThree,
  kFive,
  kResidual,
  kResidualThree,
  kMiddle,
  kWide,
  kLate,
  kStay,
  kPhasedShort,
  kPhased,
  kShortOptions,
  kMiddleOptions,
  kWideOptions,
  kPhasedShortOptions,
  kPhasedOptions,
  kShortNoWeight,
  kThreeNoWeight,
  kMiddleNoWeight,
  kWideNoWeight,
  kShortWideWeight,
  kThreeWideWeight,
  kFiveWideWeight,
  kMiddleWideWeight,
  kWideWideWeight,
  kPhasedWideWeight,
  kSums,
  kParts,
  kLong,
  kVectors,
  kAny
};

Kernel& kernel_of(DType dtype, Variant variant) {
  static const KernelTable table(
      "rms_norm_fwd_",
      {{"rms_norm",
        {"_short", "_full", "_full_four", "_full_passing", "_block", "_three", "_five", "_residual", "_residual_three", "_middle",
         "_wide", "_late", "_stay", "_phased_short", "_phased"}},
       {"rms_norm_options",
        {"_short_options", "_middle_options", "_wide_options", "_phased_short_options", "_phased_options", "_short_no_weight",
         "_three_no_weight", "_middle_no_weight", "_wide_no_weight", "_short_wide_weight", "_three_wide_weight",
         "_five_wide_weight", "_middle_wide_weight", "_wide_wide_weight", "_phased_wide_weight"}},
       {"rms_norm_parts", {"_sums", "_parts"}},
       {"rms_norm_any", {"_long", "_vectors", "_any"}}});
  return table.at(dtype, variant);
}

// What a plan depends on.
struct Problem {
  std::int64_t rows, n;
  DType dtype;
  bool common;  // a weight of x's dtype, rows of one stride and one dtype, and no bias, with or without a residual
  bool residual;
  bool no_weight, wide_weight;  // or common but for the weight, of which there is none, or one of float32 beside 16 bits
  bool aligned;                 // all arrays can be moved in vectors
  bool alike;                   // or all rows start alike, so that unaligned ones can be
  bool usual;                   // what has not the dtype of x is float32 beside 16 bits, or 16 bits beside float32

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

Problem problem_of(const RmsNormFwdParams& p, DType dtype) {
  Problem problem{p.rows, p.n, dtype};
  const int width = problem.width();
  const bool fits = problem.packs() <= INT32_MAX;  // indices of vectors
  problem.residual = p.residual.data != nullptr;
  const bool plain = p.bias == nullptr && p.y_dtype == dtype && has_one_stride(p.x) && has_one_stride(p.y) &&
                     (!problem.residual || (p.residual_dtype == dtype && has_one_stride(p.residual) && has_one_stride(p.h)));
  problem.common = plain && p.weight != nullptr && p.weight_dtype == dtype;
  problem.no_weight = plain && p.weight == nullptr && !problem.residual;
  problem.wide_weight = plain && p.weight != nullptr && p.weight_dtype == kFloat32 && size_of(dtype) == 2 && !problem.residual;
  problem.aligned = fits && p.n % width == 0 && vectors_fit(p.x, width, dtype) &&
                    vectors_fit(p.residual, width, p.residual_dtype) && vectors_fit(p.h, width, dtype) &&
                    vectors_fit(p.y, width, p.y_dtype) && aligned16(p.weight) && aligned16(p.bias);
  auto is_alike = [&](const Rows& rows, DType of) { return has_one_stride(rows) && start_alike(p.x, dtype, rows, of, width); };
  problem.alike = fits && aligned16(p.weight) && aligned16(p.bias) && is_alike(p.x, dtype) && is_alike(p.y, p.y_dtype) &&
                  (!problem.residual || (is_alike(p.residual, p.residual_dtype) && is_alike(p.h, dtype)));
  auto is_usual = [&](const void* data, DType of) {
    const bool is_wide = size_of(dtype) == 2 && of == kFloat32, is_narrow = dtype == kFloat32 && size_of(of) == 2;
    return data == nullptr || of == dtype || is_wide || is_narrow;
  };
  problem.usual = is_usual(p.weight, p.weight_dtype) && is_usual(p.bias, p.bias_dtype) && is_usual(p.y.data, p.y_dtype) &&
                  is_usual(p.residual.data, p.residual_dtype);
  return problem;
}

unsigned power_of_two_from(std::int64_t least, unsigned from) {
  while (from < least) from *= 2;
  return from;
}

// For wide rows, 8 vectors a thread: clusters that stay until all rows are done, and how many the GPU runs at once. That may be
// none, of a part of a GPU.
std::pair<LaunchShape, int> stay_shape(const Problem& problem, int device) {
  const unsigned cluster = problem.packs() <= 3072 ? 2 : problem.packs() <= 32768 ? 8 : 16;
  LaunchShape shape{0, threads_for(problem.packs(), 8 * cluster), 1, cluster};
  const int at_once = clusters_at_once(kernel_of(problem.dtype, kStay), device, shape);
  shape.blocks = cluster * static_cast<unsigned>(std::min<std::int64_t>(problem.rows, at_once));
  return {shape, at_once};
}

// Of rows in registers, those of calls that are not common.
std::optional<std::pair<Variant, LaunchShape>> plan_with_options(const Problem& problem, const Hardware& hw, int device) {
  using Found = std::optional<std::pair<Variant, LaunchShape>>;
  auto if_room = [&](Variant variant, LaunchShape shape) {
    return has_room(kernel_of(problem.dtype, variant), device, shape) ? Found({variant, shape}) : Found();
  };
  const std::int64_t rows = problem.rows, packs = problem.packs();
  if (!hw.tuned || problem.dtype == kFloat64 || !problem.usual) return {};
  const bool wide_weight = problem.wide_weight && hw.tuned == 90;
  auto variant = [&](Variant all, Variant no_weight, Variant with_wide_weight) {
    return problem.no_weight ? no_weight : wide_weight ? with_wide_weight : all;
  };
  const unsigned odd = problem.odd_vectors(hw);
  if (odd && problem.no_weight) return Found({kThreeNoWeight, resident_shape(rows, packs, 3, 128)});
  if (odd && wide_weight) return Found({odd == 3 ? kThreeWideWeight : kFiveWideWeight, resident_shape(rows, packs, odd, 128)});
  if (problem.aligned) {
    const std::int64_t most = !problem.is_large() ? 512 : problem.no_weight ? 256 : 64;
    if (packs <= most && !(problem.wants_lanes_full() && leaves_room(packs)))
      return if_room(variant(kShortOptions, kShortNoWeight, kShortWideWeight), resident_shape(rows, packs, 2, 256));
    // A few rows have several multiprocessors each.
    const bool few = hw.clusters() && rows <= 16 && 1024 < packs && packs <= 4096;
    if (few || packs <= (wide_weight ? 768 : 1536))
      return if_room(variant(kMiddleOptions, kMiddleNoWeight, kMiddleWideWeight), resident_shape(rows, packs, 4, few ? 128 : 384));
    if (packs <= 2048 * hw.largest_cluster)
      return if_room(variant(kWideOptions, kWideNoWeight, kWideWideWeight), resident_shape(rows, packs, 8, 256));
  } else if (problem.alike) {
    const bool few = rows <= 1024 && rows * problem.n <= 1 << 21;
    const std::int64_t least = few ? 64 : packs < 8 ? 16 : 8;
    if (packs <= (few ? 512 : 32)) return if_room(kPhasedShortOptions, resident_shape(rows, std::max(packs, least), 2, 256));
    if (wide_weight && packs <= 1024 * hw.largest_cluster)
      return if_room(kPhasedWideWeight, resident_shape(rows, std::max<std::int64_t>(packs, 8), 4, 256));
    if (packs <= 2048 * hw.largest_cluster) return if_room(kPhasedOptions, resident_shape(rows, packs, 8, 256));
  }
  return {};
}

// The kernels whose rows stay in registers, where one of them is for the problem: what is fastest where, as measured
// (docs/design/rms_norm.md).
std::optional<std::pair<Variant, LaunchShape>> plan_in_registers(const Problem& problem, const Hardware& hw, int device) {
  using Found = std::pair<Variant, LaunchShape>;
  const std::int64_t rows = problem.rows, packs = problem.packs();
  const bool is_double = problem.dtype == kFloat64, is_bfloat16 = problem.dtype == kBFloat16;
  const unsigned odd = problem.odd_vectors(hw);
  if (problem.common && problem.residual && problem.aligned && packs <= 1024 && !is_double && hw.tuned) {
    if (odd && 32 < packs && packs <= 96) return Found(kResidualThree, resident_shape(rows, packs, 3, 128));
    return Found(kResidual, resident_shape(rows, packs, 2, 512));
  }
  if (!problem.common || problem.residual) return plan_with_options(problem, hw, device);
  if (!hw.tuned) return {};
  // Whether L2 is smaller than x.
  const bool passes = released_from(rows, problem.n * size_of(problem.dtype), hw) != kNoRow;
  // Rows that fill their threads, of so many vectors each, and these their blocks.
  auto fills = [&](std::int64_t vectors, const LaunchShape& shape) {
    return packs == vectors * shape.block_x && rows % shape.block_y == 0;
  };
  const bool in_vectors = problem.aligned && !is_double, filled = hw.tuned == 90 && in_vectors && !passes;
  if (filled && 32 <= packs && packs <= 128 && rows * packs >= (packs == 128 ? 1 << 18 : 1 << 19)) {
    const LaunchShape shape = resident_shape(rows, packs, 4, 256);
    if (fills(4, shape)) return Found(kFullFour, shape);
  }
  if (odd) return Found(odd == 3 ? kThree : kFive, resident_shape(rows, packs, odd, 128));
  // Where caches hold x, the time is that of starting blocks, of which this leaves a quarter or half.
  const bool many_blocks = 32 < packs && packs <= 128 && rows >= (packs > 64 ? 2048 : 16384) && rows * packs <= 1 << 20;
  if ((problem.wants_lanes_full() && leaves_room(packs)) || (in_vectors && many_blocks))
    return Found(kMiddle, resident_shape(rows, packs, 4, 384));
  if (in_vectors && packs <= (problem.is_large() ? 256 : 512)) {
    const LaunchShape shape = resident_shape(rows, packs, 2, 256);
    if (!fills(2, shape)) return Found(kShort, shape);
    if (shape.block_x > 32) return Found(filled ? kBlock : kShort, shape);
    return Found(passes && hw.tuned == 90 ? kFullPassing : kFull, shape);
  }
  if (in_vectors && problem.is_large() && packs <= (is_bfloat16 ? 1536 : 1024))
    return Found(kMiddle, resident_shape(rows, packs, 4, 384));
  // A few rows have several multiprocessors each.
  if (in_vectors && hw.clusters() && rows <= 16 && 1024 < packs && packs <= 4096)
    return Found(kMiddle, resident_shape(rows, packs, 4, 128));
  // Blocks that have a row alone are faster than clusters once there are many for each multiprocessor.
  if (problem.aligned && problem.width() == 8 && hw.capability == 90 && 2048 < packs && packs <= 4096 &&
      (rows >= 20 * hw.multiprocessors || !hw.clusters())) {
    if (hw.clusters() && is_bfloat16 && 3000 < packs && packs <= 3072) return Found(kMiddle, resident_shape(rows, packs, 4, 384));
    return Found(kLate, resident_shape(rows, packs, 8, 512));
  }
  if (problem.aligned && packs <= 2048 * (is_double ? hw.largest_cluster : std::min(hw.largest_cluster, 2u))) {
    // Between, its blocks have fewer threads, and no room for more blocks.
    const LaunchShape shape = resident_shape(rows, packs, 8, 256);
    const bool better = is_double || packs <= 2048 || packs > 3840 || rows <= 256;
    if (better && has_room(kernel_of(problem.dtype, kWide), device, shape)) return Found(kWide, shape);
  }
  if (in_vectors && hw.clusters() && packs <= 4096 * hw.largest_cluster) {
    const auto [stay, at_once] = stay_shape(problem, device);
    // A few more rows than that do not wait for those.
    if (hw.capability == 90 && 16384 < packs && packs <= 32768 && at_once < rows && 3 * rows <= 4 * at_once) {
      LaunchShape shape = resident_shape(rows, packs, 8, 512);
      if (rows <= clusters_at_once(kernel_of(problem.dtype, kLate), device, shape)) return Found(kLate, shape);
    }
    if (at_once > 0) return Found(kStay, stay);
  }
  if (problem.alike && packs <= 2048 && !is_double) {
    const bool few = rows <= 1024 && rows * problem.n <= 1 << 21;
    if (packs <= (few ? 512 : 32))
      return Found(kPhasedShort, resident_shape(rows, std::max<std::int64_t>(packs, few ? 64 : packs < 8 ? 16 : 8), 2, 256));
    return Found(kPhased, resident_shape(rows, packs, 8, 256));
  }
  return {};
}

// Few long rows that L2 holds, in parts on all multiprocessors: where that is faster than a cluster a row, as measured.
std::optional<LaunchShape> plan_in_parts(const Problem& problem, const Hardware& hw) {
  if (!problem.common || problem.residual || !problem.alike || !hw.tuned || problem.dtype == kFloat64) return {};
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
std::pair<Variant, LaunchShape> plan_in_shared_memory(const Problem& problem, const Hardware& hw, unsigned largest_cluster,
                                                      RmsNormFwdParams* p) {
  const bool is_long = problem.common && !problem.residual && problem.alike && hw.tuned && problem.dtype != kFloat64;
  const Variant variant = is_long ? kLong : problem.aligned ? kVectors : kAny;
  const std::int64_t items = variant == kAny ? problem.n : problem.packs();
  unsigned cluster = std::min(power_of_two_from((items + 4607) / 4608, 1), largest_cluster);
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
    const unsigned lanes = power_of_two_from((packs + resident - 1) / resident, 1);
    const unsigned side_by_side = 128 / lanes;
    return {(blocks + side_by_side - 1) / side_by_side, lanes, side_by_side};
  }
  const unsigned cluster = power_of_two_from((packs + most * resident - 1) / (most * resident), 1);
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
  const Hardware& hw = hardware("rms_norm_any", device);
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
  // Short rows that start anywhere: to give lines back would cost more than it gains, unless x is much larger than L2.
  const bool keeps = has_one_stride(p->x) && (!problem.residual || has_one_stride(p->residual)) &&
                     (variant != kPhasedShort || problem.rows * problem.n * size_of(dtype) > 96 << 20);
  p->released_from = keeps ? released_from(problem.rows, problem.n * size_of(dtype), hw) : kNoRow;
  // The start of a launch counts in short kernels; where blocks are many or small, asking costs them more than it gains.
  const bool few_blocks = shape.blocks <= 8192 && shape.block_x * shape.block_y >= 128;
  shape.overlaps = p->overlaps = !problem.is_large() || (few_blocks && problem.rows * problem.n <= 1 << 24);
  return {kernel_of(dtype, variant), shape};
}

}  // namespace cuops
