// RMSNorm of rows that registers do not hold, and of all that other kernels do not take, as on GPUs that none is tuned for.
#include "rms_norm.h"

#include "careful.cuh"
#include "device/overlap.cuh"
#include "device/reduce.cuh"
#include "device/row.cuh"
#include "device/tuned.cuh"
#include "rstd.cuh"

namespace cuops {

// A row on its way through shared memory, in chunks of p.chunk packs a thread: the last one, which is the whole row where it can
// be, is still there when the output is made, and others are read again. Each thread reads only what it has copied itself.
template <class T, int kWidth, class Index>
struct Chunks {
  using Packed = Pack<T, kWidth>;
  const Packed* row;
  Packed* shared;  // of this thread
  Index first, step, packs;
  int count, size, first_size;
  int resident = -1;

  __device__ Index start_of(int chunk) const { return chunk == 0 ? 0 : first_size + (chunk - 1) * static_cast<Index>(size); }

  __device__ void bring(int chunk) {
    if (chunk == resident) return;
    resident = chunk;
    Index at = first + start_of(chunk) * step;
    Packed* to = shared;
#pragma unroll 4
    for (int i = chunk == 0 ? first_size : size; i > 0; --i) {
      if (at < packs) copy_async(to, row + at);
      at += step;
      to += blockDim.x;
    }
    commit_copies();
    wait_for_copies<0>();
  }

  // Visits all packs of this thread, those first that are in shared memory.
  template <int kUnroll, class Visit>
  __device__ void for_each(Visit&& visit) {
    if constexpr (sizeof(Packed) < 16) {  // too small for asynchronous copies: read in place
#pragma unroll kUnroll
      for (Index at = first; at < packs; at += step) {
        Packed v = row[at];
        visit(at, v);
      }
    } else {
      int chunk = max(resident, 0);
#pragma unroll 1
      for (int turn = 0; turn < count; ++turn) {
        bring(chunk);
        Index at = first + start_of(chunk) * step;
        Packed* from = shared;
#pragma unroll kUnroll
        for (int i = chunk == 0 ? first_size : size; i > 0; --i) {
          if (at < packs) visit(at, *from);
          at += step;
          from += blockDim.x;
        }
        chunk = chunk + 1 < count ? chunk + 1 : 0;
      }
    }
  }
};

// The common case, for rows that registers do not hold, aligned or not.
template <class T>
__device__ void rms_norm_fwd_long(const RmsNormFwdParams& p) {
  using Acc = Accumulator<T>;
  constexpr int kWidth = kVectorWidth<T>;
  extern __shared__ uint4 shared[];
  CUOPS_TEAM(Acc, 1, team);
  if (p.overlaps) wait_for_previous();
  const T* const x = static_cast<const T*>(p.x.data) + team.index * p.x.stride;
  T* const y = static_cast<T*>(p.y.data) + team.index * p.y.stride;
  const T* const weight = static_cast<const T*>(p.weight);
  const Division<T, kWidth, true, int> division(x, p.n);
  const int first = team.first(), step = team.threads();
  Chunks<T, kWidth, int> chunks{reinterpret_cast<const Vector<T>*>(x + division.head),
                                reinterpret_cast<Vector<T>*>(shared) + threadIdx.x,
                                first,
                                step,
                                division.packs,
                                p.chunks,
                                p.chunk,
                                p.first_chunk};
  Acc sum = 0;
  chunks.template for_each<4>([&](int, const Vector<T>& v) {
    const auto wide = convert<Acc>(v);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += wide.at[j] * wide.at[j];
  });
#pragma unroll 1
  for (int e = first; e < division.edges; e += step) sum += convert<Acc>(x[division.edge(e)]) * convert<Acc>(x[division.edge(e)]);
  sum = team.reduce(sum, Sum());
  const auto& constants = scalars<Acc>(p);
  const Acc mean_eps = mean_plus_eps(sum, constants, constants.eps);
  Acc* const rstd_at = p.rstd ? static_cast<Acc*>(p.rstd) + team.index : nullptr;
  if (__builtin_expect(!(sum <= Range<Acc>::kLargest && mean_eps >= Range<Acc>::kSmallest), 0)) {
    return careful_row(x, y, weight, rstd_at, p.n, constants, team);
  }
  const Acc rstd = rsqrt_rn(mean_eps);
  if (rstd_at && first == 0) *rstd_at = rstd;
  chunks.template for_each<4>([&](int at, const Vector<T>& v) {
    auto wide = convert<Acc>(v);
    const auto factor = convert<Acc>(load_beside(division, weight, at));
#pragma unroll
    for (int j = 0; j < kWidth; ++j) wide.at[j] = wide.at[j] * rstd * (factor.at[j] + constants.weight_offset);
    reinterpret_cast<Vector<T>*>(y + division.head)[at] = convert<T>(wide);
  });
#pragma unroll 1
  for (int e = first; e < division.edges; e += step) {
    const long long at = division.edge(e);
    y[at] = convert<T>(convert<Acc>(x[at]) * rstd * (convert<Acc>(weight[at]) + constants.weight_offset));
  }
}

// All rows and all arguments. Packs are vectors where all rows and parameters are aligned, else single elements.
template <class T, int kWidth>
__device__ void rms_norm_fwd_any(const RmsNormFwdParams& p) {
  using Acc = Accumulator<T>;
  using Index = Select<kWidth == 1, long long, int>;
  using Packed = Pack<T, kWidth>;
  constexpr int kUnroll = kWidth == 1 ? 4 : 2;
  extern __shared__ uint4 shared[];
  CUOPS_TEAM(Acc, 1, team);
  if (p.overlaps) wait_for_previous();
  const long long row = team.index;
  auto start_of = [&](const Rows& rows) { return reinterpret_cast<Packed*>(static_cast<T*>(rows.data) + offset_of(rows, row)); };
  const Index first = team.first(), step = team.threads();
  Chunks<T, kWidth, Index> chunks{start_of(p.x),
                                  reinterpret_cast<Packed*>(shared) + threadIdx.x,
                                  first,
                                  step,
                                  static_cast<Index>(p.n / kWidth),
                                  p.chunks,
                                  p.chunk,
                                  p.first_chunk};
  Acc sum = 0;
  auto add_squares = [&](const Packed& v, Acc scale) {
    const auto wide = convert<Acc>(v);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += wide.at[j] * scale * (wide.at[j] * scale);
  };
  const char* residual = static_cast<const char*>(p.residual.data);
  if (residual) residual += offset_of(p.residual, row) * size_of(p.residual_dtype);
  Packed* const h = start_of(p.h);
  chunks.template for_each<kUnroll>([&](Index at, Packed& v) {
    if (p.residual.data) {
      auto wide = convert<Acc>(v);
      const auto other = p.residual_dtype == kDTypeOf<T> ? convert<Acc>(reinterpret_cast<const Packed*>(residual)[at])
                                                         : load_as<Acc, kWidth>(p.residual_dtype, residual, at);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) wide.at[j] += other.at[j];
      h[at] = v = convert<T>(wide);
    }
    add_squares(v, 1);
  });
  if (p.residual.data) chunks.row = h;  // what is normalised
  sum = team.reduce(sum, Sum());
  const auto& constants = scalars<Acc>(p);
  const Acc mean_eps = mean_plus_eps(sum, constants, constants.eps);
  Acc scale = 1;
  if (__builtin_expect(!(sum <= Range<Acc>::kLargest && mean_eps >= Range<Acc>::kSmallest), 0)) {  // as in careful_row
    Acc largest = constants.sqrt_eps;
#pragma unroll 1
    for (bool scaled = false;; scaled = true) {
      sum = 0;
      chunks.template for_each<1>([&](Index, const Packed& v) {
        const auto wide = convert<Acc>(v);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) largest = Max()(largest, abs(wide.at[j]));
        add_squares(v, scale);
      });
      sum = team.reduce(scaled ? sum : largest, [&](Acc a, Acc b) { return scaled ? a + b : Max()(a, b); });
      if (scaled) break;
      scale = isinf(sum) ? Acc(1) : power_of_two_to_one(sum);
    }
  }
  const Acc rstd = rstd_of(sum, constants, scale);
  if (p.rstd && first == 0) static_cast<Acc*>(p.rstd)[row] = scale * rstd;

  auto parameter = [&](const void* data, DType dtype, Index at) {
    if (dtype == kDTypeOf<T>) return convert<Acc>(load_constant(static_cast<const Packed*>(data) + at));
    if (dtype == kDTypeOf<Acc>) return load_constant(static_cast<const Pack<Acc, kWidth>*>(data) + at);
    return load_as<Acc, kWidth>(dtype, data, at);
  };
  void* const y = static_cast<char*>(p.y.data) + offset_of(p.y, row) * size_of(p.y_dtype);
  chunks.template for_each<kUnroll>([&](Index at, const Packed& v) {
    auto wide = convert<Acc>(v);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) wide.at[j] = wide.at[j] * scale * rstd;
    if (p.weight) {
      const auto factor = parameter(p.weight, p.weight_dtype, at);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) wide.at[j] *= factor.at[j] + constants.weight_offset;
    }
    if (p.bias) {
      const auto term = parameter(p.bias, p.bias_dtype, at);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) wide.at[j] += term.at[j];
    }
    if (p.y_dtype == kDTypeOf<T>) {
      static_cast<Packed*>(y)[at] = convert<T>(wide);
    } else {
      store_as(p.y_dtype, y, at, wide);
    }
  });
}

}  // namespace cuops

// Instances, as rms_norm_plan.cc asks for them.
#define RMS_NORM_FWD(name, T)                                                                                     \
  extern "C" __global__ void __launch_bounds__(1024) rms_norm_fwd_##name##_any(cuops::RmsNormFwdParams p) {       \
    cuops::rms_norm_fwd_any<T, 1>(p);                                                                             \
  }                                                                                                               \
  extern "C" __global__ void __launch_bounds__(512, 2) rms_norm_fwd_##name##_vectors(cuops::RmsNormFwdParams p) { \
    cuops::rms_norm_fwd_any<T, cuops::kVectorWidth<T>>(p);                                                        \
  }
RMS_NORM_FWD(f64, double)
RMS_NORM_FWD(f32, float)
RMS_NORM_FWD(f16, __half)
RMS_NORM_FWD(bf16, __nv_bfloat16)

#if CUOPS_TUNED
#define RMS_NORM_FWD_LONG(name, T)                                                                             \
  extern "C" __global__ void __launch_bounds__(512, 3) rms_norm_fwd_##name##_long(cuops::RmsNormFwdParams p) { \
    cuops::rms_norm_fwd_long<T>(p);                                                                            \
  }
RMS_NORM_FWD_LONG(f32, float)
RMS_NORM_FWD_LONG(f16, __half)
RMS_NORM_FWD_LONG(bf16, __nv_bfloat16)
#endif
