// The gradient of RMSNorm on the device. With xhat = h * rstd and g = dy * (weight + weight_offset):
//   dx = rstd * (g - xhat * mean(g * xhat)) + dh,   dweight = sum over rows of dy * xhat,   dbias = sum over rows of dy.
// Here all that is not the common case, in one pass over h and dy; rms_norm_bwd_held.cu has the common case, and
// rms_norm_bwd_any.cu the way in two.
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
// posts its sums of one row before it finishes the row before, so that neither memory nor the other threads are waited for.
template <class T, int kResident, int kStages, int kThreads>
__device__ void rms_norm_bwd(const RmsNormBwdParams& p) {
  using Acc = Accumulator<T>;
  using Packed = Vector<T>;
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
  Packed* const mine = reinterpret_cast<Packed*>(shared) + thread;
  auto slot = [&](int stage, int array, int i) { return mine + ((stage * 2 + array) * kResident + i) * kThreads; };
  auto vectors = [](const Rows& rows, long long row) {
    return reinterpret_cast<Packed*>(static_cast<T*>(rows.data) + row * rows.stride);
  };
  auto copy_ahead = [&](long long row, int stage) {
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      if (row >= p.rows || !exists(i)) continue;
      copy_async(slot(stage, 0, i), vectors(p.h, row) + first + i * step);
      copy_async(slot(stage, 1, i), vectors(p.dy, row) + first + i * step);
    }
    commit_copies();
  };
  auto read = [&](int stage, int array, int i, long long row) {
    return row < p.rows && exists(i) ? convert<Acc>(load(slot(stage, array, i))) : Pack<Acc, kWidth>{};
  };

  // Teams of a block have neighbouring rows, which share pages of memory.
  const long long teams = static_cast<long long>(gridDim.x / mail.blocks) * blockDim.y;
  const long long begin = static_cast<long long>(mail.index) * blockDim.y + threadIdx.y;
  const long long ahead = threadIdx.y % max(32 / blockDim.x, 1);  // of the first row of this warp
#pragma unroll
  for (int s = 0; s < kStages; ++s) copy_ahead(begin + s * teams, s);

  // The weight of this thread's columns as the sums want it.
  Pack<Acc, kWidth>* const weight = reinterpret_cast<Pack<Acc, kWidth>*>(shared + kStages * 2 * kResident * kThreads) + thread;
#pragma unroll 4
  for (int j = 0; j < kResident * kWidth; ++j) {
    const int at = min((first + j / kWidth * step) * kWidth + j % kWidth, n - 1);
    weight[j / kWidth * kThreads].at[j % kWidth] = weight_of<T>(p, at);
  }

  Pack<Acc, kWidth> dweight[kResident] = {}, dbias[kResident] = {};
  int stage = -1;
#pragma unroll 1
  for (long long row = begin - teams; row - ahead < p.rows; row += teams) {  // before the first row, its sums
    const int next = stage + 1 == kStages ? 0 : stage + 1;
    wait_for_copies<kStages - 2>();
    const bool more = row - ahead + teams < p.rows;
    Acc sums[2] = {};  // of h^2, of g h
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      if (!more || !exists(i)) continue;
      const auto h = read(next, 0, i, row + teams), dy = read(next, 1, i, row + teams);
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
    if (mail.any(!is_ordinary(mean_eps) && row < p.rows)) {
      // As in the forward: a power of two brings h near 1, here where it waits in shared memory.
#pragma unroll 1
      for (bool scaled = false;; scaled = true) {
        sums[0] = scaled ? Acc(0) : constants.sqrt_eps;
        sums[1] = 0;
#pragma unroll 1
        for (int k = 0; k < kResident * kWidth; ++k) {
          const int i = k / kWidth, column = (first + i * step) * kWidth + k % kWidth;
          if (column >= n || row >= p.rows) continue;
          const Acc h = convert<Acc>(slot(stage, 0, i)->at[k % kWidth]);
          sums[0] = scaled ? sums[0] + h * h : Max()(sums[0], abs(h));
          sums[1] += convert<Acc>(slot(stage, 1, i)->at[k % kWidth]) * weight_of<T>(p, column) * h;
        }
        mail.exchange(sums, scaled);
        if (scaled) break;
        scale = rounded_scale<T>(sums[0]);
#pragma unroll 1
        for (int k = 0; k < kResident * kWidth; ++k) {
          T* const h = slot(stage, 0, k / kWidth)->at + k % kWidth;
          *h = convert<T>(convert<Acc>(*h) * scale);
        }
      }
    }
    const Acc rstd = rstd_of(sums[0], constants, scale), slope = -(rstd * (sums[1] * constants.inverse_n)) * rstd * rstd;

#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      const bool valid = row < p.rows && exists(i);
      const int at = first + i * step;
      const auto h = read(stage, 0, i, row), dy = read(stage, 1, i, row);
      const auto factor = weight[i * kThreads];
      Pack<Acc, kWidth> dx;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const Acc scaled = dy.at[j] * rstd;
        dx.at[j] = slope * h.at[j] + scaled * factor.at[j];
        dweight[i].at[j] += scaled * h.at[j];
        dbias[i].at[j] += dy.at[j];
      }
      if (scale != 1) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) dx.at[j] *= scale;
      }
      if (!valid) continue;
      if (p.dh.data) {
        const auto dh = convert<Acc>(load(vectors(p.dh, row) + at));
#pragma unroll
        for (int j = 0; j < kWidth; ++j) dx.at[j] += dh.at[j];
      }
      store(vectors(p.dx, row) + at, convert<T>(dx));
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
#define RMS_NORM_BWD(name, T)                                                                                  \
  extern "C" __global__ void __launch_bounds__(512) rms_norm_bwd_##name##_general(cuops::RmsNormBwdParams p) { \
    cuops::rms_norm_bwd<T, 2, 3, 512>(p);                                                                      \
  }
RMS_NORM_BWD(f32, float)
RMS_NORM_BWD(f16, __half)
RMS_NORM_BWD(bf16, __nv_bfloat16)
