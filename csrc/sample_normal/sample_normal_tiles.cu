// Normal samples along rows, for speed: no noise that is shared, and a seed on the device for some of the tiles alone.
#include "device/tuned.cuh"
#include "distribution.cuh"

CUOPS_ONLY_FOR(80, 90)

namespace cuops {

// A thread has kWidth neighbouring columns, which leave in vectors of kVector, and one of every
// p.step groups of samples. Numbers are of 32 bits: what is above them in the counters is the same in all of the draw.
template <class T, int kWidth, int kVector, class Key = HostKey>
__device__ void sample_tiles(const SampleNormalParams& p) {
  using Acc = Accumulator<T>;
  const Launches launches(p);
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x, chunk = quotient(thread, p.lines);
  unsigned tile = thread - chunk * p.lines.divisor, batch = 0;
  if (p.columns != p.dim) {
    batch = quotient(tile, p.tiles);
    tile -= batch * p.tiles.divisor;
  }
  const unsigned dim = static_cast<unsigned>(p.dim), column = tile * kWidth, first = batch * dim + column;
  wait_for_previous(false);
  Distribution<T> of[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j)
    of[j] = Distribution<T>(p, kVector == kWidth ? first + j : min(first + j, batch * dim + dim - 1));
  const Noise<Key> noise = noise_of<Key>(p, launches);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) of[j].check();
  const unsigned step = static_cast<unsigned>(p.step), numbered = static_cast<unsigned>(p.first_column) + first;
  if (chunk >= step) return;
  const unsigned top = noise.top(p.group, p.first_column);
  const long long row_bytes = p.dim * sizeof(T);
  char* const out = static_cast<char*>(p.samples) + batch * p.num_samples * row_bytes + column * sizeof(T);
  char* at = out + ((p.group + chunk) * 4 - p.start) * row_bytes;
  unsigned group = static_cast<unsigned>(p.group) + chunk;
  auto store = [&](char* to, const Pack<Acc, 4>* z, int i, Acc sign) {
    Pack<T, kWidth> v;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) v.at[j] = of[j].at(sign * z[j].at[i]);
#pragma unroll
    for (int j = 0; j < kWidth; j += kVector) {
      if (j == 0 || column + j < dim) store_pack(to + j * sizeof(T), reinterpret_cast<const Pack<T, kVector>*>(&v)[j / kVector]);
    }
  };
#pragma unroll 1
  for (int left = static_cast<int>(p.end_group - p.group) - chunk; left > 0; left -= step, group += step) {
    Pack<Acc, 4> z[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) z[j] = normals_of<T>(noise, group, numbered + j, top);
    if (group - static_cast<unsigned>(p.whole_group) < static_cast<unsigned>(p.end_whole - p.whole_group)) {
#pragma unroll
      for (int i = 0; i < 4; ++i) store(at + i * row_bytes, z, i, 1);
    } else {
      const long long whole = (p.group & ~0xffffffffll) | group;
      for_each_sample(p, whole, z, [&](bool mirrored, long long n) { store(out + n * row_bytes, z, 0, mirrored ? -1 : 1); });
    }
    at += 4 * row_bytes * step;
  }
}

}  // namespace cuops

// Instances, as sample_normal_tiles.cc asks for them: blocks that share a multiprocessor, which bounds the registers.
#define CUOPS_TILES(blocks, name, ...)                                      \
  extern "C" __global__ void __launch_bounds__(cuops::kTileThreads, blocks) \
      sample_normal_fwd_##name(cuops::SampleNormalParams p) {               \
    cuops::sample_tiles<__VA_ARGS__>(p);                                    \
  }
CUOPS_TILES(4, f32_tiles_1, float, 1, 1)
CUOPS_TILES(4, f32_tiles_2, float, 2, 2)
CUOPS_TILES(2, f32_tiles_4, float, 4, 4)
CUOPS_TILES(3, f32_tiles_4_halves, float, 4, 2)
CUOPS_TILES(3, f64_tiles_1, double, 1, 1)
CUOPS_TILES(2, f64_tiles_2, double, 2, 2)
CUOPS_TILES(4, f16_tiles_1, __half, 1, 1)
CUOPS_TILES(3, f16_tiles_4, __half, 4, 4)
CUOPS_TILES(3, f16_tiles_4_halves, __half, 4, 2)
CUOPS_TILES(4, bf16_tiles_1, __nv_bfloat16, 1, 1)
CUOPS_TILES(3, bf16_tiles_4, __nv_bfloat16, 4, 4)
CUOPS_TILES(3, bf16_tiles_4_halves, __nv_bfloat16, 4, 2)
#if CUOPS_TUNED == 90
CUOPS_TILES(4, f32_tiles_2_state, float, 2, 2, cuops::SeedKey)
CUOPS_TILES(2, f32_tiles_4_state, float, 4, 4, cuops::SeedKey)
CUOPS_TILES(3, f16_tiles_4_state, __half, 4, 4, cuops::SeedKey)
CUOPS_TILES(3, bf16_tiles_4_state, __nv_bfloat16, 4, 4, cuops::SeedKey)
#endif
