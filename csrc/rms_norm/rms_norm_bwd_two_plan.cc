// How gradients of RMSNorm are launched that two kernels compute, one row by row, one column by column.
#include <algorithm>

#include "rms_norm_bwd_plan.h"

namespace cuops {
namespace {

using Problem = RmsNormBwdProblem;
using Plan = RmsNormBwdPlan;

// The first of two kernels: rows of up to 256 columns have a part of a warp.
LaunchShape short_rows_shape(const Problem& p) {
  const unsigned lanes = threads_across(std::min<std::int64_t>(p.n, 32), 1), side_by_side = 128 / lanes;
  return {static_cast<unsigned>((p.rows + side_by_side - 1) / side_by_side), lanes, side_by_side, 1, 0, true};
}

// Longer ones a block, or a cluster where they are few.
LaunchShape long_rows_shape(const Problem& p, RmsNormBwdKernel kernel, int device, const Hardware& hw) {
  const unsigned threads = p.n > 32768 ? 512 : p.n > 2048 ? 256 : 128;
  unsigned cluster = 1;
  while (cluster < hw.largest_cluster && threads * 16 * cluster < p.n && p.rows * cluster <= hw.multiprocessors) cluster *= 2;
  auto shape_of = [&](unsigned cluster) {
    return LaunchShape{static_cast<unsigned>(p.rows) * cluster, threads, 1, cluster, 0, true};
  };
  return has_room(rms_norm_bwd_kernel(p.dtype, kernel), device, shape_of(cluster)) ? shape_of(cluster) : shape_of(8);
}

// The second: blocks for so many packs of columns, and, where rows are many, for parts of the rows; else one block has all of them,
// and finds the results.
Plan plan_second(RmsNormBwdKernel kernel, LaunchShape shape, std::int64_t packs, std::int64_t packs_a_block, const Problem& p,
                 bool few, const Hardware& hw) {
  const std::int64_t across = (packs + packs_a_block - 1) / packs_a_block, all = (p.rows + shape.block_y - 1) / shape.block_y;
  const std::int64_t groups = few ? 1 : std::max<std::int64_t>(1, std::min<std::int64_t>(all, 8 * hw.multiprocessors / across));
  shape.blocks = static_cast<unsigned>(across * groups);
  Plan plan{kernel, shape, groups, groups == 1};
  plan.parts = 1;
  return plan;
}

}  // namespace

// A thread has a pack of columns, and rows lie side by side in a block.
RmsNormBwdPlan plan_columns(const RmsNormBwdProblem& p, bool few, int device, const Hardware& hw) {
  const bool in_vectors = p.starts == kAligned && p.dtype != kFloat64;
  const std::int64_t packs = in_vectors ? vectors_of(p) : p.n;
  LaunchShape shape{0, std::min(256u, threads_across(packs, 1)), 1, 1, 0, true};
  shape.block_y = static_cast<unsigned>(std::min<std::int64_t>(256 / shape.block_x, p.rows));
  if (few) {
    shape.block_x = in_vectors ? 8 : 32;
    while (in_vectors && shape.block_x < 32 && packs >= 2 * shape.block_x * hw.multiprocessors) shape.block_x *= 2;
    shape.block_y = p.rows > 16 && in_vectors ? 32 : p.rows > 8 ? (in_vectors ? 16 : 8) : static_cast<unsigned>(p.rows);
    // Where there are blocks enough, a thread has several rows, which are on their way together.
    if (in_vectors && packs >= shape.block_x * hw.multiprocessors)
      shape.block_y = static_cast<unsigned>(std::min<std::int64_t>(256 / shape.block_x, (p.rows + 3) / 4));
  }
  Plan plan = plan_second(in_vectors ? kColumnsVectors : kColumnsAny, shape, packs, shape.block_x, p, few, hw);
  plan.rows_shape = p.n <= 256 ? short_rows_shape(p) : long_rows_shape(p, rows_kernel(plan.kernel), device, hw);
  return plan;
}

// The same for rows that start together. Few long rows are in parts, so that there are two blocks a multiprocessor: of fewer
// threads where those would have less than 16 elements.
RmsNormBwdPlan plan_phased(const RmsNormBwdProblem& p, bool few, int, const Hardware& hw) {
  const bool shifts = p.n % width_of(p.dtype) != 0;
  const std::int64_t vectors = (p.n + width_of(p.dtype) - 1) / width_of(p.dtype);
  unsigned most_across = 256;
  while (most_across > 32 && most_across * p.rows > 256) most_across /= 2;  // a thread has every 8th row or all, which start alike
  LaunchShape shape{0, std::min(most_across, threads_across(vectors + shifts, 1)), 1, 1, 0, true};
  shape.block_y = static_cast<unsigned>(std::min<std::int64_t>(256 / shape.block_x, p.rows));
  if (few) {
    shape.block_x = 16;
    shape.block_y = p.rows > 8 ? 16 : static_cast<unsigned>(p.rows);  // a warp, at least, to combine the parts of rows
    // Wider where there are blocks enough. A thread's rows start alike.
    while (shape.block_y % (2 * width_of(p.dtype)) == 0 && vectors >= 4 * shape.block_x * hw.multiprocessors)
      shape.block_x *= 2, shape.block_y /= 2;
  }
  Plan plan = plan_second(kColumnsPhased, shape, vectors, shape.block_x - shifts, p, few, hw);  // as the kernel has it
  plan.rows_shape = short_rows_shape(p);
  if (p.n <= 256) return plan;
  const bool many = p.rows > kMostRowsInParts, full = many || p.rows * p.n >= std::int64_t{2} * hw.multiprocessors * 512 * 16;
  const unsigned threads = p.n > 32768 && full ? 512 : p.n > 2048 ? 256 : 128;
  const std::int64_t most = many ? 1 : 2 * hw.multiprocessors / p.rows;
  plan.parts = static_cast<unsigned>(std::max<std::int64_t>(1, std::min(most, p.n / (threads * 16))));
  plan.rows_shape = {static_cast<unsigned>(p.rows) * plan.parts, threads, 1, 1, 0, true};
  return plan;
}

}  // namespace cuops
