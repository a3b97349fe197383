// How the kernels of kron_linear_double.cu and kron_linear_squares_bwd_f64.cu divide a block and its shared memory.
#pragma once

namespace cuops {

// Of kron_linear_double.cu: teams of warps of a block, warps of a team, and bytes of shared memory, for a tile of one of its sizes,
// and as many rows or fewer: the second factor, and two matrices of each team, with gaps between their rows.
constexpr int double_teams(int rows) { return rows == 16 ? 24 : rows <= 32 ? 8 : rows == 48 ? 4 : rows == 64 ? 2 : 1; }
constexpr int double_warps(int rows) { return (rows + 15) / 16; }
constexpr int double_matrix(int rows, int size) { return rows * (size * 8 + 32); }
constexpr int double_bytes(int rows, int size) {
  return double_matrix(size, size) + 2 * double_teams(rows) * double_matrix(rows, size);
}

}  // namespace cuops
