// What a thread adds up of gradients along rows: those of kWidth neighbouring columns over a run of groups of samples.
#pragma once

#include "distribution.cuh"

namespace cuops {

// kWidth neighbours in vectors of kVector, of which a row has `count` left: others are any of these.
template <int kVector, int kWidth, class T>
__device__ Fetched<T, kWidth> fetch_first(const T* at, int count) {
  Pack<T, kWidth> v;
#pragma unroll
  for (int j = 0; j < kWidth; j += kVector) {
    reinterpret_cast<Pack<T, kVector>*>(&v)[j / kVector] = load_pack<T, kVector>(at + min(j, count - kVector));
  }
  return fetch<T, kWidth>(&v);
}

// The gradients of a group, or zeros for samples that a draw has not.
template <class T, int kWidth>
__device__ void fetch_group(Fetched<T, kWidth> (&g)[4], const SampleNormalParams& p, long long group, const T* at, int count) {
  const bool whole = group >= p.whole_group && group < p.end_whole;
  if (whole && p.at_once == kWidth) {
#pragma unroll
    for (int i = 0; i < 4; ++i) g[i] = fetch<T, kWidth>(at + i * p.dim);
  } else if constexpr (kWidth > 1) {
    if (kWidth > 2 && whole && p.at_once == 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) g[i] = fetch_first<2, kWidth>(at + i * p.dim, count);
    } else if (whole) {
#pragma unroll
      for (int i = 0; i < 4; ++i) g[i] = fetch_first<1, kWidth>(at + i * p.dim, count);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const long long n = group * 4 - p.start + i;
        g[i] = {};
        if (0 <= n && n < p.num_samples) g[i] = fetch_first<1, kWidth>(at + i * p.dim, count);
      }
    }
  }
}

// kWidth neighbouring columns, or what a row has left of them.
template <int kWidth>
struct RowTile {
  long long batch = 0, first, column;  // which draw, where in its rows, and where in all of them
  int count;

  __device__ RowTile(const SampleNormalParams& p, long long tile, long long tiles_a_row) {
    if (p.columns != p.dim) batch = quotient(tile, tiles_a_row);
    first = (tile - batch * tiles_a_row) * kWidth;
    count = static_cast<int>(min(p.dim - first, static_cast<long long>(kWidth)));
    column = batch * p.dim + first;
  }
};

// Sums of dx and of dx z over the groups from `group` on. Antithetic samples need a kWidth of 1.
template <class T, int kWidth, class Key>
__device__ void sum_groups(const SampleNormalParams& p, const Noise<Key>& noise, const RowTile<kWidth>& tile, long long group,
                           long long end, Accumulator<T> (&dmu)[kWidth], Accumulator<T> (&dsigma)[kWidth]) {
  using Acc = Accumulator<T>;
  const T* const grad = static_cast<const T*>(p.samples) + tile.batch * p.num_samples * p.dim + tile.first;
  const long long numbered = p.shared ? 0 : p.first_column + tile.column;
  const unsigned distinct = p.shared ? 0 : 1;
  const T* at = grad + (group * 4 - p.start) * p.dim;
  Fetched<T, kWidth> g[4];
  fetch_group(g, p, group, at, tile.count);
#pragma unroll 1
  for (; group < end; ++group, at += 4 * p.dim) {
    const bool whole = group >= p.whole_group && group < p.end_whole;
    Fetched<T, kWidth> next[4];  // on their way while the noise is drawn
    if (group + 1 < end) fetch_group(next, p, group + 1, at + 4 * p.dim, tile.count);
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
}

}  // namespace cuops
