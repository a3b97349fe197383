// What the host tells the kernels of kron_linear_direct.cu.
#pragma once

#include "kron_linear.h"

namespace cuops {

// Positions in shared memory count 16-byte units, all else there bytes.
struct KronDirectParams {
  Rows x, y;  // of a sample; or of one element of the axes before the only factor's, with `columns` beyond it
  const void* bias;
  long long rows, bias_lead;
  KronFactor factors[2];
  int slices, slice_rows;                  // blocks that share a sample, and the rows of the first factor of each
  int groups, group_warps;                 // of a block; that share a sample
  int columns, column_tiles;               // beyond the only factor
  int weight, weight_pitch, weight_bytes;  // the first factor: upper halves, then lower ones
  int state, state_pitch, state_bytes;     // what 32 of its rows give, twice two halves a group
  int exponents, maxima;                   // of its rows; of each warp's part of a sample
  int shift, last_shift;                   // exponents between what is held and what is meant: after the first factor, and in all
};
static_assert(sizeof(KronDirectParams) == 264, "host and device must agree on the layout");

}  // namespace cuops
