// How the gradient of RMSNorm for h alone is launched.
#include <algorithm>
#include <optional>

#include "rms_norm_bwd_plan.h"

namespace cuops {
namespace {

constexpr std::int64_t kDxVectors = 4;  // a thread, where it has not 2

}  // namespace

// A row a team, as in the forward.
std::optional<RmsNormBwdPlan> plan_dx(const RmsNormBwdProblem& p, int device, const Hardware& hw) {
  const bool phased = p.starts != kAligned;
  const std::int64_t packs = p.n / width_of(p.dtype), most = kDxVectors * hw.largest_cluster;
  // Blocks that stay read a weight once, which pays for long rows.
  if (phased ? p.common : (p.common || p.similar) && packs > (p.wide_weight ? 4096 : 2048)) return {};
  const unsigned widest = !p.weighted || phased ? 512
                          : packs <= 1536       ? 384
                                                : 256;  // threads a block, of the instances in rms_norm_bwd_dx.cu
  if (p.starts == kAnywhere || !p.vector_weight || packs > widest * most || p.rows >= 1 << 30) return {};
  const bool few = p.rows * p.n <= 1 << 22;
  const bool fills = !leaves_room(packs) && (packs <= 256 || (p.weighted && 448 < packs && packs <= 512));  // as measured
  RmsNormBwdKernel kernel;
  LaunchShape shape;
  unsigned each = kDxVectors;
  if (!phased && !few && hw.tuned == 90 && odd_vectors(packs) && packs <= 96) {
    // 5 are faster than 3 only just above a power of two, as measured.
    const bool five = p.weighted && !p.wide_weight && ((32 < packs && packs <= 36) || (64 < packs && packs <= 73));
    kernel = p.wide_weight ? kDxWideWeightThree : !p.weighted ? kDxNoWeightThree : five ? kDxFive : kDxThree;
    each = five ? 5 : 3;
    shape = resident_shape(p.rows, packs, each, 128);
  } else if (!phased && (few ? packs <= 512 : fills)) {
    kernel = p.wide_weight ? kDxWideWeightShort : p.weighted ? kDxShort : kDxNoWeightShort;
    each = 2;
    shape = resident_shape(p.rows, packs, each, 256);
  } else {
    unsigned threads = packs > 256 * most ? widest : 256;
    if (p.wide_weight) {
      kernel = phased ? kDxWideWeightPhased : packs <= 1536 ? kDxWideWeight : kDxWideWeightLong;
      if (kernel == kDxWideWeight) threads = 384;
    } else {
      kernel = phased ? kDxPhased : p.weighted ? kDx : kDxNoWeight;
    }
    shape = resident_shape(p.rows, std::max<std::int64_t>(packs, 8), each, threads);
  }
  shape.shared_bytes = dh_bytes(p, shape, each);
  shape.overlaps = true;
  if (!has_room(rms_norm_bwd_kernel(p.dtype, kernel), device, shape)) return {};
  return RmsNormBwdPlan{kernel, shape, 0, false, kept_until(p, hw)};
}

}  // namespace cuops
