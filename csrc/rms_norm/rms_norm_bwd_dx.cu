// The gradient of RMSNorm for h alone, where nobody wants those of weight and bias, or they are not there: rows that registers
// hold, of which each is worked on by itself, as in the forward.
#include "beside.cuh"
#include "convert_again.cuh"
#include "device/overlap.cuh"
#include "device/reduce.cuh"
#include "device/tuned.cuh"
#include "passing.cuh"
#include "rms_norm.h"
#include "rstd.cuh"
#include "side_by_side.cuh"

CUOPS_ONLY_FOR(80, 90)

namespace cuops {

template <class T>
__device__ Accumulator<T> factor_at(const Beside<T>& weight, Accumulator<T> offset, long long at) {
  return weight ? weight.element(at) + offset : Accumulator<T>(1);
}

template <class T>
__device__ T gradient_at(const Accumulator<T> (&found)[3], const T* h, const T* dy, const T* dh, const Beside<T>& weight,
                         Accumulator<T> offset, long long at) {
  using Acc = Accumulator<T>;
  Pack<Acc, 1> unused = {};
  auto one = [](Acc v) { return Pack<Acc, 1>{{v}}; };
  const Acc factor = factor_at(weight, offset, at);
  const auto v = gradient_of(found, one(convert<Acc>(h[at])), one(convert<Acc>(dy[at])), one(factor), unused, unused);
  return convert<T>(v.at[0] + (dh ? convert<Acc>(dh[at]) : Acc(0)));
}

// All of a row that needs care, as careful_row has it, or that shares its warp with one and is `ordinary`: it keeps its scale.
template <class T, class Team>
__device__ __noinline__ void careful_dx(const T* h, const T* dy, const T* dh, T* dx, Beside<T> weight, long long n,
                                        RmsNormScalars<Accumulator<T>> s, bool ordinary, Team team) {
  using Acc = Accumulator<T>;
  Acc scale = 1, sums[2];
#pragma unroll 1
  for (bool scaled = false;; scaled = true) {
    sums[0] = scaled ? Acc(0) : s.sqrt_eps;
    sums[1] = 0;
#pragma unroll 1
    for (long long i = team.first(); i < n; i += team.threads()) {
      const Acc v = convert<Acc>(h[i]) * scale;
      sums[0] = scaled ? sums[0] + v * v : Max()(sums[0], abs(v));
      sums[1] += convert<Acc>(dy[i]) * factor_at(weight, s.weight_offset, i) * v;
    }
    team.reduce(sums, [&](Acc a, Acc b) { return scaled ? a + b : Max()(a, b); });
    if (scaled) break;
    scale = ordinary || isinf(sums[0]) ? Acc(1) : power_of_two_to_one(sums[0]);
  }
  if (!dx) return;
  const Acc found[3] = {scale, rstd_of(sums[0], s, scale), sums[1] * s.inverse_n};
#pragma unroll 1
  for (long long i = team.first(); i < n; i += team.threads()) dx[i] = gradient_at(found, h, dy, dh, weight, s.weight_offset, i);
}

// Of what dtype a weight is: to ask for it within the kernel would take registers for both, and wait for each vector.
enum Weight { kNone, kLike, kWideWeight };

// Threads have kResident vectors of a row. They bring the weight for kGroup of them at a time.
template <class T, Weight kWeight, int kResident, int kGroup, bool kPhased, bool kClusters>
__device__ void rms_norm_bwd_dx(const RmsNormBwdParams& p) {
  using Acc = Accumulator<T>;
  using Raw = typename Beside<T>::Raw;
  constexpr int kWidth = kVectorWidth<T>;
  extern __shared__ uint4 shared[];  // dh
  CUOPS_TEAM_OF(Acc, 2, kClusters, team);
  wait_for_previous();
  // Beyond the last row and beyond a row's end, threads load what others do, and drop it: cheaper than a choice at each load.
  const int wanted = team.index * blockDim.y + threadIdx.y, row = min(wanted, static_cast<int>(p.rows) - 1);
  auto start_of = [&](const Rows& rows) { return static_cast<T*>(rows.data) + row * rows.stride; };
  const T *const h = start_of(p.h), *const dy = start_of(p.dy);
  const Division<T, kWidth, kPhased, int> division(h, p.n);
  auto vectors_of = [&](auto* array) { return reinterpret_cast<const Vector<T>*>(array + division.head); };
  const int first = team.first(), step = team.threads();
  auto pack = [&](int i) { return min(first + i * step, division.packs - 1); };
  auto exists = [&](int i) { return first + i * step < division.packs; };
  const bool has_packs = !kPhased || division.packs > 0;
  const Passing passing(p.released_from != kNoRow);
  const Beside<T> weight{kWeight == kNone ? nullptr : p.weight, kWeight == kWideWeight ? kDTypeOf<Acc> : kDTypeOf<T>};
  const auto& constants = scalars<Acc>(p);

  Vector<T> h_of[kResident], dy_of[kResident];
  Raw factors[kGroup];
  if (has_packs) {
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      h_of[i] = passing.load(vectors_of(h) + pack(i));
      dy_of[i] = passing.load(vectors_of(dy) + pack(i));
    }
    if (kGroup == kResident) weight.fetch(factors, division, pack);
  }
  // Registers have no room for dh, of which each thread gets its own part.
  const T* const dh = p.dh.data ? start_of(p.dh) : nullptr;
  const int threads = blockDim.x * blockDim.y;
  auto* const dh_of = reinterpret_cast<Vector<T>*>(shared) + threadIdx.y * blockDim.x + threadIdx.x;
  if (dh && has_packs) {
#pragma unroll
    for (int i = 0; i < kResident; ++i) copy_async(dh_of + i * threads, vectors_of(dh) + pack(i));
    commit_copies();
  }
  const unsigned zero = p.parts;  // rows are in one part
  auto again = [&](const Vector<T>& v) { return convert_again<true>(v, zero); };
  // Every pack and its factors, for kGroup packs at a time.
  auto for_each = [&](auto&& unpacked, auto&& visit) {
#pragma unroll
    for (int from = 0; from < kResident; from += kGroup) {
      if (!exists(from)) break;
      if (kGroup < kResident) weight.fetch(factors, division, [&](int i) { return pack(from + i); });
      Pack<Acc, kWidth> factor[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const bool weighted = kWeight != kNone && (!kPhased || weight);  // unaligned rows have no kernel without one
        if (weighted) factor[i] = unpacked(factors[i]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) factor[i].at[j] = weighted ? factor[i].at[j] + constants.weight_offset : Acc(1);
      }
      visit(from, factor);
    }
  };
  T* const dx = start_of(p.dx);
  Acc sums[2] = {};  // of h^2, of g h
  auto add = [&](Acc a, Acc g) {
    sums[0] += a * a;
    sums[1] += g * a;
  };
  auto unpacked = [&](const Raw& raw) { return weight.unpack(raw); };
  for_each(unpacked, [&](int from, const Pack<Acc, kWidth>(&factor)[kGroup]) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (!exists(from + i)) continue;
      const auto a = convert<Acc>(h_of[from + i]), grad = convert<Acc>(dy_of[from + i]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) add(a.at[j], grad.at[j] * factor[i].at[j]);
    }
  });
  if constexpr (kPhased) {
#pragma unroll 1
    for (int e = first; e < division.edges; e += step) {
      const long long at = division.edge(e);
      add(convert<Acc>(h[at]), convert<Acc>(dy[at]) * factor_at(weight, constants.weight_offset, at));
    }
  }
  team.reduce(sums, Sum());
  wait_for_copies<0>();
  const Acc mean_eps = mean_plus_eps(sums[0], constants, constants.eps);
  const bool ordinary = is_ordinary(mean_eps, sums[1]);
  if (__builtin_expect(team.any(!ordinary), 0))
    return careful_dx(h, dy, dh, row == wanted ? dx : nullptr, weight, p.n, constants, ordinary, team);
  if (row != wanted) return;

  // No product here leaves the range before dx does.
  const Acc rstd = rsqrt_rn(mean_eps), mean = sums[1] * constants.inverse_n, slope = rstd * (rstd * mean);
  auto unpacked_again = [&](const Raw& raw) {
    if constexpr (kWeight == kLike) return again(*reinterpret_cast<const Vector<T>*>(&raw));
    return weight.unpack(raw);
  };
  for_each(unpacked_again, [&](int from, const Pack<Acc, kWidth>(&factor)[kGroup]) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (!exists(from + i)) continue;
      const auto a = again(h_of[from + i]), grad = again(dy_of[from + i]);
      Pack<Acc, kWidth> wide;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) wide.at[j] = rstd * (grad.at[j] * factor[i].at[j] - slope * a.at[j]);
      if (dh) {
        const auto other = convert<Acc>(load(dh_of + (from + i) * threads));
#pragma unroll
        for (int j = 0; j < kWidth; ++j) wide.at[j] += other.at[j];
      }
      store(reinterpret_cast<Vector<T>*>(dx + division.head) + pack(from + i), convert<T>(wide));
    }
  });
  if constexpr (kPhased) {
    const Acc found[3] = {1, rstd, mean};
#pragma unroll 1
    for (int e = first; e < division.edges; e += step) {
      const long long at = division.edge(e);
      dx[at] = gradient_at(found, h, dy, dh, weight, constants.weight_offset, at);
    }
  }
  if (row >= p.released_from) {
    Passing::release<T>(p.h, p.rows, p.n, row, first);
    Passing::release<T>(p.dy, p.rows, p.n, row, first);
  }
}

}  // namespace cuops

// Instances, as rms_norm_bwd_dx_plan.cc asks for them: threads a block, and blocks that share a multiprocessor; the weight; vectors
// a thread, and for how many the weight is there at a time; phased, clusters.
#define RMS_NORM_BWD_DX(name, T, suffix, kThreads, kBlocks, kWeight, ...)                                                     \
  extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) rms_norm_bwd_##name##_##suffix(cuops::RmsNormBwdParams p) { \
    cuops::rms_norm_bwd_dx<T, cuops::kWeight, __VA_ARGS__>(p);                                                                \
  }
#define RMS_NORM_BWD_DX_OF(name, T)                                                          \
  RMS_NORM_BWD_DX(name, T, dx_short, 256, sizeof(T) == 4 ? 4 : 5, kLike, 2, 2, false, false) \
  RMS_NORM_BWD_DX(name, T, dx, 384, 2, kLike, 4, 4, false, true)                             \
  RMS_NORM_BWD_DX(name, T, dx_phased, 512, 1, kLike, 4, 1, true, true)                       \
  RMS_NORM_BWD_DX(name, T, dx_no_weight_short, 256, 4, kNone, 2, 2, false, false)            \
  RMS_NORM_BWD_DX(name, T, dx_no_weight, 512, 1, kNone, 4, 1, false, true)
#define RMS_NORM_BWD_DX_WIDE_WEIGHT(name, T)                                              \
  RMS_NORM_BWD_DX(name, T, dx_wide_weight_short, 256, 4, kWideWeight, 2, 2, false, false) \
  RMS_NORM_BWD_DX(name, T, dx_wide_weight, 384, 2, kWideWeight, 4, 1, false, true)        \
  RMS_NORM_BWD_DX(name, T, dx_wide_weight_phased, 512, 1, kWideWeight, 4, 1, true, true)
RMS_NORM_BWD_DX_OF(f32, float)
RMS_NORM_BWD_DX_OF(f16, __half)
RMS_NORM_BWD_DX_OF(bf16, __nv_bfloat16)
RMS_NORM_BWD_DX_WIDE_WEIGHT(f16, __half)
RMS_NORM_BWD_DX_WIDE_WEIGHT(bf16, __nv_bfloat16)
#if CUOPS_TUNED == 90  // where they are known to be faster, or clusters are needed
#define RMS_NORM_BWD_DX_90(name, T)                                     \
  RMS_NORM_BWD_DX(name, T, dx_three, 128, 8, kLike, 3, 3, false, false) \
  RMS_NORM_BWD_DX(name, T, dx_five, 128, 5, kLike, 5, 5, false, false)  \
  RMS_NORM_BWD_DX(name, T, dx_no_weight_three, 128, 8, kNone, 3, 3, false, false)
RMS_NORM_BWD_DX_90(f32, float)
RMS_NORM_BWD_DX_90(f16, __half)
RMS_NORM_BWD_DX_90(bf16, __nv_bfloat16)
#define RMS_NORM_BWD_DX_WIDE_WEIGHT_90(name, T)                                           \
  RMS_NORM_BWD_DX(name, T, dx_wide_weight_three, 128, 6, kWideWeight, 3, 3, false, false) \
  RMS_NORM_BWD_DX(name, T, dx_wide_weight_long, 256, 2, kWideWeight, 4, 4, false, true)
RMS_NORM_BWD_DX_WIDE_WEIGHT_90(f16, __half)
RMS_NORM_BWD_DX_WIDE_WEIGHT_90(bf16, __nv_bfloat16)
#endif
