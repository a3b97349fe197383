// Gradients of two factors of one size and of their input, from samples x and dy of (size, size):
//   dx = W1^T dy W2,   dW1 = sum of (dy W2) x^T,   dW2^T = sum of (x^T W1^T) dy.
// A team of warps has a sample. Each warp multiplies 16 rows by one matrix, and what it then has in registers by another one.
#include "device/tuned.cuh"

#if CUOPS_TUNED == 90
#include "device/mma.cuh"
#include "device/overlap.cuh"
#include "device/row.cuh"
#include "kron_linear_squares.h"

namespace cuops {

extern __shared__ uint4 squares_shared[];

// 16 x 16 of a matrix in shared memory, as the tensor cores take it; float32 as two float16.
template <bool kPairs>
struct Square {
  unsigned high[4], low[4];

  template <bool kTransposed>
  __device__ void load(unsigned address) {
    if constexpr (kTransposed) {
      load_matrices_transposed(high, address);
      if constexpr (kPairs) load_matrices_transposed(low, address + 16);
    } else {
      load_matrices(high, address);
      if constexpr (kPairs) load_matrices(low, address + 16);
    }
  }
};

template <class T>
__device__ unsigned pack(float a, float b) {
  if constexpr (kSame<T, __half>) {
    const __half2 h = __floats2half2_rn(a, b);
    return *reinterpret_cast<const unsigned*>(&h);
  } else {
    const __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const unsigned*>(&h);
  }
}

__device__ inline void add(float4& sum, const float4& v) { sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w); }

__device__ inline float power_of(int exponent) { return __int_as_float(max(0, min(exponent + 127, 254)) << 23); }

template <class T, int kSize>
struct Squares {
  static constexpr bool kPairs = kSame<T, float>;
  using Part = Square<kPairs>;
  using Half = Select<kPairs, __half, T>;
  static constexpr int kGroups = kSize / 16, kThreads = 32 * kGroups, kUnits = kPairs ? 2 : 1, kPitch = kSize / 8 * kUnits + 1;
  static constexpr int kTile = kSize * kPitch;                      // units of 16 bytes
  static constexpr int kDown = 256 * kPitch, kRight = 32 * kUnits;  // bytes to the next 16 rows, or columns
  static constexpr int kLog = kSize == 128 ? 7 : kSize == 64 ? 6 : 5;

  // sum += scale * a b, for the two halves of b. Tensor cores truncate sums: for float32 they form those of 16 products only.
  template <class A>
  __device__ static void add(float (&sum)[2][4], const A& a, const Part& b, float scale) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kPairs) {
        float part[4] = {};
        mma<__half>(part, a.low, b.high[2 * i], b.high[2 * i + 1]);
        mma<__half>(part, a.high, b.low[2 * i], b.low[2 * i + 1]);
        mma<__half>(part, a.high, b.high[2 * i], b.high[2 * i + 1]);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(part[j], scale, sum[i][j]);
      } else {
        mma<T>(sum[i], a.high, b.high[2 * i], b.high[2 * i + 1]);
      }
    }
  }

  // 16 kM rows of the first matrix by 16 columns of the second, as the first operand of another product.
  template <bool kTransposed, int kM>
  __device__ static void first_product(Part (&result)[kM], const Part (&a)[kM][kGroups], unsigned b_at) {
    float c[kM][2][4] = {};
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
      Part b;
      b.template load<kTransposed>(b_at + k * (kTransposed ? kDown : kRight));
#pragma unroll
      for (int m = 0; m < kM; ++m) add(c[m], a[m][k], b, 1.0f);
    }
    constexpr float kShift = 1.0f / (1 << (15 + kLog));  // below 2^15, as both were
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float u = c[m][j / 2][j % 2 * 2], v = c[m][j / 2][j % 2 * 2 + 1];
        if constexpr (kPairs) {
          split<__half>(u * kShift, v * kShift, result[m].high[j], result[m].low[j]);
        } else {
          result[m].high[j] = pack<T>(u, v);
        }
      }
    }
  }

  template <bool kTransposed, int kM>
  __device__ static void load_rows(Part (&a)[kM][kGroups], unsigned at) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int k = 0; k < kGroups; ++k)
        a[m][k].template load<kTransposed>(at + m * (kTransposed ? kRight : kDown) + k * (kTransposed ? kDown : kRight));
    }
  }

  // sum += scale * a b c, for 16 kM rows of a; b and c as they lie in memory or transposed.
  template <bool kB, bool kC, int kM>
  __device__ static void add_chain(float (&sum)[kM][kGroups][2][4], const Part (&a)[kM][kGroups], unsigned b_at, unsigned c_at,
                                   float scale) {
#pragma unroll 1
    for (int j = 0; j < kGroups; ++j) {
      Part s[kM];
      first_product<kB>(s, a, b_at + j * (kB ? kRight : kDown));
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        Part c;
        c.template load<kC>(c_at + j * (kC ? kDown : kRight) + n * (kC ? kRight : kDown));
#pragma unroll
        for (int m = 0; m < kM; ++m) add(sum[m][n], s[m], c, scale);
      }
    }
  }

  // A warp's 16 x 16 results.
  __device__ static void store(T* to, const float (&d)[2][4], float scale, float rest) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      T* const row = to + (r * 8 + lane / 4) * kSize;
      if constexpr (kPairs) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          *reinterpret_cast<float2*>(row + i * 8 + lane % 4 * 2) =
              make_float2(d[i][2 * r] * scale * rest, d[i][2 * r + 1] * scale * rest);
      } else {
        // Two lanes exchange halves, so that each has four neighbours.
        const unsigned left = pack<T>(d[0][2 * r], d[0][2 * r + 1]), right = pack<T>(d[1][2 * r], d[1][2 * r + 1]);
        const bool odd = lane % 2;
        const unsigned other = __shfl_xor_sync(~0u, odd ? left : right, 1);
        *reinterpret_cast<uint2*>(row + odd * 8 + lane % 4 / 2 * 4) = odd ? make_uint2(other, right) : make_uint2(left, other);
      }
    }
  }

  // 16 rows of dx = scale * rest * a b c.
  __device__ static void store_chain(T* to, const Part (&a)[1][kGroups], unsigned b_at, unsigned c_at, float scale, float rest) {
    if constexpr (kPairs) {
      float d[1][kGroups][2][4] = {};
      add_chain<true, true>(d, a, b_at, c_at, 1.0f);
#pragma unroll
      for (int n = 0; n < kGroups; ++n) store(to + n * 16, d[0][n], scale, rest);
    } else {
      // Registers are few beside the sums of both gradients.
      Part s[kGroups][1];
#pragma unroll
      for (int j = 0; j < kGroups; ++j) first_product<true>(s[j], a, b_at + j * kRight);
#pragma unroll 1
      for (int n = 0; n < kGroups; ++n) {
        float d[2][4] = {};
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
          Part c;
          c.template load<true>(c_at + j * kDown + n * kRight);
          add(d, s[j][0], c, 1.0f);
        }
        store(to + n * 16, d, scale, rest);
      }
    }
  }

  // Starts to copy a contiguous matrix.
  __device__ static void copy(int to, const T* from, int thread, int threads) {
    constexpr int kRow = kSize * static_cast<int>(sizeof(T)) / 16;
#pragma unroll 4
    for (int i = thread; i < kSize * kRow; i += threads)
      copy_or_zero(reinterpret_cast<char*>(squares_shared + to + i / kRow * kPitch + i % kRow),
                   reinterpret_cast<const uint4*>(from) + i, true);
  }

  // A matrix of float32 becomes two of float16 in place, by a team, below 2^15; returns the exponent of its largest element.
  __device__ static int normalize(int at, int* largest, int thread, int barrier) {
    constexpr int kEach = kSize * kSize / 8 / kThreads, kRow = kSize / 8;
    float4 v[kEach][2];
    const bool swap = thread & 4;
    float most = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int chunk = thread + i * kThreads;
      const float4* const from = reinterpret_cast<const float4*>(squares_shared + at + chunk / kRow * kPitch + chunk % kRow * 2);
      v[i][0] = from[swap];
      v[i][1] = from[!swap];
#pragma unroll
      for (int j = 0; j < 2; ++j)
        most = fmaxf(fmaxf(fmaxf(most, fabsf(v[i][j].x)), fmaxf(fabsf(v[i][j].y), fabsf(v[i][j].z))), fabsf(v[i][j].w));
    }
    const int bits = __reduce_max_sync(~0u, __float_as_int(most));
    if (thread % 32 == 0) largest[thread / 32] = bits;
    sync_warps(barrier, kGroups);
    int all = 0;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) all = max(all, largest[i]);
    const int exponent = (all >> 23) - 127;
    const float scale = power_of(14 - exponent);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int chunk = thread + i * kThreads;
      uint4* const to = squares_shared + at + chunk / kRow * kPitch + chunk % kRow * 2;
      uint2 high[2], low[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        split<__half>(v[i][j].x * scale, v[i][j].y * scale, high[j].x, low[j].x);
        split<__half>(v[i][j].z * scale, v[i][j].w * scale, high[j].y, low[j].y);
      }
      const uint4 a =
          swap ? make_uint4(high[1].x, high[1].y, high[0].x, high[0].y) : make_uint4(high[0].x, high[0].y, high[1].x, high[1].y);
      const uint4 b =
          swap ? make_uint4(low[1].x, low[1].y, low[0].x, low[0].y) : make_uint4(low[0].x, low[0].y, low[1].x, low[1].y);
      to[swap] = swap ? b : a;
      to[!swap] = swap ? a : b;
    }
    return exponent;
  }
};

// kSplit: a block finds one of the gradients, because shared memory is too small for all that they need. kM = 2: half of the warps
// find one factor's gradient and half the other's, 32 rows each; else each warp has 16 rows of both.
template <class T, int kSize, int kTeams, int kBuffers, bool kSplit, int kM>
__device__ void squares(const KronSquaresParams& p) {
  using S = Squares<T, kSize>;
  constexpr int kGroups = S::kGroups, kElements = kSize * kSize, kAt = 16;  // units, before which there are the largest magnitudes
  constexpr int kWeights = kSplit ? 1 : 2, kState = kWeights * S::kTile + kAt;
  const int thread = threadIdx.x % S::kThreads, team = threadIdx.x / S::kThreads, barrier = 1 + team;
  const int lane = threadIdx.x % 32, group = thread / 32;
  int wanted = p.wanted, share = 1;
  if constexpr (kSplit) {
    share = __popc(wanted);
    for (int i = blockIdx.x % share; i > 0; --i) wanted &= wanted - 1;
    wanted &= -wanted;
  }
  const int block = blockIdx.x / share, blocks = gridDim.x / share;
  const bool wants_first = wanted & kFirstGradient, wants_second = wanted & kSecondGradient, wants_x = wanted & kInputGradient;
  const bool reads_x = !kSplit || !wants_x;
  const int state = kState + team * kBuffers * 2 * S::kTile;
  // Where only one of the factors fits, dx, which does without x, at first has the first one in its place.
  const int first_at = !kSplit || wants_second ? kAt : state, second_at = kSplit ? kAt : kAt + S::kTile;
  const T* const x = static_cast<const T*>(p.x);
  const T* const dy = static_cast<const T*>(p.dy);
  if (!kSplit || !wants_first) S::copy(first_at, static_cast<const T*>(p.first), threadIdx.x, blockDim.x);
  if (!kSplit || !wants_second) S::copy(second_at, static_cast<const T*>(p.second), threadIdx.x, blockDim.x);
  auto load = [&](const T* from, int at, long long sample) {
    if (sample < p.rows) S::copy(at, from + sample * kElements, thread, S::kThreads);
  };
  const long long start = static_cast<long long>(block) * kTeams + team, stride = static_cast<long long>(blocks) * kTeams;
  commit_copies();
#pragma unroll 1
  for (int i = 0; i < kBuffers; ++i) {
    if (reads_x) load(x, state + i * 2 * S::kTile, start + i * stride);
    load(dy, state + (i * 2 + 1) * S::kTile, start + i * stride);
    commit_copies();
  }
  wait_for_copies<kBuffers>();
  __syncthreads();
  int* const largest = reinterpret_cast<int*>(squares_shared) + team * kGroups;
  int* const exponents = reinterpret_cast<int*>(squares_shared) + 4 * kAt - 2;
  if constexpr (S::kPairs) {
    if (team == 0 && (!kSplit || !wants_first)) {
      const int e = S::normalize(first_at, largest, thread, barrier);
      if (thread == 0) exponents[0] = e;
      sync_warps(barrier, kGroups);
    }
    if (team == kTeams - 1 && (!kSplit || !wants_second)) {
      const int e = S::normalize(second_at, largest, thread, barrier);
      if (thread == 0) exponents[1] = e;
    }
    __syncthreads();
  }
  const unsigned base = shared_address(squares_shared);
  // A lane's part of four matrices that are taken as they lie in memory, and across.
  const unsigned as_is = ((lane / 16 * 8 + lane % 8) * S::kPitch + lane / 8 % 2 * S::kUnits) * 16;
  const unsigned across = (lane % 16 * S::kPitch + lane / 16 * S::kUnits) * 16;
  const unsigned first = base + first_at * 16, second = base + second_at * 16;
  const int own = kM == 2 ? group % (kGroups / 2) * 2 : group;  // 16 rows, or the first of 32, of the factors' gradients
  float dw[2][kGroups][2][4] = {};
  typename S::Part own_rows[1][kGroups];
  if (kSplit && wants_x) S::template load_rows<true>(own_rows, first + as_is + group * S::kRight);
  int buffer = 0;
#pragma unroll 1
  for (long long sample = start; sample < p.rows; sample += stride) {
    const bool swapped = kSplit && wants_x && buffer == 1;
    const int at = state + (kSplit ? 0 : buffer * 2 * S::kTile), other = at + (swapped ? 0 : S::kTile);
    wait_for_copies<kBuffers - 1>();
    sync_warps(barrier, kGroups);
    int x_exponent = 0, dy_exponent = 0;
    if constexpr (S::kPairs) {
      dy_exponent = S::normalize(other, largest, thread, barrier);
      sync_warps(barrier, kGroups);
      if (reads_x) x_exponent = S::normalize(at, largest, thread, barrier);
      sync_warps(barrier, kGroups);
    }
    const float scale = power_of(x_exponent + dy_exponent);
    const unsigned x_at = base + at * 16, dy_at = base + other * 16;
    if constexpr (kSplit) {
      // What is not needed any more makes room for the next sample.
      const long long next = sample + stride;
      if (wants_x) load(dy, at + (swapped ? S::kTile : 0), next);
      auto& sum = *reinterpret_cast<float (*)[1][kGroups][2][4]>(dw[0]);
      if (wants_first) {
        S::template load_rows<false>(own_rows, dy_at + across + group * S::kDown);
        sync_warps(barrier, kGroups);
        load(dy, other, next);
        S::template add_chain<true, false>(sum, own_rows, second + across, x_at + as_is, scale);
      }
      if (wants_second) {
        S::template load_rows<true>(own_rows, x_at + as_is + group * S::kRight);
        sync_warps(barrier, kGroups);
        load(x, at, next);
        S::template add_chain<false, true>(sum, own_rows, first + as_is, dy_at + across, scale);
      }
    } else {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        if (!(which == 0 ? wants_first : wants_second) || (kM == 2 && group / (kGroups / 2) != which)) continue;
        typename S::Part a[kM][kGroups];
        auto& sum = *reinterpret_cast<float (*)[kM][kGroups][2][4]>(dw[kM == 2 ? 0 : which]);
        if (which == 0) {
          S::template load_rows<false>(a, dy_at + across + own * S::kDown);
          S::template add_chain<true, false>(sum, a, second + across, x_at + as_is, scale);
        } else {
          S::template load_rows<true>(a, x_at + as_is + own * S::kRight);
          S::template add_chain<false, true>(sum, a, first + as_is, dy_at + across, scale);
        }
      }
      if (wants_x) S::template load_rows<true>(own_rows, first + as_is + group * S::kRight);
    }
    if (wants_x) {
      const int power = S::kPairs ? dy_exponent + exponents[0] + exponents[1] - 27 + S::kLog : 0;
      S::store_chain(static_cast<T*>(p.dx) + sample * kElements + group * 16 * kSize, own_rows, dy_at + across, second + across,
                     power_of(power / 2), power_of(power - power / 2));
    }
    sync_warps(barrier, kGroups);
    if (!kSplit || wants_first) load(x, at, sample + kBuffers * stride);
    if (!kSplit || wants_second) load(dy, other, sample + kBuffers * stride);
    commit_copies();
    if (kBuffers == 2 || kSplit) buffer ^= 1;
  }
  launch_dependents();
  wait_for_copies<0>();
  __syncthreads();
  // Teams add up, in order. Partial sums lie as the threads have them.
  float4* const sums = reinterpret_cast<float4*>(squares_shared + kState);
  const int number = __popc(p.wanted & (kFirstGradient | kSecondGradient));
#pragma unroll
  for (int which = 0; which < (kSplit ? 1 : 2); ++which) {
    const int role = kSplit ? wants_second : kM == 2 ? group / (kGroups / 2) : which;
    const bool exists = kSplit ? !wants_x : role == 0 ? wants_first : wants_second;
    const int place = kM == 2 ? (own + which) * 32 + lane : thread;
    const int power = S::kPairs ? exponents[role == 0] - 27 + S::kLog : 0;
    const float scale = power_of(power / 2), rest = power_of(power - power / 2);
    float4* const to = reinterpret_cast<float4*>(p.partial) +
                       (static_cast<long long>(block) * number + (role == 1 && p.wanted & kFirstGradient)) * (kElements / 4) +
                       place;
    if (kTeams > 1) {
      if (exists && team > 0) {
#pragma unroll
        for (int i = 0; i < kGroups * 2; ++i)
          sums[((team - 1) * kGroups * 2 + i) * S::kThreads + thread] = *reinterpret_cast<float4*>(dw[which][i / 2][i % 2]);
      }
      __syncthreads();
    }
    if (exists && team == 0) {
#pragma unroll
      for (int i = 0; i < kGroups * 2; ++i) {
        float4 v = *reinterpret_cast<float4*>(dw[which][i / 2][i % 2]);
#pragma unroll
        for (int more = 1; more < kTeams; ++more) add(v, sums[((more - 1) * kGroups * 2 + i) * S::kThreads + thread]);
        to[i * S::kThreads] = make_float4(v.x * scale * rest, v.y * scale * rest, v.z * scale * rest, v.w * scale * rest);
      }
    }
    if (kTeams > 1) __syncthreads();
  }
}

}  // namespace cuops

#define KRON_SQUARES(name, T, size, teams, buffers, is_split, tiles)            \
  extern "C" __global__ void __launch_bounds__(teams * size * 2, 1)             \
      kron_squares_##name(const __grid_constant__ cuops::KronSquaresParams p) { \
    cuops::squares<T, size, teams, buffers, is_split, tiles>(p);                \
  }

// Instances, as kron_linear_squares_bwd.cc asks for them.
KRON_SQUARES(32_f32, float, 32, 8, 2, false, 1)
KRON_SQUARES(64_f32, float, 64, 2, 2, false, 1)
#if __CUDA_ARCH__ == 900
KRON_SQUARES(128_f32, float, 128, 1, 1, true, 1)
#endif
KRON_SQUARES(32_f16, __half, 32, 8, 2, false, 1)
KRON_SQUARES(64_f16, __half, 64, 4, 2, false, 1)
KRON_SQUARES(128_f16, __half, 128, 1, 2, false, 2)
KRON_SQUARES(32_bf16, __nv_bfloat16, 32, 8, 2, false, 1)
KRON_SQUARES(64_bf16, __nv_bfloat16, 64, 4, 2, false, 1)
KRON_SQUARES(128_bf16, __nv_bfloat16, 128, 1, 2, false, 2)

// Adds up the blocks' partial sums: 8 vectors by 64 blocks at a time.
extern "C" __global__ void __launch_bounds__(512) kron_squares_sum(const __grid_constant__ cuops::KronSquaresSum p) {
  using namespace cuops;
  __shared__ float shared[16][32];
  const int n = p.size * p.size, column = threadIdx.x % 8, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float4* const from = reinterpret_cast<const float4*>(p.partial) + blockIdx.x * 8 + column;
  const long long stride = static_cast<long long>(n / 4) * p.gradients;
  wait_for_previous();
  float4 v = {};
#pragma unroll 4
  for (int i = threadIdx.x / 8; i < p.blocks; i += 64) add(v, from[i * stride]);
#pragma unroll
  for (int step = 8; step < 32; step *= 2)
    add(v, make_float4(__shfl_xor_sync(~0u, v.x, step), __shfl_xor_sync(~0u, v.y, step), __shfl_xor_sync(~0u, v.z, step),
                       __shfl_xor_sync(~0u, v.w, step)));
  if (lane < 8) reinterpret_cast<float4*>(shared[warp])[lane] = v;
  __syncthreads();
  if (warp > 0) return;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) sum += shared[i][lane];
  // Where the thread that had this sum says that it belongs.
  int i = blockIdx.x * 32 + lane;
  const int which = i >= n;
  i -= which * n;
  const int threads = 2 * p.size, thread = i / 4 % threads, tile = i / 4 / threads;
  const int row = thread / 32 * 16 + i % 4 / 2 * 8 + thread % 32 / 4, at = tile * 8 + thread % 4 * 2 + i % 2;
  const int to = p.transposed[which] ? at * p.size + row : row * p.size + at;
  if (p.dtype[which] == kFloat32) {
    static_cast<float*>(p.gradient[which])[to] = sum;
  } else if (p.dtype[which] == kFloat16) {
    static_cast<__half*>(p.gradient[which])[to] = convert<__half>(sum);
  } else {
    static_cast<__nv_bfloat16*>(p.gradient[which])[to] = convert<__nv_bfloat16>(sum);
  }
}
#else
extern "C" __global__ void kron_squares_nowhere() {}
#endif
