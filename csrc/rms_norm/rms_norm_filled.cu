// RMSNorm of rows that fill their threads, so that no vector has to be asked for: the common case (rms_norm.cu), with a residual,
// without a weight, or with one of float32 beside 16 bits. Where caches hold x, the time is that of the instructions, and an empty
// cache has to bring them, so there are as few as can be.
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

// kVectors vectors a thread, beside a weight of W, or none where W is void. kPasses: x passes L2, which is smaller.
template <class T, class W, int kVectors, bool kResidual, bool kPasses, class Mates>
__device__ void rms_norm_fwd_filled(const RmsNormFwdParams& p, long long row, Mates team) {
  using Acc = Accumulator<T>;
  constexpr int kWidth = kVectorWidth<T>;
  constexpr bool kWeight = !kSame<W, void>;
  using Weight = Pack<Select<kWeight, W, T>, kWidth>;
  const T* x = static_cast<const T*>(p.x.data) + row * p.x.stride;
  T* const y = static_cast<T*>(p.y.data) + row * p.y.stride;
  auto pack = [&](int i) { return threadIdx.x + i * blockDim.x; };
  if (p.overlaps) wait_for_previous();

  Weight weight[kVectors];
  Vector<T> held[kVectors];
#pragma unroll
  for (int i = 0; kWeight && i < kVectors; ++i) weight[i] = load_constant(static_cast<const Weight*>(p.weight) + pack(i));
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const auto* const from = reinterpret_cast<const Vector<T>*>(x) + pack(i);
    held[i] = kPasses ? Passing(true).load(from) : load_here(from);
  }
  if constexpr (kResidual) {
    const T* const residual = static_cast<const T*>(p.residual.data) + row * p.residual.stride;
    T* const h = static_cast<T*>(p.h.data) + row * p.h.stride;
    Vector<T> other[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) other[i] = load_here(reinterpret_cast<const Vector<T>*>(residual) + pack(i));
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      held[i] = plus(held[i], other[i]);
      store(reinterpret_cast<Vector<T>*>(h) + pack(i), held[i]);
    }
    x = h;
  }
  Acc sum = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) sum += sum_of_squares(held[i]);
  sum = team.reduce(sum, Sum());
  const auto& constants = scalars<Acc>(p);
  const Acc mean_eps = mean_plus_eps(sum, constants, constants.eps);
  Acc* const rstd_at = p.rstd ? static_cast<Acc*>(p.rstd) + row : nullptr;
  if (__builtin_expect(team.any(!(sum <= Range<Acc>::kLargest && mean_eps >= Range<Acc>::kSmallest)), 0))
    return careful_row(x, y, static_cast<const W*>(p.weight), rstd_at, p.n, constants, team);
  const Acc rstd = rsqrt_rn(mean_eps);
  if (rstd_at && threadIdx.x == 0) *rstd_at = rstd;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    auto wide = convert<Acc>(held[i]);
    if constexpr (kWeight) {
      const auto factor = convert<Acc>(weight[i]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) wide.at[j] = wide.at[j] * rstd * (factor.at[j] + constants.weight_offset);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) wide.at[j] *= rstd;
    }
    store(reinterpret_cast<Vector<T>*>(y) + pack(i), convert<T>(wide));
  }
  if (kPasses && row >= p.released_from) Passing::release<T>(p.x, p.rows, p.n, row, threadIdx.x);
}

// A part of a warp has a row.
template <class T, class W, int kVectors, bool kResidual = false, bool kPasses = false>
__device__ void rms_norm_fwd_full(const RmsNormFwdParams& p) {
  const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
  rms_norm_fwd_filled<T, W, kVectors, kResidual, kPasses>(p, row, Lanes());
}

// A block of two warps and more has one.
template <class T, class W, int kVectors, bool kResidual = false>
__device__ void rms_norm_fwd_block(const RmsNormFwdParams& p) {
  __builtin_assume(blockDim.x > 32);
  CUOPS_TEAM_OF(Accumulator<T>, 1, false, team);
  rms_norm_fwd_filled<T, W, kVectors, kResidual, false>(p, blockIdx.x, team);
}

}  // namespace cuops

// Instances, as rms_norm_plan.cc asks for them: threads a block, and blocks that share a multiprocessor; the weight, vectors a
// thread, residual, x passes L2.
#define RMS_NORM_FWD(name, T, suffix, kThreads, kBlocks, kernel, ...)                                                         \
  extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) rms_norm_fwd_##name##_##suffix(cuops::RmsNormFwdParams p) { \
    cuops::rms_norm_fwd_##kernel<T, __VA_ARGS__>(p);                                                                          \
  }
RMS_NORM_FWD(f32, float, full, 128, 12, full, float, 2)
RMS_NORM_FWD(f16, __half, full, 128, 12, full, __half, 2)
RMS_NORM_FWD(bf16, __nv_bfloat16, full, 128, 12, full, __nv_bfloat16, 2)
#if CUOPS_TUNED == 90  // where they are known to be faster
#define RMS_NORM_FWD_OF(name, T)                                        \
  RMS_NORM_FWD(name, T, full_four, 128, 8, full, T, 4)                  \
  RMS_NORM_FWD(name, T, full_passing, 128, 12, full, T, 2, false, true) \
  RMS_NORM_FWD(name, T, block, 256, 6, block, T, 2)                     \
  RMS_NORM_FWD(name, T, block_four, 256, 4, block, T, 4)                \
  RMS_NORM_FWD(name, T, full_residual, 128, 10, full, T, 2, true)       \
  RMS_NORM_FWD(name, T, full_four_residual, 128, 8, full, T, 4, true)   \
  RMS_NORM_FWD(name, T, block_residual, 256, 5, block, T, 2, true)      \
  RMS_NORM_FWD(name, T, block_four_residual, 256, 4, block, T, 4, true) \
  RMS_NORM_FWD(name, T, full_no_weight, 128, 12, full, void, 2)         \
  RMS_NORM_FWD(name, T, full_four_no_weight, 128, 8, full, void, 4)     \
  RMS_NORM_FWD(name, T, block_no_weight, 256, 6, block, void, 2)        \
  RMS_NORM_FWD(name, T, block_four_no_weight, 256, 4, block, void, 4)
RMS_NORM_FWD_OF(f32, float)
RMS_NORM_FWD_OF(f16, __half)
RMS_NORM_FWD_OF(bf16, __nv_bfloat16)
#define RMS_NORM_FWD_WIDE_WEIGHT(name, T)                              \
  RMS_NORM_FWD(name, T, full_wide_weight, 128, 10, full, float, 2)     \
  RMS_NORM_FWD(name, T, full_four_wide_weight, 128, 5, full, float, 4) \
  RMS_NORM_FWD(name, T, block_wide_weight, 256, 5, block, float, 2)
RMS_NORM_FWD_WIDE_WEIGHT(f16, __half)
RMS_NORM_FWD_WIDE_WEIGHT(bf16, __nv_bfloat16)
#endif
