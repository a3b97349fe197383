// What the host tells the kernel of kron_linear_small.cu.
#pragma once

#include "kron_linear.h"

namespace cuops {

// What some bits of a thread's number, or one of its fibers, add to where its elements are: in shared memory,
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

}  // namespace cuops
