// A step of the Cross-Entropy Method on the device: which samples are elite, and the moments of these.
#include "elite_moments.h"

#include "device/numeric.cuh"
#include "device/reduce.cuh"

namespace cuops {

// Scores as unsigned integers of the same order, the least best; what is not finite comes last.
__device__ inline unsigned key_of(float cost) {
  if (!(abs(cost) <= 3.402823466e38f)) return 0xffffffffu;
  const unsigned bits = __float_as_uint(cost + 0.0f);  // -0 is 0
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
__device__ inline unsigned long long key_of(double cost) {
  if (!(abs(cost) <= 1.7976931348623157e308)) return ~0ull;
  const unsigned long long bits = __double_as_longlong(cost + 0.0);
  return bits ^ (bits >> 63 ? ~0ull : 1ull << 63);
}

// A score with its index, so that no two are equal.
template <class Acc>
struct Entry;
template <>
struct Entry<float> {
  unsigned long long both;
  __device__ Entry() {}
  __device__ Entry(float cost, unsigned index) : both(static_cast<unsigned long long>(key_of(cost)) << 32 | index) {}
  __device__ unsigned index() const { return static_cast<unsigned>(both); }
  __device__ bool operator<(const Entry& other) const { return both < other.both; }
};
template <>
struct Entry<double> {
  unsigned long long key;
  unsigned long long place;
  __device__ Entry() {}
  __device__ Entry(double cost, unsigned index) : key(key_of(cost)), place(index) {}
  __device__ unsigned index() const { return static_cast<unsigned>(place); }
  __device__ bool operator<(const Entry& other) const { return key < other.key || (key == other.key && place < other.place); }
};

template <class Acc>
__device__ Acc score_at(const EliteSelectParams& p, long long i) {
  i += blockIdx.x * p.n;
  if constexpr (kSame<Acc, double>) {
    return static_cast<const double*>(p.scores)[i];
  } else {
    switch (p.dtype) {
      case kFloat16: return convert<float>(static_cast<const __half*>(p.scores)[i]);
      case kBFloat16: return convert<float>(static_cast<const __nv_bfloat16*>(p.scores)[i]);
      default: return static_cast<const float*>(p.scores)[i];
    }
  }
}

// Bitonic: a warp exchanges within its own 64 entries as long as the distance allows, and needs no barrier of the block then.
template <class Acc>
__device__ void sort_entries(Entry<Acc>* entries, int size) {
  for (int run = 2; run <= size; run *= 2) {
    for (int distance = run / 2; distance > 0; distance /= 2) {
      for (int pair = threadIdx.x; pair < size / 2; pair += blockDim.x) {
        const int low = 2 * pair - (pair & (distance - 1)), high = low + distance;
        const Entry<Acc> a = entries[low], b = entries[high];
        if ((b < a) == ((low & run) == 0)) {
          entries[low] = b;
          entries[high] = a;
        }
      }
      if (distance > 32 || (distance == 1 && run > 32)) {
        __syncthreads();
      } else {
        __syncwarp();
      }
    }
  }
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
  __shared__ Entry<Acc> entries[most_sorted(kDTypeOf<Acc>)];
  CUOPS_TEAM(double, 2, team);
  int* const indices = p.indices + static_cast<long long>(blockIdx.x) * p.elites;
  if (!p.sorted) {
    int size = 64;
    while (size < p.n) size *= 2;
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
      const Acc score = i < p.n ? score_at<Acc>(p, i) : Acc(0);
      entries[i] = i < p.n ? Entry<Acc>(p.maximize ? -score : score, i) : Entry<Acc>(Acc(0) / Acc(0), i);
    }
    __syncthreads();
    sort_entries(entries, size);
    __syncthreads();
  }
  double sums[2] = {0, 0};  // of the finite elites: their number, their scores
  for (int i = threadIdx.x; i < p.elites; i += blockDim.x) {
    const int index = p.sorted ? indices[i] : entries[i].index();
    if (!p.sorted) indices[i] = index;
    const Acc score = score_at<Acc>(p, index);
    if (isfinite(score)) {
      sums[0] += 1;
      sums[1] += score;
    }
  }
  team.reduce(sums, Sum());
  __syncthreads();  // thread 0 reads the first and the last index below
  if (threadIdx.x > 0) return;
  const int count = static_cast<int>(sums[0]);
  double* const summary = p.summary + blockIdx.x * 4ll;
  const double nothing = __longlong_as_double(0x7ff8000000000000ll);
  const double best = count ? static_cast<double>(score_at<Acc>(p, indices[0])) : nothing;
  const double record = p.best_score[blockIdx.x];
  const bool better = p.maximize ? best > record : best < record;
  summary[0] = best;
  summary[1] = count ? sums[1] / count : nothing;
  summary[2] = count ? static_cast<double>(score_at<Acc>(p, indices[count - 1])) : nothing;
  summary[3] = p.best_score[blockIdx.x] = better ? best : record;
  p.counts[2 * blockIdx.x] = count;
  p.counts[2 * blockIdx.x + 1] = better ? indices[0] : -1;
  p.kept_count[blockIdx.x] = max(p.kept_count[blockIdx.x], min(count, p.kept));
  if (blockIdx.x == 0) {
    p.clock[0] += 1;
    p.clock[1] = sample_seed(p.clock[2], ++p.clock[3]);
  }
}

// A block has kLanes vectors of columns; its threads share the elites, and add up in a fixed order. Values are taken relative to
// the best elite, which is near the others wherever they are, so that squares lose no digits.
template <class T, int kWidth, int kLanes>
__device__ void elite_moments(const EliteMomentsParams& p) {
  using Acc = Accumulator<T>;
  __shared__ Acc partial[16][2][kLanes * kWidth];
  const long long problem = blockIdx.x / p.tiles;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes, groups = blockDim.x / kLanes;
  const long long column = (static_cast<long long>(blockIdx.x % p.tiles) * kLanes + lane) * kWidth;
  const bool active = column < p.d;
  const int* const indices = p.indices + problem * p.elites;
  const int count = p.counts[2 * problem], record = p.counts[2 * problem + 1];
  if (count == 0) return;  // nothing to learn from
  const T* const population = static_cast<const T*>(p.population) + problem * p.n * p.d + (active ? column : 0);
  using Columns = Pack<Acc, kWidth>;
  auto row = [&](int index) { return convert<Acc>(*reinterpret_cast<const Pack<T, kWidth>*>(population + index * p.d)); };
  auto at = [&](void* rows, long long r) { return reinterpret_cast<Columns*>(static_cast<Acc*>(rows) + r * p.d + column); };

  const Columns shift = row(indices[0]);
  Columns sum = {}, squares = {};
#pragma unroll 4
  for (int i = group; i < count; i += groups) {
    const Columns x = row(indices[i]);
    if (i < p.kept_rows && active) *at(p.kept, problem * p.kept_rows + i) = x;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const Acc distance = x.at[j] - shift.at[j];
      sum.at[j] += distance;
      squares.at[j] += distance * distance;
    }
  }
  if (record >= 0 && group == 0 && active) *at(p.best_x, problem) = row(record);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
#pragma unroll
    for (int offset = kLanes; offset < 32; offset *= 2) {
      sum.at[j] += __shfl_xor_sync(0xffffffffu, sum.at[j], offset);
      squares.at[j] += __shfl_xor_sync(0xffffffffu, squares.at[j], offset);
    }
    if (threadIdx.x % 32 < kLanes) {
      partial[threadIdx.x / 32][0][lane * kWidth + j] = sum.at[j];
      partial[threadIdx.x / 32][1][lane * kWidth + j] = squares.at[j];
    }
  }
  __syncthreads();

  const Acc noise = max(p.noise - p.noise_decrease * (p.clock[0] - 1), 0.0);
  const Acc alpha_mu = p.smoothing_mu, alpha_sigma = p.smoothing_sigma;
  const long long first = static_cast<long long>(blockIdx.x % p.tiles) * (kLanes * kWidth);
  for (int c = threadIdx.x; c < kLanes * kWidth && first + c < p.d; c += blockDim.x) {
    Acc total = 0, total_squares = 0;
    for (int warp = 0; warp < blockDim.x / 32; ++warp) {
      total += partial[warp][0][c];
      total_squares += partial[warp][1][c];
    }
    const T best = (static_cast<const T*>(p.population) + (problem * p.n + indices[0]) * p.d)[first + c];
    const Acc mean = total / count, variance = max(total_squares / count - mean * mean, Acc(0));
    Acc* const mu = static_cast<Acc*>(p.mu) + problem * p.d + first + c;
    Acc* const sigma = static_cast<Acc*>(p.sigma) + problem * p.d + first + c;
    *mu = alpha_mu * (convert<Acc>(best) + mean) + (1 - alpha_mu) * *mu;
    const Acc smoothed = alpha_sigma * sqrt(variance + noise) + (1 - alpha_sigma) * *sigma;
    *sigma = min(max(smoothed * Acc(p.decay), Acc(p.floor)), Acc(p.ceiling));
  }
}

}  // namespace cuops

extern "C" __global__ void __launch_bounds__(1024) elite_select_f64(cuops::EliteSelectParams p) { cuops::elite_select<double>(p); }
extern "C" __global__ void __launch_bounds__(1024) elite_select_f32(cuops::EliteSelectParams p) { cuops::elite_select<float>(p); }

#define ELITE_MOMENTS(name, T)                                                                                      \
  extern "C" __global__ void __launch_bounds__(512) elite_moments_##name##_aligned(cuops::EliteMomentsParams p) {   \
    cuops::elite_moments<T, cuops::kVectorWidth<T>, 8>(p);                                                          \
  }                                                                                                                 \
  extern "C" __global__ void __launch_bounds__(512) elite_moments_##name##_unaligned(cuops::EliteMomentsParams p) { \
    cuops::elite_moments<T, 1, 32>(p);                                                                              \
  }
ELITE_MOMENTS(f64, double)
ELITE_MOMENTS(f32, float)
ELITE_MOMENTS(f16, __half)
ELITE_MOMENTS(bf16, __nv_bfloat16)
