// What the host tells the kernels of kron_linear_slices.cu.
#pragma once

#include "kron_linear.h"

namespace cuops {

constexpr int kSlicesMostLog = 8, kSlicesSteps = 8,
              kSlicesAhead = 8;  // of a block's threads; of loads that a thread has at once, half as many of 32 bytes

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

}  // namespace cuops
