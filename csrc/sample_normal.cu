// Normal samples on the device: mu + sigma z, z being a function of the seed, the sample and the column alone.
#include "sample_normal.h"

#include "device/tuned.cuh"
#include "sample_normal/distribution.cuh"
#include "sample_normal/truncation.cuh"

namespace cuops {

// Samples along rows: a thread has a column, and walks over groups of samples.
template <class T>
__device__ void sample_rows(const SampleNormalParams& p) {
  using Acc = Accumulator<T>;
  const Launches launches(p);
  wait_for_previous(false);
  const long long chunk = quotient(thread_index(), p.columns), column = thread_index() - chunk * p.columns;
  long long group = p.group + chunk * p.step;
  const long long end = min(group + p.step, p.end_group);
  Distribution<T> of;
  if (group < end) of = Distribution<T>(p, column);
  const Noise<SeedKey> noise = noise_of<SeedKey>(p, launches);
  of.check();
  const long long numbered = p.shared ? 0 : p.first_column + column, batch = p.columns == p.dim ? 0 : quotient(column, p.dim);
  const long long row_bytes = p.dim * sizeof(T);
  char* const out = static_cast<char*>(p.samples) + batch * p.num_samples * row_bytes + (column - batch * p.dim) * sizeof(T);
  char* at = out + (group * 4 - p.start) * row_bytes;
  while (group < end) {
    const unsigned top = noise.top(group, numbered);
#pragma unroll 1
    for (int left = groups_alike(group, end); left > 0; --left, ++group, at += 4 * row_bytes) {
      Pack<Acc, 4> z[1] = {normals_of<T>(noise, static_cast<unsigned>(group), static_cast<unsigned>(numbered), top)};
      auto store = [&](char* to, Acc normal) { *reinterpret_cast<T*>(to) = of.at(normal); };
      if (group >= p.whole_group && group < p.end_whole) {
#pragma unroll
        for (int i = 0; i < 4; ++i) store(at + i * row_bytes, z[0].at[i]);
      } else {
        for_each_sample(p, group, z,
                        [&](bool mirrored, long long n) { store(out + n * row_bytes, mirrored ? -z[0].at[0] : z[0].at[0]); });
      }
    }
  }
}

// Samples along columns: p.lanes threads have neighbouring groups of a column, and walk along it. kWhole promises that every
// group is a whole vector.
template <class T, bool kWhole, class Key>
__device__ void sample_columns(const SampleNormalParams& p) {
  using Acc = Accumulator<T>;
  const Launches launches(p);
  wait_for_previous(false);
  const Noise<Key> noise = noise_of<Key>(p, launches);
  const long long columns_a_block = blockDim.x / p.lanes, blocks = (p.columns + columns_a_block - 1) / columns_a_block;
  const long long chunk = quotient(blockIdx.x, blocks);
  const long long column = (blockIdx.x - chunk * blocks) * columns_a_block + threadIdx.x / p.lanes;
  long long group = p.group + chunk * p.step * p.lanes + threadIdx.x % p.lanes;
  if (column >= p.columns) return;
  const long long end = min(group + p.step * p.lanes, p.end_group);
  Distribution<T> of(p, column);
  of.check();
  const long long numbered = p.shared ? 0 : p.first_column + column;
  T* const row = static_cast<T*>(p.samples) + column * p.num_samples;
  T* at = row + (group * 4 - p.start);
  while (group < end) {
    const unsigned top = noise.top(group, numbered);
    const int alike = (groups_alike(group, end) + p.lanes - 1) / p.lanes;
#pragma unroll 1
    for (int left = alike; left > 0; --left, group += p.lanes, at += 4 * p.lanes) {
      Pack<Acc, 4> z[1] = {normals_of<T>(noise, static_cast<unsigned>(group), static_cast<unsigned>(numbered), top)};
      if constexpr (kWhole) {
        Pack<T, 4> v;
#pragma unroll
        for (int i = 0; i < 4; ++i) v.at[i] = of.at(z[0].at[i]);
        store_pack(at, v);
      } else if (group >= p.whole_group && group < p.end_whole) {
#pragma unroll
        for (int i = 0; i < 4; ++i) at[i] = of.at(z[0].at[i]);
      } else {
        for_each_sample(p, group, z, [&](bool mirrored, long long n) { row[n] = of.at(mirrored ? -z[0].at[0] : z[0].at[0]); });
      }
    }
  }
}

// A thread has one group of one column. Of any dtype, as the arithmetic is float64's.
__device__ inline void sample_truncated(const SampleNormalParams& p) {
  const Launches launches(p);
  wait_for_previous(false);
  const Noise<SeedKey> noise = noise_of<SeedKey>(p, launches);
  const long long count = p.end_group - p.group, fast = p.along_columns ? count : p.columns;
  const long long slow = quotient(thread_index(), fast), rest = thread_index() - slow * fast;
  const long long column = p.along_columns ? slow : rest, group = p.group + (p.along_columns ? rest : slow);
  if (column >= p.columns || group >= p.end_group) return;
  const long long numbered = p.shared ? 0 : p.first_column + column, batch = p.along_columns ? column : quotient(column, p.dim);
  const long long stride = p.along_columns ? 1 : p.dim;
  const long long first = batch * p.num_samples * stride + (p.along_columns ? 0 : column - batch * p.dim);
  double mu = 0, sigma = 0, low = 0, high = 0;
  with_dtype(p.dtype, [&](auto* as) {
    using T = typename Pointee<decltype(as)>::type;
    Distribution<T> normal(p, column);
    normal.check();
    mu = normal.mu;
    sigma = normal.sigma;
    low = convert<double>(static_cast<const T*>(p.low)[p.one_low ? 0 : column]);
    high = convert<double>(static_cast<const T*>(p.high)[p.one_high ? 0 : column]);
  });
  const Truncated of(mu, sigma, low, high);
  const unsigned top = noise.top(group, numbered);
  Words words = noise.words<0>(static_cast<unsigned>(group), static_cast<unsigned>(numbered), top);
  Words more = noise.words<1>(static_cast<unsigned>(group), static_cast<unsigned>(numbered), top);
  const int copies = p.antithetic ? 2 : 1;
  long long n = group * 4 * copies - p.start;
#pragma unroll 1
  for (int i = 0; i < 4 * copies; ++i, ++n) {
    const double u = fmin(fma(more.at[0] + 0.5, 0x1p-32, static_cast<double>(words.at[0])) * 0x1p-32, 1 - 0x1p-53);
    const bool mirrored = copies == 2 && i % 2;
    if (0 <= n && n < p.num_samples) {
      const double x = of.at(mirrored ? 1 - u : u);
      with_dtype(p.dtype, [&](auto* as) {
        using T = typename Pointee<decltype(as)>::type;
        static_cast<T*>(p.samples)[first + n * stride] = convert<T>(x);
      });
    }
    if (copies == 2 && !mirrored) continue;
    words = {{words.at[1], words.at[2], words.at[3], 0}};
    more = {{more.at[1], more.at[2], more.at[3], 0}};
  }
}

}  // namespace cuops

#define CUOPS_KERNEL(blocks, name, ...)                                                                                        \
  extern "C" __global__ void __launch_bounds__(kSampleThreads, blocks) sample_normal_fwd_##name(cuops::SampleNormalParams p) { \
    cuops::__VA_ARGS__(p);                                                                                                     \
  }
using cuops::HostKey;
using cuops::kSampleThreads;
using cuops::SeedKey;

// For any call.
#define CUOPS_ANY(T, name)                       \
  CUOPS_KERNEL(1, name##_rows_1, sample_rows<T>) \
  CUOPS_KERNEL(1, name##_columns, sample_columns<T, false, SeedKey>)
CUOPS_ANY(double, f64)
CUOPS_ANY(float, f32)
CUOPS_ANY(__half, f16)
CUOPS_ANY(__nv_bfloat16, bf16)
CUOPS_KERNEL(1, truncated, sample_truncated)

// For a launch of many blocks, which come sooner than they count themselves. It waits for all blocks of the launch before.
extern "C" __global__ void sample_normal_fwd_count(cuops::SampleNormalParams p) { ++*p.replays; }

// For speed, with the key from the host.
#if CUOPS_TUNED
CUOPS_KERNEL(7, f32_columns_whole, sample_columns<float, true, HostKey>)
CUOPS_KERNEL(7, bf16_columns_whole, sample_columns<__nv_bfloat16, true, HostKey>)
#endif
