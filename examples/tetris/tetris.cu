// Whole games of Tetris by linear policies: a warp plays a game, its lanes weigh the placements of a piece, the best one is made.
// Compiled with WIDTH (at most 14) and HEIGHT defined. A board is a bit mask for each row, from the floor up.

typedef unsigned long long u64;

// Every placement of every piece: rows of 16 bits from the bottom up, in their columns, and how many there are.
struct Placement {
  u64 rows;
  u64 height;
};

constexpr int kFeatures = 8, kMostPlacements = 34;
constexpr unsigned kFull = (1u << WIDTH) - 1;

__device__ u64 mix(u64 z) {  // SplitMix64
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}

// The piece that comes after `turn` others.
__device__ int piece_of(u64 seed, int game, int turn) {
  const u64 z = mix(mix(seed + game * 0x9e3779b97f4a7c15ull) + turn * 0x9e3779b97f4a7c15ull);
  return static_cast<int>((z >> 32) * 7 >> 32);
}

__device__ unsigned part(u64 rows, int i) { return i < 0 || i > 3 ? 0u : static_cast<unsigned>(rows >> 16 * i) & 0xffffu; }

// The row that the bottom of the piece comes to rest in.
__device__ int landing(const unsigned (&board)[HEIGHT], u64 rows) {
  int y = 0;
#pragma unroll
  for (int r = 0; r < HEIGHT; ++r) {
    unsigned hit = 0;
#pragma unroll
    for (int i = 0; i < 4 && r + i < HEIGHT; ++i) hit |= board[r + i] & part(rows, i);
    if (hit) y = r + 1;
  }
  return y;
}

// Counts for each column, a bit of all counts in each word.
struct Counters {
  unsigned bit[5];
  __device__ void add(unsigned columns) {
#pragma unroll
    for (int b = 0; b < 5; ++b) {
      const unsigned carry = bit[b] & columns;
      bit[b] ^= columns;
      columns = carry;
    }
  }
  __device__ void keep(unsigned columns) {
#pragma unroll
    for (int b = 0; b < 5; ++b) bit[b] &= columns;
  }
  __device__ int sum(unsigned columns) const {
    int total = 0;
#pragma unroll
    for (int b = 0; b < 5; ++b) total += __popc(bit[b] & columns) << b;
    return total;
  }
};

// The features of the board after a placement, as game.py has them, in one pass from the top, complete lines left out.
__device__ void features(const unsigned (&board)[HEIGHT], const Placement& placement, int y, int (&f)[kFeatures]) {
  int cleared = 0, eroded = 0, row_transitions = 0, column_transitions = 0, holes = 0, wells = 0, depth = 0, rows_with_holes = 0;
  unsigned covered = 0, above = 0;
  Counters filled = {}, well = {};
#pragma unroll
  for (int r = HEIGHT - 1; r >= 0; --r) {
    const unsigned mine = part(placement.rows, r - y), row = board[r] | mine;
    if (row == kFull) {
      ++cleared;
      eroded += __popc(mine);
      continue;
    }
    const unsigned walled = row << 1 | 1u | 1u << (WIDTH + 1);
    row_transitions += __popc((walled ^ walled >> 1) & (kFull << 1 | 1u));
    column_transitions += __popc(above ^ row);
    above = row;
    const unsigned hole = ~row & covered;
    holes += __popc(hole);
    rows_with_holes += hole != 0;
    depth += filled.sum(hole);
    filled.add(row);
    covered |= row;
    const unsigned open_well = ~covered & walled & (walled >> 2) & kFull;
    well.keep(open_well);
    well.add(open_well);
    wells += well.sum(open_well);
  }
  f[0] = 2 * y + static_cast<int>(placement.height) + 1;  // twice the height of the piece's middle
  f[1] = cleared * eroded;
  f[2] = row_transitions + 2 * cleared;  // an empty row has two
  f[3] = column_transitions + __popc(~above & kFull);
  f[4] = holes;
  f[5] = wells;
  f[6] = depth;
  f[7] = rows_with_holes;
}

// Plays each game for at most `turns` more pieces. weights: (policies, 8); games g belongs to policy g / games_each.
extern "C" __global__ void play(const float* weights, const Placement* placements, const int* placement_counts,
                                unsigned short* boards, int* lines, int* pieces, unsigned char* over, int games, int games_each,
                                int turns, int seed) {
  const int game = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (game >= games || over[game]) return;
  float w[kFeatures];
#pragma unroll
  for (int k = 0; k < kFeatures; ++k) w[k] = weights[game / games_each * kFeatures + k] * (k == 0 ? 0.5f : 1.0f);
  unsigned board[HEIGHT];
#pragma unroll
  for (int r = 0; r < HEIGHT; ++r) board[r] = boards[game * HEIGHT + r];
  int cleared = 0, turn = pieces[game];
  const long long end = static_cast<long long>(turn) + turns;
  bool lost = false;
  for (; turn < end; ++turn) {
    const int piece = piece_of(seed, game, turn), count = placement_counts[piece];
    const Placement* const choices = placements + piece * kMostPlacements;
    float best = -__int_as_float(0x7f800000);
    int chosen = kMostPlacements;
    for (int choice = lane; choice < count; choice += 32) {
      const Placement placement = choices[choice];
      const int y = landing(board, placement.rows);
      if (y + static_cast<int>(placement.height) > HEIGHT) continue;
      int f[kFeatures];
      features(board, placement, y, f);
      float value = 0;
#pragma unroll
      for (int k = 0; k < kFeatures; ++k) value += w[k] * f[k];
      if (chosen == kMostPlacements || value > best) {
        best = value;
        chosen = choice;
      }
    }
    for (int offset = 16; offset > 0; offset /= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, best, offset);
      const int other_chosen = __shfl_xor_sync(0xffffffffu, chosen, offset);
      const bool better =
          other_chosen < kMostPlacements && (chosen == kMostPlacements || other > best || (other == best && other_chosen < chosen));
      best = better ? other : best;
      chosen = better ? other_chosen : chosen;
    }
    lost = chosen == kMostPlacements;
    if (lost) break;
    const u64 rows = choices[chosen].rows;
    const int y = landing(board, rows);
#pragma unroll
    for (int r = 0; r < HEIGHT; ++r) board[r] |= part(rows, r - y);
    for (int line = 0; line < 4; ++line) {  // the lowest complete one goes, what is above comes down
      bool found = false;
#pragma unroll
      for (int r = 0; r < HEIGHT; ++r) {
        found = found || board[r] == kFull;
        if (found) board[r] = r + 1 < HEIGHT ? board[r + 1 < HEIGHT ? r + 1 : r] : 0u;
      }
      if (!found) break;
      ++cleared;
    }
  }
  if (lane > 0) return;
#pragma unroll
  for (int r = 0; r < HEIGHT; ++r) boards[game * HEIGHT + r] = static_cast<unsigned short>(board[r]);
  lines[game] += cleared;
  pieces[game] = turn;
  over[game] = lost;
}
