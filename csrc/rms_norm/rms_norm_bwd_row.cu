// The gradient of RMSNorm for one row that a block or cluster holds, in the common case: nothing is added up over rows, and what is
// read is all on its way at once. Short, because one block that runs once waits for its instructions too.
#include "device/overlap.cuh"
#include "device/reduce.cuh"
#include "device/tuned.cuh"
#include "rms_norm.h"
#include "rstd.cuh"
#include "side_by_side.cuh"

CUOPS_ONLY_FOR(80, 90)

namespace cuops {

// A thread has kWidth neighbours: a vector, or, of short rows that are no whole vectors, one.
template <class T, int kWidth>
__device__ void rms_norm_bwd_row(const RmsNormBwdParams& p) {
  CUOPS_TEAM(float, 2, team);
  const int at = team.first(), elements = static_cast<int>(p.n) - at * kWidth;  // from this thread's on
  const bool whole = elements >= kWidth && (kWidth == 1 || reinterpret_cast<unsigned long long>(p.weight) % 16 == 0);
  auto place = [&](const void* row) {
    const T* from = static_cast<const T*>(row) + at * kWidth;
    asm volatile("" : "+l"(from));  // here, before memory may be read
    return from;
  };
  const T *const h_at = place(p.h.data), *const dy_at = place(p.dy.data), *const weight_at = place(p.weight);
  auto load = [&](const T* from) {
    Fetched<T, kWidth> v = {};
    if (whole) {
      v = fetch<T, kWidth>(from);
    } else if (elements > 0) {
      auto some = v.pack();
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        if (j < elements) some.at[j] = from[j];
      }
      v = fetch<T, kWidth>(&some);
    }
    return v;
  };
  auto store = [&](void* row, const Pack<float, kWidth>& v) {
    T* const to = static_cast<T*>(row) + at * kWidth;
    const auto rounded = convert<T>(v);
    if (whole) {
      store_pack(to, rounded);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        if (j < elements) to[j] = rounded.at[j];
      }
    }
  };
  wait_for_previous();
  const auto h_of = load(h_at), dy_of = load(dy_at), weight_of = load(weight_at);
  Fetched<T, kWidth> dh_of = {};
  if (p.dh.data) dh_of = load(place(p.dh.data));
  const auto h = convert<float>(h_of.pack()), dy = convert<float>(dy_of.pack()), weight = convert<float>(weight_of.pack());
  const auto& constants = p.float32;
  float sums[2], scale = 1;
#pragma unroll 1
  for (int pass = 0;; ++pass) {  // of h^2 and g h, the largest h, of both with h times a power of two
    sums[0] = pass == 1 ? constants.sqrt_eps : 0;
    sums[1] = 0;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float v = h.at[j] * scale;
      sums[0] = pass == 1 ? Max()(sums[0], abs(v)) : sums[0] + v * v;
      sums[1] += dy.at[j] * weight.at[j] * v;
    }
    team.reduce(sums, [&](float a, float b) { return pass == 1 ? Max()(a, b) : a + b; });
    if (pass == 2) break;
    if (pass == 1) {
      scale = isinf(sums[0]) ? 1.0f : power_of_two_to_one(sums[0]);
      continue;
    }
    if (is_ordinary(mean_plus_eps(sums[0], constants, constants.eps), sums[1])) break;
  }
  if (elements <= 0) return;
  const float found[] = {scale, rstd_of(sums[0], constants, scale), sums[1] * constants.inverse_n};
  Pack<float, kWidth> dweight = {}, dbias = {};
  auto dx = gradient_of(found, h, dy, weight, dweight, dbias);
  if (p.dh.data) {
    const auto dh = convert<float>(dh_of.pack());
#pragma unroll
    for (int j = 0; j < kWidth; ++j) dx.at[j] += dh.at[j];
  }
  store(p.dx.data, dx);
  if (p.dweight) store(p.dweight, dweight);
}

}  // namespace cuops

// Instances, as rms_norm_bwd_plan.cc asks for them.
#define RMS_NORM_BWD_ROW(name, T, suffix, kWidth)                                                               \
  extern "C" __global__ void __launch_bounds__(512) rms_norm_bwd_##name##_##suffix(cuops::RmsNormBwdParams p) { \
    cuops::rms_norm_bwd_row<T, kWidth>(p);                                                                      \
  }
#define RMS_NORM_BWD_ROW_OF(name, T)                     \
  RMS_NORM_BWD_ROW(name, T, row, cuops::kVectorWidth<T>) \
  RMS_NORM_BWD_ROW(name, T, row_any, 1)
RMS_NORM_BWD_ROW_OF(f32, float)
RMS_NORM_BWD_ROW_OF(f16, __half)
RMS_NORM_BWD_ROW_OF(bf16, __nv_bfloat16)
