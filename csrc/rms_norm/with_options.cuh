// RMSNorm of rows that registers hold, in calls that are not the common case (rms_norm.cu): without a weight, or with one of
// another dtype, an offset, a bias; y of another dtype; h = x + residual, also of two dtypes; rows of two strides.
#pragma once

#include "device/overlap.cuh"
#include "device/reduce.cuh"
#include "device/row.cuh"
#include "rms_norm/beside.cuh"
#include "rms_norm/careful.cuh"
#include "rms_norm/passing.cuh"
#include "rms_norm/rstd.cuh"
#include "rms_norm/vectors.cuh"

namespace cuops {

// Elements from `at` on of a row of T, of the dtype of the sums or, beside float, of 16 bits.
template <class T, int kCount>
__device__ void store_beside(void* row, DType dtype, long long at, const Pack<Accumulator<T>, kCount>& v) {
  auto store_in = [&](auto* to) {
    using U = typename Pointee<decltype(to)>::type;
    store_pack(to + at, convert<U>(v));
  };
  if (dtype == kDTypeOf<T>) return store_in(static_cast<T*>(row));
  if constexpr (sizeof(T) == 2) {
    store_in(static_cast<float*>(row));
  } else {
    dtype == kFloat16 ? store_in(static_cast<__half*>(row)) : store_in(static_cast<__nv_bfloat16*>(row));
  }
}

// All of a row that needs care, as careful_row has it; a thread reads what it has written, and no more.
template <bool kPhased, class T, class Team>
__device__ __noinline__ void careful_row_with_options(const T* h, void* y, DType y_dtype, Beside<T> weight, Beside<T> bias,
                                                      Accumulator<T>* rstd, long long n, RmsNormScalars<Accumulator<T>> s,
                                                      Team team) {
  using Acc = Accumulator<T>;
  constexpr int kWidth = kVectorWidth<T>;
  const Division<T, kWidth, kPhased, int> division(h, n);
  const int first = team.first(), step = team.threads();
  auto for_each = [&](auto&& visit) {
#pragma unroll 1
    for (int i = first; i < division.packs; i += step) {
#pragma unroll 1
      for (int j = 0; j < kWidth; ++j) visit(division.head + static_cast<long long>(i) * kWidth + j);
    }
#pragma unroll 1
    for (int e = first; e < division.edges; e += step) visit(division.edge(e));
  };
  Acc scale = 1;
  const Acc result =
      careful_sum(s.sqrt_eps, team, scale, [&](auto&& visit) { for_each([&](long long at) { visit(convert<Acc>(h[at])); }); });
  if (!y) return;
  const Acc factor = rstd_of(result, s, scale);
  if (rstd && first == 0) *rstd = scale * factor;
  for_each([&](long long at) {
    Acc v = convert<Acc>(h[at]) * scale * factor;
    if (weight) v *= weight.element(at) + s.weight_offset;
    if (bias) v += bias.element(at);
    store_beside<T>(y, y_dtype, at, Pack<Acc, 1>{{v}});
  });
}

// Which options there may be. Small batches wait for instructions too, and many rows for registers: both are fewer where there is
// no choice.
enum Options {
  kAll,
  kNoWeight,    // and nothing else
  kWideWeight,  // of the dtype of the sums, and nothing else
  kMixedF16,    // a residual and y of it beside h of float32; a weight of one of these or none; and nothing else
  kMixedBF16,
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
  auto start_of = [&](const Rows& rows) { return kOptions == kAll ? offset_of(rows, row) : row * rows.stride; };
  const T* const x = static_cast<const T*>(p.x.data) + start_of(p.x);
  const Division<T, kWidth, kPhased, int> division(x, p.n);
  const int first = team.first(), step = team.threads();
  auto pack = [&](int i) { return min(first + i * step, division.packs - 1); };
  auto exists = [&](int i) { return first + i * step < division.packs; };
  const Passing passing(p.released_from != kNoRow);
  constexpr bool kMixed = kOptions == kMixedF16 || kOptions == kMixedBF16;
  constexpr DType kNarrow = kOptions == kMixedF16 ? kFloat16 : kBFloat16;
  const DType weight_dtype = kMixed                    ? (p.weight_dtype == kFloat32 ? kFloat32 : kNarrow)
                             : kOptions == kWideWeight ? kDTypeOf<Acc>
                                                       : p.weight_dtype;
  const DType residual_dtype = kMixed ? kNarrow : p.residual_dtype;
  const DType y_dtype = kMixed ? kNarrow : kOptions == kAll ? p.y_dtype : kDTypeOf<T>;
  const bool has_residual = kMixed || (kOptions == kAll && p.residual.data);
  const Beside<T> weight{kOptions == kNoWeight ? nullptr : p.weight, weight_dtype};
  const Beside<T> bias{kOptions == kAll ? p.bias : nullptr, p.bias_dtype};
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
  } else if (has_packs && p.rows <= 1024 && (team.blocks > 1 || p.overlaps)) {
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      weight.prefetch(division.head + pack(i) * kWidth);
      bias.prefetch(division.head + pack(i) * kWidth);
    }
  }
  const T* h = x;
  if (has_residual) {
    const void* const residual = static_cast<const char*>(p.residual.data) + start_of(p.residual) * size_of(residual_dtype);
    T* const h_at = static_cast<T*>(p.h.data) + start_of(p.h);
    auto add = [&](int i, const Pack<Acc, kWidth>& other) {
      auto wide = convert<Acc>(held[i]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) wide.at[j] += other.at[j];
      held[i] = convert<T>(wide);
      if (active && exists(i)) store(reinterpret_cast<Vector<T>*>(h_at + division.head) + pack(i), held[i]);
    };
    if (has_packs && residual_dtype == kDTypeOf<T>) {
      const auto* const from = reinterpret_cast<const Vector<T>*>(static_cast<const T*>(residual) + division.head);
      Vector<T> other[kResident];
#pragma unroll
      for (int i = 0; i < kResident; ++i) other[i] = passing.load(from + pack(i));
#pragma unroll
      for (int i = 0; i < kResident; ++i) add(i, convert<Acc>(other[i]));
    } else if (sizeof(T) == sizeof(Acc) && has_packs) {  // of 16 bits; they start at whole vectors, as those of x do
      const Beside<T> from{static_cast<const char*>(residual) + division.head * size_of(residual_dtype), residual_dtype};
      const Division<T, kWidth, false, int> aligned(x, p.n);
      constexpr int kStep = kPhased && kResident > 4 ? 4 : kResident;
#pragma unroll
      for (int i = 0; i < kResident; i += kStep) {
        Raw other[kStep];
        from.fetch(other, aligned, [&](int j) { return pack(i + j); });
#pragma unroll
        for (int j = 0; j < kStep; ++j) add(i + j, from.unpack(other[j]));
      }
    }
    if constexpr (kPhased) {
#pragma unroll 1
      for (int e = first; e < division.edges; e += step) {
        const long long at = division.edge(e);
        const T v = convert<T>(convert<Acc>(x[at]) + Beside<T>{residual, residual_dtype}.element(at));
        if (active) h_at[at] = v;
      }
    }
    if (active) h = h_at;
  }

  Acc sum = 0;
#pragma unroll
  for (int i = 0; i < kResident; ++i) {
    const Acc part = sum_of_squares(held[i]);
    sum += has_packs && exists(i) ? part : Acc(0);
  }
  if constexpr (kPhased) {
#pragma unroll 1
    for (int e = first; e < division.edges; e += step) {
      const Acc v = convert<Acc>(h[division.edge(e)]);
      sum += v * v;
    }
  }
  sum = team.reduce(sum, Sum());
  const auto& constants = scalars<Acc>(p);
  const Acc mean_eps = mean_plus_eps(sum, constants, constants.eps);
  void* const y = static_cast<char*>(p.y.data) + start_of(p.y) * size_of(y_dtype);
  Acc* const rstd_at = p.rstd ? static_cast<Acc*>(p.rstd) + row : nullptr;
  if (__builtin_expect(team.any(!(sum <= Range<Acc>::kLargest && mean_eps >= Range<Acc>::kSmallest)), 0))
    return careful_row_with_options<kPhased>(h, active ? y : nullptr, y_dtype, weight, bias, rstd_at, p.n, constants, team);
  if (!active) return;
  const Acc rstd = rsqrt_rn(mean_eps);
  if (rstd_at && first == 0) *rstd_at = rstd;

  const unsigned zero = kOptions == kAll ? p.parts : static_cast<unsigned>(p.x.outer_stride);  // of rows in one part, of one stride
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
      for (int j = 0; j < kWidth; ++j) wide.at[j] *= rstd;
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
      store_beside<T>(y, y_dtype, division.head + static_cast<long long>(pack(from + i)) * kWidth, wide);
    }
  }
  if constexpr (kPhased) {
#pragma unroll 1
    for (int e = first; e < division.edges; e += step) {
      const long long at = division.edge(e);
      Acc v = convert<Acc>(h[at]) * rstd;
      if (weight) v *= weight.element(at) + constants.weight_offset;
      if (bias) v += bias.element(at);
      store_beside<T>(y, y_dtype, at, Pack<Acc, 1>{{v}});
    }
  }
  if (row >= p.released_from) {
    Passing::release<T>(p.x, p.rows, p.n, row, first);
    if (has_residual && residual_dtype == kDTypeOf<T>) Passing::release<T>(p.residual, p.rows, p.n, row, first);
  }
}

}  // namespace cuops

// An instance, as rms_norm_plan.cc asks for it: threads a block, and blocks that share a multiprocessor; options; vectors a thread,
// and for how many parameters are there at a time; phased, clusters.
#define RMS_NORM_FWD(name, T, suffix, kThreads, kBlocks, ...)                                                                 \
  extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) rms_norm_fwd_##name##_##suffix(cuops::RmsNormFwdParams p) { \
    cuops::rms_norm_fwd_options<T, cuops::__VA_ARGS__>(p);                                                                    \
  }
