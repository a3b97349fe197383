// Copies of matrices, transposed: what a GEMM of few rows or columns leaves, or wants, across.
#include "device/overlap.cuh"
#include "kron_transpose.h"

namespace cuops {

// A warp has every eighth row of a tile, and then every eighth column, so that its lanes read and write neighbours.
template <class T>
__device__ void kron_transpose(const KronTransposeParams& p) {
  constexpr int kRows = kTransposeRows, kColumns = transpose_columns(sizeof(T)), kWarps = kTransposeThreads / 32;
  constexpr int kPitch = kColumns + (sizeof(T) == 2 ? 2 : 1);  // an odd number of words: a column is in different banks
  __shared__ T tile[kRows * kPitch];
  const unsigned tiles = p.tiles_down * p.tiles_across, matrix = blockIdx.x / tiles, own = blockIdx.x - matrix * tiles;
  const int down = own / p.tiles_across, row = down * kRows, column = (own - down * p.tiles_across) * kColumns;
  const int rows = p.rows - row, columns = p.columns - column;  // to the end of the matrix
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const T* const x = static_cast<const T*>(p.x) + (1LL * matrix * p.rows + row + warp) * p.columns + column + lane;
  T* const y = static_cast<T*>(p.y) + (1LL * matrix * p.columns + column + warp) * p.rows + row + lane;
  wait_for_previous();

  T v[kRows / kWarps][kColumns / 32];
#pragma unroll
  for (int j = 0; j < kRows / kWarps; ++j)
#pragma unroll
    for (int k = 0; k < kColumns / 32; ++k)
      if (warp + j * kWarps < rows && lane + k * 32 < columns) v[j][k] = x[1LL * j * kWarps * p.columns + k * 32];
#pragma unroll
  for (int j = 0; j < kRows / kWarps; ++j)
#pragma unroll
    for (int k = 0; k < kColumns / 32; ++k) tile[(warp + j * kWarps) * kPitch + lane + k * 32] = v[j][k];
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kColumns / kWarps; ++j)
#pragma unroll
    for (int k = 0; k < kRows / 32; ++k)
      if (warp + j * kWarps < columns && lane + k * 32 < rows)
        y[1LL * j * kWarps * p.rows + k * 32] = tile[(lane + k * 32) * kPitch + warp + j * kWarps];
}

}  // namespace cuops

// An instance a size of elements.
#define KRON_TRANSPOSE(bits, T)                                          \
  extern "C" __global__ void __launch_bounds__(cuops::kTransposeThreads) \
      kron_transpose_##bits(const cuops::KronTransposeParams p) {        \
    cuops::kron_transpose<T>(p);                                         \
  }
KRON_TRANSPOSE(16, unsigned short)
KRON_TRANSPOSE(32, unsigned)
KRON_TRANSPOSE(64, unsigned long long)
