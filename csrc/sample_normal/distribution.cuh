// What kernels that draw normal samples share: their parameters, and which numbers they draw.
#pragma once

#include "device/overlap.cuh"
#include "sample_normal.h"
#include "sample_normal/philox.cuh"

namespace cuops {

template <class T>
__device__ Accumulator<T> parameter(const void* data, bool wide, bool one, long long column) {
  using Acc = Accumulator<T>;
  const long long i = one ? 0 : column;
  if constexpr (!kSame<T, Acc>) {
    if (wide) return static_cast<const Acc*>(data)[i];
  }
  return convert<Acc>(static_cast<const T*>(data)[i]);
}

template <class T>
struct Distribution {
  Accumulator<T> mu, sigma;

  Distribution() = default;
  __device__ Distribution(const SampleNormalParams& p, long long column) {
    mu = parameter<T>(p.mu, p.mu_wide, p.one_mu, column);
    sigma = p.sigma ? parameter<T>(p.sigma, p.sigma_wide, p.one_sigma, column) : static_cast<Accumulator<T>>(p.sigma_value);
  }
  // NaN for what is no sigma. Apart from the loads, which may be on their way until here.
  __device__ void check() {
    if (!(sigma >= Accumulator<T>(0))) sigma = static_cast<Accumulator<T>>(__int_as_float(0x7fffffff));
  }
  __device__ T at(Accumulator<T> z) const { return convert<T>(fma(sigma, z, mu)); }
};

__device__ inline long long quotient(long long a, long long b) {
  return (a | b) >> 32 ? a / b : static_cast<unsigned>(a) / static_cast<unsigned>(b);
}

__device__ inline unsigned quotient(unsigned a, const Divider& by) { return __umulhi(2 * a, by.multiplier) >> by.shift; }

// How many launches were before this one. Where a kernel before has counted, the number is there. Else launches count themselves by
// their blocks: all of a launch come before any of the next. There are several counters, as thousands at one address would wait for
// each other. The first block of each counts for those that would make a power of two. Made before anything else, as the answer
// takes long.
struct Launches {
  unsigned long long counted = 0;

  __device__ explicit Launches(const SampleNormalParams& p) {
    if (p.replays == nullptr || p.replays_counted || threadIdx.x != 0) return;
    const unsigned part = blockIdx.x >> p.replays_shift, first = part << p.replays_shift, whole = 1u << p.replays_shift;
    const unsigned missing = whole - min(whole, gridDim.x - first);
    counted = atomicAdd(reinterpret_cast<unsigned long long*>(p.replays + part * kReplaysApart),
                        1ull + (blockIdx.x == first ? missing : 0));
  }
  __device__ unsigned long long before(const SampleNormalParams& p) const {
    if (p.replays_counted) return *p.replays - 1;
    __shared__ unsigned long long launches;
    if (threadIdx.x == 0) launches = counted >> p.replays_shift;
    __syncthreads();
    return launches;
  }
};

// Every thread of the grid must come here, before any leaves. In a CUDA graph, each launch moves on to the next stream. The kernel
// after this one may come from here on: it is the next to count itself.
template <class Key>
__device__ Noise<Key> noise_of(const SampleNormalParams& p, const Launches& launches) {
  unsigned long long seed = p.seed, stream = p.stream;
  if (p.replays != nullptr) stream += launches.before(p);
  launch_dependents();
  if (!kSame<Key, HostKey> && p.state != nullptr) {
    seed = p.state[0];
    stream = p.state_has_stream ? p.state[1] : 0;
  }
  Noise<Key> noise;
  if constexpr (kSame<Key, HostKey>) {
    noise.key = {p.keys};
  } else {
    noise.key = {static_cast<unsigned>(seed), static_cast<unsigned>(seed >> 32)};
  }
  noise.stream = static_cast<unsigned>(stream);
  noise.stream_high = 0x80000000u | static_cast<unsigned>(stream >> 32 & 0xfff) << 18;
  return noise;
}

// The groups from `first` on, up to `end`, that share the upper 32 bits of their numbers.
__device__ inline int groups_alike(long long first, long long end) {
  return static_cast<int>(min(end, (first | 0xffffffffll) + 1) - first);
}

__device__ inline long long thread_index() { return static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; }

// Calls visit(mirrored, n) for the samples of a group that a draw has, n being their number in it and z[j].at[0] their noise.
// Rare, so it is kept short: the noise moves along instead of being indexed.
template <class Acc, int kWidth, class Visit>
__device__ void for_each_sample(const SampleNormalParams& p, long long group, Pack<Acc, 4> (&z)[kWidth], Visit&& visit) {
  const int copies = p.antithetic ? 2 : 1;
  long long n = group * 4 * copies - p.start;
#pragma unroll 1
  for (int i = 0; i < 4 * copies; ++i, ++n) {
    const bool mirrored = copies == 2 && i % 2;
    if (0 <= n && n < p.num_samples) visit(mirrored, n);
    if (copies == 2 && !mirrored) continue;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) z[j] = {{z[j].at[1], z[j].at[2], z[j].at[3], z[j].at[0]}};
  }
}

// Calls visit with a null pointer to the dtype's type.
template <class Visit>
__device__ void with_dtype(DType dtype, Visit&& visit) {
  switch (dtype) {
    case kFloat64: return visit(static_cast<double*>(nullptr));
    case kFloat32: return visit(static_cast<float*>(nullptr));
    case kFloat16: return visit(static_cast<__half*>(nullptr));
    case kBFloat16: return visit(static_cast<__nv_bfloat16*>(nullptr));
  }
}

}  // namespace cuops
