// What kernels that draw normal samples share: their parameters, and which numbers they draw.
#pragma once

#include "philox.cuh"
#include "sample_normal.h"

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

  __device__ Distribution() = default;
  __device__ Distribution(const SampleNormalParams& p, long long column) {
    using Acc = Accumulator<T>;
    mu = parameter<T>(p.mu, p.mu_wide, p.one_mu, column);
    sigma = p.sigma ? parameter<T>(p.sigma, p.sigma_wide, p.one_sigma, column) : static_cast<Acc>(p.sigma_value);
    if (!(sigma >= Acc(0))) sigma = static_cast<Acc>(__int_as_float(0x7fffffff));
  }
  __device__ T at(Accumulator<T> z) const { return convert<T>(fma(sigma, z, mu)); }
};

// Every thread of the grid must come here, before any leaves. In a CUDA graph, each launch moves on to the next stream: the last
// block to have read the number of launches counts this one.
template <class Key>
__device__ Noise<Key> noise_of(const SampleNormalParams& p) {
  unsigned long long seed = p.seed, stream = p.stream;
  if (p.replays != nullptr) {
    const long long launches = *static_cast<volatile long long*>(p.replays);
    __syncthreads();
    if (threadIdx.x == 0) {
      auto* const arrived = reinterpret_cast<unsigned long long*>(p.replays + 1);
      __threadfence();
      if (atomicAdd(arrived, 1ull) == gridDim.x - 1) {
        *arrived = 0;
        p.replays[0] = launches + 1;
      }
    }
    stream += launches;
  }
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

__device__ inline long long quotient(long long a, long long b) {
  return (a | b) >> 32 ? a / b : static_cast<unsigned>(a) / static_cast<unsigned>(b);
}

__device__ inline long long thread_index() { return static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; }

// Calls visit(i, mirrored, n) for the samples of a group that a draw has, n being their number in it.
template <class Visit>
__device__ void for_each_sample(const SampleNormalParams& p, long long group, Visit&& visit) {
  const int copies = p.antithetic ? 2 : 1;
  long long n = group * 4 * copies - p.start;
  asm volatile("" : "+l"(n));  // or loops would carry the addresses of these rare samples along
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    for (int copy = 0; copy < copies; ++copy, ++n) {
      if (0 <= n && n < p.num_samples) visit(i, copy != 0, n);
    }
  }
}

}  // namespace cuops
