// RMSNorm on the device: y = x / sqrt(mean(x^2) + eps) * weight over rows of n elements.
#include "rms_norm.h"

#include "device/reduce.cuh"
#include "device/row.cuh"

namespace cuops {

// 1 / sqrt(mean(x^2) + eps) as a product: `scale` is a power of two, other than 1 only where squares left the range of Acc.
template <class Acc>
struct Rstd {
  Acc scale, value;
};

template <class Acc>
__device__ const RmsNormScalars<Acc>& scalars(const RmsNormFwdParams& p) {
  if constexpr (kSame<Acc, double>) {
    return p.float64;
  } else {
    return p.float32;
  }
}

template <class Acc>
__device__ Acc mean_plus_eps(Acc sum, const RmsNormScalars<Acc>& s, Acc eps) {
  return fma(sum, s.inverse_n, fma(sum, s.inverse_n_rest, eps));
}

template <class Acc>
struct Range;
template <>
struct Range<float> {
  static constexpr float kSmallest = 1e-18f, kLargest = 3e38f;
  
};
template <>
struct Range<double> {
  static constexpr double kSmallest = 1e-280, kLargest = 1e308;
  
};

// The careful way, for rows whose squares overflow or drown: brings the larger of the row and sqrt(eps) near 1, exactly.
// Out of line and from memory, so that ordinary rows pay nothing for it.
template <class T>
__device__ __noinline__ Rstd<Accumulator<T>> careful_rstd(const T* x, long long n, const RmsNormScalars<Accumulator<T>>& s,
                                                          const Cluster& cluster) {
  using Acc = Accumulator<T>;
  const long long first = cluster.rank * blockDim.x + threadIdx.x, step = cluster.size * blockDim.x;
  Acc largest = s.sqrt_eps;
#pragma unroll 1
  for (long long i = first; i < n; i += step) largest = Max()(largest, abs(convert<Acc>(x[i])));
  largest = reduce_row(largest, cluster, Max());
  const Acc scale = isinf(largest) ? Acc(1) : power_of_two_to_one(largest);
  Acc sum = 0;
#pragma unroll 1
  for (long long i = first; i < n; i += step) sum += convert<Acc>(x[i]) * scale * (convert<Acc>(x[i]) * scale);
  sum = reduce_row(sum, cluster, Sum());
  const Acc mean = isinf(sum) ? sum : mean_plus_eps(sum, s, s.eps * scale * scale);
  return {scale, mean == Acc(0) || isinf(mean) ? Acc(0) : rsqrt_rn(mean)};  // zeros give zeros, also with eps = 0
}

// kResident vectors a thread stay in registers between the two passes over the row; 0 reads the row again instead.
template <class T, int kResident, bool kAligned>
__device__ void rms_norm_fwd(const RmsNormFwdParams& p) {
  using Acc = Accumulator<T>;
  using Index = Select<kResident != 0, int, long long>;
  constexpr int kWidth = kVectorWidth<T>;
  const Cluster cluster;
  const long long row = static_cast<long long>(blockIdx.x / cluster.size) * blockDim.y + threadIdx.y;
  const bool active = row < p.rows;
  Row<T, kAligned, Index> x(p.x, row, p.n);
  const Index first = cluster.rank * blockDim.x + threadIdx.x, step = cluster.size * blockDim.x;
  const Index end = active ? x.windows() : 0;

  Vector<T> held[kResident > 0 ? kResident : 1];
#pragma unroll
  for (int i = 0; i < kResident; ++i) {
    held[i] = first + i * step < end ? x.load(x.start(first + i * step)) : Vector<T>{};
  }
  auto for_each = [&](auto&& visit) {
    if constexpr (kResident > 0) {
#pragma unroll
      for (int i = 0; i < kResident; ++i) visit(first + i * step, held[i]);
    } else {
#pragma unroll 4
      for (Index window = first; window < end; window += step) {
        Vector<T> v = x.load(x.start(window));
        visit(window, v);
      }
    }
  };

  Acc sum = 0;
  if (p.residual.data) {
    const Row<T, kAligned, Index> residual(p.residual, row, p.n), h(p.h, row, p.n);
    for_each([&](Index window, Vector<T>& v) {
      if (window >= end) return;
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
    for_each([&](Index, Vector<T>& v) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum += convert<Acc>(v.at[j]) * convert<Acc>(v.at[j]);
    });
  }
  sum = reduce_row(sum, cluster, Sum());
  const auto& constants = scalars<Acc>(p);
  const Acc mean_eps = mean_plus_eps(sum, constants, constants.eps);
  Rstd<Acc> rstd{Acc(1), rsqrt_rn(mean_eps)};
  if (!(sum <= Range<Acc>::kLargest && mean_eps >= Range<Acc>::kSmallest)) {
    rstd = careful_rstd(x.data, active ? p.n : 0, constants, cluster);
  }
  if (p.rstd && active && first == 0) static_cast<Acc*>(p.rstd)[row] = rstd.scale * rstd.value;

  void* const y = static_cast<char*>(p.y.data) + offset_of(p.y, row) * size_of(p.y_dtype);
  for_each([&](Index window, Vector<T>& v) {
    if (window >= end) return;
    const Index start = x.start(window);
    auto wide = convert<Acc>(v);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) wide.at[j] = wide.at[j] * rstd.scale * rstd.value;
    if (p.weight) {
      const auto weight = load_parameters<T, kAligned, Index>(p.weight, p.weight_wide, start, p.n);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) wide.at[j] *= weight.at[j] + constants.weight_offset;
    }
    if (p.bias) {
      const auto bias = load_parameters<T, kAligned, Index>(p.bias, p.bias_wide, start, p.n);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) wide.at[j] += bias.at[j];
    }
    if (p.y_dtype == kDTypeOf<T>) {
      Row<T, kAligned, Index>(static_cast<T*>(y), p.n).store(start, convert<T>(wide));
    } else {
      store_as<kAligned>(p.y_dtype, y, start, p.n, wide);
    }
  });
}

}  // namespace cuops

#define RMS_NORM_FWD(name, T, kResident, layout, kAligned)                                        \
  extern "C" __global__ void __launch_bounds__(kResident == 1 ? 128 : 1024) rms_norm_fwd_##name##_##kResident##_##layout(cuops::RmsNormFwdParams p) { \
    cuops::rms_norm_fwd<T, kResident, kAligned>(p);                                               \
  }

RMS_NORM_FWD(f64, double, 1, aligned, true)
RMS_NORM_FWD(f64, double, 4, aligned, true)
RMS_NORM_FWD(f64, double, 0, aligned, true)
RMS_NORM_FWD(f64, double, 4, unaligned, false)
RMS_NORM_FWD(f64, double, 0, unaligned, false)
RMS_NORM_FWD(f32, float, 1, aligned, true)
RMS_NORM_FWD(f32, float, 4, aligned, true)
RMS_NORM_FWD(f32, float, 0, aligned, true)
RMS_NORM_FWD(f32, float, 4, unaligned, false)
RMS_NORM_FWD(f32, float, 0, unaligned, false)
RMS_NORM_FWD(f16, __half, 1, aligned, true)
RMS_NORM_FWD(f16, __half, 4, aligned, true)
RMS_NORM_FWD(f16, __half, 0, aligned, true)
RMS_NORM_FWD(f16, __half, 4, unaligned, false)
RMS_NORM_FWD(f16, __half, 0, unaligned, false)
RMS_NORM_FWD(bf16, __nv_bfloat16, 1, aligned, true)
RMS_NORM_FWD(bf16, __nv_bfloat16, 4, aligned, true)
RMS_NORM_FWD(bf16, __nv_bfloat16, 0, aligned, true)
RMS_NORM_FWD(bf16, __nv_bfloat16, 4, unaligned, false)
RMS_NORM_FWD(bf16, __nv_bfloat16, 0, unaligned, false)
