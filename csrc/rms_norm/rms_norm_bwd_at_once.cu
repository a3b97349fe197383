// The gradient of RMSNorm for as many rows as the multiprocessors hold together, in the common case: what is read is all on its
// way at once, several rows a thread, so that few partial sums of dweight are left.
#include "device/arrivals.cuh"
#include "device/overlap.cuh"
#include "device/reduce.cuh"
#include "device/row_sums.cuh"
#include "device/tuned.cuh"
#include "rms_norm.h"
#include "rstd.cuh"
#include "side_by_side.cuh"
#include "windows.cuh"

CUOPS_ONLY_FOR(90, CUDA 12.0)

namespace cuops {

// What the gradient of a row needs to know of it, as in side_by_side.cuh, by one warp that reads all of it: where squares left the
// range.
template <class T>
__device__ void find_carefully(const RmsNormBwdParams& p, long long row, float (&found)[3]) {
  const T* const h = static_cast<const T*>(p.h.data) + row * p.h.stride;
  const T* const dy = static_cast<const T*>(p.dy.data) + row * p.dy.stride;
  const int n = static_cast<int>(p.n), lane = threadIdx.x % 32;
  float largest = p.float32.sqrt_eps, sums[2] = {};
#pragma unroll 1
  for (int i = lane; i < n; i += 32) largest = Max()(largest, abs(convert<float>(h[i])));
  largest = reduce_lanes(largest, 32, Max());
  const float scale = isinf(largest) ? 1.0f : power_of_two_to_one(largest);
#pragma unroll 1
  for (int i = lane; i < n; i += 32) {
    const float v = convert<float>(h[i]) * scale;
    sums[0] += v * v;
    sums[1] += convert<float>(dy[i]) * convert<float>(static_cast<const T*>(p.weight)[i]) * v;
  }
  found[0] = scale;
  found[1] = rstd_of(reduce_lanes(sums[0], 32, Sum()), p.float32, scale);
  found[2] = reduce_lanes(sums[1], 32, Sum()) * p.float32.inverse_n;
}

// A cluster has kRowsAtOnce * blockDim.y rows, and a block a part of their columns. A thread has a vector of kRowsAtOnce rows. With
// kPhased these start equally far behind a multiple of 16 bytes, and a block has one vector more than its columns fill.
template <class T, bool kPhased>
__device__ void rms_norm_bwd_at_once(const RmsNormBwdParams& p) {
  constexpr int kWidth = kVectorWidth<T>;
  extern __shared__ uint4 shared[];  // dh
  __shared__ unsigned long long arrived;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y, lane = thread % 32;
  uint4* const dh = shared + thread;
  void* const behind =
      shared + (p.dh.data ? kRowsAtOnce * threads : 0);  // sums of the cluster's warps, then those of rows side by side
  const unsigned rank = cluster_rank();
  const int blocks = cluster_blocks(), group = cluster_index(), warps = blockDim.x / 32;  // of a row in this block
  if (blocks > 1 && thread == 0) {
    init_arrivals(&arrived, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    arrive_expecting(&arrived, static_cast<unsigned>(sizeof(float2)) * kRowsAtOnce * blockDim.y * warps * blocks);
  }
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");  // all that others are to see is the barrier above

  const int step = kPhased ? kWidth : blockDim.y, turns = step / blockDim.y;  // clusters between which rows alternate
  const int first_row = group / turns * kRowsAtOnce * step + group % turns * blockDim.y + threadIdx.y;
  const int columns = (static_cast<int>(blockDim.x) - kPhased) * kWidth, begin = rank * columns;  // of this block
  const int end = min(begin + columns, static_cast<int>(p.n));
  int column = begin + static_cast<int>(threadIdx.x) * kWidth, from = 0, to = kWidth;
  if constexpr (kPhased) {
    const auto start = reinterpret_cast<unsigned long long>(static_cast<const T*>(p.h.data) + first_row * p.h.stride);
    column -= static_cast<int>(start % 16 / sizeof(T));
    from = max(begin - column, 0);
    to = min(kWidth, end - column);
  }
  const bool whole = !kPhased || (from == 0 && to == kWidth);
  const int rows = column + from < end ? static_cast<int>(p.rows) : 0;  // of this thread
  auto place = [&](const Rows& array) { return static_cast<T*>(array.data) + first_row * array.stride + column; };
  // Whether the vector reaches beyond the array, which starts at a vector.
  auto leaves = [&](int k) { return kPhased && first_row + k * step == rows - 1 && column + kWidth > p.n; };

  wait_for_previous();
  uint4 h[kRowsAtOnce] = {}, dy[kRowsAtOnce] = {}, weight_of = {};
  const T *h_at = place(p.h), *dy_at = place(p.dy);
#pragma unroll
  for (int k = 0; k < kRowsAtOnce; ++k) {
    if (first_row + k * step < rows && !leaves(k)) {
      h[k] = __ldg(reinterpret_cast<const uint4*>(h_at));
      dy[k] = __ldg(reinterpret_cast<const uint4*>(dy_at));
    }
    h_at += step * p.h.stride;
    dy_at += step * p.dy.stride;
  }
  if (p.dh.data) {
    const T* dh_at = place(p.dh);
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      if (first_row + k * step < rows) {
        if (leaves(k)) {
          dh[k * threads] = gather(dh_at, from, to);
        } else {
          copy_async(dh + k * threads, reinterpret_cast<const uint4*>(dh_at));
        }
      }
      dh_at += step * p.dh.stride;
    }
    commit_copies();
  }
  auto wide = [](const uint4& v) { return convert<float>(*reinterpret_cast<const Vector<T>*>(&v)); };
  auto weights = [&] { return static_cast<const T*>(p.weight) + column; };
  if constexpr (kPhased) {
    if (rows > 0) weight_of = gather(weights(), from, to);
#pragma unroll
    for (int k = 0; !whole && k < kRowsAtOnce; ++k) {
      if (first_row + k * step < rows && leaves(k)) {
        h[k] = gather(place(p.h) + k * step * p.h.stride, from, to);
        dy[k] = gather(place(p.dy) + k * step * p.dy.stride, from, to);
      }
      h[k] = trimmed<T>(h[k], from, to);
      dy[k] = trimmed<T>(dy[k], from, to);
    }
  } else {
    if (rows > 0) weight_of = __ldg(reinterpret_cast<const uint4*>(weights()));
  }

  float v[2 * kRowsAtOnce];  // of h^2 and g h
  {
    const auto weight = wide(weight_of);
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      const auto a = wide(h[k]), grad = wide(dy[k]);
      v[2 * k] = v[2 * k + 1] = 0;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        v[2 * k] += a.at[j] * a.at[j];
        v[2 * k + 1] += grad.at[j] * weight.at[j] * a.at[j];
      }
    }
  }
  const int which = add_up_by_halves(v);
  constexpr int kLanes = 16 / kRowsAtOnce;  // that have the same value
  float2* const sums = static_cast<float2*>(behind);
  const int local = kRowsAtOnce * threadIdx.y, in_cluster = kRowsAtOnce * blockDim.y;  // rows
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");                          // all blocks are there
  float* const mine = reinterpret_cast<float*>(sums + (rank * warps + threadIdx.x / 32) * in_cluster + local) + which;
  if (blocks == 1) {
    if (lane % kLanes == 0) *mine = v[0];
    __syncthreads();
  } else {
#pragma unroll 1
    for (int block = lane % kLanes; block < blocks; block += kLanes) send_to_block(mine, v[0], &arrived, block);
    wait_for_sent(&arrived, 0);
  }

  // Each of a thread's rows has so many lanes of its warp.
  constexpr int kOfRow = 32 / kRowsAtOnce;
  float found[] = {1, 0, 0};
  {
    float2 sum = {};
#pragma unroll 4
    for (int warp = lane % kOfRow; warp < warps * blocks; warp += kOfRow) {
      const float2 more = sums[warp * in_cluster + local + lane / kOfRow];
      sum = {sum.x + more.x, sum.y + more.y};
    }
    const auto& constants = p.float32;
    sum.x = reduce_lanes(sum.x, kOfRow, Sum());
    found[1] = rstd_of(sum.x, constants, 1.0f);
    found[2] = reduce_lanes(sum.y, kOfRow, Sum()) * constants.inverse_n;
    const bool rare =
        first_row + lane / kOfRow * step < p.rows && !is_ordinary(mean_plus_eps(sum.x, constants, constants.eps), found[2]);
    if (__builtin_expect(__any_sync(0xffffffffu, rare), 0)) {
#pragma unroll 1
      for (int k = 0; k < kRowsAtOnce; ++k) {
        if (!__any_sync(0xffffffffu, rare && lane / kOfRow == k)) continue;
        float careful[3];
        find_carefully<T>(p, first_row + k * step, careful);
#pragma unroll
        for (int i = 0; i < 3; ++i) found[i] = lane / kOfRow == k ? careful[i] : found[i];
      }
    }
  }

  const unsigned zero = static_cast<unsigned>(p.h.outer_stride);  // rows have one stride
  auto wide_again = [&](const uint4& v) { return wide(sizeof(T) < sizeof(float) ? forgotten(v, zero) : v); };
  Pack<float, kWidth> dweight = {}, dbias = {}, weight;
  if constexpr (kPhased) {
    weight = wide_again(weight_of);
  } else if (rows > 0) {  // once more, from L1: it would have kept registers until here
    weight = convert<float>(load_constant_here(weights()));
  }
  T* dx_at = place(p.dx);
  wait_for_copies<0>();
#pragma unroll
  for (int k = 0; k < kRowsAtOnce; ++k) {
    float of_row[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) of_row[i] = __shfl_sync(0xffffffffu, found[i], k * kOfRow);
    if (first_row + k * step < rows) {
      auto dx = gradient_of(of_row, wide_again(h[k]), wide_again(dy[k]), weight, dweight, dbias);
      if (p.dh.data) {
        const auto more = wide(dh[k * threads]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) dx.at[j] += more.at[j];
      }
      const auto rounded = convert<T>(dx);
      if (whole) {
        store(reinterpret_cast<Vector<T>*>(dx_at), rounded);
      } else {
        scatter(dx_at, *reinterpret_cast<const uint4*>(&rounded), from, to);
      }
    }
    dx_at += step * p.dx.stride;
  }
  if (!p.dweight) return;
  const SumsTarget<T, float> target{p.dweight, group, static_cast<int>(p.n), p.finds_results};
  if (!kPhased && blockDim.y == 1) {
    if (rows > 0) target.store(column, dweight);
    return;
  }
  __syncthreads();  // all have read the sums of warps
  if constexpr (kPhased) {
    float* const to_sum = static_cast<float*>(behind) + threadIdx.y * columns + (column - begin);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (j >= from && j < to) to_sum[j] = dweight.at[j];
    }
  } else {
    static_cast<Pack<float, kWidth>*>(behind)[thread] = dweight;
  }
  __syncthreads();
#pragma unroll 1
  for (int i = thread; begin + 4 * i < end; i += threads) {
    Pack<float, 4> total = {};
#pragma unroll 4
    for (int y = 0; y < blockDim.y; ++y) {
      const auto more = static_cast<const Pack<float, 4>*>(behind)[y * (columns / 4) + i];
#pragma unroll
      for (int j = 0; j < 4; ++j) total.at[j] += more.at[j];
    }
    target.store_four(begin + 4 * i, total);
  }
}

}  // namespace cuops

// Instances, as rms_norm_bwd_plan.cc asks for them.
#define RMS_NORM_BWD_AT_ONCE(name, T, suffix, kPhased)                                                                     \
  extern "C" __global__ void __launch_bounds__(1024, 1) rms_norm_bwd_##name##_at_once##suffix(cuops::RmsNormBwdParams p) { \
    cuops::rms_norm_bwd_at_once<T, kPhased>(p);                                                                            \
  }
#define RMS_NORM_BWD_AT_ONCE_OF(name, T) \
  RMS_NORM_BWD_AT_ONCE(name, T, , false) \
  RMS_NORM_BWD_AT_ONCE(name, T, _phased, true)
RMS_NORM_BWD_AT_ONCE_OF(f32, float)
RMS_NORM_BWD_AT_ONCE_OF(f16, __half)
RMS_NORM_BWD_AT_ONCE_OF(bf16, __nv_bfloat16)
