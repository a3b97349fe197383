// What the host tells the kernels whose factors, neighbours multiplied out, are axes of one size: kron_linear_sixteens.cu,
// kron_linear_four_sixteens.cu and kron_linear_eights.cu.
#pragma once

#include "kron_linear.h"

namespace cuops {

struct KronAxesParams {
  Rows x, y;  // of one stride in kron_linear_sixteens.cu
  const void* bias;
  long long rows, bias_lead, inner;
  KronFactor factors[kKronFactors];
  int ends[5];  // the factor behind those of each axis
};
static_assert(sizeof(KronAxesParams) == 1016, "host and device must agree on the layout");

// kron_linear_sixteens.cu: warps of a block, each of which has two tiles, of so many elements with the gaps between them; bytes of
// the weights beside them.
constexpr int kSixteensWarps = 12, kSixteensTile = 8 * (256 + 4), kSixteensWeights = 3 * 256 * 4;

// kron_linear_eights.cu: warps that make parts of samples, and that finish samples; elements of a part, and its places in shared
// memory.
constexpr int kEightsMakers = 7, kEightsFinishers = 5, kEightsPart = 2048, kEightsPlaces = 27;

// kron_linear_four_sixteens.cu: likewise, of each of the two blocks that share a sample, of which one has half of a part's
// elements.
constexpr int kFourMakers = 6, kFourFinishers = 6, kFourPart = 1024, kFourPlaces = 54;

}  // namespace cuops
