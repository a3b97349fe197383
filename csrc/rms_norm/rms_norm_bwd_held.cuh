// The gradient of RMSNorm without a bias, for rows that start together and that the registers of a block or of a cluster hold.
#pragma once

#include "beside.cuh"
#include "convert_again.cuh"
#include "device/overlap.cuh"
#include "device/reduce.cuh"
#include "held_sums.cuh"
#include "passing.cuh"
#include "rms_norm.h"
#include "rowmates.cuh"
#include "rstd.cuh"
#include "weight.cuh"
#include "windows.cuh"

namespace cuops {

// Each thread has the same columns in every row, because it adds up over rows for dweight: kResident vectors, as far apart
// as threads share the row.
// While a row is worked on, the next one is on its way to registers: enough in flight, and little enough for all multiprocessors
// to get the same share of memory. Dy is the dtype of dy: that of h, or 16 bits beside float, which the gradient for x is then
// rounded to.
template <class T, class Dy, int kResident, bool kShared, bool kWide = false, bool kPhased = false, bool kCluster = false>
__device__ void rms_norm_bwd_held(const RmsNormBwdParams& p) {
  using Acc = Accumulator<T>;
  using Packed = Vector<T>;
  constexpr int kWidth = kVectorWidth<T>;
  using DyWord = Word<Dy, kWidth>;
  constexpr bool kMixed = !kSame<T, Dy>, kPermutes = kMixed || !kPhased;
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
  const Passing passing(!kPhased && p.released_from != kNoRow);
  // Rows of a block are neighbours, which share pages of memory.
  const int teams = kWide ? gridDim.x / team.blocks : gridDim.x * blockDim.y;
  const int begin = kWide ? team.index : blockIdx.x * blockDim.y + threadIdx.y;
  const int first = kWide ? team.first() : threadIdx.x, step = kWide ? team.threads() : blockDim.x;
  const Windows<T, kPhased> windows(p.h, begin, static_cast<int>(p.n));
  auto exists = [&](int i) { return first + i * step < windows.count; };
  auto packed = [](const auto& v) {
    return *reinterpret_cast<const Pack<Select<kSame<decltype(v), const uint4&>, T, Dy>, kWidth>*>(&v);
  };
  auto wide = [&](const auto& v) { return convert<Acc>(packed(v)); };
  // Where this leaves registers enough, bfloat16 is converted by permutes for the sums rather than again for dx.
  constexpr bool kFirstPermutes = kWide && kPhased && kSame<T, __nv_bfloat16>;
  auto wide_for_sums = [&](const auto& v) {
    if constexpr (kFirstPermutes) return convert_again<true>(packed(v), 0);
    return wide(v);
  };
  unsigned edges = 0;  // bit i: vector i is partly another row's; bit 16 + i: it reaches beyond the end of its own
#pragma unroll
  for (int i = 0; kPhased && i < kResident; ++i) {
    const int at = first + i * step;
    if (exists(i) && windows.is_shared(at)) edges |= 1u << i | (windows.to(at) < kWidth) << (16 + i);
  }
  if constexpr (kPhased) edges = found_anew(edges);
  auto is_shared = [&](int i) { return kPhased && edges >> i & 1; };
  // Whether it reaches beyond the array, which starts at a vector.
  auto leaves = [&](int row, int i) { return kPhased && row == rows - 1 && edges >> (16 + i) & 1; };

  // In shared memory: with kShared, the weight as the sums want it, whatever its dtype, and with the offset. What threads have of
  // it is an odd number of fours apart, in different banks; rows that start elsewhere have other parts of it.
  constexpr int kFours = kWidth / 4, kApart = kShared ? kResident * kFours + 1 : 0;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  const int parts = kPhased ? threads : blockDim.x;
  auto* const factors = reinterpret_cast<Pack<Acc, 4>*>(shared) + (kPhased ? thread : threadIdx.x) * kApart;
  uint4* const dh = shared + parts * kApart + thread;  // of this thread's vectors, `threads` apart
  auto* const sums_of_columns = reinterpret_cast<Acc*>(shared + parts * kApart + (p.dh.data ? kResident * threads : 0));
  uint4 next_h[kResident] = {}, weight[kShared ? 1 : kResident];
  DyWord next_dy[kResident] = {};
  const uint4* h_at = windows.of(p.h, begin) + first;
  const DyWord* dy_at = windows.template of<Dy>(p.dy, begin) + first;
  uint4* dx_at = windows.of(p.dx, begin) + first;
  auto next_row = [&](auto*& at, const Rows& array) {
    constexpr int kSize = sizeof(*at) / kWidth;  // of an element
    at = reinterpret_cast<decltype(at + 0)>(reinterpret_cast<unsigned long long>(at) + teams * array.stride * kSize);
  };
  auto fetch = [&](int row) {
    const bool wanted = row < rows;
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      if (wanted && exists(i) && !leaves(row, i)) {
        next_h[i] = passing.load(h_at + i * step);
        next_dy[i] = passing.load(dy_at + i * step);
      } else if (!kWide) {  // a warp's other rows may go on
        next_h[i] = {};
        next_dy[i] = {};
      }
    }
    if constexpr (kPhased) {
      if (row != rows - 1 || !edges) return;
#pragma unroll
      for (int i = 0; i < kResident; ++i) {
        if (!leaves(row, i)) continue;
        next_h[i] = windows.gathered(p.h, row, first + i * step);
        next_dy[i] = windows.template gathered<Dy>(p.dy, row, first + i * step);
      }
    }
  };
  // Registers have no room for dh, which comes while the sums of its row are found.
  auto fetch_dh = [&](int row) {
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      const int at = first + i * step;
      if (!exists(i)) continue;
      if (leaves(row, i)) {
        dh[i * threads] = windows.gathered(p.dh, row, at);
      } else {
        copy_async(dh + i * threads, windows.of(p.dh, row) + at);
      }
    }
    commit_copies();
  };
  wait_for_previous(rows <= teams);
  fetch(begin);
  if constexpr (!kShared) {
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      if constexpr (kPhased) {
        weight[i] = exists(i) ? windows.gathered(p.weight, first + i * step) : uint4{};
      } else {
        weight[i] = __ldg(static_cast<const uint4*>(p.weight) + min(first + i * step, windows.count - 1));
      }
    }
  } else if constexpr (kPhased || kMixed) {
    if (kPhased || threadIdx.y == 0) {
#pragma unroll 4
      for (int j = 0; j < kResident * kWidth; ++j) {
        const int column = windows.column(first + j / kWidth * step) + j % kWidth;
        reinterpret_cast<Acc*>(factors)[j] = column >= 0 && column < windows.n ? weight_of<T, Dy>(p, column) : Acc(0);
      }
    }
    __syncthreads();
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
    uint4 h[kResident];
    DyWord dy[kResident];
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      h[i] = next_h[i];
      dy[i] = next_dy[i];
    }
    if (p.dh.data && active) fetch_dh(row);
    next_row(h_at, p.h);
    next_row(dy_at, p.dy);
    fetch(row + teams);
    if (kPhased && edges) {
#pragma unroll
      for (int i = 0; i < kResident; ++i) {
        if (!is_shared(i)) continue;
        h[i] = windows.trimmed(h[i], first + i * step);
        dy[i] = windows.template trimmed<Dy>(dy[i], first + i * step);
      }
    }

    Acc sums[2], scale = 1, rstd;
    auto slope_of = [&] { return -(rstd * (sums[1] * constants.inverse_n)) * rstd * rstd; };
#pragma unroll 1
    for (bool scaled = false;; scaled = true) {
      sums[0] = sums[1] = 0;  // of h^2, of g h
#pragma unroll
      for (int i = 0; i < kResident; ++i) {
        const auto a = wide_for_sums(h[i]), grad = wide_for_sums(dy[i]), factor = factor_of(i, wide_for_sums);
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
      const bool careful = active && !(is_ordinary(mean_eps, sums[1]) && (sums[1] == 0 || is_ordinary_slope(slope_of())));
      bool any = careful;
      if (!kWide && step <= 32) any = __any_sync(0xffffffffu, careful);  // what a warp decides, it must decide as one
      if (__builtin_expect(!any, 1)) break;
      // As in the forward: a power of two brings h near 1.
      sums[0] = constants.sqrt_eps;
#pragma unroll
      for (int i = 0; i < kResident; ++i) {
        const auto a = wide(h[i]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sums[0] = Max()(sums[0], abs(a.at[j]));
      }
      reduce(sums, Max());
      scale = careful ? rounded_scale<T>(sums[0]) : Acc(1);
#pragma unroll
      for (int i = 0; i < kResident; ++i) {
        auto a = wide(h[i]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) a.at[j] *= scale;
        *reinterpret_cast<Packed*>(&h[i]) = convert<T>(a);
      }
    }
    const Acc slope = slope_of();

    if (p.dh.data) wait_for_copies<0>();
    const unsigned zero = static_cast<unsigned>(p.h.outer_stride);  // rows have one stride
    auto wide_for_dx = [&](const auto& v) {
      if constexpr (kFirstPermutes) return wide(v);
      return convert_again<kPermutes>(packed(v), zero);
    };
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      const auto a = wide_for_dx(h[i]), grad = wide_for_dx(dy[i]), factor = factor_of(i, wide_for_dx);
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
        const auto other = wide(dh[i * threads]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) dx.at[j] += other.at[j];
      }
      auto store_dx = [&](auto* to) {
        using U = typename Pointee<decltype(to)>::type;
        const auto rounded = convert<U>(dx);
        if (!is_shared(i)) {
          store_pack(to, rounded);
        } else {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
            if (j >= windows.from(at) && j < windows.to(at)) to[j] = rounded.at[j];
          }
        }
      };
      store_dx(reinterpret_cast<T*>(dx_at + i * step));
      if (kMixed && p.rounded_dx.data) store_dx(reinterpret_cast<Dy*>(windows.template of<Dy>(p.rounded_dx, row) + at));
    }
    next_row(dx_at, p.dx);
    if (!kPhased && active && row >= p.released_from) {
      Passing::release<T>(p.h, p.rows, p.n, row, first);
      Passing::release<Dy>(p.dy, p.rows, p.n, row, first);
    }
  }

  launch_dependents();
  if (!p.dweight) return;
  // Of the dtype of the weight: that of h or, where shared memory has it, another.
  using Other = Select<!kShared, T, Select<kMixed, Dy, Acc>>;
  const SumsTarget<T, Acc, Other> target{p.dweight, kWide ? team.index : cluster_index(), static_cast<int>(p.n), p.finds_results,
                                         p.dweight_dtype != kDTypeOf<T>};
  leave_sums<kWide>(dweight, windows, first, step, sums_of_columns, side_by_side, target);
}

}  // namespace cuops
