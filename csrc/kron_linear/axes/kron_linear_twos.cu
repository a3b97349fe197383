// Kronecker-factored linear layers whose factors all have two rows and two columns, as in a Hadamard transform: a warp has 1024
// elements of one sample or more. An element's number has ten bits, of which a thread has five in its registers: the lowest two and
// the highest three first, then the others, by way of shared memory. A factor combines pairs of elements that differ in one bit.
#include "device/overlap.cuh"
#include "device/tuned.cuh"
#include "kron_bits.h"
#include "kron_linear/kron_shared.cuh"

CUOPS_ONLY_FOR(90)

namespace cuops {

// Applies a factor to the pairs whose numbers in v differ by kStep.
template <int kStep, class Acc>
__device__ void apply(const Acc* factor, Acc (&v)[32]) {
  const auto w = load_pack<Acc, 4>(factor);
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    if (i & kStep) continue;
    const Acc a = v[i], b = v[i + kStep];
    v[i] = fma(w.at[1], b, w.at[0] * a);
    v[i + kStep] = fma(w.at[3], b, w.at[2] * a);
  }
}

template <class T>
__device__ void kron_twos(const KronBitsParams& p) {
  using Acc = Accumulator<T>;
  constexpr int kPitch = 128 + 4;  // so that 32 lanes' elements are in different banks
  __shared__ __align__(16) Acc shared[kBitsWarps][4 * kBitsFactors + 8 * kPitch];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, count = p.count;
  const long long first = (static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + warp) << 10, end = p.rows << count;
  if (first >= end) return;
  Acc *const factors = shared[warp], *const mine = factors + 4 * kBitsFactors;
  // Neighbours k * 128 + lane * 4 of the warp's: their sample, and where they are in it.
  auto sample_of = [&](int k) { return (first + k * 128 + lane * 4) >> count; };
  const int mask = (1 << count) - 1;
  auto rest_of = [&](int k) { return (k * 128 + lane * 4) & mask; };

  Acc v[32] = {};
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    if (first + k * 128 + lane * 4 >= end) continue;
    const auto four = convert<Acc>(load_pack<T, 4>(static_cast<const T*>(p.x.data) + sample_of(k) * p.x.stride + rest_of(k)));
#pragma unroll
    for (int j = 0; j < 4; ++j) v[k * 4 + j] = four.at[j];
  }
  // The last factor, which combines neighbours, comes first.
  T parts[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int part = lane + i * 32;
    if (part >= 4 * count) continue;
    const KronFactor& f = p.factors[count - 1 - part / 4];
    parts[i] = static_cast<const T*>(f.data)[part / 2 % 2 * f.row_stride + part % 2 * f.column_stride];
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (lane + i * 32 < 4 * count) factors[lane + i * 32] = convert<Acc>(parts[i]);
  }
  __syncwarp();

  apply<1>(factors, v);  // there are two factors or more
  apply<2>(factors + 4, v);
  if (count > 7) apply<4>(factors + 28, v);
  if (count > 8) apply<8>(factors + 32, v);
  if (count > 9) apply<16>(factors + 36, v);
  if (count > 2) {
#pragma unroll
    for (int k = 0; k < 8; ++k)
      store_pack(mine + k * kPitch + lane * 4, Pack<Acc, 4>{v[k * 4], v[k * 4 + 1], v[k * 4 + 2], v[k * 4 + 3]});
    __syncwarp();
    Acc* const column = mine + lane / 4 * kPitch + lane % 4;
#pragma unroll
    for (int i = 0; i < 32; ++i) v[i] = column[i * 4];
    apply<1>(factors + 8, v);
    if (count > 3) apply<2>(factors + 12, v);
    if (count > 4) apply<4>(factors + 16, v);
    if (count > 5) apply<8>(factors + 20, v);
    if (count > 6) apply<16>(factors + 24, v);
#pragma unroll
    for (int i = 0; i < 32; ++i) column[i * 4] = v[i];
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const auto four = load_pack<Acc, 4>(mine + k * kPitch + lane * 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) v[k * 4 + j] = four.at[j];
    }
  }

#pragma unroll
  for (int k = 0; k < 8; ++k) {
    if (first + k * 128 + lane * 4 >= end) continue;
    Pack<Acc, 4> four = {v[k * 4], v[k * 4 + 1], v[k * 4 + 2], v[k * 4 + 3]};
    const long long sample = sample_of(k);
    if (p.bias) {
      const T* const bias = static_cast<const T*>(p.bias) + (sample % p.bias_lead << count) + rest_of(k);
#pragma unroll
      for (int j = 0; j < 4; ++j) four.at[j] += convert<Acc>(bias[j]);
    }
    store_pack(static_cast<T*>(p.y.data) + sample * p.y.stride + rest_of(k), convert<T>(four));
  }
}

}  // namespace cuops

#define KRON_TWOS(name, T)                                                \
  extern "C" __global__ void __launch_bounds__(32 * cuops::kBitsWarps)    \
      kron_twos_##name(const __grid_constant__ cuops::KronBitsParams p) { \
    cuops::wait_in_turn();                                                \
    cuops::kron_twos<T>(p);                                               \
  }
KRON_TWOS(f64, double)
KRON_TWOS(f32, float)
KRON_TWOS(f16, __half)
KRON_TWOS(bf16, __nv_bfloat16)
