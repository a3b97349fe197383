// The gradient of RMSNorm on the device. With xhat = h * rstd and g = dy * (weight + weight_offset):
//   dx = rstd * (g - xhat * mean(g * xhat)) + dh,   dweight = sum over rows of dy * xhat,   dbias = sum over rows of dy.
// Here what rms_norm_bwd_held.cuh, which has the common case and the like, leaves of aligned rows, in one pass over h and dy;
// rms_norm_bwd_any.cu has the way in two.
#include "device/overlap.cuh"
#include "device/row.cuh"
#include "device/row_sums.cuh"
#include "device/tuned.cuh"
#include "mailbox.cuh"
#include "rms_norm.h"
#include "rstd.cuh"
#include "weight.cuh"

CUOPS_ONLY_FOR(80, 90)

namespace cuops {

// Each thread of a team has the same columns in every row, because it adds up over rows for dweight and dbias: kResident vectors,
// a team's width apart. It copies its part of the next rows of h and dy to shared memory (asynchronously, kStages rows ahead), and
// posts its sums of one row before it finishes the row before, so that neither memory nor the other threads are waited for. Dy is
// the dtype of dy: that of h, or 16 bits beside float, which the gradient for x is then rounded to.
template <class T, class Dy, int kResident, int kStages, int kThreads>
__device__ void rms_norm_bwd(const RmsNormBwdParams& p) {
  using Acc = Accumulator<T>;
  constexpr int kWidth = kVectorWidth<T>;
  extern __shared__ uint4 shared[];
  __shared__ MailboxMemory mail_memory;
  wait_for_previous(false);
  Mailbox mail(mail_memory);
  const auto& constants = scalars<Acc>(p);
  const int n = static_cast<int>(p.n), packs = n / kWidth;
  const int first = mail.rank * blockDim.x + threadIdx.x, step = mail.blocks * blockDim.x;
  auto exists = [&](int i) { return first + i * step < packs; };

  // Shared memory: (row ahead, h or dy, i, thread).
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  auto slot = [&](int stage, int array, int i) { return shared + thread + ((stage * 2 + array) * kResident + i) * kThreads; };
  auto h_slot = [&](int stage, int i) { return reinterpret_cast<Pack<T, kWidth>*>(slot(stage, 0, i)); };
  auto dy_slot = [&](int stage, int i) { return reinterpret_cast<Pack<Dy, kWidth>*>(slot(stage, 1, i)); };
  auto copy_ahead = [&](long long row, int stage) {
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      if (row >= p.rows || !exists(i)) continue;
      copy_async(h_slot(stage, i), packs_of<kWidth, T>(p.h, row) + first + i * step);
      copy_async(dy_slot(stage, i), packs_of<kWidth, Dy>(p.dy, row) + first + i * step);
    }
    commit_copies();
  };
  auto read = [&](int i, long long row, const auto* from) {
    using U = typename Pointee<decltype(from->at + 0)>::type;
    return row < p.rows && exists(i) ? convert<Acc>(load_pack<U, kWidth>(from)) : Pack<Acc, kWidth>{};
  };

  // Teams of a block have neighbouring rows, which share pages of memory.
  const long long teams = static_cast<long long>(gridDim.x / mail.blocks) * blockDim.y;
  const long long begin = static_cast<long long>(mail.index) * blockDim.y + threadIdx.y;
  const long long ahead = threadIdx.y % max(32 / blockDim.x, 1);  // of the first row of this warp
#pragma unroll
  for (int s = 0; s < kStages; ++s) copy_ahead(begin + s * teams, s);

  // The weight of this thread's columns as the sums want it.
  auto* const weight = reinterpret_cast<Pack<Acc, kWidth>*>(shared + kStages * 2 * kResident * kThreads) + thread;
#pragma unroll 4
  for (int j = 0; j < kResident * kWidth; ++j) {
    const int at = min((first + j / kWidth * step) * kWidth + j % kWidth, n - 1);
    weight[j / kWidth * kThreads].at[j % kWidth] = weight_of<T, Dy>(p, at);
  }

  Pack<Acc, kWidth> dweight[kResident] = {}, dbias[kResident] = {};
  int stage = -1;
#pragma unroll 1
  for (long long row = begin - teams; row - ahead < p.rows; row += teams) {  // before the first row, its sums
    const int next = stage + 1 == kStages ? 0 : stage + 1;
    wait_for_copies<kStages - 2>();
    const bool more = row - ahead + teams < p.rows;
    Pack<T, kWidth> dh[kResident] = {};
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      if (p.dh.data && stage >= 0 && row < p.rows && exists(i)) dh[i] = load(packs_of<kWidth, T>(p.dh, row) + first + i * step);
    }
    Acc sums[2] = {};  // of h^2, of g h
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      if (!more || !exists(i)) continue;
      const auto h = read(i, row + teams, h_slot(next, i)), dy = read(i, row + teams, dy_slot(next, i));
      const auto factor = weight[i * kThreads];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        sums[0] += h.at[j] * h.at[j];
        sums[1] += dy.at[j] * factor.at[j] * h.at[j];
      }
    }
    mail.post(sums, more);
    if (stage < 0) {
      stage = 0;
      continue;
    }
    mail.collect(sums);

    Acc scale = 1;
    const Acc mean_eps = mean_plus_eps(sums[0], constants, constants.eps);
    const bool careful = row < p.rows && !is_ordinary(mean_eps, sums[1]);
    if (mail.any(careful)) {
      // As in the forward: a power of two brings h near 1, here where it waits in shared memory.
#pragma unroll 1
      for (bool scaled = false;; scaled = true) {
        sums[0] = scaled ? Acc(0) : constants.sqrt_eps;
        sums[1] = 0;
#pragma unroll 1
        for (int k = 0; k < kResident * kWidth; ++k) {
          const int i = k / kWidth, column = (first + i * step) * kWidth + k % kWidth;
          if (column >= n || row >= p.rows) continue;
          const Acc h = convert<Acc>(h_slot(stage, i)->at[k % kWidth]);
          sums[0] = scaled ? sums[0] + h * h : Max()(sums[0], abs(h));
          sums[1] += convert<Acc>(dy_slot(stage, i)->at[k % kWidth]) * weight_of<T, Dy>(p, column) * h;
        }
        mail.exchange(sums, scaled);
        if (scaled) break;
        scale = careful ? rounded_scale<T>(sums[0]) : Acc(1);
#pragma unroll 1
        for (int k = 0; k < kResident * kWidth; ++k) {
          T* const h = h_slot(stage, k / kWidth)->at + k % kWidth;
          *h = convert<T>(convert<Acc>(*h) * scale);
        }
      }
    }
    const Acc rstd = rstd_of(sums[0], constants, scale), slope = rstd * (sums[1] * constants.inverse_n);  // of xhat

#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      const bool valid = row < p.rows && exists(i);
      const int at = first + i * step;
      const auto h = read(i, row, h_slot(stage, i)), dy = read(i, row, dy_slot(stage, i));
      const auto factor = weight[i * kThreads];
      Pack<Acc, kWidth> dx;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const Acc xhat = h.at[j] * rstd;
        dx.at[j] = rstd * (dy.at[j] * factor.at[j] - slope * xhat);
        dweight[i].at[j] += dy.at[j] * xhat;
        dbias[i].at[j] += dy.at[j];
      }
      if (scale != 1) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) dx.at[j] *= scale;
      }
      if (!valid) continue;
      if (p.dh.data) {
        const auto more = convert<Acc>(dh[i]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) dx.at[j] += more.at[j];
      }
      store_pack(packs_of<kWidth, T>(p.dx, row) + at, convert<T>(dx));
      if (!kSame<T, Dy> && p.rounded_dx.data) store_pack(packs_of<kWidth, Dy>(p.rounded_dx, row) + at, convert<Dy>(dx));
    }
    copy_ahead(row + kStages * teams, stage);
    stage = next;
  }

  // Teams side by side in a block add up in their order, and a block or cluster writes one row of partial sums.
  launch_dependents();
  const auto write_partial = [&](void* partial, const Pack<Acc, kWidth>(&sum)[kResident]) {
    if (!partial) return;
    const SumsTarget<T, Acc> target{partial, mail.index, n, false};
    const bool alone = blockDim.y == 1;
    Acc* const block = reinterpret_cast<Acc*>(shared) + threadIdx.y * n;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      const int column = (first + i * step) * kWidth;
      if (!exists(i)) continue;
      if (alone) {
        target.store(column, sum[i]);
      } else {
        *reinterpret_cast<Pack<Acc, kWidth>*>(block + column) = sum[i];
      }
    }
    if (alone) return;
    __syncthreads();
    const auto* const sums = reinterpret_cast<const Pack<Acc, 4>*>(shared);
#pragma unroll 1
    for (int at = thread; 4 * at < n; at += blockDim.x * blockDim.y)
      target.store_four(4 * at, sum_of_rows(sums + at, blockDim.y, n / 4));
  };
  write_partial(p.dweight, dweight);
  write_partial(p.dbias, dbias);
}

}  // namespace cuops

// Instances, as rms_norm_bwd_plan.cc asks for them.
#define RMS_NORM_BWD(name, T, suffix, Dy)                                                                                          \
  extern "C" __global__ void __launch_bounds__(cuops::kGeneralThreads) rms_norm_bwd_##name##_##suffix(cuops::RmsNormBwdParams p) { \
    cuops::rms_norm_bwd<T, Dy, cuops::kGeneralVectors, cuops::kGeneralStages, cuops::kGeneralThreads>(p);                          \
  }
RMS_NORM_BWD(f32, float, general, float)
RMS_NORM_BWD(f16, __half, general, __half)
RMS_NORM_BWD(bf16, __nv_bfloat16, general, __nv_bfloat16)
RMS_NORM_BWD(f32, float, general_dy_f16, __half)
RMS_NORM_BWD(f32, float, general_dy_bf16, __nv_bfloat16)
