// The gradient of RMSNorm in the common case, and with an offset or a weight of float32 beside 16 bits: no bias, rows that start
// together and that the registers of a block or of a cluster hold.
#include "beside.cuh"
#include "convert_again.cuh"
#include "device/overlap.cuh"
#include "device/reduce.cuh"
#include "device/tuned.cuh"
#include "held_sums.cuh"
#include "passing.cuh"
#include "rms_norm.h"
#include "rowmates.cuh"
#include "rstd.cuh"
#include "windows.cuh"

CUOPS_ONLY_FOR(80, 90)

namespace cuops {

// Each thread has the same columns in every row, because it adds up over rows for dweight: kResident vectors, blockDim.x apart.
// While a row is worked on, the next one is on its way to registers: enough in flight, and little enough for all multiprocessors
// to get the same share of memory.
template <class T, int kResident, bool kShared, bool kWide = false, bool kPhased = false, bool kCluster = false>
__device__ void rms_norm_bwd_held(const RmsNormBwdParams& p) {
  using Acc = Accumulator<T>;
  using Packed = Vector<T>;
  constexpr int kWidth = kVectorWidth<T>;
  extern __shared__ uint4 shared[];
  __shared__ typename Rowmates<Acc>::Memory memory;
  Rowmates<Acc> mates(memory);
  CUOPS_TEAM_OF(Acc, 2, kWide, team);
  auto reduce = [&](Acc(&v)[2], auto op) {
    if constexpr (kWide) {
      team.reduce(v, op);
    } else {
      mates.reduce(v, op);
    }
  };
  __shared__ unsigned long long arrived;
  const SumsSideBySide<kCluster> side_by_side(arrived, p);
  const auto& constants = scalars<Acc>(p);
  const int rows = static_cast<int>(p.rows);
  const Passing passing(p.released_from != kNoRow);
  // Rows of a block are neighbours, which share pages of memory.
  const int teams = kWide ? gridDim.x / team.blocks : gridDim.x * blockDim.y;
  const int begin = kWide ? team.index : blockIdx.x * blockDim.y + threadIdx.y;
  const int first = kWide ? team.first() : threadIdx.x, step = kWide ? team.threads() : blockDim.x;
  const Windows<T, kPhased> windows(p.h, begin, static_cast<int>(p.n));
  auto exists = [&](int i) { return first + i * step < windows.count; };
  auto start_of = [](const Rows& rows, long long row) { return static_cast<const T*>(rows.data) + row * rows.stride; };
  auto wide = [](const uint4& v) { return convert<Acc>(*reinterpret_cast<const Packed*>(&v)); };
  bool shares = false;  // a vector with another row
#pragma unroll
  for (int i = 0; i < kResident; ++i) shares = shares || (kPhased && exists(i) && windows.is_shared(first + i * step));

  // With kShared, the weight of the block's columns waits in shared memory as the sums want it, whatever its dtype, and with the
  // offset. What threads have of it is an odd number of fours apart, in different banks.
  static_assert(!kShared || !kPhased);  // whose rows have different parts of it
  constexpr int kFours = kWidth / 4, kApart = kShared ? kResident * kFours + 1 : 0;
  auto* const factors = reinterpret_cast<Pack<Acc, 4>*>(shared) + threadIdx.x * kApart;
  auto* const sums_of_columns = reinterpret_cast<Acc*>(reinterpret_cast<Pack<Acc, 4>*>(shared) + blockDim.x * kApart);
  uint4 next_h[kResident] = {}, next_dy[kResident] = {}, weight[kShared ? 1 : kResident];
  const uint4 *h_at = windows.of(p.h, begin) + first, *dy_at = windows.of(p.dy, begin) + first;
  uint4* dx_at = windows.of(p.dx, begin) + first;
  auto next_row = [&](auto*& at, const Rows& array) {
    at = reinterpret_cast<decltype(at + 0)>(reinterpret_cast<unsigned long long>(at) + teams * array.stride * sizeof(T));
  };
  auto fetch = [&](int row) {
    const bool wanted = row < rows;
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      if (wanted && exists(i) && !(kPhased && windows.leaves(row, rows, first + i * step))) {
        next_h[i] = kPhased ? h_at[i * step] : passing.load(h_at + i * step);
        next_dy[i] = kPhased ? dy_at[i * step] : passing.load(dy_at + i * step);
      } else if (!kWide) {  // a warp's other rows may go on
        next_h[i] = next_dy[i] = {};
      }
    }
    if constexpr (kPhased) {
      if (!wanted || !shares || (row > 0 && row < rows - 1)) return;
#pragma unroll
      for (int i = 0; i < kResident; ++i) {
        if (!exists(i) || !windows.leaves(row, rows, first + i * step)) continue;
        next_h[i] = windows.gathered(start_of(p.h, row), first + i * step);
        next_dy[i] = windows.gathered(start_of(p.dy, row), first + i * step);
      }
    }
  };
  wait_for_previous(rows <= teams);
  fetch(begin);
  if constexpr (!kShared) {
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      if constexpr (kPhased) {
        weight[i] = exists(i) ? windows.gathered(static_cast<const T*>(p.weight), first + i * step) : uint4{};
      } else {
        weight[i] = __ldg(static_cast<const uint4*>(p.weight) + min(first + i * step, windows.count - 1));
      }
    }
  } else {
    if (threadIdx.y == 0) {
      const Beside<T> beside{p.weight, p.weight_wide ? kDTypeOf<Acc> : kDTypeOf<T>};
      typename Beside<T>::Raw raw[kResident];
      beside.fetch(raw, Division<T, kWidth, false, int>(nullptr, p.n),
                   [&](int i) { return min(first + i * step, windows.count - 1); });
#pragma unroll
      for (int i = 0; i < kResident; ++i) {
        auto factor = beside.unpack(raw[i]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) factor.at[j] += constants.weight_offset;
#pragma unroll
        for (int k = 0; k < kFours; ++k) factors[i * kFours + k] = reinterpret_cast<const Pack<Acc, 4>*>(&factor)[k];
      }
    }
    __syncthreads();
  }
  auto factor_of = [&](int i, auto&& wide) {
    Pack<Acc, kWidth> factor;
    if constexpr (!kShared) {
      factor = wide(weight[i]);
    } else {
#pragma unroll
      for (int k = 0; k < kFours; ++k) reinterpret_cast<Pack<Acc, 4>*>(&factor)[k] = factors[i * kFours + k];
    }
    return factor;
  };
  Pack<Acc, kWidth> dweight[kResident] = {};
  // Of the first row of the warp, or of the block: all go on as long as one has a row.
  const int ahead = kWide ? 0 : kShared ? threadIdx.y : step < 32 ? threadIdx.y % (32 / step) : 0;
#pragma unroll 1
  for (int row = begin; row - ahead < rows; row += teams) {
    const bool active = row < rows;
    uint4 h[kResident], dy[kResident];
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      h[i] = next_h[i];
      dy[i] = next_dy[i];
    }
    next_row(h_at, p.h);
    next_row(dy_at, p.dy);
    fetch(row + teams);
    if (kPhased && shares) {
#pragma unroll
      for (int i = 0; i < kResident; ++i) {
        if (!windows.is_shared(first + i * step)) continue;
        h[i] = windows.trimmed(h[i], first + i * step);
        dy[i] = windows.trimmed(dy[i], first + i * step);
      }
    }

    Acc sums[2], scale = 1, rstd;
    auto slope_of = [&] { return -(rstd * (sums[1] * constants.inverse_n)) * rstd * rstd; };
#pragma unroll 1
    for (bool scaled = false;; scaled = true) {
      sums[0] = sums[1] = 0;  // of h^2, of g h
#pragma unroll
      for (int i = 0; i < kResident; ++i) {
        const auto a = wide(h[i]), grad = wide(dy[i]), factor = factor_of(i, wide);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          sums[0] += a.at[j] * a.at[j];
          sums[1] += grad.at[j] * factor.at[j] * a.at[j];
        }
      }
      reduce(sums, Sum());
      if (__builtin_expect(scaled, 0)) {
        rstd = rstd_of(sums[0], constants, scale);
        break;
      }
      const Acc mean_eps = mean_plus_eps(sums[0], constants, constants.eps);
      rstd = active ? rsqrt_rn(mean_eps) : Acc(0);
      bool careful = active && !(is_ordinary(mean_eps, sums[1]) && (sums[1] == 0 || is_ordinary_slope(slope_of())));
      if (!kWide && step <= 32) careful = __any_sync(0xffffffffu, careful);  // what a warp decides, it must decide as one
      if (__builtin_expect(!careful, 1)) break;
      // As in the forward: a power of two brings h near 1.
      sums[0] = constants.sqrt_eps;
#pragma unroll
      for (int i = 0; i < kResident; ++i) {
        const auto a = wide(h[i]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sums[0] = Max()(sums[0], abs(a.at[j]));
      }
      reduce(sums, Max());
      scale = rounded_scale<T>(sums[0]);
#pragma unroll
      for (int i = 0; i < kResident; ++i) {
        auto a = wide(h[i]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) a.at[j] *= scale;
        *reinterpret_cast<Packed*>(&h[i]) = convert<T>(a);
      }
    }
    const Acc slope = slope_of();

    const unsigned zero = static_cast<unsigned>(p.h.outer_stride);  // rows have one stride
    auto wide_again = [&](const uint4& v) { return convert_again<!kPhased>(*reinterpret_cast<const Packed*>(&v), zero); };
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      const auto a = wide_again(h[i]), grad = wide_again(dy[i]), factor = factor_of(i, wide_again);
      Pack<Acc, kWidth> dx;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const Acc scaled = grad.at[j] * rstd;
        dx.at[j] = slope * a.at[j] + scaled * factor.at[j];
        dweight[i].at[j] += scaled * a.at[j];
      }
      // A loop, because the compiler would take a condition to each multiplication.
#pragma unroll 1
      for (unsigned turn = 0; scale != 1 && turn <= zero; ++turn) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) dx.at[j] *= scale;
      }
      const int at = first + i * step;
      if (!active || !exists(i)) continue;
      if (p.dh.data) {
        const bool whole = !kPhased || !windows.leaves(row, rows, at);
        const auto more = wide(whole ? windows.of(p.dh, row)[at] : windows.gathered(start_of(p.dh, row), at));
#pragma unroll
        for (int j = 0; j < kWidth; ++j) dx.at[j] += more.at[j];
      }
      const Packed rounded = convert<T>(dx);
      if (!kPhased || !windows.is_shared(at)) {
        store(reinterpret_cast<Packed*>(dx_at) + i * step, rounded);
      } else {
        T* const to = reinterpret_cast<T*>(dx_at + i * step);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          if (j >= windows.from(at) && j < windows.to(at)) to[j] = rounded.at[j];
        }
      }
    }
    next_row(dx_at, p.dx);
    if (!kPhased && active && row >= p.released_from) {
      Passing::release<T>(p.h, p.rows, p.n, row, first);
      Passing::release<T>(p.dy, p.rows, p.n, row, first);
    }
  }

  launch_dependents();
  if (!p.dweight) return;
  const SumsTarget<T, Acc> target{p.dweight, kWide ? team.index : cluster_index(), static_cast<int>(p.n), p.finds_results};
  leave_sums<kWide>(dweight, windows, first, step, sums_of_columns, side_by_side, target);
}

}  // namespace cuops

// Instances, as rms_norm_bwd_plan.cc asks for them: threads a block; vectors a thread; shared, wide, phased, cluster.
#define RMS_NORM_BWD(name, T, suffix, kThreads, ...)                                                                    \
  extern "C" __global__ void __launch_bounds__(kThreads, 1) rms_norm_bwd_##name##_##suffix(cuops::RmsNormBwdParams p) { \
    cuops::rms_norm_bwd_held<T, __VA_ARGS__>(p);                                                                        \
  }
#define RMS_NORM_BWD_OF(name, T)                   \
  RMS_NORM_BWD(name, T, held, 640, 2, false)       \
  RMS_NORM_BWD(name, T, held_shared, 640, 2, true) \
  RMS_NORM_BWD(name, T, wide, 512, 4, true, true)
RMS_NORM_BWD_OF(f32, float)
RMS_NORM_BWD_OF(f16, __half)
RMS_NORM_BWD_OF(bf16, __nv_bfloat16)
RMS_NORM_BWD(f16, __half, held_long, 384, 4, true)
RMS_NORM_BWD(bf16, __nv_bfloat16, held_long, 384, 4, true)
#if CUOPS_TUNED == 90  // others have two passes for these: each instance costs half a second of every build
#define RMS_NORM_BWD_TUNED(name, T)                              \
  RMS_NORM_BWD(name, T, held_phased, 640, 2, false, false, true) \
  RMS_NORM_BWD(name, T, wide_phased, 384, 4, false, true, true)
RMS_NORM_BWD_TUNED(f32, float)
RMS_NORM_BWD_TUNED(f16, __half)
RMS_NORM_BWD_TUNED(bf16, __nv_bfloat16)
#if CUOPS_CLUSTERS
#define RMS_NORM_BWD_CLUSTER(name, T)                                    \
  RMS_NORM_BWD(name, T, held_cluster, 640, 2, false, false, false, true) \
  RMS_NORM_BWD(name, T, held_cluster_phased, 640, 2, false, false, true, true)
RMS_NORM_BWD_CLUSTER(f32, float)
RMS_NORM_BWD_CLUSTER(f16, __half)
RMS_NORM_BWD_CLUSTER(bf16, __nv_bfloat16)
#endif
#endif
