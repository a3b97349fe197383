// What the host tells the kernels of kron_linear_transpose.cu.
#pragma once

namespace cuops {

constexpr int kTransposeThreads = 256, kTransposeRows = 64;  // of a block; of its tile
// Columns of a tile of elements of so many bytes.
constexpr int transpose_columns(int bytes) { return bytes == 8 ? 32 : 64; }

// Matrices of `rows` by `columns`, each of which becomes its transpose. A block has a tile of one.
struct KronTransposeParams {
  const void* x;
  void* y;
  int rows, columns;
  int tiles_down, tiles_across;  // of a matrix
};
static_assert(sizeof(KronTransposeParams) == 32, "host and device must agree on the layout");

}  // namespace cuops
