// Kronecker-factored linear layers on the device: y = x kron(W1, ..., Wn)^T. A tile of samples stays in shared memory, and each
// step applies one factor along one axis of it, in place.
#include "kron_linear.h"

#include "device/overlap.cuh"
#include "device/tuned.cuh"
#include "kron_linear/kron_tile.cuh"
#include "kron_linear/kron_weight.cuh"

namespace cuops {

// The fibers of a step are the vectors that its factor multiplies. A team of warps owns a group of fibers at a time, so results may
// overwrite them once the team has read all.
struct FiberTeam {
  int rank, index, count, warps;

  __device__ explicit FiberTeam(const KronStep& step)
      : rank(threadIdx.x / 32 % step.team),
        index(threadIdx.x / 32 / step.team),
        count(blockDim.x / 32 / step.team),
        warps(step.team) {}

  __device__ void sync() const {
    if (warps == 1) {
      __syncwarp();
    } else {
      sync_warps(1 + index, warps);
    }
  }
};

// acc += a b for matrices at these addresses, 16 bytes before their lower halves. Of pairs, three products matter. Tensor cores
// truncate sums, so only 16 products and those of lower halves are summed there.
template <bool kTransposedB, int kM, int kN>
__device__ void multiply(float (&acc)[kM][kN][4], const unsigned (&a_at)[kM], const unsigned (&b_at)[kN / 2], bool pair_a,
                         bool pair_b) {
  auto load_b = [](unsigned (&r)[4], unsigned at) {
    if constexpr (kTransposedB) {
      load_matrices_transposed(r, at);
    } else {
      load_matrices(r, at);
    }
  };
  unsigned a[4], a_low[4], b[kN / 2][4], b_low[kN / 2][4];
#pragma unroll
  for (int n = 0; n < kN / 2; ++n) {
    load_b(b[n], b_at[n]);
    if (pair_b) load_b(b_low[n], b_at[n] + 16);
  }
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    load_matrices(a, a_at[m]);
    float sum[kN][4] = {};
    if (pair_a) {
      load_matrices(a_low, a_at[m] + 16);
#pragma unroll
      for (int n = 0; n < kN; ++n) mma<__half>(sum[n], a_low, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    }
    if (pair_b) {
#pragma unroll
      for (int n = 0; n < kN; ++n) mma<__half>(sum[n], a, b_low[n / 2][n % 2 * 2], b_low[n / 2][n % 2 * 2 + 1]);
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      mma<__half>(sum[n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[m][n][j] += sum[n][j];
    }
  }
}

__device__ inline void store_pair(char* to, bool final, float a, float b) {
  if (final) {
    *reinterpret_cast<float2*>(to) = make_float2(a, b);
  } else {
    unsigned high, low;
    split<__half>(a, b, high, low);
    *reinterpret_cast<unsigned*>(to) = high;
    *reinterpret_cast<unsigned*>(to + 16) = low;
  }
}

// A step along an outer axis: outputs = weight (outputs x inputs) times state (inputs x fibers), 8 fibers a chunk.
template <int kM, int kN>
__device__ void step_outer(const KronFwdParams& p, const KronStep& step, int state, bool final) {
  const FiberTeam team(step);
  const bool pair_weight = step.split_weight, pair_state = step.split_state;
  const int lane = threadIdx.x % 32, stride = p.stride[step.axis] * 16, last = step.entries - 1;
  const unsigned short* const table = shared_at<unsigned short>(step.table);
  const float* const row_scale = shared_at<float>(step.row_scale);
  char* const base = shared_at<char>(state);
  const unsigned zero = shared_address(shared_at<char>(p.zero));
  const int unit = 16 * step.weight_units;
  const unsigned weight =
      shared_address(shared_at<char>(step.weight)) + (team.rank * kM * 16 + lane % 16) * step.weight_pitch * 16 + lane / 16 * unit;
  if (team.index >= team.count) return;
  for (int first = team.index * kN; first <= last; first += team.count * kN) {
    unsigned fibers[kN / 2];
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      const int fiber = first + 2 * n + lane / 16;
      fibers[n] = shared_address(base + table[fiber <= last ? fiber : first] * 16);
    }
    float acc[kM][kN][4] = {};
    unsigned from = weight;
#pragma unroll 1
    for (int k = lane % 16; k < step.in + lane % 16; k += 16) {
      unsigned a_at[kM], b_at[kN / 2];
#pragma unroll
      for (int m = 0; m < kM; ++m) a_at[m] = from + m * 16 * step.weight_pitch * 16;
#pragma unroll
      for (int n = 0; n < kN / 2; ++n) b_at[n] = k < step.in ? fibers[n] + k * stride : zero;
      multiply<true, kM, kN>(acc, a_at, b_at, pair_weight, pair_state);
      from += 2 * unit;
    }
    team.sync();
    char* to[kN];
#pragma unroll
    for (int n = 0; n < kN; ++n) to[n] = base + table[min(first + n, last)] * 16 + lane % 4 * (final ? 8 : 4);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = (team.rank * kM + m) * 16 + half * 8 + lane / 4;
        if (row >= step.out) continue;
        const float scale = row_scale[row];
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          if (first + n > last) break;
          store_pair(to[n] + row * stride, final, acc[m][n][2 * half] * scale, acc[m][n][2 * half + 1] * scale);
        }
      }
    }
  }
}

// A step along the innermost axis: outputs = state (fibers x inputs) times weight^T (inputs x outputs).
template <int kM, int kN>
__device__ void step_innermost(const KronFwdParams& p, const KronStep& step, int state, bool final, const KronTile& tile) {
  const FiberTeam team(step);
  const bool pair_weight = step.split_weight, pair_state = step.split_state;
  const bool direct = final && p.direct;
  const int lane = threadIdx.x % 32, chunks = (step.in + 7) / 8, last = step.entries - 1;
  const unsigned short* const table = shared_at<unsigned short>(step.table);
  const float* const row_scale = shared_at<float>(step.row_scale);
  char* const base = shared_at<char>(state);
  const unsigned zero = shared_address(shared_at<char>(p.zero));
  const int unit = 16 * step.weight_units;
  const unsigned weight = shared_address(shared_at<char>(step.weight)) +
                          (team.rank * kN * 8 + lane / 16 * 8 + lane % 8) * step.weight_pitch * 16 + lane / 8 % 2 * unit;
  if (team.index >= team.count) return;
  for (int first = team.index * kM * 16; first <= last; first += team.count * kM * 16) {
    unsigned fibers[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const int fiber = first + m * 16 + lane % 16;
      fibers[m] = shared_address(base + table[fiber <= last ? fiber : first] * 16);
    }
    float acc[kM][kN][4] = {};
    unsigned from = weight;
#pragma unroll 1
    for (int k = lane / 16; k < chunks + lane / 16; k += 2) {
      unsigned a_at[kM], b_at[kN / 2];
#pragma unroll
      for (int m = 0; m < kM; ++m) a_at[m] = k < chunks ? fibers[m] + k * 32 : zero;
#pragma unroll
      for (int n = 0; n < kN / 2; ++n) b_at[n] = from + n * 16 * step.weight_pitch * 16;
      multiply<false, kM, kN>(acc, a_at, b_at, pair_state, pair_weight);
      from += 2 * unit;
    }
    team.sync();
    float2 scale[kN];
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      scale[n] = *reinterpret_cast<const float2*>(row_scale + (team.rank * kN + n) * 8 + lane % 4 * 2);
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int fiber = first + m * 16 + half * 8 + lane / 4;
        if (fiber > last) continue;
        if (direct) {
          const OutputRow<float, true> output(p, tile, fiber);
          if (!output.exists) continue;
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            const int column = (team.rank * kN + n) * 8 + lane % 4 * 2;
            if (column >= step.out) break;
            *reinterpret_cast<float2*>(static_cast<float*>(p.y.data) + output.start + column) = make_float2(
                output.scale.of(acc[m][n][2 * half] * scale[n].x), output.scale.of(acc[m][n][2 * half + 1] * scale[n].y));
          }
          continue;
        }
        char* const to = base + table[fiber] * 16 + team.rank * kN * 32 + lane % 4 * (final ? 8 : 4);
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          if ((team.rank * kN + n) * 8 >= step.out) break;
          store_pair(to + n * 32, final, acc[m][n][2 * half] * scale[n].x, acc[m][n][2 * half + 1] * scale[n].y);
        }
      }
    }
  }
}

// float64: 16 x 8 matrices of weight or state times 8 x 8 of the other.
template <bool kInnermost, int kM, int kN>
__device__ void step_double(const KronFwdParams& p, const KronStep& step, int state) {
  const FiberTeam team(step);
  const int lane = threadIdx.x % 32, stride = kInnermost ? 1 : p.stride[step.axis] * 2, last = step.entries - 1;
  const unsigned short* const table = shared_at<unsigned short>(step.table);
  double* const base = shared_at<double>(state);
  constexpr int kOuts = kInnermost ? kN : 2 * kM, kIns = kInnermost ? 2 * kM : kN, kFibers = kInnermost ? 16 * kM : kN;
  const int first_out = team.rank * kOuts * 8, pitch = step.weight_pitch * 2;
  const double* const weight = shared_at<double>(step.weight) + (first_out + lane / 4) * pitch + lane % 4;
  if (team.index >= team.count) return;
  for (int first = team.index * kFibers; first <= last; first += team.count * kFibers) {
    const double* fibers[kIns];
#pragma unroll
    for (int i = 0; i < kIns; ++i) {
      const int fiber = kInnermost ? first + i * 8 + lane / 4 : first + i;
      fibers[i] = base + table[fiber <= last ? fiber : first] * 2 + (kInnermost ? 0 : lane / 4);
    }
    double acc[kM][kN][4] = {};
    for (int k = 0; k < step.in; k += 8) {
      double outs[kOuts][2], ins[kIns][2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int input = k + half * 4 + lane % 4;
#pragma unroll
        for (int i = 0; i < kOuts; ++i) outs[i][half] = weight[i * 8 * pitch + k + half * 4];
#pragma unroll
        for (int i = 0; i < kIns; ++i) ins[i][half] = input < step.in ? fibers[i][input * stride] : 0.0;
      }
      const auto &rows = kInnermost ? ins : outs, &columns = kInnermost ? outs : ins;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const double a[4] = {rows[2 * m][0], rows[2 * m + 1][0], rows[2 * m][1], rows[2 * m + 1][1]};
#pragma unroll
        for (int n = 0; n < kN; ++n) mma(acc[m][n], a, columns[n][0], columns[n][1]);
      }
    }
    team.sync();
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = m * 16 + half * 8 + lane / 4;
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          const int fiber = first + (kInnermost ? row : n), out = first_out + (kInnermost ? n * 8 : row);
          if (fiber > last || out >= step.out) continue;
          double* const to = base + table[fiber] * 2 + out * stride + lane % 4 * 2;
          *reinterpret_cast<double2*>(to) = make_double2(acc[m][n][2 * half], acc[m][n][2 * half + 1]);
        }
      }
    }
  }
}

// Without tensor cores: a warp owns 8 fibers, a lane every 32nd output.
template <class Acc>
__device__ void step_plain(const KronFwdParams& p, const KronStep& step, int state) {
  constexpr int kOuts = 4, kFibers = 8;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const unsigned short* const table = shared_at<unsigned short>(step.table);
  const int stride = step.innermost ? 1 : p.stride[step.axis] * 16 / static_cast<int>(sizeof(Acc));
  const int pitch = step.weight_pitch * 16 / sizeof(Acc);
  Acc* const base = shared_at<Acc>(state);
  const Acc* const weight = shared_at<Acc>(step.weight);
  const int groups = step.innermost ? (step.entries + kFibers - 1) / kFibers : step.entries;
  for (int group = warp; group < groups; group += warps) {
    Acc* fibers[kFibers];
#pragma unroll
    for (int i = 0; i < kFibers; ++i) {
      const int entry = step.innermost ? min(group * kFibers + i, step.entries - 1) : group;
      fibers[i] = base + table[entry] * (16 / static_cast<int>(sizeof(Acc))) + (step.innermost ? 0 : i);
    }
    Acc acc[kOuts][kFibers] = {};
    for (int k = 0; k < step.in; ++k) {
      Acc in[kFibers];
#pragma unroll
      for (int i = 0; i < kFibers; ++i) in[i] = fibers[i][k * stride];
#pragma unroll
      for (int j = 0; j < kOuts; ++j) {
        if (j * 32 >= step.out) break;
        const Acc w = weight[min(j * 32 + lane, step.out - 1) * pitch + k];
#pragma unroll
        for (int i = 0; i < kFibers; ++i) acc[j][i] += w * in[i];
      }
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kOuts; ++j) {
      if (j * 32 + lane >= step.out) break;
#pragma unroll
      for (int i = 0; i < kFibers; ++i) fibers[i][(j * 32 + lane) * stride] = acc[j][i];
    }
  }
}

template <class Acc, KronArithmetic kArithmetic>
__device__ void kron_linear_fwd(const KronFwdParams& p) {
  constexpr bool kPlain = kArithmetic == kKronPlain, kScaled = kArithmetic == kKronScaled;
  const long long sample_tiles = (p.rows + p.samples - 1) / p.samples, tiles = sample_tiles * p.column_tiles;
  const int slice = blockIdx.x % p.slices, stride = gridDim.x / p.slices;
  auto tile_at = [&](long long i) { return KronTile{i / p.column_tiles * p.samples, i % p.column_tiles * p.columns, slice}; };
  // All warps at once bring the parameters nearer, which the code below would wait for one after the other.
  for (unsigned i = threadIdx.x / 32 * 16; i < sizeof(p) / 4; i += blockDim.x / 2) {
    asm volatile("" ::"r"(reinterpret_cast<const int*>(&p)[i]));
  }
  load_raw_weights<Acc, kArithmetic>(p, slice);
  fill_tables<Acc>(p);
  if (threadIdx.x < 2) shared_at<uint4>(p.zero)[threadIdx.x] = uint4{};
  if constexpr (kScaled) {
    for (int i = threadIdx.x; i < kKronSteps + 2 * p.samples; i += blockDim.x) shared_at<int>(p.scales)[i] = 0;
  }
  __syncthreads();
  bool ready = false;
  int buffer = 0;
  for (long long next = blockIdx.x / p.slices, current = next; current < tiles;) {
    if (next < tiles) load_tile<Acc, kPlain>(p, p.state[buffer], tile_at(next));
    commit_copies();
    next += stride;
    if (p.buffers == 2) buffer ^= 1;
    if (!ready) {
      ready = true;
      finish_weights<Acc, kArithmetic>(p, slice);
      if (p.buffers == 2) continue;
    }
    const int state = p.state[buffer];
    if (p.buffers == 2) {
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();
    if constexpr (kScaled) {
      scale_tile(p, state);
      if (p.steps == 1 && p.direct) __syncthreads();  // it reads exponents, and no other step is before it
    }
    for (int i = 0; i < p.steps; ++i) {
      const KronStep& step = p.step[i];
      if constexpr (kPlain) {
        step_plain<Acc>(p, step, state);
      } else if constexpr (kSame<Acc, double>) {
        if (step.innermost) {
          step_double<true, 2, 4>(p, step, state);
        } else {
          step_double<false, 2, 4>(p, step, state);
        }
      } else {
        const bool final = i == p.steps - 1;
        if (step.innermost) {
          step_innermost<2, 4>(p, step, state, final, tile_at(current));
        } else {
          step_outer<2, 4>(p, step, state, final);
        }
      }
      __syncthreads();
    }
    if (!p.direct) store_tile<Acc, kScaled>(p, state, tile_at(current));
    __syncthreads();
    current += stride;
  }
}

}  // namespace cuops

#define KRON_LINEAR_FWD(name, Acc, kArithmetic)                                                               \
  extern "C" __global__ void __launch_bounds__(512, 1) kron_linear_fwd_##name(const cuops::KronFwdParams p) { \
    cuops::wait_in_turn();                                                                                    \
    cuops::kron_linear_fwd<Acc, cuops::kArithmetic>(p);                                                       \
  }

// Instances, as kron_arithmetic in kron_plan.cc says: float64, and all that is summed in float32.
#if CUOPS_TUNED
KRON_LINEAR_FWD(f64, double, kKronDouble)
#else
KRON_LINEAR_FWD(f64, double, kKronPlain)
#endif
#if __CUDA_ARCH__ >= 800
KRON_LINEAR_FWD(f32, float, kKronScaled)
#else
KRON_LINEAR_FWD(f32, float, kKronPlain)
#endif
