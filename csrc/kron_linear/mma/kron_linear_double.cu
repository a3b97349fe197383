// Kronecker-factored linear layers of two factors of up to 96 in float64: a warp finds 16 rows of W1 X W2^T, with its rows of W1 in
// registers.
#include "device/overlap.cuh"
#include "device/tuned.cuh"
#include "kron_doubles.cuh"
#include "kron_half.h"

CUOPS_ONLY_FOR(90)

namespace cuops {

template <int kRows, int kSize>
__device__ void kron_double(const KronInRegistersParams& p) {
  using D = Doubles<kSize, kSize == 24 ? 3 : 2, kRows>;
  constexpr int kTeams = double_teams(kRows), kFactor = kSize * D::kPitch, kBytes = kFactor + 2 * kTeams * D::kMatrix;
  static_assert(D::kParts == double_warps(kRows) && kBytes == double_bytes(kRows, kSize));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, team = warp / D::kParts, part = warp % D::kParts;
  const KronFactor &first = p.factors[0], &last = p.factors[1];
  const int out_rows = first.out, out_columns = last.out;
  const long long stride = 1LL * gridDim.x * kTeams;
  char* const shared = shared_at<char>(0);
  const int state = kFactor + 2 * team * D::kMatrix;
  // Zeros surround matrices that are smaller.
  if (first.in < kRows || min(last.in, out_columns) < kSize) {
    for (int i = threadIdx.x; i < kBytes / 16; i += blockDim.x) shared_at<uint4>(0)[i] = uint4{};
    __syncthreads();
  }
  auto load = [&](int buffer, long long sample) {
    D::template copy<32 * D::kParts>(shared + state + buffer * D::kMatrix,
                                     static_cast<const double*>(p.x.data) + offset_of(p.x, sample), first.in, last.in,
                                     threadIdx.x % (32 * D::kParts));
  };
  long long sample = blockIdx.x + 1LL * gridDim.x * team;
  if (sample < p.rows) load(0, sample);
  D::copy_factor(shared, static_cast<const double*>(last.data), out_columns, last.in, last.row_stride, last.column_stride);
  commit_copies();
  D d;
#pragma unroll
  for (int i = 0; i < D::kRowTiles * 4; ++i) {
    const int row = part * 16 + i % 2 * 8 + lane / 4, k = i / 4 * 8 + lane % 4 + i / 2 % 2 * 4;
    d.a[i / 4][i % 4] = row < out_rows && k < first.in
                            ? static_cast<const double*>(first.data)[row * first.row_stride + k * first.column_stride]
                            : 0.0;
  }
  wait_for_copies<0>();
  __syncthreads();
  const unsigned base = shared_address(shared);
  int buffer = 0;
#pragma unroll 1
  for (; sample < p.rows; sample += stride, buffer ^= 1) {
    wait_for_copies<0>();
    if constexpr (D::kParts == 1) {
      __syncwarp();
    } else {
      sync_warps(1 + team, D::kParts);
    }
    // What was in the other buffer has been read.
    if (sample + stride < p.rows) load(buffer ^ 1, sample + stride);
    commit_copies();
    d.clear();
    d.template multiply<true>(base + state + buffer * D::kMatrix, base);
    if (p.bias) {
      const double* const bias = static_cast<const double*>(p.bias) + sample % p.bias_lead * (out_rows * out_columns);
#pragma unroll
      for (int i = 0; i < D::kTiles * 4; ++i) {
        const int row = part * 16 + i % 4 / 2 * 8 + lane / 4, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (row < out_rows && column < out_columns) d.sum[i / 4][i % 4] += bias[row * out_columns + column];
      }
    }
    d.store(static_cast<double*>(p.y.data) + offset_of(p.y, sample), out_rows, out_columns, part);
  }
}

}  // namespace cuops

#define KRON_DOUBLE(rows, size, name)                                                                         \
  extern "C" __global__ void __launch_bounds__(32 * cuops::double_teams(rows) * cuops::double_warps(rows), 1) \
      kron_double_##name(const __grid_constant__ cuops::KronInRegistersParams p) {                            \
    cuops::wait_in_turn();                                                                                    \
    cuops::kron_double<rows, size>(p);                                                                        \
  }

// Instances, as kron_plan_double.cc asks for them.
KRON_DOUBLE(16, 16, 16)
KRON_DOUBLE(24, 24, 24)
KRON_DOUBLE(32, 32, 32)
KRON_DOUBLE(48, 48, 48)
KRON_DOUBLE(64, 64, 64)
KRON_DOUBLE(64, 80, 64_80)
KRON_DOUBLE(80, 80, 80)
KRON_DOUBLE(96, 96, 96)
