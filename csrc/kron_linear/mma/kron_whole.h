// What the host tells the kernels of kron_linear_whole.cu.
#pragma once

#include "kron_linear.h"

namespace cuops {

// One step: the Kronecker product of `count` neighbours as one matrix in shared memory, padded to whole
// tiles.
struct KronWholeStep {
  int first, count;  // of the factors
  int out, in;
  int rows, columns;       // padded
  int weight, weight_low;  // in shared memory: (rows, columns) and the lower halves
  int pitch;               // of a row
  KronDivisor by_columns;
};

// The exponents below which weights are held: as float16, and as bfloat16, whose products must stay in range for any x.
constexpr int kWeightTop = 15, kBFloatWeightTop = -9;

// A sample is (outer.in, rows.in, columns.in): the last two axes are multiplied in registers, then the outer one from shared
// memory.
struct KronWholeParams {
  Rows x, y;
  const void* bias;
  long long rows, tiles, bias_lead;
  KronFactor factors[kKronFactors];
  KronWholeStep step[3];  // along the outer axis (in == 1: none), the rows, and the columns
  int factor_count;
  int samples;  // of a tile
  int state[2], buffers;
  int pitch, units, columns_log;     // of a row of the state; of a chunk of 8
  int slice_pitch, slice_gap;        // between neighbours of the outer axis; beyond their rows
  int sample_out;                    // elements
  int sample_chunks, sample_pieces;  // of 8 elements, of 16 bytes
  int groups, slice_units;           // groups of rows a slice; 16 columns each
  KronDivisor by_sample_chunks, by_sample_pieces, by_groups, by_in_rows, by_row_units;
  int scales, zero, factors_at;
  int shift, outer_shift, last_shift;  // exponents between what is held and what is meant: of each step's results, and in all
  DType dtype;
  bool x_linear;
};
static_assert(sizeof(KronWholeParams) == 1256, "host and device must agree on the layout");

}  // namespace cuops
