// Gradients by one factor of kron_linear on the device: of the factor, products of two arrays summed over all that it does not
// touch, and of what it is applied to.
#include "device/overlap.cuh"
#include "device/row_sums.cuh"
#include "device/tuned.cuh"
#include "kron_factor_bwd_dx.cuh"
#include "kron_factor_bwd_operand.cuh"
#include "kron_factor_bwd_products.cuh"
#include "kron_linear/kron_block_sums.cuh"

CUOPS_ONLY_FOR(80, 90)

namespace cuops {

// Blocks take every n-th stage of the depth, so that every run adds in the same order. Warps share the block's tile; where this is
// small, several warps have the same part of it, each in other steps.
template <class T, class Acc, bool kPairs, bool kAcrossG, bool kAcrossX, bool kDx = false, int kPiece = 16>
__device__ void kron_linear_factor_bwd(const KronFactorBwdParams& p) {
  static_assert((!kDx && kPiece == 16) || !(kAcrossG || kAcrossX));
  using G = BwdOperand<T, kAcrossG, kDx, kPiece>;
  using X = BwdOperand<T, kAcrossX, kDx, kPiece>;
  const int pairs = p.out_blocks * p.in_blocks, pair = static_cast<int>(blockIdx.x) % pairs;
  const unsigned block = blockIdx.x / pairs, blocks = gridDim.x / pairs;
  const int first_out = pair % p.out_blocks * p.g.tile, first_in = pair / p.out_blocks * p.x.tile;
  const int out_tiles = (p.g.tile + kBwdTile - 1) / kBwdTile, in_tiles = (p.x.tile + kBwdTile - 1) / kBwdTile;
  const int warp = threadIdx.x / 32, tiles = out_tiles * in_tiles, parts = static_cast<int>(blockDim.x) / 32 / tiles;
  const int part = warp / tiles, tile = warp - part * tiles, m0 = tile % out_tiles * kBwdTile, n0 = tile / out_tiles * kBwdTile;
  const int depth = p.steps * G::kStep;
  const unsigned stages = (p.depth + depth - 1) / depth;

  if constexpr (kDx) {  // what is beyond g's rows counts as zeros
    for (int i = threadIdx.x; i < p.w_at; i += blockDim.x) *shared_at<uint4>(i) = uint4{};
    __syncthreads();
  }
  G g(p, p.g, first_out, block, blocks);
  X x(p, p.x, first_in, block, blocks);
  auto load = [&](unsigned stage, int slot) {
    if (stage < stages) {
      g.copy(slot * p.stage_units, depth);
      x.copy(slot * p.stage_units + p.x_at, depth);
    }
    commit_copies();
  };
#pragma unroll 1
  for (int i = 0; i < kBwdStages - 1; ++i) load(block + i * blocks, i);
  Select<kDx, BwdInput<T, kPiece>, NoFactor> factor(p, block, blocks);
  Acc sum[2][4][4] = {};
  int slot = 0;
#pragma unroll 1
  for (unsigned stage = block; stage < stages; stage += blocks) {
    wait_for_copies<kBwdStages - 2>();
    if constexpr (kPiece == 2) {
      g.mend(slot * p.stage_units, stage, p.steps);
      x.mend(slot * p.stage_units + p.x_at, stage, p.steps);
    }
    __syncthreads();
    load(stage + (kBwdStages - 1) * blocks, slot > 0 ? slot - 1 : kBwdStages - 1);
    if (part < parts) {
#pragma unroll 1
      for (int step = part; step < p.steps; step += parts) {
        unsigned rows[4][4], columns[4][4];
        G::load_rows(rows, p.g, slot * p.stage_units, m0, step);
        X::load_rows(columns, p.x, slot * p.stage_units + p.x_at, n0, step);
        add_products<kPairs>(rows, columns, sum, p.g.size - first_out - m0, p.x.size - first_in - n0, T());
      }
    }
    if constexpr (kDx) factor.apply(slot * p.stage_units);
    slot = slot + 1 < kBwdStages ? slot + 1 : 0;
  }
  __syncthreads();
  // Parts are added in order: a lane's sums are where the same lane of the other parts has its own.
  Acc* const shared = shared_at<Acc>(0) + tile * kBwdTile * kBwdTile + threadIdx.x % 32;
  for (int turn = 1; turn < parts; ++turn) {
    if (part == turn) {
#pragma unroll
      for (int i = 0; i < 32; ++i) shared[i * 32] = sum[i / 16][i / 4 % 4][i % 4];
    }
    __syncthreads();
    if (part == 0) {
#pragma unroll
      for (int i = 0; i < 32; ++i) sum[i / 16][i / 4 % 4][i % 4] += shared[i * 32];
    }
    __syncthreads();
  }
  if (part > 0) return;
  const long long sums = static_cast<long long>(p.g.size) * p.x.size, stride = sums_stride(sums);
  Acc* const partial = static_cast<Acc*>(p.partial) + block * stride;
  const int lane = threadIdx.x % 32;
  if (pair == 0 && threadIdx.x < stride - sums) partial[sums + threadIdx.x] = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int m = m0 + G::row_of(i / 16 * 2 + i % 4 / 2, lane / 4), n = n0 + X::row_of(i / 4 % 4, lane % 4 * 2 + i % 2);
    if (m < min(p.g.tile, p.g.size - first_out) && n < min(p.x.tile, p.x.size - first_in))
      partial[static_cast<long long>(first_out + m) * p.x.size + first_in + n] = sum[i / 16][i / 4 % 4][i % 4];
  }
}

template <class Acc, class Vector>
__device__ void kron_factor_bwd_sum(const KronFactorBwdSum& p) {
  const long long stride = sums_stride(p.n) * sizeof(Acc) / sizeof(Vector);
  const bool exists = blockIdx.x * 8 + threadIdx.x % 8 < stride;
  add_up_blocks<Acc, Vector>(p, stride, exists, [&](int i, Acc sum) {
    if (i < p.n) store_chunk(p.dtype, p.dw, i, Pack<Acc, 1>{sum});
  });
}

}  // namespace cuops

extern "C" __global__ void __launch_bounds__(512) kron_factor_bwd_sum_f32(const __grid_constant__ cuops::KronFactorBwdSum p) {
  cuops::kron_factor_bwd_sum<float, float4>(p);
}
extern "C" __global__ void __launch_bounds__(512) kron_factor_bwd_sum_f64(const __grid_constant__ cuops::KronFactorBwdSum p) {
  cuops::kron_factor_bwd_sum<double, double2>(p);
}

// Instances, as kron_linear_factor_bwd.cc asks for them: both operands along the depth, g along and x across, both across; both
// along it, and dx; and both along it, without dx and with it, in pieces of a vector and of a word.
#define KRON_LINEAR_BWD_OF(name, ...)                                                \
  extern "C" __global__ void __launch_bounds__(512, 1)                               \
      kron_factor_bwd_##name(const __grid_constant__ cuops::KronFactorBwdParams p) { \
    cuops::wait_in_turn();                                                           \
    cuops::kron_linear_factor_bwd<__VA_ARGS__>(p);                                   \
  }
#define KRON_LINEAR_BWD(name, T, Acc, pairs, piece)                   \
  KRON_LINEAR_BWD_OF(name##_along, T, Acc, pairs, false, false)       \
  KRON_LINEAR_BWD_OF(name##_along_across, T, Acc, pairs, false, true) \
  KRON_LINEAR_BWD_OF(name##_across, T, Acc, pairs, true, true)        \
  KRON_LINEAR_BWD_OF(name##_pieces, T, Acc, pairs, false, false, false, piece)
#define KRON_LINEAR_BWD_DX(name, T, Acc, piece)                    \
  KRON_LINEAR_BWD_OF(name##_dx, T, Acc, false, false, false, true) \
  KRON_LINEAR_BWD_OF(name##_dx_pieces, T, Acc, false, false, false, true, piece)
#define KRON_LINEAR_BWD_WORDS(name, T)                                      \
  KRON_LINEAR_BWD_OF(name##_words, T, float, false, false, false, false, 2) \
  KRON_LINEAR_BWD_OF(name##_dx_words, T, float, false, false, false, true, 2)
KRON_LINEAR_BWD(f64, double, double, false, 8)
KRON_LINEAR_BWD(f32, float, float, true, 4)
KRON_LINEAR_BWD(tf32, float, float, false, 4)
KRON_LINEAR_BWD(f16, __half, float, false, 4)
KRON_LINEAR_BWD(bf16, __nv_bfloat16, float, false, 4)
KRON_LINEAR_BWD_DX(f64, double, double, 8)
KRON_LINEAR_BWD_DX(f16, __half, float, 4)
KRON_LINEAR_BWD_DX(bf16, __nv_bfloat16, float, 4)
KRON_LINEAR_BWD_WORDS(f16, __half)
KRON_LINEAR_BWD_WORDS(bf16, __nv_bfloat16)
