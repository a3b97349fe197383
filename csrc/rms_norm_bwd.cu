// The gradient of RMSNorm on the device. With xhat = h * rstd and g = dy * (weight + weight_offset):
//   dx = rstd * (g - xhat * mean(g * xhat)) + dh,   dweight = sum over rows of dy * xhat,   dbias = sum over rows of dy.
#include "device/reduce.cuh"
#include "device/rstd.cuh"
#include "rms_norm.h"

namespace cuops {

// The columns of one thread, the same in every row, because it adds up over rows: kWidth neighbours, and the next ones `step`
// times as far. kWidth is a vector where all rows are aligned, else 1.
template <int kWidth>
struct Columns {
  int first, step, n;

  __device__ bool has(int i) const { return (first + i * step) * kWidth < n; }

  // Beyond the end, the last pack, for the caller to drop: cheaper than a choice at each load.
  template <class T>
  __device__ Pack<T, kWidth> load(const T* data, int i) const {
    return *reinterpret_cast<const Pack<T, kWidth>*>(data + min((first + i * step) * kWidth, n - kWidth));
  }
  template <class T>
  __device__ void store(T* data, int i, const Pack<T, kWidth>& v) const {
    if (has(i)) *reinterpret_cast<Pack<T, kWidth>*>(data + (first + i * step) * kWidth) = v;
  }
};

// Each team takes every n-th row and keeps its sums for dweight and dbias in registers, so that every run adds in the same
// order. Each thread holds kResident packs of h
// and of dy, and while they are worked on, those of its next row are on their way.
template <class T, int kResident, int kWidth, bool kBias>
__device__ void rms_norm_bwd(const RmsNormBwdParams& p) {
  using Acc = Accumulator<T>;
  CUOPS_TEAM(Acc, 2, team);
  const auto& constants = scalars<Acc>(p);
  const long long teams = static_cast<long long>(gridDim.x / team.blocks) * blockDim.y;
  const Columns<kWidth> columns{static_cast<int>(team.first()), static_cast<int>(team.threads()), static_cast<int>(p.n)};

  Pack<Acc, kWidth> dweight[kResident] = {}, dbias[kBias ? kResident : 1] = {};
  // The weight as float32 where registers allow, else again for each row.
  constexpr bool kHoldWeight = kResident * kWidth <= 16;
  auto load_weight = [&](int i) {
    Pack<Acc, kWidth> weight;
    if (!p.weight) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) weight.at[j] = 1;
      return weight;
    }
    if (kSame<T, Acc> || !p.weight_wide) {
      weight = convert<Acc>(columns.load(static_cast<const T*>(p.weight), i));
    } else {
      weight = columns.load(static_cast<const Acc*>(p.weight), i);
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) weight.at[j] += constants.weight_offset;
    return weight;
  };
  Pack<Acc, kWidth> held_weight[kHoldWeight ? kResident : 1] = {};
#pragma unroll
  for (int i = 0; kHoldWeight && i < kResident; ++i) held_weight[i] = load_weight(i);
  auto weight_at = [&](int i) { return kHoldWeight ? held_weight[kHoldWeight ? i : 0] : load_weight(i); };

  Pack<T, kWidth> next_h[kResident], next_dy[kResident];
  auto load_next = [&](long long wanted) {
    const long long row = min(wanted, p.rows - 1);
    const T* const h_row = static_cast<const T*>(p.h.data) + row * p.h.stride;
    const T* const dy_row = static_cast<const T*>(p.dy.data) + row * p.dy.stride;
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      if (sizeof(T) < 4 || (wanted < p.rows && columns.has(i))) {  // wider elements choose for free
        next_h[i] = columns.load(h_row, i);
        next_dy[i] = columns.load(dy_row, i);
      } else {
        next_h[i] = next_dy[i] = Pack<T, kWidth>{};
      }
    }
  };

  load_next(static_cast<long long>(team.index) * blockDim.y + threadIdx.y);
  // The rows of a block go in step, also those beyond the end.
  for (long long row = static_cast<long long>(team.index) * blockDim.y + threadIdx.y; row - threadIdx.y < p.rows; row += teams) {
    Pack<T, kWidth> h[kResident], dy[kResident];
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      h[i] = next_h[i];
      dy[i] = next_dy[i];
    }
    load_next(row + teams);
    Acc sums[2], scale = 1, mean_eps;
#pragma unroll 1
    for (bool careful = false;; careful = true) {
      sums[0] = sums[1] = 0;  // of h^2, of g h
#pragma unroll
      for (int i = 0; i < kResident; ++i) {
        const auto wide = convert<Acc>(h[i]), grad = convert<Acc>(dy[i]), weight = weight_at(i);
        Acc squares = 0, products = 0;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          squares += wide.at[j] * wide.at[j];
          products += grad.at[j] * weight.at[j] * wide.at[j];
        }
        sums[0] += columns.has(i) ? squares : Acc(0);
        sums[1] += columns.has(i) ? products : Acc(0);
      }
      team.reduce(sums, Sum());
      mean_eps = isinf(sums[0]) ? sums[0] : mean_plus_eps(sums[0], constants, constants.eps * scale * scale);
      if (careful || !team.any(!(sums[0] <= Range<Acc>::kLargest && mean_eps >= Range<Acc>::kSmallest))) break;
      // As careful_rstd of the forward: a power of two brings h near 1; from here on h is the scaled one.
      Acc largest = constants.sqrt_eps;
#pragma unroll
      for (int i = 0; i < kResident; ++i) {
        const auto wide = convert<Acc>(h[i]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) largest = Max()(largest, abs(wide.at[j]));  // of repeated elements too
      }
      largest = team.reduce(largest, Max());
      scale = isinf(largest) ? Acc(1) : power_of_two_to_one(largest);
#pragma unroll
      for (int i = 0; i < kResident; ++i) {
        auto wide = convert<Acc>(h[i]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) wide.at[j] *= scale;
        h[i] = convert<T>(wide);
      }
    }
    const Acc rstd = mean_eps == Acc(0) || isinf(mean_eps) ? Acc(0) : rsqrt_rn(mean_eps);
    const Acc outer = rstd * scale, slope = outer * rstd * (sums[1] * constants.inverse_n);

#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      if (row >= p.rows) break;
      const auto wide = convert<Acc>(h[i]), grad = convert<Acc>(dy[i]), weight = weight_at(i);
      Pack<Acc, kWidth> dx;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const Acc normed = wide.at[j] * rstd;
        dx.at[j] = outer * (grad.at[j] * weight.at[j]) - normed * slope;
        dweight[i].at[j] += grad.at[j] * normed;
        if constexpr (kBias) dbias[i].at[j] += grad.at[j];
      }
      if (p.dh.data) {
        const auto dh = convert<Acc>(columns.load(static_cast<const T*>(p.dh.data) + row * p.dh.stride, i));
#pragma unroll
        for (int j = 0; j < kWidth; ++j) dx.at[j] += dh.at[j];
      }
      columns.store(static_cast<T*>(p.dx.data) + row * p.dx.stride, i, convert<T>(dx));
    }
  }

  // Rows side by side in a block add up in their order, and a block writes one row of partial sums.
  auto write_partial = [&](void* partial, Pack<Acc, kWidth>(&sum)[kResident]) {
    Acc* const to = static_cast<Acc*>(partial) + team.index * p.n;
    for (unsigned turn = 0; turn < blockDim.y; ++turn) {
      if (threadIdx.y == turn) {
#pragma unroll
        for (int i = 0; i < kResident; ++i) {
          if (turn > 0) {
            const auto before = columns.load(static_cast<const Acc*>(to), i);
#pragma unroll
            for (int j = 0; j < kWidth; ++j) sum[i].at[j] += before.at[j];
          }
          columns.store(to, i, sum[i]);
        }
      }
      if (blockDim.y > 1) __syncthreads();
    }
  };
  if (p.dweight) write_partial(p.dweight, dweight);
  if constexpr (kBias) {
    if (p.dbias) write_partial(p.dbias, dbias);
  }
}

// Adds up the columns of a matrix of partial sums: blocks of 32 columns by blockDim.y rows at a time.
template <class Acc>
__device__ void sum_rows(const SumRowsParams& p) {
  __shared__ Acc shared[16][33];
  const long long column = static_cast<long long>(blockIdx.x) * 32 + threadIdx.x;
  const Acc* const partial = static_cast<const Acc*>(p.partial) + column;
  Acc sum = 0;
  if (column < p.n) {
#pragma unroll 8
    for (long long row = threadIdx.y; row < p.rows; row += blockDim.y) sum += partial[row * p.n];
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || column >= p.n) return;
  for (unsigned i = 1; i < blockDim.y; ++i) sum += shared[i][threadIdx.x];
  switch (p.dtype) {
    case kFloat64: static_cast<double*>(p.sum)[column] = sum; return;
    case kFloat32: static_cast<float*>(p.sum)[column] = sum; return;
    case kFloat16: static_cast<__half*>(p.sum)[column] = convert<__half>(static_cast<float>(sum)); return;
    case kBFloat16: static_cast<__nv_bfloat16*>(p.sum)[column] = convert<__nv_bfloat16>(static_cast<float>(sum)); return;
  }
}

}  // namespace cuops

extern "C" __global__ void sum_rows_f32(cuops::SumRowsParams p) { cuops::sum_rows<float>(p); }
extern "C" __global__ void sum_rows_f64(cuops::SumRowsParams p) { cuops::sum_rows<double>(p); }

#define RMS_NORM_BWD(name, T, kResident, layout, kWidth, bias, kBias)                 \
  extern "C" __global__ void __launch_bounds__(512)                                   \
      rms_norm_bwd_##name##_##kResident##_##layout##bias(cuops::RmsNormBwdParams p) { \
    cuops::rms_norm_bwd<T, kResident, kWidth, kBias>(p);                              \
  }

// Instances, as plan_bwd in rms_norm_bwd.cc asks for them.
#define RMS_NORM_BWD_OF(name, T)                                         \
  RMS_NORM_BWD(name, T, 2, aligned, cuops::kVectorWidth<T>, _bias, true) \
  RMS_NORM_BWD(name, T, 8, unaligned, 1, _bias, true)
RMS_NORM_BWD_OF(f64, double)
RMS_NORM_BWD_OF(f32, float)
RMS_NORM_BWD_OF(f16, __half)
RMS_NORM_BWD_OF(bf16, __nv_bfloat16)

#if __CUDA_ARCH__ >= 800
RMS_NORM_BWD(f32, float, 4, aligned, 4, , false)
RMS_NORM_BWD(f32, float, 2, aligned, 4, , false)
RMS_NORM_BWD(f16, __half, 2, aligned, 8, , false)
RMS_NORM_BWD(f16, __half, 4, aligned, 8, , false)
RMS_NORM_BWD(bf16, __nv_bfloat16, 2, aligned, 8, , false)
RMS_NORM_BWD(bf16, __nv_bfloat16, 4, aligned, 8, , false)
#endif
