// What the host tells the kernels of sample_normal.
#pragma once

#include "dtype.h"

namespace cuops {

// What a call in a CUDA graph counts its replays in: counters of its blocks, so many int64 apart.
constexpr int kReplaysParts = 32, kReplaysApart = 8;

constexpr int kSampleThreads = 128;                               // of a block
constexpr int kMostBlocks = 0x7fffffff;                           // of a launch
constexpr int kGradientBlocks = 5;                                // of the gradient along rows that a multiprocessor runs at a time
constexpr int kAtOnceThreads = kGradientBlocks * kSampleThreads;  // of a block of the gradient in one launch, at most
constexpr int kChunkSumThreads = 512;                             // of a block of the sums of its chunks
constexpr int kTileThreads = 256;                                 // of a block of sample_tiles
constexpr int kSharedThreads = 128;                               // of a block of sample_shared
constexpr int kSharedNoiseRows = 1024;                            // that it has at most

// Quotients of numbers below 2^31.
struct Divider {
  unsigned divisor, multiplier, shift;
};

struct SampleNormalParams {
  void* samples;      // (batch, num_samples, dim), or (batch, dim, num_samples); in the backward, their gradients
  void* partial;      // backward: (chunks, 2, columns), sums for mu and for sigma, in the dtype of the arithmetic
  const void* mu;     // columns = batch * dim of them, or one
  const void* sigma;  // likewise; nullptr: sigma_value
  const void* low;    // likewise, in the samples' dtype; nullptr: not truncated
  const void* high;
  const long long* state;  // the seed, and the stream where there are two; nullptr: the values here
  long long* replays;      // how many blocks were launched before; nullptr: not counted
  unsigned long long seed, stream;
  long long columns, dim, num_samples;
  long long first_column, start;     // where in the whole draw this part is
  long long group, end_group;        // the groups of four samples that it has part in; a group of antithetic ones makes eight
  long long whole_group, end_whole;  // those that are all in it; none where samples are antithetic
  double sigma_value;
  long long step;  // groups that a thread takes in turn; in sample_tiles it takes one of so many
  union {
    unsigned lanes;    // where samples lie along columns: threads side by side in a column, a power of two
    unsigned period;   // in sample_shared: rows
    unsigned at_once;  // in the gradient along rows: elements that are read at a time
  };
  unsigned keys[20];  // the key schedule of `seed`, for kernels without `state`
  DType dtype;        // of the samples
  bool state_has_stream;
  bool one_mu, one_sigma, one_low, one_high;
  bool mu_wide, sigma_wide;  // in the dtype of the arithmetic, where the samples have 16 bits
  bool shared, antithetic;
  bool along_columns;
  bool replays_counted;    // by a kernel before this one, in the first counter
  unsigned replays_shift;  // of the blocks that share a counter of replays, as a power of two
  Divider lines;           // threads for a group of samples of all columns; in sample_shared, blocks for a period
  Divider tiles;           // threads for one of one distribution's row; in sample_shared, those of a block for a period
};
static_assert(sizeof(SampleNormalParams) == 296, "host and device must agree on the layout");

// The gradients in one launch.
struct SampleAtOnceParams {
  SampleNormalParams draw;
  void *dmu, *dsigma;
  unsigned tiles_shift;  // tiles of columns that a block has side by side, as a power of two
  DType dmu_dtype, dsigma_dtype;
};
static_assert(sizeof(SampleAtOnceParams) == 320, "host and device must agree on the layout");

// In the gradient in one launch, threads of a block add up in slices, a warp each or a chunk that is more: how many threads, as a
// power of two.
constexpr unsigned slice_shift_of(unsigned tiles_shift) { return tiles_shift > 5 ? tiles_shift : 5; }

// The gradients, from their sums over chunks.
struct SampleSumParams {
  const void* partial;  // (chunks, 2, columns)
  void *dmu, *dsigma;
  long long chunks, columns;
  unsigned rows;  // threads that share a sum, a power of two
  DType dmu_dtype, dsigma_dtype;
};
static_assert(sizeof(SampleSumParams) == 48, "host and device must agree on the layout");

}  // namespace cuops
