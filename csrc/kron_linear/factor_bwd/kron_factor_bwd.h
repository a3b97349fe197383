// What the host tells the kernels of kron_linear_factor_bwd.cu.
#pragma once

#include "kron_linear.h"

namespace cuops {

constexpr int kBwdBlock = 128;  // the most rows and columns of the gradient that a block finds
constexpr int kBwdTile = 32;    // that a warp finds
constexpr int kBwdStages = 3;   // of the depth, in shared memory at a time
constexpr int kBwdMostWarps = 16;

// One of the arrays: `size` rows along the depth, or across it, where the depth's neighbours are `size` elements apart.
struct KronFactorBwdOperand {
  const void* data;
  int size, tile;  // the rows of most blocks
  int pitch;       // of shared memory, in units of 16 bytes: of a row, or of one of the depth
  int unit_bits;   // across: of the power of two that the units of a tile's rows are at most
  int fifths_at;   // where in a stage the last words are of units that are in five words of device memory, one a thread and line
};

// The gradient of one factor, (out, in): the sum over depth = rows * inner of g (rows, out, inner) times x (rows, in, inner).
struct KronFactorBwdParams {
  KronFactorBwdOperand g, x;
  void* partial;          // (blocks, out, in) in the dtype of the sums
  unsigned depth, inner;  // in elements; where both operands lie along the depth, a row of it counts as whole vectors
  int steps;              // of a stage: a power of two, from 2 on
  int stage_units, x_at;  // of shared memory: a stage, and where x begins in it
  int out_blocks, in_blocks;
  unsigned row_vectors;  // of a row along the depth, whose last one may have less than 16 bytes
  // Where x's gradient is found too: the factor, (out, in), and dx = its transpose times g, as x.
  const void* w;
  void* dx;
  int w_at;  // in shared memory
};
static_assert(sizeof(KronFactorBwdParams) == 128, "host and device must agree on the layout");

// Adds up the partial sums of the blocks.
struct KronFactorBwdSum {
  const void* partial;
  void* dw;
  long long n;
  int blocks;
  DType dtype;  // of dw
};
static_assert(sizeof(KronFactorBwdSum) == 32, "host and device must agree on the layout");

}  // namespace cuops
