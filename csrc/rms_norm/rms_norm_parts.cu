// RMSNorm of few rows that are so long that all multiprocessors have parts of them, and the gradient of one: a first kernel adds up
// what a second one needs to know of the rows. Both divide rows alike, so a block of the second has its part on the way before the
// first one ends.
#include "device/overlap.cuh"
#include "device/row.cuh"
#include "device/tuned.cuh"
#include "parts.cuh"
#include "rms_norm.h"
#include "side_by_side.cuh"

CUOPS_ONLY_FOR(80, 90)

namespace cuops {

// Part `part` of a row: kPartVectors of its vectors a thread; the first part has the edges too.
template <class T>
struct Part {
  static constexpr int kWidth = kVectorWidth<T>;
  using Vectors = Fetched<T, kWidth>[kPartVectors];
  const Division<T, kWidth, true, int> division;
  const int part, first;

  __device__ Part(const T* row, long long n, int part)
      : division(row, n), part(part), first(part * kPartVectors * blockDim.x + threadIdx.x) {}

  __device__ int pack(int k) const { return first + k * static_cast<int>(blockDim.x); }
  __device__ bool exists(int k) const { return pack(k) < division.packs; }
  __device__ void fetch_row(Vectors& to, const T* row) const {
#pragma unroll
    for (int k = 0; k < kPartVectors; ++k) {
      if (exists(k)) to[k] = fetch<T, kWidth>(row + division.head + pack(k) * static_cast<long long>(kWidth));
    }
  }
  // Of a parameter, which starts at a multiple of 16 bytes: what is beside the row's.
  __device__ void fetch_parameter(Vectors& low, Vectors& high, const T* parameter) const {
#pragma unroll
    for (int k = 0; k < kPartVectors; ++k) {
      if (exists(k)) low[k] = fetch<T, kWidth>(parameter + pack(k) * static_cast<long long>(kWidth));
      if (exists(k) && division.head > 0) high[k] = fetch<T, kWidth>(parameter + (pack(k) + 1) * static_cast<long long>(kWidth));
    }
  }
  __device__ Pack<float, kWidth> parameter(const Vectors& low, const Vectors& high, int k) const {
    if (division.head == 0) return convert<float>(low[k].pack());
    return convert<float>(shifted(low[k].pack(), high[k].pack(), division.head * static_cast<int>(sizeof(T))));
  }
  template <class Visit>
  __device__ void for_each_edge(Visit&& visit) const {
#pragma unroll 1
    for (int e = part == 0 ? threadIdx.x : division.edges; e < division.edges; e += blockDim.x) visit(division.edge(e));
  }
};

template <class T>
__device__ void rms_norm_fwd_sums(const RmsNormFwdParams& p) {
  CUOPS_TEAM_OF(float, 1, false, team);
  wait_for_previous();
  const int row = blockIdx.x / p.parts;
  const T* const x = static_cast<const T*>(p.x.data) + row * p.x.stride;
  const Part<T> part(x, p.n, blockIdx.x - row * p.parts);
  typename Part<T>::Vectors x_of;
  part.fetch_row(x_of, x);
  float sums[1];
  const float scale = sums_of_part(p, team, sums, [&](auto&& add) {
#pragma unroll
    for (int k = 0; k < kPartVectors; ++k) {
      if (!part.exists(k)) continue;
      const auto wide = convert<float>(x_of[k].pack());
#pragma unroll
      for (int j = 0; j < part.kWidth; ++j) add(wide.at[j], 0.0f);
    }
    part.for_each_edge([&](long long i) { add(convert<float>(x[i]), 0.0f); });
  });
  if (threadIdx.x == 0) *reinterpret_cast<float2*>(static_cast<float*>(p.found) + 2 * blockIdx.x) = make_float2(scale, sums[0]);
}

template <class T>
__device__ void rms_norm_fwd_parts(const RmsNormFwdParams& p) {
  const int row = blockIdx.x / p.parts;
  const T *const x = static_cast<const T*>(p.x.data) + row * p.x.stride, *const weight = static_cast<const T*>(p.weight);
  T* const y = static_cast<T*>(p.y.data) + row * p.y.stride;
  const Part<T> part(x, p.n, blockIdx.x - row * p.parts);
  typename Part<T>::Vectors x_of, low, high;
  part.fetch_row(x_of, x);
  part.fetch_parameter(low, high, weight);
  wait_for_previous();
  float found[3];
  combine_parts<1>(p, static_cast<const float*>(p.found) + 2 * row * p.parts, 32, found);
  const float scale = found[0], rstd = found[1], offset = p.float32.weight_offset;
  if (p.rstd && part.first == 0) static_cast<float*>(p.rstd)[row] = scale * rstd;
#pragma unroll
  for (int k = 0; k < kPartVectors; ++k) {
    if (!part.exists(k)) continue;
    auto wide = convert<float>(x_of[k].pack());
    const auto factor = part.parameter(low, high, k);
#pragma unroll
    for (int j = 0; j < part.kWidth; ++j) wide.at[j] = wide.at[j] * scale * rstd * (factor.at[j] + offset);
    store(reinterpret_cast<Vector<T>*>(y + part.division.head) + part.pack(k), convert<T>(wide));
  }
  part.for_each_edge(
      [&](long long i) { y[i] = convert<T>(convert<float>(x[i]) * scale * rstd * (convert<float>(weight[i]) + offset)); });
}

template <class T>
__device__ void rms_norm_bwd_sums(const RmsNormBwdParams& p) {
  CUOPS_TEAM_OF(float, 2, false, team);
  wait_for_previous();
  const T *const h = static_cast<const T*>(p.h.data), *const dy = static_cast<const T*>(p.dy.data);
  const T* const weight = static_cast<const T*>(p.weight);
  const Part<T> part(h, p.n, blockIdx.x);
  typename Part<T>::Vectors h_of, dy_of, weight_of;
  part.fetch_row(h_of, h);
  part.fetch_row(dy_of, dy);
  part.fetch_row(weight_of, weight);
  float sums[2];
  const float scale = sums_of_part(p, team, sums, [&](auto&& add) {
#pragma unroll
    for (int k = 0; k < kPartVectors; ++k) {
      if (!part.exists(k)) continue;
      const auto wide = convert<float>(h_of[k].pack()), grad = convert<float>(dy_of[k].pack());
      const auto factor = convert<float>(weight_of[k].pack());
#pragma unroll
      for (int j = 0; j < part.kWidth; ++j) add(wide.at[j], grad.at[j] * factor.at[j]);
    }
    part.for_each_edge([&](long long i) { add(convert<float>(h[i]), convert<float>(dy[i]) * convert<float>(weight[i])); });
  });
  if (threadIdx.x != 0) return;
  float* const found = static_cast<float*>(p.found) + 3 * blockIdx.x;
  found[0] = scale;
  found[1] = sums[0];
  found[2] = sums[1];
}

template <class T>
__device__ void rms_norm_bwd_parts(const RmsNormBwdParams& p) {
  constexpr int kWidth = kVectorWidth<T>;
  const T *const h = static_cast<const T*>(p.h.data), *const dy = static_cast<const T*>(p.dy.data);
  const T *const weight = static_cast<const T*>(p.weight), *const dh = static_cast<const T*>(p.dh.data);
  T *const dx = static_cast<T*>(p.dx.data), *const dweight = static_cast<T*>(p.dweight);
  const Part<T> part(h, p.n, blockIdx.x);
  typename Part<T>::Vectors h_of, dy_of, weight_of;
  part.fetch_row(h_of, h);
  part.fetch_row(dy_of, dy);
  part.fetch_row(weight_of, weight);
  wait_for_previous();
  float found[3];
  combine_parts<2>(p, static_cast<const float*>(p.found), 32, found);
#pragma unroll
  for (int k = 0; k < kPartVectors; ++k) {
    if (!part.exists(k)) continue;
    Pack<float, kWidth> sums = {}, unused = {};
    auto wide = gradient_of(found, convert<float>(h_of[k].pack()), convert<float>(dy_of[k].pack()),
                            convert<float>(weight_of[k].pack()), sums, unused);
    if (dh) {
      const auto more = convert<float>(load(reinterpret_cast<const Vector<T>*>(dh) + part.pack(k)));
#pragma unroll
      for (int j = 0; j < kWidth; ++j) wide.at[j] += more.at[j];
    }
    store(reinterpret_cast<Vector<T>*>(dx) + part.pack(k), convert<T>(wide));
    if (dweight) store(reinterpret_cast<Vector<T>*>(dweight) + part.pack(k), convert<T>(sums));
  }
  part.for_each_edge([&](long long i) {
    Pack<float, 1> sums = {}, unused = {};
    auto one = [](const T* array, long long at) { return Pack<float, 1>{{convert<float>(array[at])}}; };
    const auto of_h = gradient_of(found, one(h, i), one(dy, i), one(weight, i), sums, unused);
    dx[i] = convert<T>(of_h.at[0] + (dh ? convert<float>(dh[i]) : 0.0f));
    if (dweight) dweight[i] = convert<T>(sums.at[0]);
  });
}

}  // namespace cuops

// Instances, as rms_norm_plan.cc and rms_norm_bwd_plan.cc ask for them.
#define RMS_NORM_PARTS(name, T)                                                                                \
  extern "C" __global__ void __launch_bounds__(512, 2) rms_norm_fwd_##name##_sums(cuops::RmsNormFwdParams p) { \
    cuops::rms_norm_fwd_sums<T>(p);                                                                            \
  }                                                                                                            \
  extern "C" __global__ void __launch_bounds__(512) rms_norm_fwd_##name##_parts(cuops::RmsNormFwdParams p) {   \
    cuops::rms_norm_fwd_parts<T>(p);                                                                           \
  }                                                                                                            \
  extern "C" __global__ void __launch_bounds__(512) rms_norm_bwd_##name##_sums(cuops::RmsNormBwdParams p) {    \
    cuops::rms_norm_bwd_sums<T>(p);                                                                            \
  }                                                                                                            \
  extern "C" __global__ void __launch_bounds__(512, sizeof(T) == 4 ? 2 : 1)                                    \
      rms_norm_bwd_##name##_parts(cuops::RmsNormBwdParams p) {                                                 \
    cuops::rms_norm_bwd_parts<T>(p);                                                                           \
  }
RMS_NORM_PARTS(f32, float)
RMS_NORM_PARTS(f16, __half)
RMS_NORM_PARTS(bf16, __nv_bfloat16)
