// How the kernels of kron_linear_double.cu and kron_linear_squares_bwd_f64.cu divide a block and its shared memory.
#pragma once

namespace cuops {

// Of kron_linear_double.cu: teams of warps of a block, warps of a team, and bytes of shared memory, for a tile of one of its sizes:
// the second factor, and two matrices of each team, with gaps between their rows.
constexpr int double_teams(int size) { return size == 16 ? 24 : size <= 32 ? 8 : size == 48 ? 4 : 2; }
constexpr int double_warps(int size) { return (size + 15) / 16; }
constexpr int double_matrix(int size) { return size * (size * 8 + 32); }
constexpr int double_bytes(int size) { return (1 + 2 * double_teams(size)) * double_matrix(size); }

}  // namespace cuops
