// What the host tells the kernels of kron_linear_cube.cu and kron_linear_cube_f64.cu.
#pragma once

#include "kron_linear.h"

namespace cuops {

constexpr int kCubeSize = 32;  // of a factor, at most

// In float32: a slab is a matrix of the last two sizes in shared memory, which has so many of them, beside the last two factors,
// each as long as a slab. Some warps make slabs, others finish samples.
constexpr int kCubeSlab = kCubeSize * kCubeSize * 4, kCubeSlabs = 54, kCubeBytes = (2 + kCubeSlabs) * kCubeSlab;
constexpr int kCubeMakers = 6, kCubeFinishers = 6, kCubeThreads = 32 * (kCubeMakers + kCubeFinishers);

// In float64: rows of the first factor that a block has; bytes of a row of 32, with a gap for the banks, of the matrix that one of
// these rows gives, and of shared memory.
constexpr int kCubeRows = 16, kCubePitch = (kCubeSize + 4) * 8, kCubeMatrix = kCubeSize * kCubePitch + 16,
              kCubeBytesF64 = kCubeRows * kCubeMatrix + (kCubeRows + 2 * kCubeSize) * kCubeSize * 8, kCubeThreadsF64 = 384;

struct KronCubeParams {
  Rows x, y;  // of a sample
  const void* bias;
  long long rows, bias_lead;
  KronFactor factors[3];
  KronDivisor by_columns;  // of the last factor
  int slices;              // blocks that share a sample
};
static_assert(sizeof(KronCubeParams) == 272, "host and device must agree on the layout");

}  // namespace cuops
