// The gradient of normal samples: sums of dx and of dx z over the samples of each column, z being drawn again.
#include "device/reduce.cuh"
#include "device/tuned.cuh"
#include "distribution.cuh"

namespace cuops {

// Gradients along rows: a thread has kWidth neighbouring columns, and walks over groups of samples. dim is a multiple of kWidth.
template <class T, int kWidth, class Key>
__device__ void sum_rows(const SampleNormalParams& p) {
  using Acc = Accumulator<T>;
  const long long tiles = p.columns / kWidth, chunk = quotient(thread_index(), tiles);
  const long long column = (thread_index() - chunk * tiles) * kWidth;
  long long group = p.group + chunk * p.step;
  const long long end = min(group + p.step, p.end_group);
  if (group >= end) return;
  const Noise<Key> noise = noise_of<Key>(p, Launches(p));
  const long long batch = p.columns == p.dim ? 0 : quotient(column, p.dim);
  const T* const grad = static_cast<const T*>(p.samples) + batch * p.num_samples * p.dim + (column - batch * p.dim);
  const long long numbered = p.shared ? 0 : p.first_column + column;
  const unsigned distinct = p.shared ? 0 : 1;
  const T* at = grad + (group * 4 - p.start) * p.dim;
  Acc dmu[kWidth] = {}, dsigma[kWidth] = {};
#pragma unroll 1
  for (; group < end; ++group, at += 4 * p.dim) {
    Pack<T, kWidth> g[4];
    const bool whole = group >= p.whole_group && group < p.end_whole;
    if (whole) {  // on their way while the noise is drawn
#pragma unroll
      for (int i = 0; i < 4; ++i) g[i] = load_pack<T, kWidth>(at + i * p.dim);
    }
    const unsigned top = noise.top(group, numbered);
    Pack<Acc, 4> z[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      z[j] = normals_of<T>(noise, static_cast<unsigned>(group), static_cast<unsigned>(numbered) + j * distinct, top);
    }
    if (whole) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Pack<Acc, kWidth> dx = convert<Acc>(g[i]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          dmu[j] += dx.at[j];
          dsigma[j] = fma(dx.at[j], z[j].at[i], dsigma[j]);
        }
      }
    } else {
      for_each_sample(p, group, z, [&](bool mirrored, long long n) {
        const Pack<Acc, kWidth> dx = convert<Acc>(load_pack<T, kWidth>(grad + n * p.dim));
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          dmu[j] += dx.at[j];
          dsigma[j] = fma(dx.at[j], mirrored ? -z[j].at[0] : z[j].at[0], dsigma[j]);
        }
      });
    }
  }
  Acc* const partial = static_cast<Acc*>(p.partial) + chunk * 2 * p.columns + column;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
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

}  // namespace cuops

#define CUOPS_KERNEL(name, ...)                                                                                               \
  extern "C" __global__ void __launch_bounds__(cuops::kSampleThreads) sample_normal_bwd_##name(cuops::SampleNormalParams p) { \
    cuops::__VA_ARGS__(p);                                                                                                    \
  }
using cuops::HostKey;
using cuops::SeedKey;

// For any call.
#define CUOPS_ANY(T, name)                             \
  CUOPS_KERNEL(name##_rows_1, sum_rows<T, 1, SeedKey>) \
  CUOPS_KERNEL(name##_columns, sum_columns<T>)
CUOPS_ANY(double, f64)
CUOPS_ANY(float, f32)
CUOPS_ANY(__half, f16)
CUOPS_ANY(__nv_bfloat16, bf16)

// For speed, with the key from the host.
#if CUOPS_TUNED >= 80
CUOPS_KERNEL(f32_rows_4, sum_rows<float, 4, HostKey>)
CUOPS_KERNEL(f16_rows_4, sum_rows<__half, 4, HostKey>)
CUOPS_KERNEL(bf16_rows_4, sum_rows<__nv_bfloat16, 4, HostKey>)
#endif
