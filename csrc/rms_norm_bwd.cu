// The gradient of RMSNorm on the device. With xhat = h * rstd and g = dy * (weight + weight_offset):
//   dx = rstd * (g - xhat * mean(g * xhat)) + dh,   dweight = sum over rows of dy * xhat,   dbias = sum over rows of dy.
// Here all that is not the common case, in one pass over h and dy; rms_norm_bwd_held.cu has the common case, and
// rms_norm_bwd_any.cu the way in two.
#include "device/mailbox.cuh"
#include "device/overlap.cuh"
#include "device/row.cuh"
#include "device/rstd.cuh"
#include "device/tuned.cuh"
#include "device/weight.cuh"
#include "rms_norm.h"

namespace cuops {

// Stores pack `at` of a row that starts anywhere: each lane but the first of its group completes an aligned window with the end
// of its neighbour's pack; the rest goes element by element. All lanes come here; n is 0 for those that have nothing to store.
template <class T, int kWidth>
__device__ void store_shifted(T* row, int at, int n, const Pack<T, kWidth>& v, int lane, int group) {
  const int phase = static_cast<int>(reinterpret_cast<unsigned long long>(row) & 15) / static_cast<int>(sizeof(T));
  alignas(16) unsigned before[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) before[j] = __shfl_up_sync(0xffffffffu, reinterpret_cast<const unsigned*>(&v)[j], 1);
  const int start = at * kWidth - phase;  // of the aligned window
  const bool own = (phase == 0 || lane > 0) && start + kWidth <= n;
  const bool next = lane < group - 1 && start + 2 * kWidth <= n;
  if (own) {
    const auto window =
        shifted(*reinterpret_cast<const Pack<T, kWidth>*>(before), v, (kWidth - phase) % kWidth * static_cast<int>(sizeof(T)));
    store(reinterpret_cast<Pack<T, kWidth>*>(row + start), phase == 0 ? v : window);
  }
  if (own && (next || phase == 0)) return;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    if (at * kWidth + j < n && (j < kWidth - phase ? !own : !next)) row[at * kWidth + j] = v.at[j];
  }
}

// Copies an aligned window, of which `bytes` are the row's. The last of the array goes by elements: it may be the memory's end.
template <class Packed>
__device__ void copy_window(Packed* shared, const char* from, int bytes, const char* end) {
  const auto* const window = reinterpret_cast<const Packed*>(from);
  if (from + 16 <= end) {
    copy_async(shared, window, min(bytes, 16));
  } else {
#pragma unroll 1
    for (int j = 0; j * static_cast<int>(sizeof(window->at[0])) < bytes; ++j) shared->at[j] = window->at[j];
  }
}

// Each thread of a team has the same columns in every row, because it adds up over rows for dweight and dbias: kResident vectors,
// a team's width apart. It copies its part of the next rows of h and dy to shared memory (asynchronously, kStages rows ahead), and
// posts its sums of one row before it finishes the row before, so that neither memory nor the other threads are waited for.
// Rows may start anywhere and end within a vector: copies are of aligned windows, and each warp copies one more.
template <class T, int kResident, int kStages, int kThreads>
__device__ void rms_norm_bwd(const RmsNormBwdParams& p) {
  using Acc = Accumulator<T>;
  using Packed = Vector<T>;
  constexpr int kWidth = kVectorWidth<T>;
  extern __shared__ uint4 shared[];
  __shared__ MailboxMemory<Acc> mail_memory;
  wait_for_previous(false);
  Mailbox<Acc> mail(mail_memory);
  const auto& constants = scalars<Acc>(p);
  const int n = static_cast<int>(p.n), packs = (n + kWidth - 1) / kWidth;
  const int first = mail.rank * blockDim.x + threadIdx.x, step = mail.blocks * blockDim.x;
  const int group = min(blockDim.x, 32), lane = threadIdx.x % group;
  auto exists = [&](int i) { return first + i * step < packs; };

  // Shared memory: (row ahead, h or dy, i, thread), with a slot more for each warp or less.
  constexpr int kLine = kThreads + kThreads / 4;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  Packed* const mine = reinterpret_cast<Packed*>(shared) + thread + thread / group;
  auto slot = [&](int stage, int array, int i) { return mine + stage * (2 * kResident * kLine) + (array * kResident + i) * kLine; };
  auto start_of = [](const Rows& rows, long long row) { return static_cast<const T*>(rows.data) + row * rows.stride; };
  auto copy_row = [&](const Rows& rows, long long row, int stage, int array) {
    const T* const from = start_of(rows, row);
    const char* const windows = reinterpret_cast<const char*>(reinterpret_cast<unsigned long long>(from) & ~15ull);
    const char* const end = reinterpret_cast<const char*>(start_of(rows, p.rows - 1) + n);
    const int bytes = static_cast<int>(reinterpret_cast<const char*>(from + n) - windows);
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      const int at = (first + i * step) * 16;
      if (at < bytes) copy_window(slot(stage, array, i), windows + at, bytes - at, end);
      if (lane == group - 1 && at + 16 < bytes) copy_window(slot(stage, array, i) + 1, windows + at + 16, bytes - at - 16, end);
    }
  };
  auto copy_ahead = [&](long long row, int stage) {
    if (row < p.rows) {
      copy_row(p.h, row, stage, 0);
      copy_row(p.dy, row, stage, 1);
    }
    commit_copies();
  };
  auto phase_of = [&](const Rows& rows, long long row) {  // in bytes
    return static_cast<int>(reinterpret_cast<unsigned long long>(start_of(rows, row)) & 15);
  };
  auto element = [&](int stage, int array, int i, int j, const Rows& rows, long long row) {
    const int at = j + phase_of(rows, row) / static_cast<int>(sizeof(T));
    return slot(stage, array, i)[at / kWidth].at + at % kWidth;
  };
  auto read = [&](int stage, int array, int i, const Rows& rows, long long row) {
    const Packed* const at = slot(stage, array, i);
    auto wide = convert<Acc>(shifted(load(at), load(at + 1), phase_of(rows, row)));
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      wide.at[j] = row < p.rows && (first + i * step) * kWidth + j < n ? wide.at[j] : Acc(0);
    }
    return wide;
  };

  // Teams of a block have neighbouring rows, which share pages of memory.
  const long long teams = static_cast<long long>(gridDim.x / mail.blocks) * blockDim.y;
  const long long begin = static_cast<long long>(mail.index) * blockDim.y + threadIdx.y;
  const long long ahead = threadIdx.y % (32 / group);  // of the first row of this warp
#pragma unroll
  for (int s = 0; s < kStages; ++s) copy_ahead(begin + s * teams, s);

  // The weight of this thread's columns as the sums want it.
  Pack<Acc, kWidth>* const weight = reinterpret_cast<Pack<Acc, kWidth>*>(shared + kStages * 2 * kResident * kLine) + thread;
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
    __syncwarp();
    const bool more = row - ahead + teams < p.rows;
    Acc sums[2] = {};  // of h^2, of g h
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      if (!more || !exists(i)) continue;
      const auto h = read(next, 0, i, p.h, row + teams), dy = read(next, 1, i, p.dy, row + teams);
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
    // Also where the cube of rstd would leave the range.
    if (mail.any(!(mean_eps <= 1 / Range<Acc>::kSmallest && mean_eps >= Range<Acc>::kSmallest) && row < p.rows)) {
      // As in the forward: a power of two brings h near 1, here where it waits in shared memory.
#pragma unroll 1
      for (bool scaled = false;; scaled = true) {
        sums[0] = scaled ? Acc(0) : constants.sqrt_eps;
        sums[1] = 0;
#pragma unroll 1
        for (int k = 0; k < kResident * kWidth; ++k) {
          const int i = k / kWidth, column = (first + i * step) * kWidth + k % kWidth;
          if (column >= n || row >= p.rows) continue;
          const Acc h = convert<Acc>(*element(stage, 0, i, k % kWidth, p.h, row));
          sums[0] = scaled ? sums[0] + h * h : Max()(sums[0], abs(h));
          sums[1] += convert<Acc>(*element(stage, 1, i, k % kWidth, p.dy, row)) * weight_of<T>(p, column) * h;
        }
        mail.exchange(sums, scaled);
        if (scaled) break;
        scale = isinf(sums[0]) ? Acc(1) : power_of_two_to_one(sums[0]);
        __syncwarp();
        // With the windows between warps.
#pragma unroll 1
        for (int k = 0; k < (lane == group - 1 ? 2 : 1) * kResident * kWidth; ++k) {
          T* const h = slot(stage, 0, k / kWidth % kResident)[k / kWidth / kResident].at + k % kWidth;
          *h = convert<T>(convert<Acc>(*h) * scale);
        }
        __syncwarp();
      }
    }
    const Acc rstd = rstd_of(sums[0], constants, scale), slope = -(rstd * (sums[1] * constants.inverse_n)) * rstd * rstd;

#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      const bool valid = row < p.rows && exists(i);
      const auto h = read(stage, 0, i, p.h, row), dy = read(stage, 1, i, p.dy, row);
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
      const int at = first + i * step;
      if (p.dh.data && valid) {
        const T* const dh = start_of(p.dh, row) + at * kWidth;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) dx.at[j] += convert<Acc>(dh[min(j, n - 1 - at * kWidth)]);
      }
      T* const to = static_cast<T*>(p.dx.data) + row * p.dx.stride;
      const Packed rounded = convert<T>(dx);
      store_shifted(to, at, valid ? n : 0, rounded, lane, group);
    }
    __syncwarp();
    copy_ahead(row + kStages * teams, stage);
    stage = next;
  }

  // Teams side by side in a block add up in their order, and a block writes one row of partial sums.
  launch_dependents();
  auto write_partial = [&](void* partial, Pack<Acc, kWidth>(&sum)[kResident]) {
    Acc* const to = static_cast<Acc*>(partial) + mail.index * p.n;
    Acc* const block = reinterpret_cast<Acc*>(shared);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kResident; ++i) {
      if (!exists(i)) continue;
      const int at = (first + i * step) * kWidth;
      if (blockDim.y > 1) {
        *reinterpret_cast<Pack<Acc, kWidth>*>(block + threadIdx.y * packs * kWidth + at) = sum[i];
      } else {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          if (at + j < n) to[at + j] = sum[i].at[j];
        }
      }
    }
    if (blockDim.y == 1) return;
    __syncthreads();
#pragma unroll 1
    for (int at = threadIdx.y * blockDim.x + threadIdx.x; at < n; at += blockDim.x * blockDim.y) {
      Acc total = 0;
#pragma unroll 1
      for (unsigned team = 0; team < blockDim.y; ++team) total += block[team * packs * kWidth + at];
      to[at] = total;
    }
  };
  if (p.dweight) write_partial(p.dweight, dweight);
  if (p.dbias) write_partial(p.dbias, dbias);
}

}  // namespace cuops

// Instances, as plan_bwd in rms_norm_bwd.cc asks for them.
#if CUOPS_TUNED
#define RMS_NORM_BWD(name, T)                                                                                  \
  extern "C" __global__ void __launch_bounds__(512) rms_norm_bwd_##name##_general(cuops::RmsNormBwdParams p) { \
    cuops::rms_norm_bwd<T, 2, 3, 512>(p);                                                                      \
  }
RMS_NORM_BWD(f32, float)
RMS_NORM_BWD(f16, __half)
RMS_NORM_BWD(bf16, __nv_bfloat16)
#else  // into a program without kernels, older NVRTC puts the number of its process
extern "C" __global__ void rms_norm_bwd_none() {}
#endif
