// The gradient of RMSNorm in two passes over h and dy, and the sums over rows that both ways end with.
#include "device/overlap.cuh"
#include "device/reduce.cuh"
#include "device/row.cuh"
#include "device/row_sums.cuh"
#include "rms_norm.h"
#include "side_by_side.cuh"
#include "weight.cuh"

namespace cuops {

// The weight of a pack of columns, as weight_of has it of one; where it comes as a pack, that is on its way before.
template <int kWidth>
__device__ bool comes_as_pack(const RmsNormBwdParams& p) {
  return kWidth > 1 && p.weight && !p.weight_wide;
}
template <class T, int kWidth>
__device__ Fetched<T, kWidth> fetch_weights(const RmsNormBwdParams& p, long long at) {
  return comes_as_pack<kWidth>(p) ? fetch<T, kWidth>(static_cast<const T*>(p.weight) + at * kWidth) : Fetched<T, kWidth>{};
}
template <class T, int kWidth>
__device__ Pack<Accumulator<T>, kWidth> weights_of(const RmsNormBwdParams& p, long long at, const Fetched<T, kWidth>& fetched) {
  using Acc = Accumulator<T>;
  if (comes_as_pack<kWidth>(p)) {
    auto weight = convert<Acc>(fetched.pack());
#pragma unroll
    for (int j = 0; j < kWidth; ++j) weight.at[j] += scalars<Acc>(p).weight_offset;
    return weight;
  }
  Pack<Acc, kWidth> weight;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) weight.at[j] = weight_of<T>(p, at * kWidth + j);
  return weight;
}

// Any rows on any GPU, in two kernels, which both read h and dy: for rows too wide for the kernel in one pass, and GPUs without
// tuned kernels. Packs are vectors where all is aligned, else single elements. A part of a warp, a block or a cluster finds out
// about one row what its gradient needs.
template <class T, int kWidth>
__device__ void rms_norm_bwd_rows(const RmsNormBwdParams& p) {
  using Acc = Accumulator<T>;
  constexpr int kBatch = kWidth > 1 ? 2 : 4;  // packs of a thread on their way
  CUOPS_TEAM(Acc, 2, team);
  wait_for_previous();
  // Beyond the last row, threads do what those of the last row do.
  const long long wanted = static_cast<long long>(team.index) * blockDim.y + threadIdx.y, row = min(wanted, p.rows - 1);
  const long long packs = p.n / kWidth;
  const auto *const h = packs_of<kWidth, T>(p.h, row), *const dy = packs_of<kWidth, T>(p.dy, row);
  const auto& constants = scalars<Acc>(p);
  Acc sums[2], scale = 1;
  bool ordinary = true;  // it may share a warp with rows that are not
#pragma unroll 1
  for (int pass = 0;; ++pass) {  // of h^2 and g h, the largest h, of both with h times a power of two
    sums[0] = pass == 1 ? constants.sqrt_eps : Acc(0);
    sums[1] = 0;
#pragma unroll 1
    for (long long first = team.first(); first < packs; first += kBatch * team.threads()) {
      Fetched<T, kWidth> h_of[kBatch], dy_of[kBatch], weight_of_pack[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const long long i = first + k * team.threads();
        if (i >= packs) break;
        h_of[k] = fetch<T, kWidth>(h + i);
        dy_of[k] = fetch<T, kWidth>(dy + i);
        weight_of_pack[k] = fetch_weights<T, kWidth>(p, i);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const long long i = first + k * team.threads();
        if (i >= packs) break;
        const auto wide = convert<Acc>(h_of[k].pack()), grad = convert<Acc>(dy_of[k].pack());
        const auto weight = weights_of<T, kWidth>(p, i, weight_of_pack[k]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const Acc v = wide.at[j] * scale;
          sums[0] = pass == 1 ? Max()(sums[0], abs(v)) : sums[0] + v * v;
          sums[1] += grad.at[j] * weight.at[j] * v;
        }
      }
    }
    team.reduce(sums, [&](Acc a, Acc b) { return pass == 1 ? Max()(a, b) : a + b; });
    if (pass == 2) break;
    if (pass == 1) {
      scale = ordinary || isinf(sums[0]) ? Acc(1) : power_of_two_to_one(sums[0]);
    } else {
      ordinary = is_ordinary(mean_plus_eps(sums[0], constants, constants.eps), sums[1]);
      if (!team.any(!ordinary)) break;
    }
  }
  if (team.first() != 0 || row != wanted) return;
  const Acc rstd = rstd_of(sums[0], constants, scale);
  Acc* const found = static_cast<Acc*>(p.found) + 3 * row;
  found[0] = scale;
  found[1] = rstd;
  found[2] = sums[1] * constants.inverse_n;
}

// A thread has one pack of columns; rows lie side by side in a block of up to 256 threads, and the blocks of these columns take
// turns.
template <class T, int kWidth>
__device__ void rms_norm_bwd_columns(const RmsNormBwdParams& p) {
  using Acc = Accumulator<T>;
  const long long packs = p.n / kWidth, across = (packs + blockDim.x - 1) / blockDim.x;
  const long long group = blockIdx.x / across, groups = gridDim.x / across;
  const long long at = (blockIdx.x - group * across) * blockDim.x + threadIdx.x;
  const bool exists = at < packs;
  Pack<Acc, kWidth> weight = {}, dweight = {}, dbias = {};
  if (exists) weight = weights_of<T, kWidth>(p, at, fetch_weights<T, kWidth>(p, at));
  wait_for_previous();
  // Several rows are on their way at a time: what is stored of one would keep the loads of the next behind it.
  constexpr int kRows = 4;
  const long long step = groups * blockDim.y;
#pragma unroll 1
  for (long long first = group * blockDim.y + threadIdx.y; exists && first < p.rows; first += kRows * step) {
    Fetched<T, kWidth> h_of[kRows], dy_of[kRows];
    Acc found[kRows][3] = {};
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const long long row = first + k * step;
      if (row >= p.rows) break;
      h_of[k] = fetch<T, kWidth>(packs_of<kWidth, T>(p.h, row) + at);
      dy_of[k] = fetch<T, kWidth>(packs_of<kWidth, T>(p.dy, row) + at);
#pragma unroll
      for (int i = 0; i < 3; ++i) found[k][i] = static_cast<const Acc*>(p.found)[3 * row + i];
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const long long row = first + k * step;
      if (row >= p.rows) break;
      auto dx = gradient_of(found[k], convert<Acc>(h_of[k].pack()), convert<Acc>(dy_of[k].pack()), weight, dweight, dbias);
      if (p.dh.data) {
        const auto dh = convert<Acc>(load_pack<T, kWidth>(packs_of<kWidth, T>(p.dh, row) + at));
#pragma unroll
        for (int j = 0; j < kWidth; ++j) dx.at[j] += dh.at[j];
      }
      store_pack(packs_of<kWidth, T>(p.dx, row) + at, convert<T>(dx));
    }
  }
  add_up_side_by_side<false>(p, dweight, dbias, at, 0, blockDim.x, group);
}

// Adds up the columns of a matrix of partial sums: a thread has four neighbouring columns of every blockDim.y-th row.
template <class Acc>
__device__ void sum_rows(const SumRowsParams& p) {
  using Four = Pack<Acc, 4>;
  constexpr int kAtOnce = 6;  // loads in flight
  __shared__ Four shared[512];
  const long long column = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * 4, stride = sums_stride(p.n);
  const Acc* const partial = static_cast<const Acc*>(p.partial) + column;
  wait_for_previous();
  Four sum = {};
  auto add_up = [&](auto load) {
#pragma unroll 1
    for (int row = threadIdx.y; row < p.rows; row += kAtOnce * blockDim.y) {
      Four more[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int at = row + k * blockDim.y;
        more[k] = at < p.rows ? load(partial + at * stride) : Four{};
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum.at[j] += more[k].at[j];
      }
    }
  };
  const int there = static_cast<int>(min(p.n - column, 4LL));
  if (there == 4) {
    add_up([](const Acc* from) { return *reinterpret_cast<const Four*>(from); });
  } else if (there > 0) {  // nobody has written behind the last column
    add_up([&](const Acc* from) {
      Four some = {};
#pragma unroll
      for (int j = 0; j < 3; ++j) {
        if (j < there) some.at[j] = from[j];
      }
      return some;
    });
  }
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, columns = 4 * blockDim.x;
  shared[thread] = sum;
  __syncthreads();
#pragma unroll 1
  for (int c = thread; c < columns; c += blockDim.x * blockDim.y) {
    Acc total = 0;
#pragma unroll 8
    for (int y = 0; y < blockDim.y; ++y) total += reinterpret_cast<const Acc*>(shared)[y * columns + c];
    const long long at = static_cast<long long>(blockIdx.x) * columns + c;
    if (at >= p.n) return;
    store_result(p.dtype, p.sum, at, total);
  }
}

}  // namespace cuops

extern "C" __global__ void rms_norm_sum_rows_f32(cuops::SumRowsParams p) { cuops::sum_rows<float>(p); }
extern "C" __global__ void rms_norm_sum_rows_f64(cuops::SumRowsParams p) { cuops::sum_rows<double>(p); }

// Instances, as rms_norm_bwd_plan.cc asks for them.
#define RMS_NORM_BWD_IN_TWO(name, T, suffix, kWidth)                                                                   \
  extern "C" __global__ void __launch_bounds__(1024) rms_norm_bwd_##name##_rows##suffix(cuops::RmsNormBwdParams p) {   \
    cuops::rms_norm_bwd_rows<T, kWidth>(p);                                                                            \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256) rms_norm_bwd_##name##_columns##suffix(cuops::RmsNormBwdParams p) { \
    cuops::rms_norm_bwd_columns<T, kWidth>(p);                                                                         \
  }
#define RMS_NORM_BWD_IN_TWO_OF(name, T) \
  RMS_NORM_BWD_IN_TWO(name, T, _any, 1) \
  RMS_NORM_BWD_IN_TWO(name, T, _vectors, cuops::kVectorWidth<T>)
RMS_NORM_BWD_IN_TWO(f64, double, _any, 1)
RMS_NORM_BWD_IN_TWO_OF(f32, float)
RMS_NORM_BWD_IN_TWO_OF(f16, __half)
RMS_NORM_BWD_IN_TWO_OF(bf16, __nv_bfloat16)
