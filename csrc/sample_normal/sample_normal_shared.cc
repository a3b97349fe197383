// By how many blocks, of how many rows each, sample_shared draws.
#include "sample_normal_launch.h"

namespace cuops {
namespace {

Kernel& kernel_for(DType dtype, bool one_row) {
  static const KernelTable table("sample_normal_fwd_", {{"sample_normal_shared", {"_shared_periods", "_shared"}}});
  return table.at(dtype, one_row);
}

}  // namespace

bool launch_shared(SampleNormalParams& p, DType dtype, int device, CUstream stream, const Hardware& hw) {
  const int size = size_of(dtype), vector = 16 / size;
  const std::int64_t most = std::int64_t{1} << 30, batches = p.columns / p.dim;
  std::int64_t period = 1;
  while (period * p.dim % vector != 0) period *= 2;
  const bool few = p.columns * p.num_samples * size < 1 << 20;  // drawn sooner by threads that do not wait for each other
  const bool whole = aligned16(p.samples) && (batches == 1 || p.num_samples % period == 0);
  if (!p.shared || few || !whole || period * p.dim > most) return false;
  const std::int64_t vectors = period * p.dim / vector, columns = ceil_div(vectors, kSharedThreads);
  const std::int64_t tiles = ceil_div(vectors, columns), lanes = kSharedThreads / tiles;
  // Memory is written fastest where blocks are short, but each has to load its distributions and to draw its noise.
  const std::int64_t turns = batches * columns * ceil_div(p.num_samples, lanes * period), most_turns = size == 2 ? 16 : 8;
  const std::int64_t turn = std::clamp<std::int64_t>(turns / (2 * std::int64_t{hw.multiprocessors}), 1, most_turns);
  p.period = static_cast<unsigned>(period);
  p.step = std::min(lanes * turn, kSharedNoiseRows / period);
  const std::int64_t blocks = batches * ceil_div(p.num_samples, p.step * period) * columns;
  if (blocks > most) return false;
  p.lines = divider_of(columns);
  p.tiles = divider_of(tiles);
  launch_threads(kernel_for(dtype, period == 1), blocks * kSharedThreads, device, stream, &p, kSharedThreads);
  return true;
}

}  // namespace cuops
