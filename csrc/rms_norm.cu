// RMSNorm on the device: y = x / sqrt(mean(x^2) + eps) * weight over rows of n elements.
#include "rms_norm.h"

#include "device/reduce.cuh"
#include "device/row.cuh"
#include "device/rstd.cuh"

namespace cuops {

// The careful way, for rows whose squares overflow or drown: brings the larger of the row and sqrt(eps) near 1, exactly.
// Out of line and from memory, so that ordinary rows pay nothing for it. Its arguments are values: a reference would move all
// parameters of the kernel to the stack.
template <class T>
__device__ __noinline__ Rstd<Accumulator<T>> careful_rstd(const T* x, long long n, RmsNormScalars<Accumulator<T>> s,
                                                          Team<Accumulator<T>, 1> team) {
  using Acc = Accumulator<T>;
  __syncwarp();  // x may be what other lanes have just written
  Acc largest = s.sqrt_eps;
#pragma unroll 1
  for (long long i = team.first(); i < n; i += team.threads()) largest = Max()(largest, abs(convert<Acc>(x[i])));
  largest = team.reduce(largest, Max());
  const Acc scale = isinf(largest) ? Acc(1) : power_of_two_to_one(largest);
  Acc sum = 0;
#pragma unroll 1
  for (long long i = team.first(); i < n; i += team.threads()) sum += convert<Acc>(x[i]) * scale * (convert<Acc>(x[i]) * scale);
  sum = team.reduce(sum, Sum());
  const Acc mean = isinf(sum) ? sum : mean_plus_eps(sum, s, s.eps * scale * scale);
  return {scale, mean == Acc(0) || isinf(mean) ? Acc(0) : rsqrt_rn(mean)};  // zeros give zeros, also with eps = 0
}

// kResident vectors a thread stay in registers between the two passes over the row; 0 reads the row again instead.
// kPlain is the common case, for speed: a weight of x's dtype, rows of one stride, and nothing else.
template <class T, int kResident, bool kAligned, bool kPlain>
__device__ void rms_norm_fwd(const RmsNormFwdParams& p) {
  using Acc = Accumulator<T>;
  using Index = Select<kResident != 0, int, long long>;
  constexpr int kWidth = kVectorWidth<T>;
  CUOPS_TEAM(Acc, 1, team);
  // Beyond the last row and beyond a row's end, threads load what others do, and drop it: cheaper than a choice at each load.
  const long long wanted = static_cast<long long>(team.index) * blockDim.y + threadIdx.y, row = min(wanted, p.rows - 1);
  const bool active = wanted < p.rows;
  auto row_of = [&](const Rows& rows) { return kPlain ? row * rows.stride : offset_of(rows, row); };
  Row<T, kAligned, Index> x(static_cast<T*>(p.x.data) + row_of(p.x), p.n);
  const Index first = team.first(), step = team.threads(), end = x.windows();

  Vector<T> held[kResident > 0 ? kResident : 1];
#pragma unroll
  for (int i = 0; i < kResident; ++i) {
    held[i] = x.load(x.start(min(first + i * step, end - 1)));
  }
  auto for_each = [&](auto&& visit) {
    if constexpr (kResident > 0) {
#pragma unroll
      for (int i = 0; i < kResident; ++i) visit(first + i * step, held[i]);
    } else {
#pragma unroll 2
      for (Index window = first; window < end; window += step) {
        Vector<T> v = x.load(x.start(window));
        visit(window, v);
      }
    }
  };
  // Where registers allow, the weight is on its way while the row is summed.
  constexpr bool kWeightEarly = kPlain && kResident == 1;
  auto load_weight = [&](Index window) {
    return load_parameters<T, kAligned, Index>(p.weight, !kPlain && p.weight_wide, x.start(window), p.n);
  };
  Pack<Acc, kWidth> early_weight;
  if constexpr (kWeightEarly) early_weight = load_weight(min(first, end - 1));

  Acc sum = 0;
  if (!kPlain && p.residual.data) {
    const Row<T, kAligned, Index> residual(p.residual, row, p.n), h(p.h, row, p.n);
    for_each([&](Index window, Vector<T>& v) {
      if (window >= end || !active) return;
      const auto r = residual.load(x.start(window));
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        v.at[j] = convert<T>(convert<Acc>(v.at[j]) + convert<Acc>(r.at[j]));
        sum += convert<Acc>(v.at[j]) * convert<Acc>(v.at[j]);
      }
      h.store(x.start(window), v);
    });
    x.data = h.data;  // what the later passes normalise
  } else {
    for_each([&](Index window, const Vector<T>& v) {
      const auto wide = convert<Acc>(v);
      Acc part = 0;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) part += wide.at[j] * wide.at[j];
      sum += window < end ? part : Acc(0);
    });
  }
  sum = team.reduce(sum, Sum());
  const auto& constants = scalars<Acc>(p);
  const Acc mean_eps = mean_plus_eps(sum, constants, constants.eps);
  Rstd<Acc> rstd{Acc(1), rsqrt_rn(mean_eps)};
  if (team.any(!(sum <= Range<Acc>::kLargest && mean_eps >= Range<Acc>::kSmallest))) {
    rstd = careful_rstd(x.data, p.n, constants, team);
    // What stays in registers is scaled there, exactly, so that ordinary rows need no second factor.
    if constexpr (kResident > 0) {
      for_each([&](Index, Vector<T>& v) {
        auto wide = convert<Acc>(v);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) wide.at[j] *= rstd.scale;
        v = convert<T>(wide);
      });
    }
  }
  if (p.rstd && active && first == 0) static_cast<Acc*>(p.rstd)[row] = rstd.scale * rstd.value;

  void* const y = static_cast<char*>(p.y.data) + row_of(p.y) * (kPlain ? sizeof(T) : size_of(p.y_dtype));
  for_each([&](Index window, const Vector<T>& v) {
    if (window >= end || !active) return;
    auto wide = convert<Acc>(v);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) wide.at[j] = (kResident > 0 ? wide.at[j] : wide.at[j] * rstd.scale) * rstd.value;
    if (kPlain || p.weight) {
      const auto weight = kWeightEarly ? early_weight : load_weight(window);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) wide.at[j] *= kPlain ? weight.at[j] : weight.at[j] + constants.weight_offset;
    }
    if (!kPlain && p.bias) {
      const auto bias = load_parameters<T, kAligned, Index>(p.bias, p.bias_wide, x.start(window), p.n);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) wide.at[j] += bias.at[j];
    }
    if (kPlain || p.y_dtype == kDTypeOf<T>) {
      Row<T, kAligned, Index>(static_cast<T*>(y), p.n).store(x.start(window), convert<T>(wide));
    } else {
      store_as<kAligned>(p.y_dtype, y, x.start(window), p.n, wide);
    }
  });
}

}  // namespace cuops

// Registers are bounded so that enough blocks share a multiprocessor to hide one another's waits.
constexpr int kThreads[] = {1024, 128, 256, 0, 512, 0, 0, 0, 256}, kBlocks[] = {1, 12, 6, 0, 2, 0, 0, 0, 3};

#define RMS_NORM_FWD(name, T, kResident, suffix, kAligned, kPlain)                      \
  extern "C" __global__ void __launch_bounds__(kThreads[kResident], kBlocks[kResident]) \
      rms_norm_fwd_##name##_##kResident##_##suffix(cuops::RmsNormFwdParams p) {         \
    cuops::rms_norm_fwd<T, kResident, kAligned, kPlain>(p);                             \
  }

// Instances, as plan_fwd in rms_norm.cc asks for them: any rows; rows of the common case; aligned rows with all arguments.
RMS_NORM_FWD(f64, double, 0, any, false, false)
RMS_NORM_FWD(f32, float, 0, any, false, false)
RMS_NORM_FWD(f16, __half, 0, any, false, false)
RMS_NORM_FWD(bf16, __nv_bfloat16, 0, any, false, false)

#if __CUDA_ARCH__ >= 800
#define RMS_NORM_FWD_PLAIN(kResident)                     \
  RMS_NORM_FWD(f32, float, kResident, plain, true, true)  \
  RMS_NORM_FWD(f16, __half, kResident, plain, true, true) \
  RMS_NORM_FWD(bf16, __nv_bfloat16, kResident, plain, true, true)
RMS_NORM_FWD_PLAIN(2)
RMS_NORM_FWD_PLAIN(4)
#endif

#if __CUDA_ARCH__ >= 900
RMS_NORM_FWD_PLAIN(1)
RMS_NORM_FWD_PLAIN(8)
RMS_NORM_FWD(f64, double, 4, general, true, false)
RMS_NORM_FWD(f32, float, 4, general, true, false)
RMS_NORM_FWD(f16, __half, 4, general, true, false)
RMS_NORM_FWD(bf16, __nv_bfloat16, 4, general, true, false)
#endif
