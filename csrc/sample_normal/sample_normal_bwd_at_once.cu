// The gradient of few normal samples in one launch: blocks have all groups of their columns, and so no sums to leave for another.
#include "device/tuned.cuh"
#include "row_gradients.cuh"

namespace cuops {

// Adds up what the chunks of a block have for each tile, in an order that is always the same: threads of the first chunk get it.
template <class Acc, int kWidth>
__device__ void add_up_chunks(Acc (&sums)[2][kWidth], unsigned tiles_shift) {
  const unsigned tiles = 1u << tiles_shift;
#pragma unroll 1
  for (unsigned offset = 16; offset >= tiles; offset /= 2) {
#pragma unroll
    for (int j = 0; j < 2 * kWidth; ++j) sums[j / kWidth][j % kWidth] += __shfl_xor_sync(~0u, sums[j / kWidth][j % kWidth], offset);
  }
  const unsigned slice_shift = slice_shift_of(tiles_shift), slices = blockDim.x >> slice_shift;
  const unsigned slice = threadIdx.x >> slice_shift, tile = threadIdx.x & ((1u << slice_shift) - 1);
  if (slices == 1) return;
  extern __shared__ uint4 shared[];
  auto* const of_slice = reinterpret_cast<Pack<Acc, 2 * kWidth>*>(shared) + tile;
  if (slice > 0 && tile < tiles) of_slice[(slice - 1) * tiles] = reinterpret_cast<const Pack<Acc, 2 * kWidth>&>(sums);
  __syncthreads();
  if (threadIdx.x >= tiles) return;
#pragma unroll 4
  for (unsigned other = 0; other + 1 < slices; ++other) {
    const Pack<Acc, 2 * kWidth> v = of_slice[other * tiles];
#pragma unroll
    for (int j = 0; j < 2 * kWidth; ++j) sums[j / kWidth][j % kWidth] += v.at[j];
  }
}

template <class Acc, int kWidth>
__device__ void store_gradient(void* gradient, DType dtype, const RowTile<kWidth>& tile, const Acc (&sums)[kWidth]) {
  with_dtype(dtype, [&](auto* as) {
    using T = typename Pointee<decltype(as)>::type;
    T* const to = static_cast<T*>(gradient) + tile.column;
    Pack<T, kWidth> v;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) v.at[j] = convert<T>(sums[j]);
    if (tile.count == kWidth && reinterpret_cast<unsigned long long>(to) % alignof(Pack<T, kWidth>) == 0) {
      store_pack(to, v);
      return;
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (j < tile.count) to[j] = v.at[j];
    }
  });
}

// Neighbouring threads have neighbouring tiles of columns, and those of the next chunk follow.
template <class T, int kWidth, class Key>
__device__ void sum_rows_at_once(const SampleAtOnceParams& of) {
  const SampleNormalParams& p = of.draw;
  const long long row = (p.dim + kWidth - 1) / kWidth, tiles = p.columns == p.dim ? row : p.columns / p.dim * row;
  const unsigned chunk = threadIdx.x >> of.tiles_shift, beside = threadIdx.x - (chunk << of.tiles_shift);
  const long long number = (static_cast<long long>(blockIdx.x) << of.tiles_shift) + beside;
  const RowTile<kWidth> tile(p, min(number, tiles - 1), row);
  const long long group = p.group + chunk * p.step, end = min(group + p.step, p.end_group);
  wait_for_previous(false);
  const Noise<Key> noise = noise_of<Key>(p, Launches(p));
  alignas(16) Accumulator<T> sums[2][kWidth] = {};
  if (number < tiles && group < end) sum_groups<T>(p, noise, tile, group, end, sums[0], sums[1]);
  add_up_chunks(sums, of.tiles_shift);
  if (chunk > 0 || number >= tiles) return;
  store_gradient(of.dmu, of.dmu_dtype, tile, sums[0]);
  store_gradient(of.dsigma, of.dsigma_dtype, tile, sums[1]);
}

}  // namespace cuops

#define CUOPS_AT_ONCE(name, ...)                                         \
  extern "C" __global__ void __launch_bounds__(cuops::kAtOnceThreads, 1) \
      sample_normal_bwd_##name##_at_once(cuops::SampleAtOnceParams p) {  \
    cuops::sum_rows_at_once<__VA_ARGS__>(p);                             \
  }
CUOPS_AT_ONCE(f64_rows_1, double, 1, cuops::SeedKey)
CUOPS_AT_ONCE(f32_rows_1, float, 1, cuops::SeedKey)
CUOPS_AT_ONCE(f16_rows_1, __half, 1, cuops::SeedKey)
CUOPS_AT_ONCE(bf16_rows_1, __nv_bfloat16, 1, cuops::SeedKey)
#if CUOPS_TUNED
CUOPS_AT_ONCE(f64_rows_2, double, 2, cuops::HostKey)
CUOPS_AT_ONCE(f32_rows_4, float, 4, cuops::HostKey)
CUOPS_AT_ONCE(f16_rows_4, __half, 4, cuops::HostKey)
CUOPS_AT_ONCE(bf16_rows_4, __nv_bfloat16, 4, cuops::HostKey)
#endif
