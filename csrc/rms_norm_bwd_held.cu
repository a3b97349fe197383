// The gradient of RMSNorm in the common case: a weight of h's dtype, no bias, aligned rows that the registers of a block hold.
#include "device/held_sums.cuh"
#include "device/overlap.cuh"
#include "device/passing.cuh"
#include "device/reduce.cuh"
#include "device/rowmates.cuh"
#include "device/rstd.cuh"
#include "device/tuned.cuh"
#include "device/windows.cuh"
#include "rms_norm.h"

namespace cuops {

// Each thread has the same columns in every row, because it adds up over rows for dweight: kResident vectors, blockDim.x apart.
// While a row is worked on, the next one is on its way to registers: enough in flight, and little enough for all multiprocessors
// to get the same share of memory.
template <class T, int kResident, bool kWide, bool kPhased>
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
  const auto& constants = scalars<Acc>(p);
  const Passing passing(p.released_from != kNoRow);
  // Rows of a block are neighbours, which share pages of memory.
  const long long teams = kWide ? gridDim.x / team.blocks : static_cast<long long>(gridDim.x) * blockDim.y;
  const long long begin = kWide ? team.index : static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int first = kWide ? team.first() : threadIdx.x, step = kWide ? team.threads() : blockDim.x;
  const Windows<T, kPhased> windows(p.h, begin, static_cast<int>(p.n));
  auto exists = [&](int i) { return first + i * step < windows.count; };
  auto start_of = [](const Rows& rows, long long row) { return static_cast<const T*>(rows.data) + row * rows.stride; };
  auto wide = [](const uint4& v) { return convert<Acc>(*reinterpret_cast<const Packed*>(&v)); };
  bool shares = false;  // a vector with another row
#pragma unroll
  for (int i = 0; i < kResident; ++i) shares = shares || (kPhased && exists(i) && windows.is_shared(first + i * step));

  // Where registers are scarce, the weight waits in shared memory: without that, a vector on its way went to the stack, which
  // waited.
  constexpr int kMostThreads = 512;
  constexpr bool kSharedWeight = kWide && !kPhased;
  __shared__ uint4 shared_weight[kSharedWeight ? kResident * kMostThreads : 1];
  uint4 next_h[kResident] = {}, next_dy[kResident] = {}, weight[kSharedWeight ? 1 : kResident];
  auto weight_of = [&](int i) -> uint4& {
    if constexpr (kSharedWeight) {
      return shared_weight[i * kMostThreads + threadIdx.x];
    } else {
      return weight[i];
    }
  };
  auto fetch = [&](long long row) {
    const bool wanted = row < p.rows;
    const uint4 *const h = windows.of(p.h, row) + first, *const dy = windows.of(p.dy, row) + first;
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      if (wanted && exists(i) && !(kPhased && windows.leaves(row, p.rows, first + i * step))) {
        next_h[i] = kPhased ? h[i * step] : passing.load(h + i * step);
        next_dy[i] = kPhased ? dy[i * step] : passing.load(dy + i * step);
      } else if (!kWide) {  // a warp's other rows may go on
        next_h[i] = next_dy[i] = {};
      }
    }
    if constexpr (kPhased) {
      if (!wanted || !shares || (row > 0 && row < p.rows - 1)) return;
#pragma unroll
      for (int i = 0; i < kResident; ++i) {
        if (!exists(i) || !windows.leaves(row, p.rows, first + i * step)) continue;
        next_h[i] = windows.gathered(start_of(p.h, row), first + i * step);
        next_dy[i] = windows.gathered(start_of(p.dy, row), first + i * step);
      }
    }
  };
  const long long ahead = !kWide && step < 32 ? threadIdx.y % (32 / step) : 0;  // of the first row of this warp
  wait_for_previous(false);
  fetch(begin);
#pragma unroll
  for (int i = 0; i < kResident; ++i) {
    if constexpr (kPhased) {
      weight_of(i) = exists(i) ? windows.gathered(static_cast<const T*>(p.weight), first + i * step) : uint4{};
    } else {
      weight_of(i) = __ldg(static_cast<const uint4*>(p.weight) + min(first + i * step, windows.count - 1));
    }
  }

  Pack<Acc, kWidth> dweight[kResident] = {};
#pragma unroll 1
  for (long long row = begin; row - ahead < p.rows; row += teams) {
    const bool active = row < p.rows;
    uint4 h[kResident], dy[kResident];
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      h[i] = next_h[i];
      dy[i] = next_dy[i];
    }
    fetch(row + teams);
    if (kPhased && shares) {
#pragma unroll
      for (int i = 0; i < kResident; ++i) {
        if (!windows.is_shared(first + i * step)) continue;
        h[i] = windows.trimmed(h[i], first + i * step);
        dy[i] = windows.trimmed(dy[i], first + i * step);
      }
    }

    Acc sums[2], scale = 1;
#pragma unroll 1
    for (bool scaled = false;; scaled = true) {
      sums[0] = sums[1] = 0;  // of h^2, of g h
#pragma unroll
      for (int i = 0; i < kResident; ++i) {
        const auto a = wide(h[i]), grad = wide(dy[i]), factor = wide(weight_of(i));
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          sums[0] += a.at[j] * a.at[j];
          sums[1] += grad.at[j] * factor.at[j] * a.at[j];
        }
      }
      reduce(sums, Sum());
      if (__builtin_expect(scaled, 0)) break;
      const Acc mean_eps = mean_plus_eps(sums[0], constants, constants.eps);
      // Also where the cube of rstd would leave the range. What a warp decides, it must decide as one.
      bool careful = active && !(mean_eps <= 1 / Range<Acc>::kSmallest && mean_eps >= Range<Acc>::kSmallest);
      if (!kWide && step <= 32) careful = __any_sync(0xffffffffu, careful);
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
      scale = isinf(sums[0]) ? Acc(1) : power_of_two_to_one(sums[0]);
#pragma unroll
      for (int i = 0; i < kResident; ++i) {
        auto a = wide(h[i]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) a.at[j] *= scale;
        *reinterpret_cast<Packed*>(&h[i]) = convert<T>(a);
      }
    }
    const Acc rstd = rstd_of(sums[0], constants, scale), slope = -(rstd * (sums[1] * constants.inverse_n)) * rstd * rstd;

    const unsigned zero = static_cast<unsigned>(p.h.outer_stride);  // rows have one stride
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      if constexpr (sizeof(T) < sizeof(Acc)) {
        h[i] = forgotten(h[i], zero);
        dy[i] = forgotten(dy[i], zero);
        if (!kSharedWeight) weight_of(i) = forgotten(weight_of(i), zero);
      }
      const auto a = wide(h[i]), grad = wide(dy[i]), factor = wide(weight_of(i));
      Pack<Acc, kWidth> dx;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const Acc scaled = grad.at[j] * rstd;
        dx.at[j] = slope * a.at[j] + scaled * factor.at[j];
        dweight[i].at[j] += scaled * a.at[j];
      }
      if (scale != 1) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) dx.at[j] *= scale;
      }
      const int at = first + i * step;
      if (!active || !exists(i)) continue;
      if (p.dh.data) {
        const bool whole = !kPhased || !windows.leaves(row, p.rows, at);
        const auto more = wide(whole ? windows.of(p.dh, row)[at] : windows.gathered(start_of(p.dh, row), at));
#pragma unroll
        for (int j = 0; j < kWidth; ++j) dx.at[j] += more.at[j];
      }
      const Packed rounded = convert<T>(dx);
      if (!kPhased || !windows.is_shared(at)) {
        store(reinterpret_cast<Packed*>(windows.of(p.dx, row)) + at, rounded);
      } else {
        T* const to = static_cast<T*>(p.dx.data) + row * p.dx.stride + windows.column(at);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          if (j >= windows.from(at) && j < windows.to(at)) to[j] = rounded.at[j];
        }
      }
    }
    if (!kPhased && active && row >= p.released_from) {
      Passing::release<T>(p.h, p.rows, p.n, row, first);
      Passing::release<T>(p.dy, p.rows, p.n, row, first);
    }
  }

  launch_dependents();
  if (!p.dweight) return;
  const SumsTarget<T, Acc> target{p.dweight, kWide ? team.index : cluster_index(), static_cast<int>(p.n), p.finds_results};
  leave_sums<kWide>(dweight, windows, first, step, reinterpret_cast<Acc*>(shared), target);
}

}  // namespace cuops

// Instances, as rms_norm_bwd_plan.cc asks for them.
#if CUOPS_TUNED
#define RMS_NORM_BWD(name, T, suffix, kResident, kWide, kPhased, kThreads, kBlocks)                                           \
  extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) rms_norm_bwd_##name##_##suffix(cuops::RmsNormBwdParams p) { \
    cuops::rms_norm_bwd_held<T, kResident, kWide, kPhased>(p);                                                                \
  }
#define RMS_NORM_BWD_OF(name, T)                       \
  RMS_NORM_BWD(name, T, held, 2, false, false, 640, 1) \
  RMS_NORM_BWD(name, T, wide, 4, true, false, 512, 1)
RMS_NORM_BWD_OF(f32, float)
RMS_NORM_BWD_OF(f16, __half)
RMS_NORM_BWD_OF(bf16, __nv_bfloat16)
RMS_NORM_BWD(f16, __half, held_long, 4, false, false, 384, 1)
RMS_NORM_BWD(bf16, __nv_bfloat16, held_long, 4, false, false, 384, 1)
#if __CUDA_ARCH__ == 900  // others have two passes for these: each instance costs half a second of every build
#define RMS_NORM_BWD_PHASED(name, T)                         \
  RMS_NORM_BWD(name, T, held_phased, 2, false, true, 640, 1) \
  RMS_NORM_BWD(name, T, wide_phased, 4, true, true, 384, 1)
RMS_NORM_BWD_PHASED(f32, float)
RMS_NORM_BWD_PHASED(f16, __half)
RMS_NORM_BWD_PHASED(bf16, __nv_bfloat16)
#endif
#else  // into a program without kernels, older NVRTC puts the number of its process
extern "C" __global__ void rms_norm_bwd_held_none() {}
#endif
