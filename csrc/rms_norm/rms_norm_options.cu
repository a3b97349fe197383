// RMSNorm of rows that registers hold, in calls that are not the common case (rms_norm.cu): without a weight, or with one of
// another dtype, an offset, a bias; y of another dtype; h = x + residual, also of two dtypes; rows of two strides.
#include "rms_norm.h"

#include "device/overlap.cuh"
#include "device/reduce.cuh"
#include "device/row.cuh"
#include "device/tuned.cuh"
#include "rms_norm/beside.cuh"
#include "rms_norm/passing.cuh"
#include "rms_norm/rstd.cuh"

CUOPS_ONLY_FOR(80, 90)

namespace cuops {

template <class T>
__device__ void store_beside(void* data, DType dtype, int at, const Pack<Accumulator<T>, kVectorWidth<T>>& v) {
  constexpr int kWidth = kVectorWidth<T>;
  auto store_in = [&](auto* to) {
    using U = typename Pointee<decltype(to)>::type;
    store_pack(to + static_cast<long long>(at) * kWidth, convert<U>(v));
  };
  if (dtype == kDTypeOf<T>) return store_in(static_cast<T*>(data));
  if constexpr (sizeof(T) == 2) {
    store_in(static_cast<float*>(data));
  } else {
    dtype == kFloat16 ? store_in(static_cast<__half*>(data)) : store_in(static_cast<__nv_bfloat16*>(data));
  }
}

// Which options there may be. Small batches wait for instructions too, and go where these are few.
enum Options {
  kAll,
  kNoWeight,    // and nothing else
  kWideWeight,  // of the dtype of the sums, and nothing else
};

// Threads have kResident vectors of a row. They bring parameters for kGroup of them at a time.
template <class T, Options kOptions, int kResident, int kGroup, bool kPhased, bool kClusters>
__device__ void rms_norm_fwd_options(const RmsNormFwdParams& p) {
  using Acc = Accumulator<T>;
  constexpr int kWidth = kVectorWidth<T>;
  CUOPS_TEAM_OF(Acc, 1, kClusters, team);
  if (p.overlaps) wait_for_previous();
  // Beyond the last row and beyond a row's end, threads load what others do, and drop it: cheaper than a choice at each load.
  const long long wanted = static_cast<long long>(team.index) * blockDim.y + threadIdx.y, row = min(wanted, p.rows - 1);
  const bool active = wanted < p.rows;
  const T* const x = static_cast<const T*>(p.x.data) + offset_of(p.x, row);
  const Division<T, kWidth, kPhased, int> division(x, p.n);
  const int first = team.first(), step = team.threads();
  auto pack = [&](int i) { return min(first + i * step, division.packs - 1); };
  auto exists = [&](int i) { return first + i * step < division.packs; };
  const Passing passing(p.released_from != kNoRow);
  const Beside<T> weight{kOptions == kNoWeight ? nullptr : p.weight, kOptions == kWideWeight ? kDTypeOf<Acc> : p.weight_dtype};
  const Beside<T> bias{kOptions == kAll ? p.bias : nullptr, p.bias_dtype};
  const bool has_residual = kOptions == kAll && p.residual.data;
  if (kOptions == kWideWeight) __builtin_assume(weight.data != nullptr);
  using Raw = typename Beside<T>::Raw;
  const bool has_packs = !kPhased || division.packs > 0;

  Vector<T> held[kResident];
  if (has_packs) {
#pragma unroll
    for (int i = 0; i < kResident; ++i) held[i] = passing.load(reinterpret_cast<const Vector<T>*>(x + division.head) + pack(i));
  }
  // Parameters are on their way while the row is summed where there are registers, else as far as the caches.
  Raw factors[kGroup], terms[kGroup];
  if (kGroup == kResident && has_packs) {
    weight.fetch(factors, division, pack);
    bias.fetch(terms, division, pack);
  } else if (has_packs && (team.blocks > 1 || p.overlaps)) {
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      weight.prefetch(division.head + pack(i) * kWidth);
      bias.prefetch(division.head + pack(i) * kWidth);
    }
  }
  // Edges are few, and are read again from here.
  const T* edges = x;
  if (has_residual) {
    const void* const residual = static_cast<const char*>(p.residual.data) + offset_of(p.residual, row) * size_of(p.residual_dtype);
    T* const h = static_cast<T*>(p.h.data) + offset_of(p.h, row);
    auto add = [&](int i, const Pack<Acc, kWidth>& other) {
      auto wide = convert<Acc>(held[i]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) wide.at[j] += other.at[j];
      held[i] = convert<T>(wide);
      if (active && exists(i)) store(reinterpret_cast<Vector<T>*>(h + division.head) + pack(i), held[i]);
    };
    if (has_packs && p.residual_dtype == kDTypeOf<T>) {
      const auto* const from = reinterpret_cast<const Vector<T>*>(static_cast<const T*>(residual) + division.head);
      Vector<T> other[kResident];
#pragma unroll
      for (int i = 0; i < kResident; ++i) other[i] = passing.load(from + pack(i));
#pragma unroll
      for (int i = 0; i < kResident; ++i) add(i, convert<Acc>(other[i]));
    } else if (!kPhased) {
      const Beside<T> narrow{residual, p.residual_dtype};
      Raw other[kResident];
      narrow.fetch(other, division, pack);
#pragma unroll
      for (int i = 0; i < kResident; ++i) add(i, narrow.unpack(other[i]));
    }
    if constexpr (kPhased) {
#pragma unroll 1
      for (int e = first; e < division.edges; e += step) {
        const long long at = division.edge(e);
        const T v = convert<T>(convert<Acc>(x[at]) + convert<Acc>(static_cast<const T*>(residual)[at]));
        if (active) h[at] = v;
      }
      if (active) edges = h;
    }
  }

  auto sum_of_squares = [&](Acc scale) {
    Acc sum = 0;
    auto square = [&](Acc v) { return v * scale * (v * scale); };
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      const auto wide = convert<Acc>(held[i]);
      Acc part = 0;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) part += square(wide.at[j]);
      sum += has_packs && exists(i) ? part : Acc(0);
    }
    if constexpr (kPhased) {
#pragma unroll 1
      for (int e = first; e < division.edges; e += step) sum += square(convert<Acc>(edges[division.edge(e)]));
    }
    return team.reduce(sum, Sum());
  };
  Acc scale = 1, sum = sum_of_squares(scale);
  const auto& constants = scalars<Acc>(p);
  const Acc mean_eps = mean_plus_eps(sum, constants, constants.eps);
  if (__builtin_expect(team.any(!(sum <= Range<Acc>::kLargest && mean_eps >= Range<Acc>::kSmallest)), 0)) {  // as in careful_row
    Acc largest = constants.sqrt_eps;
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      const auto wide = convert<Acc>(held[i]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) largest = Max()(largest, has_packs ? abs(wide.at[j]) : Acc(0));
    }
    if constexpr (kPhased) {
#pragma unroll 1
      for (int e = first; e < division.edges; e += step) largest = Max()(largest, abs(convert<Acc>(edges[division.edge(e)])));
    }
    largest = team.reduce(largest, Max());
    scale = isinf(largest) ? Acc(1) : power_of_two_to_one(largest);
    sum = sum_of_squares(scale);
  }
  if (!active) return;
  const Acc rstd = rstd_of(sum, constants, scale);
  if (p.rstd && first == 0) static_cast<Acc*>(p.rstd)[row] = scale * rstd;

  const unsigned zero = static_cast<unsigned>(p.parts);  // rows are in one part
  const DType y_dtype = kOptions == kAll ? p.y_dtype : kDTypeOf<T>;
  void* const y = static_cast<char*>(p.y.data) + (offset_of(p.y, row) + division.head) * size_of(y_dtype);
#pragma unroll
  for (int from = 0; from < kResident; from += kGroup) {
    if (!has_packs || !exists(from)) break;
    if (kGroup < kResident) {
      weight.fetch(factors, division, [&](int i) { return pack(from + i); });
      bias.fetch(terms, division, [&](int i) { return pack(from + i); });
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (!exists(from + i)) continue;
      auto wide = convert<Acc>(forgotten(held[from + i], zero));
#pragma unroll
      for (int j = 0; j < kWidth; ++j) wide.at[j] = wide.at[j] * scale * rstd;
      if (weight) {
        const auto factor = weight.unpack(factors[i]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) wide.at[j] *= factor.at[j] + constants.weight_offset;
      }
      if (bias) {
        const auto term = bias.unpack(terms[i]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) wide.at[j] += term.at[j];
      }
      store_beside<T>(y, y_dtype, pack(from + i), wide);
    }
  }
  if constexpr (kPhased) {
#pragma unroll 1
    for (int e = first; e < division.edges; e += step) {
      const long long at = division.edge(e);
      Acc v = convert<Acc>(edges[at]) * scale * rstd;
      if (weight) v *= weight.element(at) + constants.weight_offset;
      if (bias) v += bias.element(at);
      static_cast<T*>(y)[at - division.head] = convert<T>(v);
    }
  }
  if (row >= p.released_from) {
    Passing::release<T>(p.x, p.rows, p.n, row, first);
    if (has_residual && p.residual_dtype == kDTypeOf<T>) Passing::release<T>(p.residual, p.rows, p.n, row, first);
  }
}

}  // namespace cuops

// Instances, as rms_norm_plan.cc asks for them: threads a block, and blocks that share a multiprocessor; options; vectors a thread,
// and for how many parameters are there at a time; phased, clusters.
#define RMS_NORM_FWD(name, T, suffix, kThreads, kBlocks, ...)                                                                 \
  extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) rms_norm_fwd_##name##_##suffix(cuops::RmsNormFwdParams p) { \
    cuops::rms_norm_fwd_options<T, cuops::__VA_ARGS__>(p);                                                                    \
  }
#define RMS_NORM_FWD_OF(name, T)                                               \
  RMS_NORM_FWD(name, T, short_options, 256, 3, kAll, 2, 2, false, false)       \
  RMS_NORM_FWD(name, T, middle_options, 384, 2, kAll, 4, 2, false, true)       \
  RMS_NORM_FWD(name, T, wide_options, 256, 2, kAll, 8, 2, false, true)         \
  RMS_NORM_FWD(name, T, phased_short_options, 256, 3, kAll, 2, 2, true, false) \
  RMS_NORM_FWD(name, T, phased_options, 256, 2, kAll, 8, 2, true, true)        \
  RMS_NORM_FWD(name, T, short_no_weight, 256, 6, kNoWeight, 2, 2, false, false)
#if CUOPS_TUNED == 90  // others have those above
#define RMS_NORM_FWD_WIDE_WEIGHT(name, T)                                           \
  RMS_NORM_FWD(name, T, short_wide_weight, 256, 4, kWideWeight, 2, 2, false, false) \
  RMS_NORM_FWD(name, T, middle_wide_weight, 384, 2, kWideWeight, 4, 2, false, true) \
  RMS_NORM_FWD(name, T, wide_wide_weight, 256, 2, kWideWeight, 8, 4, false, true)   \
  RMS_NORM_FWD(name, T, phased_wide_weight, 256, 2, kWideWeight, 4, 4, true, true)
RMS_NORM_FWD_WIDE_WEIGHT(f16, __half)
RMS_NORM_FWD_WIDE_WEIGHT(bf16, __nv_bfloat16)
#endif
RMS_NORM_FWD_OF(f32, float)
RMS_NORM_FWD_OF(f16, __half)
RMS_NORM_FWD_OF(bf16, __nv_bfloat16)
