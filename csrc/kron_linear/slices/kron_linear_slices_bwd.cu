// All gradients of few small samples in one short launch: a block has a row of a factor's gradient, or of one sample's dx. Each of
// these is what the other factors make of a slice of dy, one after the other, and what they have in common is computed again.
#include "device/cluster.cuh"
#include "device/overlap.cuh"
#include "device/tuned.cuh"
#include "kron_slices.cuh"
#include "kron_slices.h"

CUOPS_ONLY_FOR(90)

namespace cuops {

template <class T>
__device__ void kron_slices_bwd(const KronSlicesBwdParams& p) {
  using Acc = Accumulator<T>;
  const int thread = threadIdx.x, threads = blockDim.x, block = blockIdx.x;
  Acc* const shared = shared_at<Acc>(0);
  const bool back = block >= p.start;  // a row of dx
  int own = 0;
  if (!back) {
    own = p.factors - 1;
    while (block < p.factor[own].start) --own;
  }
  const KronSlicesFactor& f = p.factor[own];
  const int index = block - (back ? p.start : f.start), groups = 1 << p.groups_log;
  const int sample = back ? divide(index, f.by_in) : (index & (groups - 1)) * p.samples;
  const int row = back ? index - sample * f.in : index >> p.groups_log;
  const int samples = back ? 1 : max(0, min(p.samples, p.rows - sample)), count = samples * f.rest;
  const T* const dy = static_cast<const T*>(p.dy) + 1LL * sample * p.out + (back ? 0 : row * f.out_after);
  const T* const x = static_cast<const T*>(p.x) + 1LL * sample * p.in;
  if (back && sample >= p.rows) return;  // beyond the end of the last cluster
  wait_for_previous();

  // The other factors.
#pragma unroll 1
  for (int k = 0; k < p.factors; ++k) {
    const KronSlicesFactor& g = p.factor[k];
    if (k == own) continue;
    bring_factor(shared + g.weight, 1, g.pitch, static_cast<const T*>(g.data), g.row_stride, g.column_stride, g.in * g.out,
                 g.by_in);
  }
  commit_copies();
  if (back) {
    const T* const weight = static_cast<const T*>(f.data) + row * f.column_stride;
    const int parts = 1 << p.parts_log, part = thread & (parts - 1);
#pragma unroll 1
    for (int base = 0; base < count; base += threads >> p.parts_log) {
      const int i = base + (thread >> p.parts_log);
      Acc sum = 0;
      in_batches<T, 4>(
          part, i < count ? f.out : 0, parts, [&](int o) { return dy + o * f.rest + i; },
          [&](int o, T v) { sum += convert<Acc>(weight[o * f.row_stride]) * convert<Acc>(v); });
#pragma unroll 1
      for (int with = parts / 2; with > 0; with /= 2) sum += __shfl_xor_sync(~0u, sum, with);
      if (part == 0 && i < count) shared[p.state[0] + i] = sum;
    }
  } else {
    in_batches<T, 4>(
        thread, count, threads,
        [&](int i) {
          const int before = divide(i, f.by_out_after);
          return dy + before * f.out_after * f.out + i - before * f.out_after;
        },
        [&](int i, T v) { shared[p.state[0] + i] = convert<Acc>(v); });
  }
  wait_for_copies<0>();
  __syncthreads();

#pragma unroll 1
  for (int s = 0; s < p.factors - 1; ++s) {
    const KronSlicesTurn& turn = p.turn[own][s];
    const KronSlicesFactor& g = p.factor[s + (s >= own)];
    const Acc* const from = shared + p.state[s % 2];
    Acc* const to = shared + p.state[1 - s % 2];
    const int total = samples * turn.results, after = turn.by_after.divisor, ways = 1 << turn.ways_log, way = thread & (ways - 1);
#pragma unroll 1
    for (int base = 0; base < total; base += threads >> turn.ways_log) {
      const int i = base + (thread >> turn.ways_log), rest = divide(i, turn.by_after), before = divide(rest, g.by_in);
      const Acc* const state = from + before * g.out * after + i - rest * after;
      const Acc* const weight = shared + g.weight + (rest - before * g.in) * g.pitch;
      Acc sum = 0;
      if (i < total) {
#pragma unroll 4
        for (int k = way; k < g.out; k += ways) sum += weight[k] * state[k * after];
      }
#pragma unroll 1
      for (int with = ways / 2; with > 0; with /= 2) sum += __shfl_xor_sync(~0u, sum, with);
      if (way > 0 || i >= total) continue;
      if (back && s == p.factors - 2) {
        static_cast<T*>(p.dx)[1LL * sample * p.in + row * turn.results + i] = convert<T>(sum);
      } else {
        to[i] = sum;
      }
    }
    if (back && s == p.factors - 2) return;
    __syncthreads();
  }

  const Acc* const g = shared + p.state[(p.factors - 1) % 2];
  Acc* const sums = shared + p.sums;
  const int all = f.parts * f.lanes, ways = 1 << f.ways_log, way = thread & (ways - 1), column = thread >> f.ways_log;
  // Of one column of x, the elements of a thread.
  const int rest = divide(thread, f.by_lanes), part = divide(rest, f.by_in), lane = thread - rest * f.lanes,
            own_column = rest - part * f.in, many = part < f.parts ? samples * f.before : 0;
  int before = part, after = lane;
  Acc sum = 0;
#pragma unroll 1
  while (before < many) {
    constexpr int kBatch = 4;
    T v[kBatch];
    int at[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      at[j] = before < many ? before * f.after + after : -1;
      if (at[j] < 0) continue;
      v[j] = x[(before * f.in + own_column) * f.after + after];
      after += f.lanes;
      if (after < f.after) continue;
      after = lane;
      before += f.parts;
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      if (at[j] >= 0) sum += convert<Acc>(v[j]) * g[at[j]];
  }
  if (part < f.parts) sums[(own_column * f.parts + part) * f.lanes + lane] = sum;
  __syncthreads();
  sum = 0;
  if (column < f.in) {
#pragma unroll 4
    for (int i = way; i < all; i += ways) sum += sums[column * all + i];
  }
#pragma unroll 1
  for (int with = ways / 2; with > 0; with /= 2) sum += __shfl_xor_sync(~0u, sum, with);
  T* const gradient = static_cast<T*>(f.gradient) + row * f.in;
  if (groups == 1) {
    if (way == 0 && column < f.in) gradient[column] = convert<T>(sum);
    return;
  }
  __syncthreads();
  if (way == 0 && column < f.in) sums[column] = sum;
  cluster_barrier();
  if ((index & (groups - 1)) == 0 && thread < f.in) {
    sum = sums[thread];
#pragma unroll 4
    for (int other = 1; other < groups; ++other) sum += load_remote(sums + thread, other);
    gradient[thread] = convert<T>(sum);
  }
  cluster_barrier();  // a block that ended would take its sums with it
}

}  // namespace cuops

// An instance a dtype.
#define KRON_SLICES_BWD(name, T)                                                     \
  extern "C" __global__ void __launch_bounds__(1 << cuops::kSlicesMostLogBwd)        \
      kron_slices_bwd_##name(const __grid_constant__ cuops::KronSlicesBwdParams p) { \
    cuops::kron_slices_bwd<T>(p);                                                    \
  }
KRON_SLICES_BWD(f64, double)
KRON_SLICES_BWD(f32, float)
KRON_SLICES_BWD(f16, __half)
KRON_SLICES_BWD(bf16, __nv_bfloat16)
