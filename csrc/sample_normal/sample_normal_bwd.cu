// The gradient of normal samples: sums of dx and of dx z over the samples of each column, z being drawn again.
#include "device/reduce.cuh"
#include "device/tuned.cuh"
#include "distribution.cuh"

namespace cuops {

// Four neighbours in vectors of kVector, of which a row has `count` left: others are any of these.
template <int kVector, class T>
__device__ Fetched<T, 4> fetch_first(const T* at, int count) {
  Pack<T, 4> v;
#pragma unroll
  for (int j = 0; j < 4; j += kVector) {
    reinterpret_cast<Pack<T, kVector>*>(&v)[j / kVector] = load_pack<T, kVector>(at + min(j, count - kVector));
  }
  return fetch<T, 4>(&v);
}

// The gradients of a group, or zeros for samples that a draw has not.
template <class T, int kWidth>
__device__ void fetch_group(Fetched<T, kWidth> (&g)[4], const SampleNormalParams& p, long long group, const T* at, int count) {
  const bool whole = group >= p.whole_group && group < p.end_whole;
  if (whole && p.lanes == kWidth) {
#pragma unroll
    for (int i = 0; i < 4; ++i) g[i] = fetch<T, kWidth>(at + i * p.dim);
  } else if constexpr (kWidth == 4) {
    if (whole && p.lanes == 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) g[i] = fetch_first<2>(at + i * p.dim, count);
    } else if (whole) {
#pragma unroll
      for (int i = 0; i < 4; ++i) g[i] = fetch_first<1>(at + i * p.dim, count);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const long long n = group * 4 - p.start + i;
        g[i] = {};
        if (0 <= n && n < p.num_samples) g[i] = fetch_first<1>(at + i * p.dim, count);
      }
    }
  }
}

// Gradients along rows: a thread has kWidth neighbouring columns, or what a row has left of them, and walks over groups of samples.
// Antithetic ones need a kWidth of 1.
template <class T, int kWidth, class Key>
__device__ void sum_rows(const SampleNormalParams& p) {
  using Acc = Accumulator<T>;
  const long long row = (p.dim + kWidth - 1) / kWidth, tiles = p.columns == p.dim ? row : p.columns / p.dim * row;
  const long long chunk = quotient(thread_index(), tiles), tile = thread_index() - chunk * tiles;
  long long group = p.group + chunk * p.step;
  const long long end = min(group + p.step, p.end_group);
  const Noise<Key> noise = noise_of<Key>(p, Launches(p));
  if (group >= end) return;
  const long long batch = p.columns == p.dim ? 0 : quotient(tile, row), first = (tile - batch * row) * kWidth;
  const int count = static_cast<int>(min(p.dim - first, static_cast<long long>(kWidth)));
  const T* const grad = static_cast<const T*>(p.samples) + batch * p.num_samples * p.dim + first;
  const long long column = batch * p.dim + first, numbered = p.shared ? 0 : p.first_column + column;
  const unsigned distinct = p.shared ? 0 : 1;
  const T* at = grad + (group * 4 - p.start) * p.dim;
  Acc dmu[kWidth] = {}, dsigma[kWidth] = {};
  Fetched<T, kWidth> g[4];
  fetch_group(g, p, group, at, count);
#pragma unroll 1
  for (; group < end; ++group, at += 4 * p.dim) {
    const bool whole = group >= p.whole_group && group < p.end_whole;
    Fetched<T, kWidth> next[4];  // on their way while the noise is drawn
    if (group + 1 < end) fetch_group(next, p, group + 1, at + 4 * p.dim, count);
    const unsigned top = noise.top(group, numbered);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      Pack<Acc, 4> z[1] = {normals_of<T>(noise, static_cast<unsigned>(group), static_cast<unsigned>(numbered) + j * distinct, top)};
      if (whole || kWidth > 1) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const Acc dx = convert<Acc>(g[i].pack().at[j]);
          dmu[j] += dx;
          dsigma[j] = fma(dx, z[0].at[i], dsigma[j]);
        }
      } else {
        for_each_sample(p, group, z, [&](bool mirrored, long long n) {
          const Acc dx = convert<Acc>(grad[n * p.dim]);
          dmu[j] += dx;
          dsigma[j] = fma(dx, mirrored ? -z[0].at[0] : z[0].at[0], dsigma[j]);
        });
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) g[i] = next[i];
  }
  Acc* const partial = static_cast<Acc*>(p.partial) + chunk * 2 * p.columns + column;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    if (j >= count) break;
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
#if CUOPS_TUNED >= 80
CUOPS_KERNEL(kGradientBlocks, f32_rows_4, sum_rows<float, 4, HostKey>)
CUOPS_KERNEL(kGradientBlocks, f16_rows_4, sum_rows<__half, 4, HostKey>)
CUOPS_KERNEL(kGradientBlocks, bf16_rows_4, sum_rows<__nv_bfloat16, 4, HostKey>)
#endif
