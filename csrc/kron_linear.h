// What the host tells the kernels of kron_linear.
#pragma once

#include "dtype.h"
#include "rows.h"
#include "tensor_map.h"

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
  int size[kKronAxes];  // of the tile before the step
  KronDivisor by_size[kKronAxes], by_chunks, by_columns, by_pieces;
  int team;                                             // warps that share the same fibers, each with its own outputs
  int weight, weight_pitch, weight_units, weight_rows;  // in shared memory; units a chunk
  int row_scale;                                        // one float32 a row of the weight
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
static_assert(sizeof(KronFwdParams) == 1848, "host and device must agree on the layout");

// One step of kron_linear_tuned.cu: the Kronecker product of `count` neighbours as one matrix in shared memory, padded to whole
// tiles.
struct KronTunedStep {
  int first, count;  // of the factors
  int out, in;
  int rows, columns;       // padded
  int weight, weight_low;  // in shared memory: (rows, columns) and the lower halves
  int pitch;               // of a row
  KronDivisor by_rows, by_columns;
};

// The exponents below which weights are held: as float16, and as bfloat16, whose products must stay in range for any x.
constexpr int kWeightTop = 15, kBFloatWeightTop = -9;

// A sample is (outer.in, rows.in, columns.in): the last two axes are multiplied in registers, then the outer one from shared
// memory.
struct KronTunedParams {
  Rows x, y;
  const void* bias;
  float* partial;  // of gradients: one for each team of warps
  long long rows, tiles, bias_lead;
  KronFactor factors[kKronFactors];
  KronTunedStep step[3];  // along the outer axis (in == 1: none), the rows, and the columns
  int factor_count;
  int samples;  // of a tile
  int state[2], buffers;
  int pitch, units, columns_log;  // of a row of the state; of a chunk of 8
  int slice_pitch, slice_gap;     // between neighbours of the outer axis; beyond their rows
  int sample_out;                 // elements
  int sample_chunks, sample_pieces, groups,
      slice_units;  // pieces of 16 bytes in device memory; groups of rows a slice; 16 columns each
  KronDivisor by_sample_chunks, by_sample_pieces, by_groups, by_in_rows, by_row_units;
  int scales, zero, factors_at;
  int shift, outer_shift, last_shift;  // exponents between what is held and what is meant: of each step's results, and in all
  DType dtype;
  bool x_linear;
  unsigned char gradients;  // of the first factor (1), the second (2), both (3)
};
static_assert(sizeof(KronTunedParams) == 1288, "host and device must agree on the layout");

// kron_linear_small.cu: what some bits of a thread's number, or one of its fibers, add to where its elements are: in shared memory,
// in device memory from the start of the tile, and among the tile's samples.
constexpr int kKronParts = 10;
struct KronSmallPart {
  int log, shared, memory, sample;
};

// One pass over the tile: one axis of 8 or 16, or two neighbouring ones of 8.
struct KronSmallStage {
  KronSmallPart part[kKronParts], fiber[8];
  int parts;
  int log_size;            // of the axis, the outer one of two
  int shared, memory;      // from one element of a fiber to the next
  bool pair, unit;         // unit: elements of a fiber are neighbours in memory
  int first[2], count[2];  // of the factors whose product an axis has; the outer one first
  int weight[2];           // in shared memory
};

// A sample has 2^n elements in axes of 8 and 16, and columns beyond the factors' axes.
struct alignas(16) KronSmallParams {
  Rows x, y;  // of one stride
  const void* bias;
  long long rows, tiles, bias_lead;
  KronFactor factors[kKronFactors];
  KronSmallStage stage[kKronSteps];
  KronSmallPart chunk[kKronParts];                        // of 4 neighbours
  int chunk_parts, factor_count, stages, samples, items;  // of a tile; items: 64 elements each
  int columns, column_tiles, sample_out;                  // of a tile; tiles beside one another; elements
  int state, raw, raw_count;                              // in shared memory: the tile, the factors; their elements
  bool copies_out;                                        // the results go to y from shared memory
};
static_assert(sizeof(KronSmallParams) == 2528, "host and device must agree on the layout");

// kron_linear_sixteens.cu: warps of a block, each of which has two tiles, of so many elements with the gaps between them; bytes of
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

// kron_linear_direct.cu: positions in shared memory count 16-byte units, all else there bytes.
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

// kron_linear_half.cu: warps of a block, of which those that share a sample have 32 columns of the results each; and how it divides
// shared memory, in units of 16 bytes: the largest magnitudes of the factors; these, of 32 bits, the last of 16; and two matrices
// of each sample. Slices of three factors' results are a pitch apart.
constexpr int kHalfWarps = 16, kHalfMaxima = 24, kHalfPitch = 32 * 32 / 4 + 2;
constexpr int half_samples(int size) { return kHalfWarps / (size / 32); }
constexpr int half_units(int size) {
  const int matrix = size * size / 8;
  return kHalfMaxima + 3 * matrix + half_samples(size) * 2 * matrix;
}
constexpr int kHalfCubeUnits = half_units(32) + 32 * 32 / 4 + 32 * kHalfPitch;

// kron_linear_double.cu: teams of warps of a block, warps of a team, and bytes of shared memory, for a tile of one of its sizes:
// the second factor, and two matrices of each team, with gaps between their rows.
constexpr int double_teams(int size) { return size == 16 ? 24 : size <= 32 ? 8 : size == 48 ? 4 : 2; }
constexpr int double_warps(int size) { return (size + 15) / 16; }
constexpr int double_matrix(int size) { return size * (size * 8 + 32); }
constexpr int double_bytes(int size) { return (1 + 2 * double_teams(size)) * double_matrix(size); }

// Of kron_linear_half.cu and kron_linear_double.cu.
struct KronHalfParams {
  Rows x, y;  // of a sample
  const void* bias;
  long long rows, bias_lead;
  KronFactor factors[3];
  KronDivisor by_units;  // of 8 neighbours, in a row of the last axis
};
static_assert(sizeof(KronHalfParams) == 264, "host and device must agree on the layout");

// kron_linear_wide.cu, for factors of up to `size`, 64 or 128: the threads that compute, beside those of which one asks for copies,
// and the registers of either. A block starts with as many a thread as a multiprocessor has; from what some give up the others
// take, and would wait forever for more than there are.
constexpr int kWideMost = 128, kWideCopyThreads = 128, kWideCopyRegisters = 24;
constexpr int wide_threads(int size) { return size == 64 ? 512 : 256; }
constexpr int wide_registers(int threads) {
  const int block = threads + kWideCopyThreads;
  return (65536 / block / 8 * 8 * block - kWideCopyRegisters * kWideCopyThreads) / threads / 8 * 8;
}
// Of X, the rows that one copy takes, and its bytes; the bytes of W1, of 32 bits, and W2; how many copies shared memory has beside
// these, and its bytes.
constexpr int wide_rows(int size, int element_size) { return element_size == 2 ? size : 64; }
constexpr int wide_copy(int size, int element_size) { return wide_rows(size, element_size) * size * element_size; }
constexpr int wide_factors(int size, int element_size) { return size * size * (4 + element_size); }
constexpr int wide_slots(int size, int element_size) {
  return (225 * 1024 - wide_factors(size, element_size)) / wide_copy(size, element_size);
}
constexpr int wide_bytes(int size, int element_size) {
  return 1024 + wide_factors(size, element_size) + wide_slots(size, element_size) * wide_copy(size, element_size);
}

struct KronWideParams {
  TensorMap matrices;  // of x
  Rows x, y;           // of a sample
  const void* bias;
  long long rows, bias_lead;
  KronFactor factors[2];
};
static_assert(sizeof(KronWideParams) == 384, "host and device must agree on the layout");

// kron_linear_bits.cu and kron_linear_twos.cu: the most warps of a block, factors, elements of these, and passes.
constexpr int kBitsWarps = 4, kBitsFactors = 10, kBitsElements = 576, kBitsPasses = 6;

// Factors of 2^log, of which the last one is for an element's bit `first` and those after it, and has elements from `at` on.
struct KronBitsPass {
  int first, log, count, at;
};
struct KronBitsParams {
  Rows x, y;  // of one stride
  const void* bias;
  long long rows, bias_lead;
  KronFactor factors[kBitsFactors];
  KronBitsPass pass[kBitsPasses];
  int count, passes, elements;  // of the factors
  int log_sample, warps;        // of a sample's elements; of a block, that have elements
  DType dtype;
};
static_assert(sizeof(KronBitsParams) == 768, "host and device must agree on the layout");

// The gradient of one factor: the sum over depth = rows * inner of g (rows, out, inner) times x (rows, in, inner).
struct KronBwdParams {
  const void *g, *x;
  void* partial;  // (blocks, out, in) in the dtype of the sums
  long long rows, inner;
  int out, in;
  int out_blocks, in_blocks;  // of kKronBlock
  int depth;                  // of a tile
  KronDivisor by_inner;
  int g_pitch, x_pitch, g_state[2], x_state[2], scales, buffers;
  int shared_units;  // all of it
  DType dtype;
  bool pairs;       // float32 as two float16
  bool depth_rows;  // in shared memory, a row is an element of the depth, rather than one of out or in
  bool vectors;
};
static_assert(sizeof(KronBwdParams) == 112, "host and device must agree on the layout");
constexpr int kKronBlock = 128;

}  // namespace cuops
