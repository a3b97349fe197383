// Kronecker-factored linear layers of factors of 2, 4, 8 and 16 with up to 1024 elements a sample: a warp has 1024 elements, of one
// sample or more, whose numbers have ten bits. Five neighbouring bits at a time, and after the last bit the first one, belong to
// the registers of a thread, which multiplies there by the factors that these bits are for; the other five are those of its lane.
#include "device/overlap.cuh"
#include "device/tuned.cuh"
#include "kron_bits.h"
#include "kron_linear/kron_shared.cuh"

CUOPS_ONLY_FOR(90)

namespace cuops {

constexpr int kBits = 10, kHeld = 1 << kBits / 2;  // elements of a thread

// Where an element waits in shared memory: any five neighbouring bits tell banks apart.
__device__ constexpr int place_of(int element) { return element ^ element >> 5; }

// Multiplies by a factor of 2^kLog rows and columns, for which bits kAt and later of a number in v are.
template <int kLog, int kAt, class Acc>
__device__ __forceinline__ void apply(const Acc* factor, Acc (&v)[kHeld]) {
  constexpr int kSize = 1 << kLog, kStep = 1 << kAt, kTogether = kSize < 4 ? kSize : 4;
  Acc in[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) in[i] = v[i];
#pragma unroll
  for (int row = 0; row < kSize; ++row) {
#pragma unroll
    for (int begin = 0; begin < kSize; begin += kTogether) {
      const auto w = load_anew<kTogether>(factor + row * kSize + begin);
#pragma unroll
      for (int group = 0; group < kHeld / kSize; ++group) {
        const int first = group / kStep * kStep * kSize + group % kStep, i = first + row * kStep;
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          const Acc x = in[first + (begin + j) * kStep];
          v[i] = begin + j == 0 ? w.at[j] * x : fma(w.at[j], x, v[i]);
        }
      }
    }
  }
}

template <class Acc>
__device__ void kron_bits(const KronBitsParams& p) {
  __shared__ __align__(16) Acc factors[kBitsElements];
  __shared__ __align__(16) Acc shared[kBitsWarps][1 << kBits];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, log_sample = p.log_sample;
  const long long end = p.rows << log_sample;
  const long long first = warp < p.warps ? (static_cast<long long>(blockIdx.x) * p.warps + warp) << kBits : end;
  // Neighbours k * 128 + lane * 4 of the warp's: their sample, and where they are in it.
  auto exists = [&](int k) { return first + k * 128 + lane * 4 < end; };
  auto sample_of = [&](int k) { return (first + k * 128 + lane * 4) >> log_sample; };
  auto rest_of = [&](int k) { return (k * 128 + lane * 4) & ((1 << log_sample) - 1); };
  auto at_of = [&](const Rows& rows, int k) { return sample_of(k) * rows.stride + rest_of(k); };

  Acc* const mine = shared[warp];
  const int place = place_of(lane * 4);
  with_element<Acc>(p.dtype, [&](auto element) {
    using T = decltype(element);
    Fetched<T, 4> fours[8] = {};
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (exists(k)) fours[k] = fetch<T, 4>(static_cast<const T*>(p.x.data) + at_of(p.x, k));
    }
    constexpr int kEach = (kBitsElements + 32 * kBitsWarps - 1) / (32 * kBitsWarps);
    T part[kEach] = {};
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int i = threadIdx.x + e * 32 * kBitsWarps;
      if (i >= p.elements) break;
      int j = 0;
#pragma unroll
      for (int k = 1; k < kBitsFactors; ++k) j += k < p.count && p.factors[k].raw <= i;
      const KronFactor& f = p.factors[j];
      const int at = i - f.raw, row = divide(at, f.by_in), column = at - row * f.in;
      part[e] = static_cast<const T*>(f.data)[row * f.row_stride + column * f.column_stride];
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int i = threadIdx.x + e * 32 * kBitsWarps;
      if (i < p.elements) factors[i] = convert<Acc>(part[e]);
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const auto four = convert<Acc>(fours[k].pack());
#pragma unroll
      for (int j = 0; j < 4; ++j) mine[place ^ place_of(k * 128 + j)] = four.at[j];
    }
  });
  __syncthreads();
  if (first >= end) return;

#pragma unroll 1
  for (int i = 0; i < p.passes; ++i) {
    const KronBitsPass& pass = p.pass[i];
    const Acc* const factor = factors + pass.at;
    auto rotated = [&](int number) {
      return place_of((number << pass.first | number >> (kBits - pass.first)) & ((1 << kBits) - 1));
    };
    const int base = rotated(lane << 5), bits[5] = {rotated(1), rotated(2), rotated(4), rotated(8), rotated(16)};
    auto at = [&](int number) {
      int place = base;
#pragma unroll
      for (int b = 0; b < 5; ++b) place ^= number >> b & 1 ? bits[b] : 0;
      return mine + place;
    };
    Acc v[kHeld];
#pragma unroll
    for (int k = 0; k < kHeld; ++k) v[k] = *at(k);
    if (pass.log == 1) {
      apply<1, 0>(factor, v);
      if (pass.count > 1) apply<1, 1>(factor - 4, v);
      if (pass.count > 2) apply<1, 2>(factor - 8, v);
      if (pass.count > 3) apply<1, 3>(factor - 12, v);
      if (pass.count > 4) apply<1, 4>(factor - 16, v);
    } else if (pass.log == 2) {
      apply<2, 0>(factor, v);
      if (pass.count > 1) apply<2, 2>(factor - 16, v);
    } else if (pass.log == 3) {
      apply<3, 0>(factor, v);
    } else {
      apply<4, 0>(factor, v);
    }
#pragma unroll
    for (int k = 0; k < kHeld; ++k) *at(k) = v[k];
    __syncwarp();
  }

  with_element<Acc>(p.dtype, [&](auto element) {
    using T = decltype(element);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (!exists(k)) continue;
      Pack<Acc, 4> four;
#pragma unroll
      for (int j = 0; j < 4; ++j) four.at[j] = mine[place ^ place_of(k * 128 + j)];
      if (p.bias) {
        const T* const bias = static_cast<const T*>(p.bias) + (sample_of(k) % p.bias_lead << log_sample) + rest_of(k);
#pragma unroll
        for (int j = 0; j < 4; ++j) four.at[j] += convert<Acc>(bias[j]);
      }
      store_pack(static_cast<T*>(p.y.data) + at_of(p.y, k), convert<T>(four));
    }
  });
}

}  // namespace cuops

// kBlocks: that a multiprocessor is to hold; those of float64 would leave too few registers were they more.
#define KRON_BITS(name, Acc, kBlocks)                                           \
  extern "C" __global__ void __launch_bounds__(32 * cuops::kBitsWarps, kBlocks) \
      kron_bits_##name(const __grid_constant__ cuops::KronBitsParams p) {       \
    cuops::wait_in_turn();                                                      \
    cuops::kron_bits<Acc>(p);                                                   \
  }
KRON_BITS(f64, double, 2)
KRON_BITS(f32, float, 4)
