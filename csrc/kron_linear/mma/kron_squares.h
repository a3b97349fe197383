// What the host tells the kernels of kron_linear_squares_bwd.cu, kron_linear_squares_bwd_f64.cu, kron_linear_wide_bwd.cu and
// kron_linear_wide_bwd_f32.cu.
#pragma once

#include "dtype.h"
#include "tensor_map.h"

namespace cuops {

constexpr int kFirstGradient = 1, kSecondGradient = 2, kInputGradient = 4;

// Shared memory of kron_linear_squares_bwd.cu, in units of 16 bytes: the largest magnitudes, and then tiles of `size` rows, with
// `pairs` of two numbers of 16 bits each.
constexpr int kSquaresMagnitudes = 16;
constexpr int squares_pitch(int size, bool pairs) { return size / 8 * (pairs ? 2 : 1) + 1; }

struct KronSquaresParams {
  const void *x, *dy, *first, *second;  // (rows, in[0], in[1]), (rows, out[0], out[1]), and the factors, (out, in) each
  void* dx;
  void* partial;  // (blocks, gradients of factors, size, size), in the order of registers; in float64, row by row
  long long rows;
  int wanted, out[2], in[2];
};
static_assert(sizeof(KronSquaresParams) == 80, "host and device must agree on the layout");

struct KronWideSquaresParams {
  TensorMap x, dy;
  KronSquaresParams squares;
};
static_assert(sizeof(KronWideSquaresParams) == 384, "host and device must agree on the layout");

struct KronSquaresSum {
  const void* partial;
  void* gradient[2];
  int blocks, size, gradients, out[2], in[2];  // out, in: of each gradient
  DType dtype[2];
  bool transposed[2];
};
static_assert(sizeof(KronSquaresSum) == 56, "host and device must agree on the layout");

}  // namespace cuops
