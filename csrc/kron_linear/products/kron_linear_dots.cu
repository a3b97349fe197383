// Few and short sums of products, of one factor or its gradients, or of all factors at once: each result has some lanes of a warp
// to itself, which read what they multiply from the caches. So nothing waits for a barrier, and little code for its instructions.
#include "device/overlap.cuh"
#include "device/reduce.cuh"
#include "device/tuned.cuh"
#include "kron_dots.h"
#include "kron_linear/kron_shared.cuh"

CUOPS_ONLY_FOR(90)

namespace cuops {

// The sum of `count` packs of a and b, which are so many bytes apart; kBatch of them are on their way together. No lane of the warp
// has more than `most`.
template <class T, int kWidth, int kBatch>
__device__ Accumulator<T> dot(const char* a, const char* b, int a_apart, int b_apart, int count, int most) {
  using Acc = Accumulator<T>;
  Acc sum = 0;
#pragma unroll 1
  for (int i = 0; i < most; i += kBatch) {
    Fetched<T, kWidth> u[kBatch], v[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int at = min(i + j, count - 1);  // rather than a choice at each load; no lane has none
      u[j] = fetch<T, kWidth>(a + at * a_apart);
      v[j] = fetch<T, kWidth>(b + at * b_apart);
    }
    __syncwarp();  // compilers would have each wait for the one before it
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const auto x = convert<Acc>(u[j].pack()), y = convert<Acc>(v[j].pack());
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum = i + j < count ? sum + x.at[e] * y.at[e] : sum;
    }
  }
  return sum;
}

template <class T>
__device__ void kron_dots(const KronDotsParams& p) {
  using Acc = Accumulator<T>;
  constexpr int kWidth = kVectorWidth<T>, kSize = sizeof(T);
  const bool second = blockIdx.x >= p.dots[0].blocks;
  const KronDots& q = p.dots[second];
  const int thread = (blockIdx.x - (second ? p.dots[0].blocks : 0)) * kDotsThreads + threadIdx.x;
  const int lanes = 1 << q.lanes_log, lane = thread & (lanes - 1), wanted = thread >> q.lanes_log, index = min(wanted, q.count - 1);
  const int row = divide(index, q.by_n), n = static_cast<int>(q.by_n.divisor), column = index - row * n;
  const int width = q.vectors ? kWidth : 1, packs = q.vectors ? q.k / kWidth : q.k;
  const int a_step = width * q.a_step * kSize, b_step = width * q.b_step * kSize, most = (packs + lanes - 1) >> q.lanes_log,
            count = (packs - lane + lanes - 1) >> q.lanes_log;
  const char* const a = static_cast<const char*>(q.a) + (static_cast<long long>(row) * q.a_row * kSize + lane * a_step);
  const char* const b = static_cast<const char*>(q.b) + (static_cast<long long>(column) * q.b_row * kSize + lane * b_step);
  // What can be found out without reading memory comes first, since the kernel before may still write there: to have a choice
  // depend on it keeps it there.
  if (a == nullptr || b == nullptr) __trap();
  wait_for_previous();
  const int a_apart = a_step << q.lanes_log, b_apart = b_step << q.lanes_log;
  Acc sum = q.vectors ? dot<T, kWidth, 4>(a, b, a_apart, b_apart, count, most) : dot<T, 1, 8>(a, b, a_apart, b_apart, count, most);
  sum = reduce_lanes(sum, lanes, Sum());
  if (lane != 0 || index != wanted) return;
  if (q.bias) sum += convert<Acc>(static_cast<const T*>(q.bias)[row % q.bias_lead * n + column]);
  static_cast<T*>(q.c)[static_cast<long long>(row) * q.c_row + column] = convert<T>(sum);
}

// All factors at once: a result is a sum over elements of x, each times an element of every factor.
template <class T, int kFactors>
__device__ void kron_terms(const KronTermsParams& p, int block) {
  using Acc = Accumulator<T>;
  constexpr int kBatch = kTermsBatch;
  const int thread = block * kDotsThreads + threadIdx.x, lanes = 1 << p.lanes_log, lane = thread & (lanes - 1);
  const int wanted = thread >> p.lanes_log, index = min(wanted, p.count - 1), out = static_cast<int>(p.by_out.divisor);
  const int row = divide(index, p.by_out), o = index - row * out;
  int rows_at[kFactors];  // of the factors: where the row is that the result has
  int rest = o;
#pragma unroll
  for (int k = kFactors - 1; k >= 0; --k) {
    const int before = divide(rest, p.factor[k].by_out);
    rows_at[k] = (rest - before * static_cast<int>(p.factor[k].by_out.divisor)) * p.factor[k].row_stride;
    rest = before;
  }
  int x_at[kBatch], at[kBatch][kFactors];
  auto find = [&](int from) {
    int all = 0;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      x_at[j] = min(from + (j << p.lanes_log), p.in - 1);
      int i = x_at[j];
#pragma unroll
      for (int k = kFactors - 1; k >= 0; --k) {
        const int before = divide(i, p.factor[k].by_in);
        at[j][k] = rows_at[k] + (i - before * static_cast<int>(p.factor[k].by_in.divisor)) * p.factor[k].column_stride;
        all |= at[j][k];
        i = before;
      }
    }
    return all;
  };
  if (find(lane) < 0) __trap();  // as above
  wait_for_previous();
  const T* const x = static_cast<const T*>(p.x) + row * static_cast<long long>(p.x_stride);
  Acc sum = 0;
#pragma unroll 1
  for (int from = 0; from < p.in; from += kBatch << p.lanes_log) {
    if (from > 0) find(from + lane);
    T u[kBatch], v[kBatch][kFactors];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      u[j] = x[x_at[j]];
#pragma unroll
      for (int k = 0; k < kFactors; ++k) v[j][k] = static_cast<const T*>(p.factor[k].data)[at[j][k]];
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      Acc term = convert<Acc>(u[j]);
#pragma unroll
      for (int k = kFactors - 1; k >= 0; --k) term *= convert<Acc>(v[j][k]);
      sum = from + lane + (j << p.lanes_log) < p.in ? sum + term : sum;
    }
  }
  sum = reduce_lanes(sum, lanes, Sum());
  if (lane != 0 || index != wanted) return;
  if (p.bias) sum += convert<Acc>(static_cast<const T*>(p.bias)[row % p.bias_lead * out + o]);
  static_cast<T*>(p.y)[row * static_cast<long long>(p.y_stride) + o] = convert<T>(sum);
}

template <class T, int kFactors>
__device__ void kron_terms_bwd(const KronTermsBwdParams& p) {
  using Acc = Accumulator<T>;
  constexpr int kBatch = kTermsBatch;
  if (blockIdx.x >= p.start) return kron_terms<T, kFactors>(p.back, blockIdx.x - p.start);
  int own = 0;
#pragma unroll
  for (int k = 1; k < kFactors; ++k) own = blockIdx.x >= p.factor[k].first ? k : own;
  const auto& f = p.factor[own];
  const int thread = (blockIdx.x - f.first) * kDotsThreads + threadIdx.x, lanes = 1 << f.lanes_log, lane = thread & (lanes - 1);
  const int wanted = thread >> f.lanes_log, columns = static_cast<int>(f.by_in.divisor),
            result = min(wanted, static_cast<int>(f.by_out.divisor) * columns - 1);
  const int row = divide(result, f.by_in), column = result - row * columns;
  constexpr int kOthers = kFactors - 1;
  int x_at[kBatch], dy_at[kBatch], at[kBatch][kOthers];
  auto find = [&](int from) {
    int all = 0;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      int rest = min(from + (j << f.lanes_log), f.terms - 1);
      x_at[j] = column * f.column_step;
      dy_at[j] = row * f.row_step;
#pragma unroll
      for (int k = kOthers - 1; k >= 0; --k) {
        const auto& g = p.factor[k + (k >= own)];
        const int after_in = divide(rest, g.by_in), i = rest - after_in * static_cast<int>(g.by_in.divisor);
        rest = divide(after_in, g.by_out);
        const int o = after_in - rest * static_cast<int>(g.by_out.divisor);
        at[j][k] = o * g.row_stride + i * g.column_stride;
        x_at[j] += i * g.column_step;
        dy_at[j] += o * g.row_step;
      }
      x_at[j] += rest * p.in;
      dy_at[j] += rest * p.out;
      all |= x_at[j] | dy_at[j];
    }
    return all;
  };
  if (find(lane) < 0) __trap();  // as above
  wait_for_previous();
  Acc sum = 0;
#pragma unroll 1
  for (int from = 0; from < f.terms; from += kBatch << f.lanes_log) {
    if (from > 0) find(from + lane);
    T u[kBatch], v[kBatch], w[kBatch][kOthers];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      u[j] = static_cast<const T*>(p.x)[x_at[j]];
      v[j] = static_cast<const T*>(p.dy)[dy_at[j]];
#pragma unroll
      for (int k = 0; k < kOthers; ++k) w[j][k] = static_cast<const T*>(p.factor[k + (k >= own)].data)[at[j][k]];
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      Acc term = convert<Acc>(v[j]);  // as a chain has it: dy by the other factors, and then by x
#pragma unroll
      for (int k = 0; k < kOthers; ++k) term *= convert<Acc>(w[j][k]);
      term *= convert<Acc>(u[j]);
      sum = from + lane + (j << f.lanes_log) < f.terms ? sum + term : sum;
    }
  }
  __shared__ Acc of_warp[kDotsThreads / 32];
  sum = reduce_lanes(sum, min(lanes, 32), Sum());
  if (lanes > 32) {
    const int warp = threadIdx.x / 32, warps = lanes / 32;
    if (threadIdx.x % 32 == 0) of_warp[warp] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int k = 0; k < kDotsThreads / 32; ++k) sum += k < warps ? of_warp[(warp & -warps) + k] : Acc(0);
  }
  if (lane == 0 && result == wanted) static_cast<T*>(f.gradient)[result] = convert<T>(sum);
}

}  // namespace cuops

#define KRON_DOTS(name, T)                                                \
  extern "C" __global__ void __launch_bounds__(cuops::kDotsThreads, 4)    \
      kron_dots_##name(const __grid_constant__ cuops::KronDotsParams p) { \
    cuops::kron_dots<T>(p);                                               \
  }

#define KRON_TERMS(name, T, factors)                                                    \
  extern "C" __global__ void __launch_bounds__(cuops::kDotsThreads, 4)                  \
      kron_terms_##name##_##factors(const __grid_constant__ cuops::KronTermsParams p) { \
    cuops::kron_terms<T, factors>(p, blockIdx.x);                                       \
  }

#define KRON_TERMS_BWD(name, T, factors)                                                       \
  extern "C" __global__ void __launch_bounds__(cuops::kDotsThreads, 4)                         \
      kron_terms_bwd_##name##_##factors(const __grid_constant__ cuops::KronTermsBwdParams p) { \
    cuops::kron_terms_bwd<T, factors>(p);                                                      \
  }

// Instances, as kron_plan_dots.cc asks for them.
KRON_DOTS(f64, double)
KRON_DOTS(f32, float)
KRON_DOTS(f16, __half)
KRON_DOTS(bf16, __nv_bfloat16)
KRON_TERMS(f64, double, 2)
KRON_TERMS(f32, float, 2)
KRON_TERMS(f16, __half, 2)
KRON_TERMS(bf16, __nv_bfloat16, 2)
KRON_TERMS(f64, double, 3)
KRON_TERMS(f32, float, 3)
KRON_TERMS(f16, __half, 3)
KRON_TERMS(bf16, __nv_bfloat16, 3)
KRON_TERMS(f64, double, 4)
KRON_TERMS(f32, float, 4)
KRON_TERMS(f16, __half, 4)
KRON_TERMS(bf16, __nv_bfloat16, 4)
KRON_TERMS_BWD(f64, double, 2)
KRON_TERMS_BWD(f32, float, 2)
KRON_TERMS_BWD(f16, __half, 2)
KRON_TERMS_BWD(bf16, __nv_bfloat16, 2)
KRON_TERMS_BWD(f64, double, 3)
KRON_TERMS_BWD(f32, float, 3)
KRON_TERMS_BWD(f16, __half, 3)
KRON_TERMS_BWD(bf16, __nv_bfloat16, 3)
KRON_TERMS_BWD(f64, double, 4)
KRON_TERMS_BWD(f32, float, 4)
KRON_TERMS_BWD(f16, __half, 4)
KRON_TERMS_BWD(bf16, __nv_bfloat16, 4)
