// What the host tells the kernels of kron_linear.
#pragma once

#include "dtype.h"
#include "rows.h"

namespace cuops {

constexpr int kKronFactors = 16;  // of one launch
constexpr int kKronSteps = 4;     // after small neighbours are merged
constexpr int kKronAxes = kKronSteps + 1;

// What the numbers of a tile are while a kernel works on them.
enum KronArithmetic : unsigned char {
  kKronPlain,   // those of the sums, without tensor cores
  kKronDouble,  // float64
  kKronScaled,  // one or two float16, scaled by powers of two: for float32 two, for TF32 one, for 16-bit dtypes one, then two
};

// n / divisor for n * divisor < 2^32.
struct KronDivisor {
  unsigned divisor, magic;
};

struct KronFactor {
  const void* data;
  long long row_stride, column_stride;
  int out, in;
  KronDivisor by_out, by_in;
  int raw;       // in shared memory, where it is merged; else -1. Elements before it in other kernels than kron_linear.cu
  bool vectors;  // rows may be read in vectors
};

// One factor, or the Kronecker product of some small neighbours, applied to one axis of the tile.
struct KronStep {
  int first, count;  // of the factors
  int out, in, axis;
  KronDivisor by_size[kKronAxes], by_chunks, by_columns, by_pieces;  // size: of the tile before the step
  int team;                                                          // warps that share the same fibers, each with its own outputs
  int weight, weight_pitch, weight_units, weight_rows;               // in shared memory; units a chunk
  int row_scale;                                                     // one float32 a row of the weight
  int table, entries;  // where each group of 8 fibers starts; where each row starts for the innermost axis
  bool innermost;
  bool split_state, split_weight;  // operands are pairs of 16-bit numbers
};

// Positions in shared memory count 16-byte units. A chunk is 8 neighbours of the innermost axis; it takes two units (8 float32, or
// the upper and the lower halves of 8 pairs), or four in float64.
struct KronFwdParams {
  Rows x, y;  // a row is a sample
  long long rows, bias_lead;
  const void* bias;
  long long in_pitch, out_pitch, inner;  // in elements; inner: the columns beyond the group's axes
  KronFactor factors[kKronFactors];
  KronStep step[kKronSteps];
  int factor_count, steps, axes;
  int in[kKronAxes], out[kKronAxes], stride[kKronAxes];
  KronDivisor by_in[kKronAxes], by_out[kKronAxes];
  int in_rows, out_rows, all_out_rows, in_chunks, out_chunks;
  KronDivisor by_in_rows, by_out_rows, by_in_pieces, by_out_pieces, by_in_chunks;
  int samples, sample_stride;  // of a tile
  int scale_lanes;             // that work on the same sample
  int columns, column_tiles;   // of a tile; 0 and 1: the innermost axis has a factor
  int slices, sliced_out;      // of the outputs of axis 0: out[0] is a slice of sliced_out
  int in_table, out_table, scales, zero, state[2], buffers;
  DType dtype;                     // of x and y
  bool direct;                     // the last step writes to y, rather than to the tile
  unsigned char x_piece, y_piece;  // neighbours that move together: a vector of x, a chunk of y, or 4 of 16 bits, or 1
  bool x_linear;                   // the samples of x follow one another without gaps, in whole chunks
};
static_assert(sizeof(KronFwdParams) == 1768, "host and device must agree on the layout");

}  // namespace cuops
