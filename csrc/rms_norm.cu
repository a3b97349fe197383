// RMSNorm on the device: y = x / sqrt(mean(x^2) + eps) * weight over rows of n elements. Here are kernels of common calls, whose
// rows stay in registers; other calls and rows have those beside it, and rms_norm_any.cu those for any.
#include "rms_norm.h"

#include "device/overlap.cuh"
#include "device/reduce.cuh"
#include "device/row.cuh"
#include "device/tuned.cuh"
#include "rms_norm/careful.cuh"
#include "rms_norm/passing.cuh"
#include "rms_norm/rstd.cuh"
#include "rms_norm/vectors.cuh"

CUOPS_ONLY_FOR(80, 90)

namespace cuops {

// The common case, for rows that registers hold: a weight of x's dtype, rows of one stride, and no more, unless kResidual. A
// row belongs to a part of a warp, to a block or to a cluster. Each thread keeps kResident vectors, and as many of the weight,
// which are on their way while the row is summed; but where blocks of many threads have many vectors (kLate), there is no room for
// these, and it is read once the row is summed. Where registers decide (kForgets), what was converted is not kept for the end.
template <class T, int kResident, bool kPhased = false, bool kResidual = false, bool kClusters = false, bool kLate = false,
          bool kForgets = kLate || (2 < kResident && kResident < 8)>
__device__ void rms_norm_fwd_held(const RmsNormFwdParams& p) {
  using Acc = Accumulator<T>;
  constexpr int kWidth = kVectorWidth<T>;
  CUOPS_TEAM_OF(Acc, 1, kClusters, team);
  if (p.overlaps) wait_for_previous();
  // Beyond the last row and beyond a row's end, threads load what others do, and drop it: cheaper than a choice at each load.
  const long long wanted = static_cast<long long>(team.index) * blockDim.y + threadIdx.y, row = min(wanted, p.rows - 1);
  const bool active = wanted < p.rows;
  const T* x = static_cast<const T*>(p.x.data) + row * p.x.stride;
  T* const y = static_cast<T*>(p.y.data) + row * p.y.stride;
  const T* const parameter = static_cast<const T*>(p.weight);
  const Division<T, kWidth, kPhased, int> division(x, p.n);
  const int first = kClusters ? team.first() : threadIdx.x, step = kClusters ? team.threads() : blockDim.x;
  auto pack = [&](int i) { return min(first + i * step, division.packs - 1); };
  auto exists = [&](int i) { return first + i * step < division.packs; };
  const Passing passing(p.released_from != kNoRow);

  Vector<T> held[kResident], weight[kLate ? 1 : kResident];
  if (!kPhased || division.packs > 0) {
    // The weight first: behind these loads of x, the compiler would put it off until x is there.
#pragma unroll
    for (int i = 0; !kLate && i < kResident; ++i) weight[i] = load_beside(division, parameter, pack(i));
#pragma unroll
    for (int i = 0; i < kResident; ++i) held[i] = passing.load(reinterpret_cast<const Vector<T>*>(x + division.head) + pack(i));
  }
  // An edge a thread, on its way with the vectors: most teams have no more.
  T edge = convert<T>(0.0f), edge_weight = edge;
  if (kPhased && first < division.edges) {
    edge = x[division.edge(first)];
    edge_weight = parameter[division.edge(first)];
  }

  if (kLate && team.blocks > 1) {  // other blocks of the multiprocessor have other parts of the weight
#pragma unroll
    for (int i = 0; i < kResident; ++i) prefetch_constant(parameter + pack(i) * kWidth);
  }
  if constexpr (kResidual) {
    const Vector<T>* const residual =
        reinterpret_cast<const Vector<T>*>(static_cast<const T*>(p.residual.data) + row * p.residual.stride);
    T* const h = static_cast<T*>(p.h.data) + row * p.h.stride;
    Vector<T> other[kResident];
#pragma unroll
    for (int i = 0; i < kResident; ++i) other[i] = passing.load(residual + pack(i));
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      held[i] = plus(held[i], other[i]);
      if (active && exists(i)) store(reinterpret_cast<Vector<T>*>(h) + pack(i), held[i]);
    }
    x = h;
  }
  Acc sum = 0;
#pragma unroll
  for (int i = 0; i < kResident; ++i) {
    const Acc part = sum_of_squares(held[i]);
    sum += exists(i) ? part : Acc(0);
  }
  if constexpr (kPhased) {
    sum += convert<Acc>(edge) * convert<Acc>(edge);
#pragma unroll 1
    for (int e = first + step; e < division.edges; e += step)
      sum += convert<Acc>(x[division.edge(e)]) * convert<Acc>(x[division.edge(e)]);
  }
  sum = team.reduce(sum, Sum());
  const auto& constants = scalars<Acc>(p);
  const Acc mean_eps = mean_plus_eps(sum, constants, constants.eps);
  Acc* const rstd_at = p.rstd ? static_cast<Acc*>(p.rstd) + row : nullptr;
  const bool rare = !(sum <= Range<Acc>::kLargest && mean_eps >= Range<Acc>::kSmallest);
  if (__builtin_expect(team.any(rare), 0)) {
    if constexpr (kResidual && kClusters) {
      if (team.blocks > 1) cluster_barrier();  // after which all blocks see h, which each has written a part of
    }
    return careful_row(x, active ? y : nullptr, parameter, rstd_at, p.n, constants, team);
  }
  if (!active) return;
  const Acc rstd = rsqrt_rn(mean_eps);
  if (rstd_at && first == 0) *rstd_at = rstd;
  const unsigned zero = static_cast<unsigned>(p.x.outer_stride);  // rows have one stride
#pragma unroll
  for (int i = 0; i < kResident; ++i) {
    if (!exists(i)) continue;
    auto wide = convert<Acc>(kForgets ? forgotten(held[i], zero) : held[i]);
    const auto factor = convert<Acc>(kLate ? load_constant_here(parameter + pack(i) * kWidth) : weight[kLate ? 0 : i]);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) wide.at[j] = wide.at[j] * rstd * (factor.at[j] + constants.weight_offset);
    store(reinterpret_cast<Vector<T>*>(y + division.head) + pack(i), convert<T>(wide));
  }
  if constexpr (kPhased) {
    auto edge_of = [&](T v, T factor) {
      return convert<T>(convert<Acc>(v) * rstd * (convert<Acc>(factor) + constants.weight_offset));
    };
    if (first < division.edges) y[division.edge(first)] = edge_of(edge, edge_weight);
#pragma unroll 1
    for (int e = first + step; e < division.edges; e += step) {
      const long long at = division.edge(e);
      y[at] = edge_of(x[at], parameter[at]);
    }
  }
  if (row >= p.released_from) {
    Passing::release<T>(p.x, p.rows, p.n, row, first);
    if (kResidual) Passing::release<T>(p.residual, p.rows, p.n, row, first);
  }
}

// Wide rows, a row a cluster. Clusters stay until all rows are done, so that a thread keeps its part of the weight; while a row is
// worked on, the next one is on its way to registers.
template <class T, int kResident>
__device__ void rms_norm_fwd_stay(const RmsNormFwdParams& p) {
  using Acc = Accumulator<T>;
  constexpr int kWidth = kVectorWidth<T>;
  CUOPS_TEAM(Acc, 1, team);
  const auto& constants = scalars<Acc>(p);
  const int packs = static_cast<int>(p.n) / kWidth, first = team.first(), step = team.threads();
  const long long teams = gridDim.x / team.blocks;
  auto exists = [&](int i) { return first + i * step < packs; };
  auto wide = [](const uint4& v) { return convert<Acc>(*reinterpret_cast<const Vector<T>*>(&v)); };
  const Passing passing(p.released_from != kNoRow);
  if (p.overlaps) wait_for_previous(p.rows <= teams);

  uint4 next[kResident] = {}, weight[kResident] = {};
  auto fetch = [&](long long row) {
    const auto* const x = reinterpret_cast<const uint4*>(static_cast<const T*>(p.x.data) + row * p.x.stride) + first;
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      if (exists(i)) next[i] = passing.load(x + i * step);
    }
  };
  fetch(team.index);
#pragma unroll
  for (int i = 0; i < kResident; ++i) {
    if (exists(i)) weight[i] = __ldg(static_cast<const uint4*>(p.weight) + first + i * step);
  }
#pragma unroll 1
  for (long long row = team.index; row < p.rows; row += teams) {
    uint4 x[kResident];
#pragma unroll
    for (int i = 0; i < kResident; ++i) x[i] = next[i];
    if (row + teams < p.rows) fetch(row + teams);
    Acc sum = 0;
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      const auto v = wide(x[i]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum += v.at[j] * v.at[j];
    }
    sum = team.reduce(sum, Sum());
    const Acc mean_eps = mean_plus_eps(sum, constants, constants.eps);
    T* const y = static_cast<T*>(p.y.data) + row * p.y.stride;
    Acc* const rstd_at = p.rstd ? static_cast<Acc*>(p.rstd) + row : nullptr;
    if (__builtin_expect(!(sum <= Range<Acc>::kLargest && mean_eps >= Range<Acc>::kSmallest), 0)) {
      const T* const from = static_cast<const T*>(p.x.data) + row * p.x.stride;
      careful_row(from, y, static_cast<const T*>(p.weight), rstd_at, p.n, constants, team);
      team.skip(2);
      continue;
    }
    const Acc rstd = rsqrt_rn(mean_eps);
    if (rstd_at && first == 0) *rstd_at = rstd;
    const unsigned zero = static_cast<unsigned>(p.x.outer_stride);  // rows have one stride
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      if (!exists(i)) continue;
      weight[i] = forgotten(weight[i], zero);
      auto v = wide(forgotten(x[i], zero));
      const auto factor = wide(weight[i]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) v.at[j] = v.at[j] * rstd * (factor.at[j] + constants.weight_offset);
      store(reinterpret_cast<Vector<T>*>(y) + first + i * step, convert<T>(v));
    }
    if (row >= p.released_from) Passing::release<T>(p.x, p.rows, p.n, row, first);
  }
  launch_dependents();
}

}  // namespace cuops

// Instances, as rms_norm_plan.cc asks for them: threads a block, and blocks that share a multiprocessor to hide one another's
// waits, which bounds the registers; vectors a thread; phased, residual, clusters, late, forgets.
#define RMS_NORM_FWD(name, T, suffix, kThreads, kBlocks, ...)                                                                 \
  extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) rms_norm_fwd_##name##_##suffix(cuops::RmsNormFwdParams p) { \
    cuops::rms_norm_fwd_held<T, __VA_ARGS__>(p);                                                                              \
  }
#define RMS_NORM_FWD_OF(name, T)                               \
  RMS_NORM_FWD(name, T, short, 512, 3, 2)                      \
  RMS_NORM_FWD(name, T, residual, 512, 2, 2, false, true)      \
  RMS_NORM_FWD(name, T, middle, 512, 2, 4, false, false, true) \
  RMS_NORM_FWD(name, T, wide, 256, 2, 8, false, false, true)   \
  RMS_NORM_FWD(name, T, phased_short, 256, 4, 2, true)         \
  RMS_NORM_FWD(name, T, phased, 256, 2, 8, true)
RMS_NORM_FWD_OF(f32, float)
RMS_NORM_FWD_OF(f16, __half)
RMS_NORM_FWD_OF(bf16, __nv_bfloat16)
RMS_NORM_FWD(f64, double, wide, 256, 2, 8, false, false, true)
#if CUOPS_TUNED == 90  // where they are known to be faster
#define RMS_NORM_FWD_90(name, T)                                     \
  RMS_NORM_FWD(name, T, three, 128, 8, 3)                            \
  RMS_NORM_FWD(name, T, five, 128, 6, 5)                             \
  RMS_NORM_FWD(name, T, residual_three, 128, 6, 3, false, true)      \
  RMS_NORM_FWD(name, T, residual_four, 384, 2, 4, false, true, true) \
  RMS_NORM_FWD(name, T, late, 512, 2, 8, false, false, true, true)
RMS_NORM_FWD_90(f32, float)
RMS_NORM_FWD_90(f16, __half)
RMS_NORM_FWD_90(bf16, __nv_bfloat16)
RMS_NORM_FWD(f32, float, residual_few, 256, 4, 4, false, true)
RMS_NORM_FWD(f16, __half, residual_few, 512, 3, 2, false, true, false, false, true)
RMS_NORM_FWD(bf16, __nv_bfloat16, residual_few, 512, 3, 2, false, true, false, false, true)
#endif
#if CUOPS_CLUSTERS
#define RMS_NORM_FWD_STAY(name, T)                                                                          \
  extern "C" __global__ void __launch_bounds__(512) rms_norm_fwd_##name##_stay(cuops::RmsNormFwdParams p) { \
    cuops::rms_norm_fwd_stay<T, 8>(p);                                                                      \
  }
RMS_NORM_FWD_STAY(f32, float)
RMS_NORM_FWD_STAY(f16, __half)
RMS_NORM_FWD_STAY(bf16, __nv_bfloat16)
#endif
