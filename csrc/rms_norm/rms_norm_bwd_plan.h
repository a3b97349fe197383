// Which kernels compute a gradient of RMSNorm, and how they are launched.
#pragma once

#include <cstdint>
#include <optional>

#include "host/kernel.h"
#include "rms_norm.h"
#include "rms_norm_plan.h"

namespace cuops {

// Of the common case and the like, several rows a block (kernels by length, and one whose blocks are a cluster that has all rows)
// or several blocks a row, for aligned rows and for those that start anywhere (rms_norm_bwd_held.cu; with an offset, beside a
// weight of float32, or of h of float32 beside dy of 16 bits, rms_norm_bwd_held_shared.cu), and all rows at once
// (rms_norm_bwd_at_once.cu); of all other aligned rows (rms_norm_bwd.cu); of h alone (rms_norm_bwd_dx.cu); and those for any rows
// on any GPU, which work in pairs (rms_norm_bwd_any.cu, and rms_norm_bwd_phased.cu for rows that start together). Of one row,
// rms_norm_bwd_row.cu, by vectors or elements.
enum RmsNormBwdKernel {
  kRow,
  kRowAny,
  kHeld,
  kHeldLong,
  kHeldCluster,
  kWide,
  kHeldPhased,
  kHeldClusterPhased,
  kWidePhased,
  kHeldShared,
  kHeldSharedPhased,
  kHeldSharedCluster,
  kHeldDyF16,
  kHeldDyF16Phased,
  kWideDyF16,
  kWideDyF16Phased,
  kHeldDyF16Cluster,
  kHeldDyBF16,
  kHeldDyBF16Phased,
  kWideDyBF16,
  kWideDyBF16Phased,
  kHeldDyBF16Cluster,
  kAtOnce,
  kAtOncePhased,
  kGeneral,
  kGeneralDyF16,
  kGeneralDyBF16,
  kDxShort,
  kDxThree,
  kDxFive,
  kDx,
  kDxPhased,
  kDxNoWeightShort,
  kDxNoWeightThree,
  kDxNoWeight,
  kDxWideWeightShort,
  kDxWideWeightThree,
  kDxWideWeight,
  kDxWideWeightLong,
  kDxWideWeightPhased,
  kRowsAny,
  kRowsVectors,
  kRowsPhased,
  kSums,
  kColumnsAny,  // in the order of kRows*
  kColumnsVectors,
  kColumnsPhased,
  kParts
};

Kernel& rms_norm_bwd_kernel(DType dtype, RmsNormBwdKernel kernel);

// Of two kernels for the rows and then the columns, the first, by the second.
inline RmsNormBwdKernel rows_kernel(RmsNormBwdKernel columns) {
  return static_cast<RmsNormBwdKernel>(columns - kColumnsAny + kRowsAny);
}

// Where rows start: all at a multiple of 16 bytes, weight and n too; those of one number equally far behind one; or anywhere.
enum RowStarts { kAligned, kTogether, kAnywhere };

struct RmsNormBwdProblem {
  std::int64_t rows, n;
  DType dtype, dy_dtype;  // of h and all else, of dy
  RowStarts starts;
  bool vector_weight;  // starts at a multiple of 16 bytes
  bool common;         // a weight and dy of h's dtype, which is not float64; no offset, no gradient for a bias
  bool similar;        // or common but for an offset, or a weight of the dtype of the sums
  bool weighted;       // there is a weight
  bool wide_weight;    // of the dtype of the sums, which is another than h's
  bool dh;             // there is a gradient for h
  bool dbias;          // that of the bias is wanted
  bool dx_alone;       // nobody wants sums over rows
};

struct RmsNormBwdPlan {
  RmsNormBwdKernel kernel;
  LaunchShape shape;
  std::int64_t partial_rows;   // of sums for dweight and dbias
  bool finds_results = false;  // of these sums, rather than partial ones
  long long released_from = kNoRow;
  LaunchShape rows_shape{};  // of the kernel before kColumns* and kParts
  unsigned parts = 0;        // of a row in that kernel
};

// Nothing where dy has another dtype than h and no kernel reads both.
std::optional<RmsNormBwdPlan> plan_rms_norm_bwd(const RmsNormBwdProblem& problem, int device);

// Where rms_norm_bwd_dx.cu has the rows, for gradients of h alone.
std::optional<RmsNormBwdPlan> plan_dx(const RmsNormBwdProblem& problem, int device, const Hardware& hw);

// Two kernels for any rows, and for those that start together. `few`: one block of the second has all rows of its columns.
RmsNormBwdPlan plan_columns(const RmsNormBwdProblem& problem, bool few, int device, const Hardware& hw);
RmsNormBwdPlan plan_phased(const RmsNormBwdProblem& problem, bool few, int device, const Hardware& hw);

// Vectors that a row touches.
std::int64_t vectors_of(const RmsNormBwdProblem& problem);

// Threads for rows of `vectors`, `each` a thread: a power of two up to a warp, then whole warps.
unsigned threads_across(std::int64_t vectors, unsigned each);

// Whether dy has 16 bits and h float32.
inline bool is_mixed(const RmsNormBwdProblem& p) { return p.dy_dtype != p.dtype; }

// Of shared memory for dh on its way, where threads have `each` vectors of a row.
inline unsigned dh_bytes(const RmsNormBwdProblem& p, const LaunchShape& shape, unsigned each) {
  return p.dh ? shape.block_x * shape.block_y * each * 16 : 0;
}

// L2 keeps h and dy longest where blocks that stay have rows of their own, which gained 1 to 3 % and nothing in clusters, and in
// the gradients of h alone.
inline long long kept_until(const RmsNormBwdProblem& p, const Hardware& hw) {
  return released_from(p.rows, p.n * (size_of(p.dtype) + size_of(p.dy_dtype)), hw);
}

// For the sum of so many rows of partial sums.
LaunchShape sum_rows_shape(std::int64_t rows, std::int64_t n);

}  // namespace cuops
