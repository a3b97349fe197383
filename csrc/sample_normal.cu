// Normal samples on the device: mu + sigma z, z being a function of the seed, the sample and the column alone.
#include "sample_normal.h"

#include "device/distribution.cuh"
#include "device/truncation.cuh"

namespace cuops {

// As wide as can be; the compiler takes a structure apart.
template <class T, int kWidth>
__device__ void store_pack(void* to, const Pack<T, kWidth>& v) {
  constexpr int kBytes = sizeof(T) * kWidth;
  using Word = Select<kBytes % 16 == 0, uint4, Select<kBytes == 8, uint2, Select<kBytes == 4, unsigned, unsigned short>>>;
#pragma unroll
  for (int i = 0; i < kBytes / static_cast<int>(sizeof(Word)); ++i) {
    static_cast<Word*>(to)[i] = reinterpret_cast<const Word*>(&v)[i];
  }
}

// Samples along rows: a thread has kWidth neighbouring columns, and walks over groups of samples. dim is a multiple of kWidth.
template <class T, int kWidth, bool kShared>
__device__ void sample_rows(const SampleNormalParams& p) {
  using Acc = Accumulator<T>;
  const Noise noise = noise_of(p);
  const Groups groups(p);
  const long long tiles = p.columns / kWidth, chunk = quotient(thread_index(), tiles);
  const long long column = (thread_index() - chunk * tiles) * kWidth;
  long long group = groups.first + chunk * p.step;
  const long long end = min(group + p.step, groups.end);
  if (group >= end) return;

  Distribution<T> of[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) of[j] = Distribution<T>(p, column + j);
  const bool shared = kWidth == 1 ? p.shared : kShared;
  const long long batch = p.columns == p.dim ? 0 : quotient(column, p.dim), row_bytes = p.dim * sizeof(T);
  char* const out = static_cast<char*>(p.samples) + batch * p.num_samples * row_bytes + (column - batch * p.dim) * sizeof(T);
  char* at = out + (group * 4 - p.start) * row_bytes;

#pragma unroll 1
  for (int left = static_cast<int>(end - group); left > 0; --left, ++group, at += 4 * row_bytes) {
    Pack<Acc, 4> z[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      z[j] = kShared && j ? z[0] : normals_of<Acc>(noise, group, shared ? 0 : p.first_column + column + j);
    }
    auto store = [&](char* to, int i, bool mirrored) {
      Pack<T, kWidth> v;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) v.at[j] = of[j].at(mirrored ? -z[j].at[i] : z[j].at[i]);
      store_pack(to, v);
    };
    if (group >= groups.whole_first && group < groups.whole_end) {
#pragma unroll
      for (int i = 0; i < 4; ++i) store(at + i * row_bytes, i, false);
    } else {
      for_each_sample(p, groups, group, [&](int i, bool mirrored, long long n) { store(out + n * row_bytes, i, mirrored); });
    }
  }
}

// Samples along columns: a thread has a group, and walks over columns. kWhole promises that every group is a whole vector.
template <class T, bool kWhole>
__device__ void sample_columns(const SampleNormalParams& p) {
  using Acc = Accumulator<T>;
  const Noise noise = noise_of(p);
  const Groups groups(p);
  const long long count = groups.end - groups.first, chunk = quotient(thread_index(), count);
  const long long group = groups.first + thread_index() - chunk * count;
  long long column = chunk * p.step;
  const long long end = min(column + p.step, p.columns);
  if (column >= end) return;
  T* row = static_cast<T*>(p.samples) + column * p.num_samples;
  Pack<Acc, 4> z;
  if (p.shared) z = normals_of<Acc>(noise, group, 0);
#pragma unroll 1
  for (int left = static_cast<int>(end - column); left > 0; --left, ++column, row += p.num_samples) {
    const Distribution<T> of(p, column);
    if (!p.shared) z = normals_of<Acc>(noise, group, p.first_column + column);
    if constexpr (kWhole) {
      Pack<T, 4> v;
#pragma unroll
      for (int i = 0; i < 4; ++i) v.at[i] = of.at(z.at[i]);
      store_pack(row + (group * 4 - p.start), v);
    } else {
      for_each_sample(p, groups, group, [&](int i, bool mirrored, long long n) { row[n] = of.at(mirrored ? -z.at[i] : z.at[i]); });
    }
  }
}

// A thread has one group of one column.
template <class T>
__device__ void sample_truncated(const SampleNormalParams& p) {
  const Noise noise = noise_of(p);
  const Groups groups(p);
  const long long count = groups.end - groups.first, fast = p.along_columns ? count : p.columns;
  const long long slow = quotient(thread_index(), fast), rest = thread_index() - slow * fast;
  const long long column = p.along_columns ? slow : rest, group = groups.first + (p.along_columns ? rest : slow);
  if (column >= p.columns || group >= groups.end) return;
  const long long numbered = p.shared ? 0 : p.first_column + column, batch = p.along_columns ? column : quotient(column, p.dim);
  T* const out = static_cast<T*>(p.samples) + batch * p.num_samples * (p.along_columns ? 1 : p.dim) +
                 (p.along_columns ? 0 : column - batch * p.dim);
  const Distribution<T> normal(p, column);
  const Truncated of(normal.mu, normal.sigma, convert<double>(static_cast<const T*>(p.low)[p.one_low ? 0 : column]),
                     convert<double>(static_cast<const T*>(p.high)[p.one_high ? 0 : column]));
  Words words = noise.words<0>(group, numbered), more = noise.words<1>(group, numbered);
  long long n = group * 4 * groups.copies - p.start;
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const double u = fmin(fma(more.at[0] + 0.5, 0x1p-32, static_cast<double>(words.at[0])) * 0x1p-32, 1 - 0x1p-53);
#pragma unroll 1
    for (int copy = 0; copy < groups.copies; ++copy, ++n) {
      if (0 <= n && n < p.num_samples) out[n * (p.along_columns ? 1 : p.dim)] = convert<T>(of.at(copy ? 1 - u : u));
    }
    words = {{words.at[1], words.at[2], words.at[3], 0}};
    more = {{more.at[1], more.at[2], more.at[3], 0}};
  }
}

}  // namespace cuops

#define CUOPS_KERNEL(name, ...) \
  extern "C" __global__ void __launch_bounds__(256) sample_normal_fwd_##name(cuops::SampleNormalParams p) { cuops::__VA_ARGS__(p); }
#define CUOPS_WIDER(T, name, width)                               \
  CUOPS_KERNEL(name##_rows_##width, sample_rows<T, width, false>) \
  CUOPS_KERNEL(name##_rows_##width##_shared, sample_rows<T, width, true>)

#define CUOPS_ANY(T, name)                               \
  CUOPS_KERNEL(name##_rows_1, sample_rows<T, 1, false>)  \
  CUOPS_KERNEL(name##_columns, sample_columns<T, false>) \
  CUOPS_KERNEL(name##_truncated, sample_truncated<T>)
CUOPS_ANY(double, f64)
CUOPS_ANY(float, f32)
CUOPS_ANY(__half, f16)
CUOPS_ANY(__nv_bfloat16, bf16)

#if __CUDA_ARCH__ >= 800  // older GPUs do with those above, which keeps their images small
#define CUOPS_WIDE(T, name)                                   \
  CUOPS_KERNEL(name##_columns_whole, sample_columns<T, true>) \
  CUOPS_WIDER(T, name, 2)
CUOPS_WIDE(double, f64)
CUOPS_WIDE(float, f32)
CUOPS_WIDE(__half, f16)
CUOPS_WIDE(__nv_bfloat16, bf16)
CUOPS_WIDER(float, f32, 4)
CUOPS_WIDER(__half, f16, 4)
CUOPS_WIDER(__nv_bfloat16, bf16, 4)
#endif
