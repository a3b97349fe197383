// What parts of a row find, one after the other in memory: a power of two that h was scaled by, and then the sum of h^2 and, for
// the gradient, that of g h.
#pragma once

#include "device/reduce.cuh"
#include "rms_norm.h"
#include "rstd.cuh"

namespace cuops {

// Puts the sums of a part into `sums`, and returns the scale: 1, unless the squares left the range. visit(add) calls add(h, g) for
// each element. All threads of the team must come here. Of several parts, one whose sum of g h is 0 is scaled too: its 1 would be
// its row's, in which the sums of others may drown.
template <int kSums, class Params, class Team, class Visit>
__device__ float sums_of_part(const Params& p, Team& team, float (&sums)[kSums], Visit&& visit) {
  const auto& constants = p.float32;
  float scale = 1;
  bool ordinary = true;  // it may share a warp with rows that are not
  bool large = false;    // the sum of g h: its row's may leave the range, and no scale may make it larger
#pragma unroll 1
  for (int pass = 0;; ++pass) {  // of h^2 and g h, the largest h, of both with h times a power of two
    sums[0] = pass == 1 ? constants.sqrt_eps : 0;
    if constexpr (kSums == 2) sums[1] = 0;
    visit([&](float element, float g) {
      const float v = element * scale;
      sums[0] = pass == 1 ? Max()(sums[0], abs(v)) : sums[0] + v * v;
      if constexpr (kSums == 2) sums[1] += g * v;
    });
    team.reduce(sums, [&](float a, float b) { return pass == 1 ? Max()(a, b) : a + b; });
    if (pass == 2) return scale;
    if (pass == 1) {
      scale = ordinary || isinf(sums[0]) ? 1.0f : power_of_two_to_one(sums[0]);
      if (large) scale = min(scale, 1.0f);
      continue;
    }
    const float mean_eps = mean_plus_eps(sums[0], constants, constants.eps);
    if constexpr (kSums == 2) large = !(abs(sums[1]) <= Range<float>::kLargest / p.parts);
    ordinary = kSums == 2 ? is_ordinary(mean_eps, sums[1]) && !large && (sums[1] != 0 || p.parts == 1)
                          : sums[0] <= Range<float>::kLargest / p.parts && mean_eps >= Range<float>::kSmallest;
    if (!team.any(!ordinary)) return scale;
  }
}

// Of a row: the scale, rstd of what was scaled by it, and the mean of g h (0 where it is not asked for). A part whose squares left
// the range has a scale of its own: the smallest one becomes the row's, and since all are powers of two, only what is too small to
// count is lost. By so many neighbouring lanes, for a row each; all lanes of the warp must come here.
template <int kSums, class Params>
__device__ void combine_parts(const Params& p, const float* found, int lanes, float (&row)[3]) {
  constexpr int kBatch = 4, kEach = kSums + 1;  // loads on their way; numbers of a part
  const auto& constants = p.float32;
  const unsigned count = p.parts, lane = threadIdx.x + threadIdx.y * blockDim.x;
  float scale = 1, sums[2] = {};
  bool ordinary = true;  // all of this warp's
#pragma unroll 1
  for (unsigned begin = lane % lanes; begin < count; begin += kBatch * lanes) {
    float parts[kBatch][kEach];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const unsigned part = begin + k * lanes;
#pragma unroll
      for (int i = 0; i < kEach; ++i) parts[k][i] = part < count ? found[kEach * part + i] : i == 0;
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      ordinary &= parts[k][0] == 1;
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] += parts[k][i + 1];
    }
  }
  if (!__all_sync(0xffffffffu, ordinary)) {
    scale = found[0];
#pragma unroll 1
    for (unsigned part = 0; part < count; ++part) scale = min(scale, found[kEach * part]);
    sums[0] = sums[1] = 0;
#pragma unroll 1
    for (unsigned part = lane % lanes; part < count; part += lanes) {
      const float factor = scale / found[kEach * part];  // its square may be 0, which infinity must not meet
      sums[0] += found[kEach * part + 1] * factor * factor;
      if constexpr (kSums == 2) sums[1] += found[kEach * part + 2] * factor;
    }
  }
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = reduce_lanes(sums[i], lanes, Sum());
  row[0] = scale;
  row[1] = rstd_of(sums[0], constants, scale);
  row[2] = sums[1] * constants.inverse_n;
}

}  // namespace cuops
