// What the host tells the kernels of kron_linear_half.cu and kron_linear_double.cu.
#pragma once

#include "kron_linear.h"

namespace cuops {

// Of kron_linear_half.cu: warps of a block, of which those that share a sample have 32 columns of the results each; and how it
// divides shared memory, in units of 16 bytes: the largest magnitudes of the factors; these, of 32 bits, the last of 16; and two
// matrices of each sample. Slices of three factors' results are a pitch apart.
constexpr int kHalfWarps = 16, kHalfMaxima = 24, kHalfPitch = 32 * 32 / 4 + 2;
constexpr int half_samples(int size) { return kHalfWarps / (size / 32); }
constexpr int half_units(int size) {
  const int matrix = size * size / 8;
  return kHalfMaxima + 3 * matrix + half_samples(size) * 2 * matrix;
}
constexpr int kHalfCubeUnits = half_units(32) + 32 * 32 / 4 + 32 * kHalfPitch;

struct KronInRegistersParams {
  Rows x, y;  // of a sample
  const void* bias;
  long long rows, bias_lead;
  KronFactor factors[3];
  KronDivisor by_units;  // of 8 neighbours, in a row of the last axis
};
static_assert(sizeof(KronInRegistersParams) == 264, "host and device must agree on the layout");

}  // namespace cuops
