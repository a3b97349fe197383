// By how many threads, of how many columns each, sample_tiles draws.
#include "sample_normal_launch.h"

namespace cuops {
namespace {

constexpr int kReservedBytes = 2048;  // at least what the system and the kernel itself take of a block's shared memory

enum Tile { kOne, kTwo, kFour, kFourHalves, kTwoState, kFourState };

Kernel& kernel_for(DType dtype, Tile tile) {
  static const KernelTable table(
      "sample_normal_fwd_",
      {{"sample_normal_tiles", {"_tiles_1", "_tiles_2", "_tiles_4", "_tiles_4_halves", "_tiles_2_state", "_tiles_4_state"}}});
  return table.at(dtype, tile);
}

struct Share {
  std::int64_t threads;  // that share the groups of a tile
  std::int64_t blocks;   // of the multiprocessor with most of them
};

// So many threads that the multiprocessor with most blocks has least to do, its preparations counting for a third of a group. More
// blocks, with less to wait for at the end, may take 1/48 longer by this measure.
Share share_groups(std::int64_t groups, std::int64_t tiles, std::int64_t multiprocessors) {
  Share best{};
  std::int64_t least = INT64_MAX;
  for (int blocks = 8; blocks >= 2; blocks -= 2) {  // two at a time fill one
    const std::int64_t share = std::clamp<std::int64_t>(blocks * multiprocessors * kTileThreads / tiles, 1, groups);
    const std::int64_t busiest = ceil_div(ceil_div(share * tiles, kTileThreads), multiprocessors);
    const std::int64_t turns = busiest * (3 * ceil_div(groups, share) + 1);
    if (turns < least - least / 48) {
      best = {share, busiest};
      least = turns;
    }
  }
  return best;
}

}  // namespace

bool launch_tiles(SampleNormalParams& p, DType dtype, int device, CUstream stream, const Hardware& hw) {
  const std::int64_t groups = p.end_group - p.group, size = size_of(dtype), bytes = p.columns * p.num_samples * size;
  const std::int64_t last = p.first_column + p.columns - 1, most = std::int64_t{1} << 30;
  const bool state = p.state != nullptr;
  if ((state && (dtype == kFloat64 || hw.tuned < 90)) || p.shared || groups > most || p.columns > most || last >> 32 != 0 ||
      p.group >> 32 != (p.end_group - 1) >> 32) {
    return false;
  }
  const auto at = reinterpret_cast<std::uintptr_t>(p.samples);
  auto fits = [&](int width) { return p.dim % width == 0 && at % (width * size) == 0; };
  // Few numbers are drawn sooner by more threads. Rows that share 32 bytes with their neighbours are to be written at about the
  // same time, before they leave the cache: by many blocks, one after the other.
  const bool few = p.columns * groups < std::int64_t{hw.multiprocessors} * 2 * kTileThreads * 4;
  const bool ragged = bytes >= 32 << 20 && (p.dim * size % 32 != 0 || at % 32 != 0);
  Tile tile = kOne;
  int width = 1;
  if (size < 8 && fits(4) && !(few && size == 4)) {
    tile = state ? kFourState : kFour;
    width = 4;
  } else if (fits(2) && !(state && size == 2)) {
    const bool halves = !state && (size == 2 || (size == 4 && ragged));
    tile = state ? kTwoState : halves ? kFourHalves : kTwo;
    width = halves ? 4 : 2;
  } else if (state) {
    return false;
  }
  const std::int64_t row = ceil_div(p.dim, width), tiles = p.columns / p.dim * row;
  Share share{ceil_div(groups, std::min<std::int64_t>(groups, width == 4 ? 16 : 32)), 0};
  if (!ragged) share = share_groups(groups, tiles, hw.multiprocessors);
  p.step = share.threads;
  if (p.step * tiles > most) return false;
  p.lines = divider_of(tiles);
  p.tiles = divider_of(row);
  // While the kernel before ends, some multiprocessors have room for more blocks than others. Shared memory that nobody uses
  // spreads them evenly.
  const bool even = hw.tuned >= 90 && share.blocks >= 2 && share.blocks <= 4;
  const unsigned shared_bytes = even ? static_cast<unsigned>(hw.shared_bytes / share.blocks - kReservedBytes) : 0;
  launch_threads(kernel_for(dtype, tile), p.step * tiles, device, stream, &p, kTileThreads, shared_bytes);
  return true;
}

}  // namespace cuops
