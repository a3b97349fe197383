// What the host tells the kernels of kron_linear_slices.cu and kron_linear_slices_bwd.cu.
#pragma once

#include "kron_linear.h"

namespace cuops {

constexpr int kSlicesMostLog = 8;  // of a block's threads
constexpr int kSlicesSteps = 8;
constexpr int kSlicesAhead = 8;  // loads that a thread has at once, half as many of 32 bytes

// A factor along one axis of a slice, of `before` by `in` by `after` elements.
struct KronSlicesStep {
  const void* data;
  long long row_stride, column_stride;
  int in, out, before, after;
  int weight, pitch, ways_log;  // in shared memory, in elements; threads that share a sum
  KronDivisor by_in, by_out, by_after;
};

// A slice is what one row of the first factor, or one of the first and one of the second, make of a sample.
struct KronSlicesParams {
  const void *x, *first, *bias;
  void* y;
  long long x_stride, y_stride, row_stride, column_stride;  // of samples, of the first factor
  int in, rest;                                             // columns of the first factor; elements of a sample for each
  int bias_lead, slices;                                    // of a sample
  int seconds;           // of these, for a row of the first factor; then the first step has one row of the second factor
  int parts_log, steps;  // threads that share a sum over `in`
  int slice_out;         // elements of a slice of y
  int state[2];          // in shared memory, in elements
  KronDivisor by_slices, by_seconds;
  KronSlicesStep step[kSlicesSteps];
};
static_assert(sizeof(KronSlicesParams) == 120 + 80 * kSlicesSteps, "host and device must agree on the layout");

constexpr int kSlicesFactors = 12, kSlicesMostLogBwd = 9;  // of the gradients: factors, and a block's threads

// A factor of the gradients. Blocks from `start` on have a row of its gradient each, of one part of the samples: what the other
// factors make of dy's elements of that row, `rest` a sample, is multiplied by x, as `before` by in by `after` elements. Of a
// column's `before` and `after`, `parts` by `lanes` threads take some each, so that neighbours read neighbours.
struct KronSlicesFactor {
  const void* data;
  void* gradient;
  long long row_stride, column_stride;
  int out, in, weight, pitch;  // the latter two of its transpose in shared memory, in elements
  KronDivisor by_in;
  int start, rest;
  int out_after, before, after;  // out_after: elements of dy beyond the axis
  int lanes, parts, ways_log;    // ways: threads that share the last sum
  KronDivisor by_out_after, by_lanes;
};

// A factor applied to what is a row of another one's gradient: its results for a sample, with `after` elements beyond the axis.
struct KronSlicesTurn {
  KronDivisor by_after;
  int results, ways_log;
};

struct KronSlicesBwdParams {
  const void *x, *dy;
  void* dx;
  int in, out, rows;                        // elements of a sample
  int factors, start, samples, groups_log;  // the first block for dx; samples of a part; parts, which are the blocks of a cluster
  int parts_log;                            // threads that share a sum of dx over the first factor
  int state[2], sums;                       // in shared memory, in elements
  KronSlicesFactor factor[kSlicesFactors];
  KronSlicesTurn turn[kSlicesFactors][kSlicesFactors - 1];  // of the first factor also for dx
};
static_assert(sizeof(KronSlicesBwdParams) == 72 + (104 + 16 * (kSlicesFactors - 1)) * kSlicesFactors,
              "host and device must agree on the layout");

}  // namespace cuops
