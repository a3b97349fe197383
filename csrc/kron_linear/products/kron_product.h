// What the host tells the kernels of kron_linear_product.cu.
#pragma once

#include "kron_linear.h"

namespace cuops {

constexpr int kKronMostProduct = 256;  // rows and columns of a factor
// Rows and columns of a tile of the result, and threads of its block.
constexpr int kProductTile = 16, kProductThreads = 256;
// Of the axis that is summed over, what shared memory holds at a time.
constexpr int product_depth(DType dtype) { return dtype == kFloat64 ? 64 : 128; }

// Where the elements of a matrix are. Index c of one of its axes, which is two in one, is at (c / inner) * outer + c % inner; that
// of the other at index * step.
struct KronPlaces {
  long long outer, step;
  KronDivisor by_inner;
};

// How four neighbours along an axis are read: together, one by one, or each from a place of its own.
enum KronFours : unsigned char { kTogether4, kBeside4, kScattered4 };

// A matrix that is multiplied, whose axes are that of the sum, and another.
struct KronOperand {
  const void* data;
  KronPlaces places;
  bool splits_sum;  // the axis of the sum is the one that is two in one
  bool along_sum;   // fours are along the axis of the sum, else along the other
  KronFours fours;
};

// c (m, n) = the sum over k of a (m, k) times b (n, k).
struct KronProduct {
  KronOperand a, b;
  void* c;
  KronPlaces places;
  bool splits_rows;  // which of c's axes is two in one
  KronFours fours;   // of a row
  const void* bias;  // (bias_lead, n), for rows in turn
  int bias_lead;
  int m, n, k;
  int splits_log, depth;  // parts of the sum, which the blocks of a cluster have; elements of a part
  KronDivisor by_column_tiles;
  int blocks;
};

struct KronProductParams {
  KronProduct product[2];  // the second may have no blocks
};
static_assert(sizeof(KronProductParams) == 336, "host and device must agree on the layout");

}  // namespace cuops
