// What the host tells the kernels of kron_linear_squares_bwd.cu.
#pragma once

#include "dtype.h"

namespace cuops {

constexpr int kFirstGradient = 1, kSecondGradient = 2, kInputGradient = 4;

struct KronSquaresParams {
  const void *x, *dy, *first, *second;  // (rows, size, size) and the factors, (size, size)
  void* dx;
  float* partial;  // (blocks, gradients of factors, size, size)
  long long rows;
  int wanted;
};
static_assert(sizeof(KronSquaresParams) == 64, "host and device must agree on the layout");

struct KronSquaresSum {
  const float* partial;
  void* gradient[2];
  int blocks, size, gradients;
  DType dtype[2];
  bool transposed[2];
};
static_assert(sizeof(KronSquaresSum) == 40, "host and device must agree on the layout");

}  // namespace cuops
