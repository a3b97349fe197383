// The gradient of RMSNorm in the common case: a weight of h's dtype, no bias, aligned rows that the registers of a block hold.
#include "device/overlap.cuh"
#include "device/reduce.cuh"
#include "device/row.cuh"
#include "device/rstd.cuh"
#include "device/tuned.cuh"
#include "rms_norm.h"

namespace cuops {

// The threads that share a row, one of blockDim.y in a block: those of other rows are not waited for.
template <class Acc>
class Rowmates {
 public:
  using Memory = Acc[2][32][2];
  __device__ explicit Rowmates(Memory& memory) : memory_(memory) {}

  // Combines both values over the row's threads, and gives each of them the same bits. 0 must be neutral for op.
  template <class Op>
  __device__ void reduce(Acc (&v)[2], Op op) {
    for (Acc& value : v) value = blockDim.x >= 32 ? reduce_lanes(value, 32, op) : reduce_lanes(value, blockDim.x, op);
    if (blockDim.x <= 32) return;
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    auto* const mine = memory_[turn_] + threadIdx.y * warps;
    if (lane == 0) {
      mine[threadIdx.x / 32][0] = v[0];
      mine[threadIdx.x / 32][1] = v[1];
    }
    asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.y), "r"(blockDim.x) : "memory");
    const int lanes = 1 << (32 - __clz(warps - 1)), from = lane & (lanes - 1);
    for (int k = 0; k < 2; ++k) v[k] = reduce_lanes(from < warps ? mine[from][k] : Acc(0), lanes, op);
    turn_ ^= 1;
  }

 private:
  Memory& memory_;
  unsigned turn_ = 0;
};

// Each thread has the same columns in every row, because it adds up over rows for dweight: kResident vectors, blockDim.x apart.
// While a row is worked on, the next one is on its way to registers: enough in flight, and little enough for all multiprocessors
// to get the same share of memory.
template <class T, int kResident, bool kWide>
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
  const int packs = static_cast<int>(p.n) / kWidth;
  const int first = kWide ? team.first() : threadIdx.x, step = kWide ? team.threads() : blockDim.x;
  auto exists = [&](int i) { return first + i * step < packs; };
  auto vectors = [](const Rows& rows, long long row) {
    return reinterpret_cast<uint4*>(static_cast<T*>(rows.data) + row * rows.stride);
  };
  auto wide = [](const uint4& v) { return convert<Acc>(*reinterpret_cast<const Packed*>(&v)); };

  uint4 next_h[kResident] = {}, next_dy[kResident] = {}, weight[kResident];
  auto fetch = [&](long long row) {
    const bool wanted = row < p.rows;
    const uint4 *const h = vectors(p.h, row) + first, *const dy = vectors(p.dy, row) + first;
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      if (wanted && exists(i)) {
        next_h[i] = h[i * step];
        next_dy[i] = dy[i * step];
      } else if (!kWide) {  // a warp's other rows may go on
        next_h[i] = next_dy[i] = {};
      }
    }
  };
  // Rows of a block are neighbours, which share pages of memory.
  const long long teams = kWide ? gridDim.x / team.blocks : static_cast<long long>(gridDim.x) * blockDim.y;
  const long long begin = kWide ? team.index : static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
  const long long ahead = !kWide && step < 32 ? threadIdx.y % (32 / step) : 0;  // of the first row of this warp
  wait_for_previous(p.rows <= teams);
  fetch(begin);
#pragma unroll
  for (int i = 0; i < kResident; ++i) weight[i] = __ldg(static_cast<const uint4*>(p.weight) + min(first + i * step, packs - 1));

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

    Acc sums[2], scale = 1;
#pragma unroll 1
    for (bool scaled = false;; scaled = true) {
      sums[0] = sums[1] = 0;  // of h^2, of g h
#pragma unroll
      for (int i = 0; i < kResident; ++i) {
        const auto a = wide(h[i]), grad = wide(dy[i]), factor = wide(weight[i]);
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
        weight[i] = forgotten(weight[i], zero);
      }
      const auto a = wide(h[i]), grad = wide(dy[i]), factor = wide(weight[i]);
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
      if (!active || !exists(i)) continue;
      if (p.dh.data) {
        const auto more = wide(vectors(p.dh, row)[first + i * step]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) dx.at[j] += more.at[j];
      }
      store(reinterpret_cast<Packed*>(vectors(p.dx, row)) + first + i * step, convert<T>(dx));
    }
  }

  // Rows side by side in a block add up in their order, first those of a warp, and a team of blocks writes one row of partial sums.
  launch_dependents();
  if (!p.dweight) return;
  Acc* const partial = static_cast<Acc*>(p.dweight) + (kWide ? team.index : blockIdx.x) * p.n;
  if constexpr (kWide) {
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      if (exists(i)) *(reinterpret_cast<Pack<Acc, kWidth>*>(partial) + first + i * step) = dweight[i];
    }
    return;
  }
  const int side = max(32 / step, 1), count = blockDim.y / side;
#pragma unroll 1
  for (int offset = step; offset < 32; offset *= 2) {
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) dweight[i].at[j] += __shfl_xor_sync(0xffffffffu, dweight[i].at[j], offset);
    }
  }
  Acc* const to = count > 1 ? reinterpret_cast<Acc*>(shared) + threadIdx.y / side * p.n : partial;
#pragma unroll
  for (int i = 0; i < kResident; ++i) {
    if (threadIdx.y % side == 0 && exists(i)) *(reinterpret_cast<Pack<Acc, kWidth>*>(to) + first + i * step) = dweight[i];
  }
  if (count == 1) return;
  __syncthreads();
  using Four = Pack<Acc, 4>;
#pragma unroll 1
  for (int at = threadIdx.y * step + first; at < p.n / 4; at += step * blockDim.y) {
    Four total = {};
#pragma unroll 1
    for (int team = 0; team < count; ++team) {
      const Four more = reinterpret_cast<const Four*>(shared)[team * (p.n / 4) + at];
#pragma unroll
      for (int j = 0; j < 4; ++j) total.at[j] += more.at[j];
    }
    reinterpret_cast<Four*>(partial)[at] = total;
  }
}

}  // namespace cuops

// Instances, as plan_bwd in rms_norm_bwd.cc asks for them.
#if CUOPS_TUNED
#define RMS_NORM_BWD(name, T, suffix, kWide, kThreads)                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads) rms_norm_bwd_##name##_##suffix(cuops::RmsNormBwdParams p) { \
    cuops::rms_norm_bwd_held<T, 4, kWide>(p);                                                                        \
  }
#define RMS_NORM_BWD_OF(name, T) RMS_NORM_BWD(name, T, held, false, 384) RMS_NORM_BWD(name, T, wide, true, 512)
RMS_NORM_BWD_OF(f32, float)
RMS_NORM_BWD_OF(f16, __half)
RMS_NORM_BWD_OF(bf16, __nv_bfloat16)
#else  // into a program without kernels, older NVRTC puts the number of its process
extern "C" __global__ void rms_norm_bwd_held_none() {}
#endif
