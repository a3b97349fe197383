// What the host tells the kernels of kron_linear_dots.cu.
#pragma once

#include "kron_linear.h"

namespace cuops {

constexpr int kDotsThreads = 128;

// c (m, n) = the sum over k of a (m, k) times b (n, k): row r of each matrix is at r * row, element k of a and b at k * step, those
// of c are neighbours.
struct KronDots {
  const void *a, *b;
  void* c;
  const void* bias;  // (bias_lead, n), for rows in turn
  int a_row, a_step, b_row, b_step, c_row;
  int bias_lead;
  int k, count;  // results: m * n
  KronDivisor by_n;
  int blocks;
  unsigned char lanes_log;  // lanes that share a sum
  bool vectors;             // a and b can be moved in vectors of 16 bytes
};

struct KronDotsParams {
  KronDots dots[2];  // the second may have no blocks
};
static_assert(sizeof(KronDotsParams) == 160, "host and device must agree on the layout");

constexpr int kTermsFactors = 4, kTermsBatch = 4;  // at most; elements of x that a lane asks for together

// y (rows, out) = the sum over i of x (rows, in) times an element of each factor, of row o and column i as these have it.
struct KronTermsParams {
  const void* x;
  void* y;
  const void* bias;        // (bias_lead, out), for rows in turn
  int x_stride, y_stride;  // from row to row
  int bias_lead;
  int in, count;  // results: rows * out
  KronDivisor by_out;
  int lanes_log;  // lanes that share a sum
  struct {
    const void* data;
    int row_stride, column_stride;
    KronDivisor by_out, by_in;
  } factor[kTermsFactors];
};
static_assert(sizeof(KronTermsParams) == 184, "host and device must agree on the layout");

// All gradients of that, where x and dy = (rows, elements) have no gaps: a result of a factor's is the sum over rows, and over the
// rows and columns of all others, of an element of x, one of dy, and one of each other factor.
struct KronTermsBwdParams {
  KronTermsParams back;  // of dx from dy
  const void *x, *dy;
  int in, out;  // elements of a row
  int start;    // the first block of dx
  struct {
    const void* data;
    void* gradient;  // nullptr: not wanted, no blocks
    int row_stride, column_stride;
    KronDivisor by_out, by_in;
    int row_step, column_step;  // how far the elements of dy, and of x, are apart that neighbouring rows and columns belong to
    int first, terms;           // its first block; terms of a result
    int lanes_log;              // lanes that share one, up to a block's
  } factor[kTermsFactors];
};
static_assert(sizeof(KronTermsBwdParams) == 472, "host and device must agree on the layout");

}  // namespace cuops
