// The gradient of normal samples: sums of dx and of dx z over the samples of each column, z being drawn again.
#include "device/distribution.cuh"
#include "device/reduce.cuh"

namespace cuops {

// Gradients along rows: a thread has a column, and walks over groups of samples.
template <class T>
__device__ void sum_rows(const SampleNormalParams& p) {
  using Acc = Accumulator<T>;
  const long long chunk = quotient(thread_index(), p.columns), column = thread_index() - chunk * p.columns;
  long long group = p.group + chunk * p.step;
  const long long end = min(group + p.step, p.end_group);
  if (group >= end) return;
  const Noise<SeedKey> noise = noise_of<SeedKey>(p);
  const long long batch = quotient(column, p.dim);
  const T* const grad = static_cast<const T*>(p.samples) + batch * p.num_samples * p.dim + (column - batch * p.dim);
  const long long numbered = p.shared ? 0 : p.first_column + column;
  Acc dmu = 0, dsigma = 0;
#pragma unroll 1
  for (; group < end; ++group) {
    Pack<Acc, 4> g;
    const bool whole = group >= p.whole_group && group < p.end_whole;
    const T* const at = grad + (group * 4 - p.start) * p.dim;
    if (whole) {  // on their way while the noise is drawn
#pragma unroll
      for (int i = 0; i < 4; ++i) g.at[i] = convert<Acc>(at[i * p.dim]);
    }
    Pack<Acc, 4> z[1] = {
        normals_of<T>(noise, static_cast<unsigned>(group), static_cast<unsigned>(numbered), noise.top(group, numbered))};
    if (whole) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        dmu += g.at[i];
        dsigma = fma(g.at[i], z[0].at[i], dsigma);
      }
    } else {
      for_each_sample(p, group, z, [&](bool mirrored, long long n) {
        const Acc dx = convert<Acc>(grad[n * p.dim]);
        dmu += dx;
        dsigma = fma(dx, mirrored ? -z[0].at[0] : z[0].at[0], dsigma);
      });
    }
  }
  Acc* const partial = static_cast<Acc*>(p.partial) + chunk * 2 * p.columns;
  partial[column] = dmu;
  partial[p.columns + column] = dsigma;
}

// Gradients along columns: a block has a chunk of a column.
template <class T>
__device__ void sum_columns(const SampleNormalParams& p) {
  using Acc = Accumulator<T>;
  CUOPS_TEAM(Acc, 2, team);
  const long long chunk = blockIdx.x / p.columns, column = blockIdx.x - chunk * p.columns;
  const long long first = p.group + chunk * p.step, end = min(first + p.step, p.end_group);
  const Noise<SeedKey> noise = noise_of<SeedKey>(p);
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

#define CUOPS_KERNELS(T, name)                                          \
  extern "C" __global__ void __launch_bounds__(cuops::kSampleThreads)   \
      sample_normal_bwd_##name##_rows(cuops::SampleNormalParams p) {    \
    cuops::sum_rows<T>(p);                                              \
  }                                                                     \
  extern "C" __global__ void __launch_bounds__(cuops::kSampleThreads)   \
      sample_normal_bwd_##name##_columns(cuops::SampleNormalParams p) { \
    cuops::sum_columns<T>(p);                                           \
  }
CUOPS_KERNELS(double, f64)
CUOPS_KERNELS(float, f32)
CUOPS_KERNELS(__half, f16)
CUOPS_KERNELS(__nv_bfloat16, bf16)
