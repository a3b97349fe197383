// Kronecker-factored linear layers of few small samples, in one short launch: a block multiplies a whole sample by one row of the
// first factor, and what it then has by the other factors, one after the other.
#include "device/overlap.cuh"
#include "device/tuned.cuh"
#include "kron_slices.cuh"
#include "kron_slices.h"

CUOPS_ONLY_FOR(90)

namespace cuops {

// kWidth: neighbours that move together.
template <class T, int kWidth>
__device__ void kron_slices(const KronSlicesParams& p) {
  using Acc = Accumulator<T>;
  constexpr int kAhead = sizeof(Acc) * kWidth == 32 ? kSlicesAhead / 2 : kSlicesAhead;
  const int thread = threadIdx.x, threads = blockDim.x;
  const int sample = divide(blockIdx.x, p.by_slices), slice = blockIdx.x - sample * p.slices, row = divide(slice, p.by_seconds);
  const int second = slice - row * p.seconds;  // row of the second factor
  const int parts = 1 << p.parts_log, part = thread & (parts - 1), columns = threads >> p.parts_log;
  const T* const x = static_cast<const T*>(p.x) + sample * p.x_stride + part * p.rest;
  const T* const weight = static_cast<const T*>(p.first) + row * p.row_stride + part * p.column_stride;
  const long long weight_step = p.column_stride * parts;
  const int x_step = p.rest * parts, rows = (p.in - part + parts - 1) >> p.parts_log;
  Acc* const shared = shared_at<Acc>(0);
  int column = (thread >> p.parts_log) * kWidth;
  wait_for_previous();

  Fetched<T, kWidth> ahead[kAhead];
  T weights[kAhead];
  auto load = [&](int from) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (from + j >= rows || column >= p.rest) break;
      ahead[j] = fetch<T, kWidth>(x + (from + j) * x_step + column);
      weights[j] = weight[(from + j) * weight_step];
    }
  };
  load(0);
  // The other factors.
#pragma unroll 1
  for (int s = 0; s < p.steps; ++s) {
    const KronSlicesStep& step = p.step[s];
    const bool one = s == 0 && p.seconds > 1;
    const T* const from = static_cast<const T*>(step.data) + (one ? second * step.row_stride : 0);
    if constexpr (kSame<Acc, T>) {  // here rather than by bring_factor(), with which float32 1 x 3^5 takes 3.5 us rather than 3.2
#pragma unroll 1
      for (int i = thread; i < step.in * step.out; i += threads) {
        const int o = divide(i, step.by_in), k = i - o * step.in;
        copy_number(shared + step.weight + o * step.pitch + k, from + o * step.row_stride + k * step.column_stride);
      }
    } else {
      bring_factor(shared + step.weight, step.pitch, 1, from, step.row_stride, step.column_stride, step.in * step.out, step.by_in);
    }
  }
  commit_copies();

  bool loaded = true;
#pragma unroll 1
  for (; column - (thread >> p.parts_log) * kWidth < p.rest; column += columns * kWidth) {
    Acc sum[kWidth] = {};
#pragma unroll 1
    for (int from = 0; from < rows; from += kAhead) {
      if (!loaded) load(from);
      loaded = false;
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (from + j >= rows || column >= p.rest) break;
        const Acc w = convert<Acc>(weights[j]);
        const auto wide = convert<Acc>(ahead[j].pack());
#pragma unroll
        for (int e = 0; e < kWidth; ++e) sum[e] += w * wide.at[e];
      }
    }
#pragma unroll 1
    for (int with = parts / 2; with > 0; with /= 2) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum[e] += __shfl_xor_sync(~0u, sum[e], with);
    }
#pragma unroll
    for (int e = 0; e < kWidth; ++e)
      if (part == 0 && column < p.rest) shared[p.state[0] + column + e] = sum[e];
  }
  wait_for_copies<0>();
  __syncthreads();

#pragma unroll 1
  for (int s = 0; s < p.steps; ++s) {
    const KronSlicesStep& step = p.step[s];
    const Acc* const from = shared + p.state[s % 2];
    Acc* const to = shared + p.state[1 - s % 2];
    const bool last = s == p.steps - 1;
    const long long start = sample * p.y_stride + 1LL * slice * p.slice_out;
    const int total = step.before * step.out * step.after, ways = 1 << step.ways_log, way = thread & (ways - 1);
#pragma unroll 1
    for (int base = 0; base < total; base += threads >> step.ways_log) {
      const int i = base + (thread >> step.ways_log), rest = divide(i, step.by_after), before = divide(rest, step.by_out);
      const Acc* const state = from + before * step.in * step.after + i - rest * step.after;
      const Acc* const weight = shared + step.weight + (rest - before * step.out) * step.pitch;
      Acc sum = 0;
      if (i < total) {
#pragma unroll 4
        for (int k = way; k < step.in; k += ways) sum += weight[k] * state[k * step.after];
      }
#pragma unroll 1
      for (int with = ways / 2; with > 0; with /= 2) sum += __shfl_xor_sync(~0u, sum, with);
      if (way > 0 || i >= total) continue;
      if (last) {
        if (p.bias)
          sum += convert<Acc>(
              static_cast<const T*>(p.bias)[1LL * (sample % p.bias_lead) * p.slices * p.slice_out + slice * p.slice_out + i]);
        static_cast<T*>(p.y)[start + i] = convert<T>(sum);
      } else {
        to[i] = sum;
      }
    }
    if (!last) __syncthreads();
  }
}

}  // namespace cuops

#define KRON_SLICES(name, T, width)                                                     \
  extern "C" __global__ void __launch_bounds__(1 << cuops::kSlicesMostLog)              \
      kron_slices_##name##_##width(const __grid_constant__ cuops::KronSlicesParams p) { \
    cuops::kron_slices<T, width>(p);                                                    \
  }

// Instances, as kron_plan_slices.cc asks for them.
KRON_SLICES(f64, double, 1)
KRON_SLICES(f64, double, 4)
KRON_SLICES(f32, float, 1)
KRON_SLICES(f32, float, 4)
KRON_SLICES(f16, __half, 1)
KRON_SLICES(f16, __half, 4)
KRON_SLICES(bf16, __nv_bfloat16, 1)
KRON_SLICES(bf16, __nv_bfloat16, 4)
