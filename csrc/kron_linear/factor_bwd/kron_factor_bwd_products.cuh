// Products of a warp of kron_linear_factor_bwd.cu, by the tensor cores of each dtype.
#pragma once

#include "kron_linear/kron_shared.cuh"

namespace cuops {

// sum += a step's products: 32 x 32 sums, of 16 x 8 each. kPairs: float32 as pairs, or as TF32. As tensor cores cut sums off, they
// form those of 8 products only.
template <bool kPairs>
__device__ void add_products(const unsigned (&g)[4][4], const unsigned (&x)[4][4], float (&sum)[2][4][4], int, int, float) {
#pragma unroll
  for (int k = 0; k < 4; k += 2) {
    unsigned high[2][4], low[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) split_tf32(g[i / 4 * 2 + i % 2][k + i % 4 / 2], high[i / 4][i % 4], low[i / 4][i % 4]);
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
      unsigned x_high[2][2], x_low[2][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) split_tf32(x[n + i / 2][k + i % 2], x_high[i / 2][i % 2], x_low[i / 2][i % 2]);
      float part[2][2][4] = {};
      auto add_part = [&](const unsigned (&a)[2][4], const unsigned (&b)[2][2]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) mma_tf32(part[i / 2][i % 2], a[i / 2], b[i % 2][0], b[i % 2][1]);
      };
      if constexpr (kPairs) {
        add_part(low, x_high);
        add_part(high, x_low);
      }
      add_part(high, x_high);
#pragma unroll
      for (int i = 0; i < 16; ++i) sum[i / 8][n + i / 4 % 2][i % 4] += part[i / 8][i / 4 % 2][i % 4];
    }
  }
}

template <bool, class Half>
__device__ void add_products(const unsigned (&g)[4][4], const unsigned (&x)[4][4], float (&sum)[2][4][4], int, int, Half) {
#pragma unroll
  for (int k = 0; k < 4; k += 2) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const unsigned a[4] = {g[2 * m][k], g[2 * m + 1][k], g[2 * m][k + 1], g[2 * m + 1][k + 1]};
#pragma unroll
      for (int n = 0; n < 4; ++n) mma<Half>(sum[m][n], a, x[n][k], x[n][k + 1]);
    }
  }
}

template <bool>
__device__ void add_products(const unsigned (&g)[4][4], const unsigned (&x)[4][4], double (&sum)[2][4][4], int rows, int columns,
                             double) {
  auto number = [](const unsigned (&v)[4], int k) {
    return __hiloint2double(static_cast<int>(v[2 * k + 1]), static_cast<int>(v[2 * k]));
  };
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    if (m * 16 >= rows) continue;
    const double a[4] = {number(g[2 * m], 0), number(g[2 * m + 1], 0), number(g[2 * m], 1), number(g[2 * m + 1], 1)};
#pragma unroll
    for (int n = 0; n < 4; ++n)
      if (n / 2 * 16 < columns) mma(sum[m][n], a, number(x[n], 0), number(x[n], 1));
  }
}

}  // namespace cuops
