// What the host tells the kernels of kron_linear_fibers.cu and kron_linear_fibers_bwd.cu.
#pragma once

#include "kron_linear.h"

namespace cuops {

// Factors of one launch, how many neighbours are multiplied out, to how many rows and columns, and the threads that a
// multiprocessor has registers for.
constexpr int kFibersFactors = 12, kFibersMerged = 4, kFibersMost = 16, kFibersThreads = 768, kFibersThreadsF64 = 512,
              kFibersThreadsBwd = 512;

// What instances there are: up to kFibersSmall rows and columns, a weight is filled up with zeros to a square that registers hold;
// beyond that its columns are, and its rows to a multiple of 4.
constexpr int kFibersSmall = 6;
constexpr int fibers_class(int out, int in) {
  const int most = out > in ? out : in;
  if (most <= kFibersSmall) return most <= 2 ? 2 : most <= 4 ? most : kFibersSmall;
  return in <= 8 ? 8 : in == 9 ? 9 : in <= 12 ? 12 : 16;
}
// In shared memory: elements of a row of a weight, and of all.
constexpr int fibers_pitch(int out, int in) {
  const int size = fibers_class(out, in);
  return size == 2 ? 2 : (size + 3) / 4 * 4;
}
constexpr int fibers_weight(int out, int in) {
  const int size = fibers_class(out, in);
  return (size <= kFibersSmall ? size + size % 2 : (out + 3) / 4 * 4) * fibers_pitch(out, in);
}

// A weight, or its transpose, as shared memory has it: where, its class, the elements of a row and of all.
struct KronFibersMatrix {
  int at, size, pitch, count;
  KronDivisor by_pitch;
};

// The fibers of a step are the vectors that its factor multiplies. A tile lies in shared memory as its samples do in device memory;
// positions there count elements of the sums.
struct KronFibersStep {
  int first, count;  // of the factors
  int out, in;
  int fibers, inner;  // of a sample; elements beyond the axis
  KronDivisor by_inner;
  int sums;                             // of its gradient, among those of all steps
  int state;                            // before the step
  KronFibersMatrix weight, transposed;  // the latter for the gradient
};

// An array of samples as a tile takes them: in runs of neighbours. Without columns beyond the factors' axes a run is a sample, else
// a row of columns, of which the next one is `inner` elements after it.
struct KronFibersArray {
  Rows rows;      // of a sample
  int run, runs;  // elements; of a sample
  KronDivisor by_run;
  int together;  // elements that move together: 4 or 1
  bool dense;    // all samples follow one another
};

// The columns of a tile are a part of those beyond the factors' axes; or 0, where it has so many whole samples.
struct KronFibersChain {
  KronFactor factors[kFibersFactors];
  KronFibersStep step[kFibersFactors];
  long long rows, inner, tiles;
  int steps, samples, columns, column_tiles;
  int weights, sums;  // elements of all
  DType dtype;
};

struct KronFibersParams {
  KronFibersChain chain;
  KronFibersArray x, y;
  const void* bias;
  long long bias_lead;
  int result;  // the state after the last step
};
static_assert(sizeof(KronFibersParams) == 1920, "host and device must agree on the layout");

struct KronFibersBwdParams {
  KronFibersChain chain;
  KronFibersArray x, dy, dx;
  void* partial;  // (blocks, sums), in the dtype of the sums; without blocks where they are `together`
  int gradient;   // the state of dy
  int found;      // in shared memory: the sums of each warp
  int wanted;     // bits of the steps whose factors' gradients are
  // Whether the blocks are one cluster, or only one, and store these themselves; else `partial` is added up by another kernel.
  bool together;
  int total, raw;                   // in shared memory: then the gradients of all steps; the factors of products
  void* gradients[kFibersFactors];  // as in KronFibersSum
};
static_assert(sizeof(KronFibersBwdParams) == 2080, "host and device must agree on the layout");

// Adds up what blocks found, a block of threads a step, and takes the products apart.
struct KronFibersSum {
  const void* partial;
  long long blocks;
  int sums, steps;
  struct {
    int first, count, out, in, sums;
  } step[kFibersFactors];
  KronFactor factors[kFibersFactors];
  void* gradient[kFibersFactors];  // contiguous, of the factors' dtype; nullptr where not wanted
  DType dtype;
};
static_assert(sizeof(KronFibersSum) == 1040, "host and device must agree on the layout");

}  // namespace cuops
