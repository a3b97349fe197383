// What the host tells the kernels of RMSNorm.
#pragma once

#include "dtype.h"
#include "rows.h"

namespace cuops {

// What the sums need, in their own precision.
template <class Acc>
struct RmsNormScalars {
  Acc inverse_n, inverse_n_rest;  // their sum is 1 / n, to twice the precision
  Acc eps;  // 0 where it is no normal number of Acc, but less; NaN where it is more: then every row is scaled first
  Acc sqrt_eps;
  Acc weight_offset;
};

constexpr long long kNoRow = 0x7fffffffffffffff;

// What the common case reads comes first, in two lines of the constant cache: small batches wait for each.
struct RmsNormFwdParams {
  Rows x, y;
  long long rows;
  long long n;  // hidden size
  const void* weight;
  void* rstd;  // one a row, in the dtype of the sums
  RmsNormScalars<float> float32;
  DType y_dtype, weight_dtype, bias_dtype;
  bool overlaps;            // the launch overlaps with the kernel before it
  long long released_from;  // L2 keeps x longest (rms_norm/passing.cuh), and from this row on not beyond the kernel; or kNoRow
  int chunks, chunk, first_chunk;  // packs that a thread brings to shared memory at a time; the first time it may be fewer
  int parts;                       // of a row, in rms_norm_parts.cu
  Rows residual, h;                // h = x + residual, where there is a residual: x, of the two, is one that has h's dtype
  const void* bias;
  RmsNormScalars<double> float64;
  void* found;  // two values for each part of a row
  DType residual_dtype;
};
static_assert(sizeof(RmsNormFwdParams) == 272, "host and device must agree on the layout");

constexpr int kPartVectors = 4;        // of a thread, in rms_norm_parts.cu
constexpr int kMostRowsInParts = 128;  // for which rms_norm_bwd_phased.cu has shared memory
constexpr int kRowsAtOnce = 4;         // of a thread, in rms_norm_bwd_at_once.cu
// Of the gradient's kernels: vectors of a thread, threads of a block at most, rows that are on their way at a time.
constexpr unsigned kHeldVectors = 2, kHeldThreads = 640, kHeldLongVectors = 4, kHeldLongThreads = 384;
constexpr unsigned kWideVectors = 4, kWideThreads = 512;
constexpr unsigned kGeneralVectors = 2, kGeneralThreads = 512, kGeneralStages = 3;

// Gradients for h (so for x and residual), weight and bias, from those for y and h. The kernels compute rstd again.
struct RmsNormBwdParams {
  Rows dy, dh, h, dx;  // rows of one stride
  Rows rounded_dx;     // dx in the dtype of dy, where that is another than h's; may be missing
  long long rows;
  long long n;
  const void* weight;
  void* dweight;  // rows of partial sums, in the dtype of the sums, each of n up to a multiple of four; or the results
  void* dbias;    // likewise
  void* found;    // three values for each part of a row, for the kernel that follows another
  RmsNormScalars<double> float64;
  RmsNormScalars<float> float32;
  bool weight_wide, weight_narrow;   // of the dtype of the sums, of that of dy; or of h's
  bool finds_results;                // what dweight and dbias point to, rather than partial sums
  DType dweight_dtype, dbias_dtype;  // of the results
  unsigned parts;                    // of a row, in `found`
  long long released_from;           // L2 keeps dy and h longest, and from this row on not beyond the kernel; or kNoRow
};
static_assert(sizeof(RmsNormBwdParams) == 288, "host and device must agree on the layout");

// Adds up partial sums.
struct SumRowsParams {
  const void* partial;  // rows of n in the dtype of the sums, which start at multiples of four
  void* sum;            // (n)
  long long rows;
  long long n;
  DType dtype;  // of the sum
};
static_assert(sizeof(SumRowsParams) == 40, "host and device must agree on the layout");

}  // namespace cuops
