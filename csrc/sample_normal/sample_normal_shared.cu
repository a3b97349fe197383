// Normal samples with one noise for all columns, along rows: a block draws the noise of its rows once, so that writing is all that
// counts.
#include "device/tuned.cuh"
#include "distribution.cuh"

CUOPS_ONLY_FOR(80, 90)

namespace cuops {

// p.period rows are a period: so few that they are whole vectors of memory. A block has p.step periods, or some of their vectors; a
// thread has one vector of every so many periods, always the same one. With kOneRow, a period is a row.
template <class T, bool kOneRow>
__device__ void sample_shared(const SampleNormalParams& p) {
  using Acc = Accumulator<T>;
  constexpr int kVector = 16 / sizeof(T);
  __shared__ Acc noise_of_row[kSharedNoiseRows];
  const Launches launches(p);
  const unsigned line = quotient(blockIdx.x, p.lines), tiles = p.tiles.divisor, dim = static_cast<unsigned>(p.dim);
  const int lane = quotient(threadIdx.x, p.tiles), lanes = blockDim.x / tiles, period = kOneRow ? 1 : p.period;
  const unsigned begin = ((blockIdx.x - line * p.lines.divisor) * tiles + threadIdx.x - lane * tiles) * kVector;
  const long long rows_a_block = p.step * period;
  long long batch = 0, chunk = line;
  if (p.columns != p.dim) {
    const long long chunks = (p.num_samples + rows_a_block - 1) / rows_a_block;
    batch = quotient(chunk, chunks);
    chunk -= batch * chunks;
  }
  const long long first = chunk * rows_a_block;
  const int rows = static_cast<int>(min(rows_a_block, p.num_samples - first));

  wait_for_previous(false);
  Distribution<T> of[kVector];
  int row_of[kVector];
  unsigned row = kOneRow ? 0 : begin / dim, column = begin - row * dim;
#pragma unroll
  for (int j = 0; j < kVector; ++j, ++column) {
    if (!kOneRow && column == dim) {
      column = 0;
      ++row;
    }
    row_of[j] = row;
    of[j] = Distribution<T>(p, batch * dim + min(column, dim - 1));
  }
  const Noise<SeedKey> noise = noise_of<SeedKey>(p, launches);
#pragma unroll
  for (int j = 0; j < kVector; ++j) of[j].check();

  const int copies = p.antithetic ? 2 : 1;
  const long long start = p.start + first, last_group = (start + rows - 1) / copies / 4;
  for (long long group = start / copies / 4 + threadIdx.x; group <= last_group; group += blockDim.x) {
    const Pack<Acc, 4> z = normals_of<T>(noise, static_cast<unsigned>(group), 0, noise.top(group, 0));
    int at = static_cast<int>(group * 4 * copies - start);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      for (int copy = 0; copy < copies; ++copy, ++at) {
        if (at >= 0 && at < rows) noise_of_row[at] = copy ? -z.at[i] : z.at[i];
      }
    }
  }
  __syncthreads();

  if (lane >= lanes || begin >= period * dim) return;
  T* at = static_cast<T*>(p.samples) + (batch * p.num_samples + first + lane * period) * p.dim + begin;
  const long long step = static_cast<long long>(lanes * period) * p.dim;
#pragma unroll 4
  for (int i = lane * period; i < rows; i += lanes * period, at += step) {
    Pack<T, kVector> v;
#pragma unroll
    for (int j = 0; j < kVector; ++j) v.at[j] = of[j].at(noise_of_row[i + row_of[j]]);
    if (kOneRow || i + period <= rows) {
      store_pack(at, v);
    } else {  // the last period is not whole
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (i + row_of[j] < rows) at[j] = v.at[j];
      }
    }
  }
}

}  // namespace cuops

#define CUOPS_SHARED(name, ...)                                                                                               \
  extern "C" __global__ void __launch_bounds__(cuops::kSharedThreads) sample_normal_fwd_##name(cuops::SampleNormalParams p) { \
    cuops::sample_shared<__VA_ARGS__>(p);                                                                                     \
  }
CUOPS_SHARED(f64_shared, double, true)
CUOPS_SHARED(f32_shared, float, true)
CUOPS_SHARED(f16_shared, __half, true)
CUOPS_SHARED(bf16_shared, __nv_bfloat16, true)
CUOPS_SHARED(f64_shared_periods, double, false)
CUOPS_SHARED(f32_shared_periods, float, false)
CUOPS_SHARED(f16_shared_periods, __half, false)
CUOPS_SHARED(bf16_shared_periods, __nv_bfloat16, false)
