// What the host tells the kernels of kron_linear_sixteens.cu.
#pragma once

#include "kron_linear.h"

namespace cuops {

// Warps of a block, each of which has two tiles, of so many elements with the gaps between them; bytes of
// the weights beside them.
constexpr int kSixteensWarps = 12, kSixteensTile = 8 * (256 + 4), kSixteensWeights = 3 * 256 * 4, kSixteensFactors = 12;
struct KronSixteensParams {
  Rows x, y;  // of one stride
  const void* bias;
  long long rows, bias_lead, inner;
  KronFactor factors[kSixteensFactors];
  int ends[3];  // the factor behind those of each axis
};
static_assert(sizeof(KronSixteensParams) == 784, "host and device must agree on the layout");

}  // namespace cuops
