// Gradients of two factors and of their input in float64, as in kron_linear_squares_bwd.cu:
//   dW1 = sum of dy W2 x^T,   dW2 = sum of dy^T W1 x,   dx = W1^T dy W2.
// A team of warps has a sample. Each of these products has its own warps, of 16 rows each.
#include "device/overlap.cuh"
#include "device/tuned.cuh"
#include "kron_doubles.cuh"
#include "kron_linear/kron_block_sums.cuh"
#include "kron_squares.h"

CUOPS_ONLY_FOR(90)

namespace cuops {

// kChunk: of Doubles.
template <int kSize, int kTeams, int kChunk>
__device__ void squares(const KronSquaresParams& p) {
  using D = Doubles<kSize, kChunk>;
  static_assert(D::kParts == double_warps(kSize) && D::kMatrix == double_matrix(kSize, kSize));
  constexpr int kWarps = 3 * D::kParts, kThreads = 32 * kWarps;
  const int thread = threadIdx.x % kThreads, team = threadIdx.x / kThreads, lane = threadIdx.x % 32;
  const int role = thread / 32 / D::kParts, part = thread / 32 % D::kParts;
  const bool wanted = p.wanted >> role & 1;
  const long long stride = 1LL * gridDim.x * kTeams;
  char* const shared = shared_at<char>(0);
  const int state = (2 + 4 * team) * D::kMatrix;
  // Zeros surround matrices that are smaller.
  if (min(min(p.out[0], p.in[0]), min(p.out[1], p.in[1])) < kSize) {
    for (int i = threadIdx.x; i < (2 + 4 * kTeams) * D::kMatrix / 16; i += blockDim.x) shared_at<uint4>(0)[i] = uint4{};
    __syncthreads();
  }
  const int in_size = p.in[0] * p.in[1], out_size = p.out[0] * p.out[1];
  auto load = [&](int buffer, long long sample) {
    char* const to = shared + state + buffer * 2 * D::kMatrix;
    D::template copy<kThreads>(to, static_cast<const double*>(p.x) + sample * in_size, p.in[0], p.in[1], thread);
    D::template copy<kThreads>(to + D::kMatrix, static_cast<const double*>(p.dy) + sample * out_size, p.out[0], p.out[1], thread);
  };
  long long sample = blockIdx.x + 1LL * gridDim.x * team;
  if (sample < p.rows) load(0, sample);
  D::copy_factor(shared, static_cast<const double*>(p.first), p.out[0], p.in[0], p.in[0], 1);
  D::copy_factor(shared + D::kMatrix, static_cast<const double*>(p.second), p.out[1], p.in[1], p.in[1], 1);
  commit_copies();
  wait_for_copies<0>();
  __syncthreads();
  const unsigned first = shared_address(shared), second = first + D::kMatrix;
  D d;
  d.clear();
  int buffer = 0;
#pragma unroll 1
  for (; sample < p.rows; sample += stride, buffer ^= 1) {
    const unsigned x = first + state + buffer * 2 * D::kMatrix, dy = x + D::kMatrix;
    wait_for_copies<0>();
    sync_warps(1 + team, kWarps);
    // What was in the other buffers has been read.
    if (sample + stride < p.rows) load(buffer ^ 1, sample + stride);
    commit_copies();
    if (!wanted) continue;
    if (role == 0) {
      d.template load_rows<false>(dy, part);
      d.template multiply<true>(second, x);
    } else {
      if (role == 2) d.clear();
      d.template load_rows<true>(role == 1 ? dy : first, part);
      d.template multiply<false>(role == 1 ? first : dy, role == 1 ? x : second);
      if (role == 2) d.store(static_cast<double*>(p.dx) + sample * in_size, p.in[0], p.in[1], part);
    }
  }
  launch_dependents();
  wait_for_copies<0>();
  sync_warps(1 + team, kWarps);
  // Teams add up, in order, by way of the memory of their samples.
  double* const sums = reinterpret_cast<double*>(shared + state) + (role * D::kParts + part) * D::kTiles * 128 + lane;
  constexpr int kNext = 4 * D::kMatrix / sizeof(double);
  static_assert(2 * D::kParts * D::kTiles * 128 <= kNext || kTeams == 1);
  if (team > 0 && role < 2) {
#pragma unroll
    for (int i = 0; i < D::kTiles * 4; ++i) sums[i * 32] = d.sum[i / 4][i % 4];
  }
  if (kTeams > 1) __syncthreads();
  if (team > 0 || role == 2 || !wanted) return;
#pragma unroll
  for (int i = 0; i < D::kTiles * 4; ++i) {
#pragma unroll
    for (int more = 1; more < kTeams; ++more) d.sum[i / 4][i % 4] += sums[more * kNext + i * 32];
  }
  const int number = __popc(p.wanted & (kFirstGradient | kSecondGradient)), which = role == 1 && p.wanted & kFirstGradient;
  d.store(static_cast<double*>(p.partial) + (1LL * blockIdx.x * number + which) * (kSize * kSize), kSize, kSize, part);
}

}  // namespace cuops

#define KRON_SQUARES(size, teams, chunk)                                              \
  extern "C" __global__ void __launch_bounds__(96 * teams * ((size + 15) / 16), 1)    \
      kron_squares_##size##_f64(const __grid_constant__ cuops::KronSquaresParams p) { \
    cuops::wait_in_turn();                                                            \
    cuops::squares<size, teams, chunk>(p);                                            \
  }

// Instances, as kron_linear_squares_bwd.cc asks for them.
KRON_SQUARES(16, 8, 1)
KRON_SQUARES(24, 2, 3)
KRON_SQUARES(32, 2, 4)
KRON_SQUARES(48, 1, 1)
KRON_SQUARES(64, 1, 2)

extern "C" __global__ void __launch_bounds__(512) kron_squares_sum_f64(const __grid_constant__ cuops::KronSquaresSum p) {
  using namespace cuops;
  const int n = p.size * p.size;
  add_up_blocks<double, double2>(p, static_cast<long long>(n / 2) * p.gradients, true, [&](int at, double sum) {
    const int which = at >= n, out = (at - which * n) / p.size, in = at % p.size;
    if (out < p.out[which] && in < p.in[which]) static_cast<double*>(p.gradient[which])[out * p.in[which] + in] = sum;
  });
}
