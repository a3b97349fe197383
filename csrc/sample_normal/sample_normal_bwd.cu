// The gradient of normal samples: sums of dx and of dx z over the samples of each column, z being drawn again.
#include "device/reduce.cuh"
#include "device/tuned.cuh"
#include "row_gradients.cuh"

namespace cuops {

// Gradients along rows: a thread has a tile of columns, and walks over a chunk of the groups.
template <class T, int kWidth, class Key>
__device__ void sum_rows(const SampleNormalParams& p) {
  using Acc = Accumulator<T>;
  const long long row = (p.dim + kWidth - 1) / kWidth, tiles = p.columns == p.dim ? row : p.columns / p.dim * row;
  const long long chunk = quotient(thread_index(), tiles), group = p.group + chunk * p.step;
  const long long end = min(group + p.step, p.end_group);
  const Noise<Key> noise = noise_of<Key>(p, Launches(p));
  if (group >= end) return;
  const RowTile<kWidth> tile(p, thread_index() - chunk * tiles, row);
  Acc dmu[kWidth] = {}, dsigma[kWidth] = {};
  sum_groups<T>(p, noise, tile, group, end, dmu, dsigma);
  Acc* const partial = static_cast<Acc*>(p.partial) + chunk * 2 * p.columns + tile.column;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    if (j >= tile.count) break;
    partial[j] = dmu[j];
    partial[p.columns + j] = dsigma[j];
  }
}

// Gradients along columns: a block has a chunk of a column.
template <class T>
__device__ void sum_columns(const SampleNormalParams& p) {
  using Acc = Accumulator<T>;
  CUOPS_TEAM(Acc, 2, team);
  const long long chunk = blockIdx.x / p.columns, column = blockIdx.x - chunk * p.columns;
  const long long first = p.group + chunk * p.step, end = min(first + p.step, p.end_group);
  const Noise<SeedKey> noise = noise_of<SeedKey>(p, Launches(p));
  const T* const grad = static_cast<const T*>(p.samples) + column * p.num_samples;
  const long long numbered = p.shared ? 0 : p.first_column + column;
  Acc sums[2] = {};
#pragma unroll 1
  for (long long group = first + threadIdx.x; group < end; group += blockDim.x) {
    Pack<Acc, 4> z[1] = {
        normals_of<T>(noise, static_cast<unsigned>(group), static_cast<unsigned>(numbered), noise.top(group, numbered))};
    if (group >= p.whole_group && group < p.end_whole) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Acc dx = convert<Acc>(grad[group * 4 - p.start + i]);
        sums[0] += dx;
        sums[1] = fma(dx, z[0].at[i], sums[1]);
      }
      continue;
    }
    for_each_sample(p, group, z, [&](bool mirrored, long long n) {
      const Acc dx = convert<Acc>(grad[n]);
      sums[0] += dx;
      sums[1] = fma(dx, mirrored ? -z[0].at[0] : z[0].at[0], sums[1]);
    });
  }
  team.reduce(sums, Sum());
  Acc* const partial = static_cast<Acc*>(p.partial) + chunk * 2 * p.columns;
  if (threadIdx.x < 2) partial[threadIdx.x * p.columns + column] = threadIdx.x ? sums[1] : sums[0];
}

// The sums of all chunks: p.rows threads for each, side by side with those of other columns.
template <class Acc>
__device__ void sum_chunks(const SampleSumParams& p) {
  __shared__ Acc sums[kChunkSumThreads];
  const unsigned width = kChunkSumThreads / p.rows, row = threadIdx.x / width;
  const long long column = static_cast<long long>(blockIdx.x) * width + threadIdx.x % width, both = 2 * p.columns;
  Acc sum = 0;
  wait_for_previous(false);
  if (column < both) {
    const Acc* const partial = static_cast<const Acc*>(p.partial) + column;
#pragma unroll 8
    for (long long chunk = row; chunk < p.chunks; chunk += p.rows) sum += partial[chunk * both];
  }
  sums[threadIdx.x] = sum;
  for (unsigned half = p.rows / 2; half > 0; half /= 2) {
    __syncthreads();
    if (row < half) sums[threadIdx.x] += sums[threadIdx.x + half * width];
  }
  if (row > 0 || column >= both) return;
  const bool of_sigma = column >= p.columns;
  with_dtype(of_sigma ? p.dsigma_dtype : p.dmu_dtype, [&](auto* as) {
    using T = typename Pointee<decltype(as)>::type;
    static_cast<T*>(of_sigma ? p.dsigma : p.dmu)[of_sigma ? column - p.columns : column] = convert<T>(sums[threadIdx.x]);
  });
}

}  // namespace cuops

#define CUOPS_KERNEL(blocks, name, ...)                                                                                        \
  extern "C" __global__ void __launch_bounds__(kSampleThreads, blocks) sample_normal_bwd_##name(cuops::SampleNormalParams p) { \
    cuops::__VA_ARGS__(p);                                                                                                     \
  }
#define CUOPS_SUM(T, name)                                                                                                  \
  extern "C" __global__ void __launch_bounds__(kChunkSumThreads) sample_normal_bwd_##name##_sum(cuops::SampleSumParams p) { \
    cuops::sum_chunks<T>(p);                                                                                                \
  }
using cuops::HostKey;
using cuops::kChunkSumThreads;
using cuops::kGradientBlocks;
using cuops::kSampleThreads;
using cuops::SeedKey;

// For any call.
#define CUOPS_ANY(T, name)                                              \
  CUOPS_KERNEL(kGradientBlocks, name##_rows_1, sum_rows<T, 1, SeedKey>) \
  CUOPS_KERNEL(1, name##_columns, sum_columns<T>)
CUOPS_ANY(double, f64)
CUOPS_ANY(float, f32)
CUOPS_ANY(__half, f16)
CUOPS_ANY(__nv_bfloat16, bf16)
CUOPS_SUM(double, f64)
CUOPS_SUM(float, f32)

// For speed, with the key from the host.
#if CUOPS_TUNED
CUOPS_KERNEL(kGradientBlocks, f64_rows_2, sum_rows<double, 2, HostKey>)
CUOPS_KERNEL(kGradientBlocks, f32_rows_4, sum_rows<float, 4, HostKey>)
CUOPS_KERNEL(kGradientBlocks, f16_rows_4, sum_rows<__half, 4, HostKey>)
CUOPS_KERNEL(kGradientBlocks, bf16_rows_4, sum_rows<__nv_bfloat16, 4, HostKey>)
#endif
