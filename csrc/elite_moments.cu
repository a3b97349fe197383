// A step of the Cross-Entropy Method on the device: which samples are elite, and the moments of these.
#include "elite_moments.h"

#include "device/overlap.cuh"
#include "elite_moments/select_least.cuh"

namespace cuops {

template <class Acc>
__device__ Key<Acc> key_at(const EliteSelectParams& p, long long i) {
  auto score = [&]() -> Acc {
    const long long at = blockIdx.x * p.n + i;
    if constexpr (kSame<Acc, double>) return static_cast<const double*>(p.scores)[at];
    if (p.dtype == kFloat16) return convert<Acc>(static_cast<const __half*>(p.scores)[at]);
    if (p.dtype == kBFloat16) return convert<Acc>(static_cast<const __nv_bfloat16*>(p.scores)[at]);
    return static_cast<const Acc*>(p.scores)[at];
  };
  return key_of(p.maximize ? -score() : score());
}

// The seed of a step's samples (SplitMix64), as reference.py has it.
__device__ inline long long sample_seed(unsigned long long seed, unsigned long long step) {
  unsigned long long z = seed + step * 0x9e3779b97f4a7c15ull;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return static_cast<long long>((z ^ z >> 31) >> 1);
}

// A block for each problem.
template <class Acc>
__device__ void elite_select(const EliteSelectParams& p) {
  constexpr Key<Acc> kWorst = ~static_cast<Key<Acc>>(0);
  __shared__ Selection<Acc> shared;
  __shared__ Key<Acc> shared_least, shared_most;
  __shared__ int shared_finite, shared_best;
  CUOPS_TEAM(double, 1, team);
  if (threadIdx.x == 0) {
    shared_least = kWorst;
    shared_most = 0;
    shared_finite = 0;
    shared_best = 0x7fffffff;
  }
  wait_for_previous();
  // What the end needs is on its way from here.
  const double record = p.best_score[blockIdx.x];
  const int kept_before = p.kept_count[blockIdx.x];
  const long long step = p.clock[0], seed = p.clock[2], steps = p.clock[3];
  __syncthreads();
  Key<Acc> least = kWorst, most = 0;
  int finite = 0;
  auto load = [&](unsigned i) { return key_at<Acc>(p, i); };
  for_each_key(threadIdx.x, static_cast<unsigned>(p.n), blockDim.x, load, [&](unsigned i, Key<Acc> key) {
    if (p.n <= kCached) shared.keys[i] = key;
    finite += key != kWorst;
    least = min(least, key);
    most = max(most, key == kWorst ? Key<Acc>(0) : key);
  });
  for (int offset = 16; offset > 0; offset /= 2) {
    finite += __shfl_xor_sync(0xffffffffu, finite, offset);
    least = min(least, __shfl_xor_sync(0xffffffffu, least, offset));
    most = max(most, __shfl_xor_sync(0xffffffffu, most, offset));
  }
  if (threadIdx.x % 32 == 0) {
    atomicAdd(&shared_finite, finite);
    atomicMin(&shared_least, least);
    atomicMax(&shared_most, most);
  }
  __syncthreads();
  const int count = min(shared_finite, p.elites), kept = min(count, p.kept);
  least = shared_least;
  most = shared_most;
  int* const indices = p.indices + static_cast<long long>(blockIdx.x) * p.elites;
  int* const kept_indices = p.kept_indices + static_cast<long long>(blockIdx.x) * p.kept;
  Key<Acc> worst = kWorst;
  double sum = 0;
#pragma unroll 1
  for (int round = 0; round < 2; ++round) {
    const int wanted = round ? kept : count, room = round ? p.kept : p.elites;
    int* const to = round ? kept_indices : indices;
    if (wanted > 0) {
      most = select_least<Acc>(static_cast<unsigned>(p.n), load, wanted, least, most, to, shared, [&](int i, Key<Acc> key) {
        if (round > 0) return;
        sum += cost_of(key);
        if (key == least) atomicMin(&shared_best, i);
      });
      if (round == 0) worst = most;
    }
    for (int i = wanted + threadIdx.x; i < room; i += blockDim.x) to[i] = -1;
  }
  sum = team.reduce(sum, Sum());
  __syncthreads();  // shared_best is there
  if (threadIdx.x > 0) return;
  const double sign = p.maximize ? -1 : 1, nothing = __longlong_as_double(0x7ff8000000000000ll);
  const double best = count ? sign * cost_of(least) : nothing;
  const bool better = sign * best < sign * record;
  double* const summary = p.summary + blockIdx.x * 4ll;
  summary[0] = best;
  summary[1] = count ? sign * sum / count : nothing;
  summary[2] = count ? sign * cost_of(worst) : nothing;
  summary[3] = p.best_score[blockIdx.x] = better ? best : record;
  int* const counts = p.counts + blockIdx.x * 3ll;
  counts[0] = count;
  counts[1] = count ? shared_best : -1;
  counts[2] = better ? shared_best : -1;
  p.kept_count[blockIdx.x] = max(kept_before, kept);
  if (blockIdx.x == 0) {
    p.clock[0] = step + 1;
    p.clock[1] = sample_seed(seed, steps + 1);
    p.clock[3] = steps + 1;
  }
}

// A block has kLanes vectors of columns, and its threads share the elites. Each takes its own first elite for zero, which is near
// the others wherever they are, so that squares lose no digits; all add up in a fixed order.
template <class T, int kWidth, int kLanes>
__device__ void elite_moments(const EliteMomentsParams& p) {
  using Acc = Accumulator<T>;
  using Columns = Pack<Acc, kWidth>;
  constexpr int kColumns = kLanes * kWidth, kAtOnce = 4;
  __shared__ Acc means[32][kColumns], squares_of[32][kColumns];
  __shared__ int sizes[32];
  const long long problem = blockIdx.x / p.tiles, start = static_cast<long long>(blockIdx.x % p.tiles) * kColumns;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes, groups = blockDim.x / kLanes, warps = blockDim.x / 32;
  const long long column = start + lane * kWidth;
  const bool active = column < p.d;
  const int* const indices = p.indices + problem * p.elites;
  const int* const kept_indices = p.kept_indices + problem * p.kept_rows;
  const long long corner = problem * p.n * p.d + (active ? column : 0);
  auto row = [&](int index) {
    const long long at = corner + max(index, 0) * p.d;
    if constexpr (kWidth == 1 && kSame<T, float>) {  // of any dtype
      if (p.dtype == kFloat16) return Pack<T, 1>{convert<float>(static_cast<const __half*>(p.population)[at])};
      if (p.dtype == kBFloat16) return Pack<T, 1>{convert<float>(static_cast<const __nv_bfloat16*>(p.population)[at])};
    }
    return *reinterpret_cast<const Pack<T, kWidth>*>(static_cast<const T*>(p.population) + at);
  };
  auto copy = [&](int index, void* to, long long r) {
    if (index >= 0 && active) {
      *reinterpret_cast<Columns*>(static_cast<Acc*>(to) + r * p.d + column) = convert<Acc>(row(index));
    }
  };
  // What the end needs, and the kernel before does not write, is on its way from here.
  const int mine = threadIdx.x;
  Acc* const mu = static_cast<Acc*>(p.mu) + problem * p.d + start + mine;
  Acc* const sigma = static_cast<Acc*>(p.sigma) + problem * p.d + start + mine;
  const bool updates = mine < kColumns && start + mine < p.d;
  const Acc old_mu = updates ? *mu : Acc(0), old_sigma = updates ? *sigma : Acc(0);
  wait_for_previous();
  const int count = p.counts[3 * problem], record = p.counts[3 * problem + 2];
  const Acc noise = max(p.noise - p.noise_decrease * (p.clock[0] - 1), 0.0);

  Columns zero = {}, sum = {}, squares = {};
  int size = 0;
#pragma unroll 1
  for (int i = group; i < p.elites; i += kAtOnce * groups) {
    Pack<T, kWidth> rows[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) rows[u] = row(indices[min(i + u * groups, p.elites - 1)]);
    if (i == group && i < count) zero = convert<Acc>(rows[0]);
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (i + u * groups >= count) break;
      const Columns x = convert<Acc>(rows[u]);
      ++size;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const Acc distance = x.at[j] - zero.at[j];
        sum.at[j] += distance;
        squares.at[j] += distance * distance;
      }
    }
  }
  for (int i = group; i < p.kept_rows; i += groups) copy(kept_indices[i], p.kept, problem * p.kept_rows + i);
  if (group == 0) copy(record, p.best_x, problem);

  // Mean and sum of squares about it, of this thread's elites, of its warp's, and of all.
  const Acc share = size ? Acc(1) / size : Acc(0);
  Columns mean;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    mean.at[j] = zero.at[j] + sum.at[j] * share;
    squares.at[j] = max(squares.at[j] - sum.at[j] * sum.at[j] * share, Acc(0));
  }
#pragma unroll
  for (int offset = kLanes; offset < 32; offset *= 2) {
    const int other = __shfl_xor_sync(0xffffffffu, size, offset), both = size + other;
    const Acc part = both ? static_cast<Acc>(other) / both : Acc(0);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const Acc distance = __shfl_xor_sync(0xffffffffu, mean.at[j], offset) - mean.at[j];
      squares.at[j] += __shfl_xor_sync(0xffffffffu, squares.at[j], offset);
      if (size && other) squares.at[j] += distance * distance * part * size;
      if (other) mean.at[j] += distance * part;
    }
    size = both;
  }
  if (threadIdx.x % 32 < kLanes) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      means[threadIdx.x / 32][lane * kWidth + j] = mean.at[j];
      squares_of[threadIdx.x / 32][lane * kWidth + j] = squares.at[j];
    }
    sizes[threadIdx.x / 32] = size;
  }
  __syncthreads();
  if (!updates || count == 0) return;  // without elites there is nothing to learn from
  const Acc near = means[0][mine];
  Acc shift = 0, total = 0;
#pragma unroll 4
  for (int warp = 1; warp < warps; ++warp) shift += sizes[warp] ? (means[warp][mine] - near) * sizes[warp] : Acc(0);
  const Acc new_mean = near + shift / count;
#pragma unroll 4
  for (int warp = 0; warp < warps; ++warp) {
    const Acc distance = means[warp][mine] - new_mean;
    total += sizes[warp] ? squares_of[warp][mine] + distance * distance * sizes[warp] : Acc(0);
  }
  const Acc alpha_mu = p.smoothing_mu, alpha_sigma = p.smoothing_sigma;
  *mu = alpha_mu * new_mean + (1 - alpha_mu) * old_mu;
  const Acc smoothed = alpha_sigma * sqrt(total / count + noise) + (1 - alpha_sigma) * old_sigma;
  *sigma = min(max(smoothed * Acc(p.decay), Acc(p.floor)), Acc(p.ceiling));
}

}  // namespace cuops

extern "C" __global__ void __launch_bounds__(1024) elite_select_f64(cuops::EliteSelectParams p) { cuops::elite_select<double>(p); }
extern "C" __global__ void __launch_bounds__(1024) elite_select_f32(cuops::EliteSelectParams p) { cuops::elite_select<float>(p); }

#define ELITE_MOMENTS(name, T, layout, kWidth, kLanes)                                                              \
  extern "C" __global__ void __launch_bounds__(1024) elite_moments_##name##_##layout(cuops::EliteMomentsParams p) { \
    cuops::elite_moments<T, kWidth, kLanes>(p);                                                                     \
  }
ELITE_MOMENTS(f64, double, unaligned, 1, 32)
ELITE_MOMENTS(f32, float, unaligned, 1, 32)
#if CUOPS_TUNED
ELITE_MOMENTS(f64, double, aligned, 2, 8)
ELITE_MOMENTS(f32, float, aligned, 4, 8)
ELITE_MOMENTS(f16, __half, aligned, 8, 8)
ELITE_MOMENTS(bf16, __nv_bfloat16, aligned, 8, 8)
#endif
