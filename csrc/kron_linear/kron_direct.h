// What the host tells the kernels of kron_linear_direct.cu, kron_linear_cube.cu and kron_linear_cube_f64.cu.
#pragma once

#include "kron_linear.h"

namespace cuops {

// Positions in shared memory count 16-byte units, all else there bytes.
struct KronDirectParams {
  Rows x, y;  // of a sample; or of one element of the axes before the only factor's, with `columns` beyond it
  const void* bias;
  long long rows, bias_lead;
  KronFactor factors[3];
  KronDivisor by_columns;
  int slices, slice_rows;                  // blocks that share a sample, and the rows of the first factor of each
  int groups, group_warps;                 // of a block; that share a sample
  int columns, column_tiles;               // beyond the only factor
  int weight, weight_pitch, weight_bytes;  // the first factor: upper halves, then lower ones
  int state, state_pitch, state_bytes;     // what 32 of its rows give, twice two halves a group
  int exponents, maxima;                   // of its rows; of each warp's part of a sample
  int shift, last_shift;                   // exponents between what is held and what is meant: after the first factor, and in all
};
static_assert(sizeof(KronDirectParams) == 328, "host and device must agree on the layout");

// kron_linear_cube_f64.cu: rows of the first factor that a block has; bytes of a row of 32, with a gap for the banks, of the matrix
// that one of these rows gives, and of shared memory.
constexpr int kKronCubeRows = 16, kKronCubePitch = (32 + 4) * 8, kKronCubeMatrix = 32 * kKronCubePitch + 16,
              kKronCubeShared = kKronCubeRows * kKronCubeMatrix + (kKronCubeRows + 32 + 32) * 32 * 8;

}  // namespace cuops
