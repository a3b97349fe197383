// The gradient of normal samples: sums of dx and of dx z over the samples of each column, z being drawn again.
#include "device/distribution.cuh"
#include "device/reduce.cuh"

namespace cuops {

// Gradients along rows: a thread has a column, and walks over groups of samples.
template <class T>
__device__ void sum_rows(const SampleNormalParams& p) {
  using Acc = Accumulator<T>;
  const Groups groups(p);
  const long long chunk = quotient(thread_index(), p.columns), column = thread_index() - chunk * p.columns;
  long long group = groups.first + chunk * p.step;
  const long long end = min(group + p.step, groups.end);
  if (group >= end) return;
  const Noise noise = noise_of(p);
  const long long batch = quotient(column, p.dim);
  const T* const grad = static_cast<const T*>(p.samples) + batch * p.num_samples * p.dim + (column - batch * p.dim);
  Acc dmu = 0, dsigma = 0;
#pragma unroll 1
  for (; group < end; ++group) {
    Pack<Acc, 4> g;
    const bool whole = group >= groups.whole_first && group < groups.whole_end;
    const T* const at = grad + (group * 4 - p.start) * p.dim;
    if (whole) {  // on their way while the noise is drawn
#pragma unroll
      for (int i = 0; i < 4; ++i) g.at[i] = convert<Acc>(at[i * p.dim]);
    }
    const Pack<Acc, 4> z = normals_of<Acc>(noise, group, p.shared ? 0 : p.first_column + column);
    if (whole) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        dmu += g.at[i];
        dsigma = fma(g.at[i], z.at[i], dsigma);
      }
    } else {
      for_each_sample(p, groups, group, [&](int i, bool mirrored, long long n) {
        const Acc dx = convert<Acc>(grad[n * p.dim]);
        dmu += dx;
        dsigma = fma(dx, mirrored ? -z.at[i] : z.at[i], dsigma);
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
  const Groups groups(p);
  const long long chunk = blockIdx.x / p.columns, column = blockIdx.x - chunk * p.columns;
  const long long first = groups.first + chunk * p.step, end = min(first + p.step, groups.end);
  const Noise noise = noise_of(p);
  const T* const grad = static_cast<const T*>(p.samples) + column * p.num_samples;
  Acc sums[2] = {};
#pragma unroll 1
  for (long long group = first + threadIdx.x; group < end; group += blockDim.x) {
    const Pack<Acc, 4> z = normals_of<Acc>(noise, group, p.shared ? 0 : p.first_column + column);
    for_each_sample(p, groups, group, [&](int i, bool mirrored, long long n) {
      const Acc dx = convert<Acc>(grad[n]);
      sums[0] += dx;
      sums[1] = fma(dx, mirrored ? -z.at[i] : z.at[i], sums[1]);
    });
  }
  team.reduce(sums, Sum());
  Acc* const partial = static_cast<Acc*>(p.partial) + chunk * 2 * p.columns;
  if (threadIdx.x < 2) partial[threadIdx.x * p.columns + column] = threadIdx.x ? sums[1] : sums[0];
}

}  // namespace cuops

#define CUOPS_KERNELS(T, name)                                                                                        \
  extern "C" __global__ void __launch_bounds__(256) sample_normal_bwd_##name##_rows(cuops::SampleNormalParams p) {    \
    cuops::sum_rows<T>(p);                                                                                            \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(256) sample_normal_bwd_##name##_columns(cuops::SampleNormalParams p) { \
    cuops::sum_columns<T>(p);                                                                                         \
  }
CUOPS_KERNELS(double, f64)
CUOPS_KERNELS(float, f32)
CUOPS_KERNELS(__half, f16)
CUOPS_KERNELS(__nv_bfloat16, bf16)
