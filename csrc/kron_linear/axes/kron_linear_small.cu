// Kronecker-factored linear layers for small float32 factors, without tensor cores: a thread has 64 elements of the tile in
// registers, along one or two of its axes at a time. The first axes come from device memory, the last go there; between them is
// shared memory.
#include "device/overlap.cuh"
#include "device/tuned.cuh"
#include "kron_linear/kron_shared.cuh"
#include "kron_small.h"

CUOPS_ONLY_FOR(90)

namespace cuops {

constexpr int kEach = 64;  // elements of a thread

// The parameters, which calls reach faster there. A warp asks the constant cache for one word at a time, as it would serve the
// lanes one by one.
__device__ inline const KronSmallParams& params() { return *shared_at<KronSmallParams>(0); }
__device__ inline void load_params(const KronSmallParams& given) {
  const int4* const words = reinterpret_cast<const int4*>(&given);
  auto word_at = [&](const void* at) {
    return static_cast<int>(static_cast<const char*>(at) - reinterpret_cast<const char*>(&given) + 15) / 16;
  };
  // All but the factors and stages that there are not.
  const int factors = word_at(given.factors + given.factor_count), stages = word_at(given.stage + given.stages);
  const int stage = word_at(given.stage), chunk = word_at(given.chunk), end = word_at(&given + 1);
  const int count = factors + stages - stage + end - chunk;
  constexpr int kTogether = 8;
  const int warps = blockDim.x / 32;
#pragma unroll 1
  for (int i = threadIdx.x / 32; i < count; i += kTogether * warps) {
    int at[kTogether];
    int4 word[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int n = min(i + k * warps, count - 1);
      at[k] = n < factors ? n : n - factors + stage;
      if (at[k] >= stages) at[k] += chunk - stages;
      word[k] = words[at[k]];
    }
    if (threadIdx.x % 32 > 0) continue;
#pragma unroll
    for (int k = 0; k < kTogether; ++k) shared_at<int4>(0)[at[k]] = word[k];
  }
}

// Lets the first tile of x, of whole samples, come to the L2 cache meanwhile.
__device__ inline void ask_for_tile(const KronSmallParams& given) {
  if (given.columns > 0) return;
  const long long first = min(static_cast<long long>(blockIdx.x) * given.samples, given.rows - given.samples);
  constexpr int kLine = 128 / sizeof(float);
#pragma unroll 1
  for (int i = threadIdx.x * kLine; i < given.items * kEach; i += blockDim.x * kLine) {
    const int sample = i / given.sample_out, rest = i - sample * given.sample_out;
    const float* const line = static_cast<const float*>(given.x.data) + (first + sample) * given.x.stride + rest;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
  }
}

// The factors as they are, one after the other, all of them on their way at the same time.
__device__ inline void load_factors() {
  const KronSmallParams& p = params();
#pragma unroll 1
  for (int i = threadIdx.x; i < p.raw_count; i += blockDim.x) {
    int j = 0;
#pragma unroll 4
    for (int k = 1; k < p.factor_count; ++k) j += p.factors[k].raw <= i;
    const KronFactor& f = p.factors[j];
    const int at = i - f.raw, row = divide(at, f.by_in), column = at - row * f.in;
    shared_at<float>(p.raw)[i] = static_cast<const float*>(f.data)[row * f.row_stride + column * f.column_stride];
  }
}

// The product of the factors of an axis: of powers of two.
__device__ inline void merge_factors(const KronSmallStage& stage, int which) {
  const KronSmallParams& p = params();
  constexpr int kTogether = 4;
  const int log_size = stage.log_size, mask = (1 << log_size) - 1, count = 1 << 2 * log_size;
  const int first = stage.first[which], last = first + stage.count[which] - 1;
#pragma unroll 1
  for (int begin = threadIdx.x; begin < count; begin += kTogether * blockDim.x) {
    float v[kTogether];
#pragma unroll
    for (float& value : v) value = 1;
    int shift = 0;
#pragma unroll 1
    for (int j = last; j >= first; --j) {
      const int in = p.factors[j].in;
      const float* const raw = shared_at<float>(p.raw) + p.factors[j].raw;
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const int i = begin + k * blockDim.x, row = i >> log_size & mask, column = i & mask;
        v[k] *= raw[(row >> shift & (in - 1)) * in + (column >> shift & (in - 1))];
      }
      shift += __ffs(in) - 1;
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (begin + k * blockDim.x < count) shared_at<float>(stage.weight[which])[begin + k * blockDim.x] = v[k];
    }
  }
}

// Where the elements of an item are: in shared memory, and from the start of the tile in device memory.
struct Place {
  int shared = 0, memory = 0, sample = 0;

  __device__ Place(const KronSmallPart* part, int parts, int item) {
#pragma unroll 1
    for (int i = 0; i < parts; ++i) {
      const int index = item & ((1 << part[i].log) - 1);
      item >>= part[i].log;
      shared += index * part[i].shared;
      memory += index * part[i].memory;
      sample += index * part[i].sample;
    }
  }
};

template <int kN, bool kPair>
__device__ __noinline__ void run_stage(int index, const float* x, float* y) {
  const KronSmallParams& p = params();
  const KronSmallStage& stage = p.stage[index];
  constexpr int kFibers = kEach / kN, kOuts = 32 / kFibers;
  const bool unit = !kPair && stage.unit;
  const int shared_step = stage.shared, memory_step = stage.memory;
#pragma unroll 1
  for (int item = threadIdx.x; item < p.items; item += blockDim.x) {
    const Place place(stage.part, stage.parts, item);
    float* const state = shared_at<float>(p.state) + place.shared;
    float v[kN][kFibers];
    if (unit) {
#pragma unroll
      for (int j = 0; j < kFibers; ++j) {
        const float* const from = x ? x + place.memory + stage.fiber[j].memory : state + stage.fiber[j].shared;
#pragma unroll
        for (int i = 0; i < kN; i += 4) {
          const float4 four = *reinterpret_cast<const float4*>(from + i);
          v[i][j] = four.x, v[i + 1][j] = four.y, v[i + 2][j] = four.z, v[i + 3][j] = four.w;
        }
      }
    } else if (x) {
#pragma unroll
      for (int j = 0; j < kFibers; ++j) {
        const float* const from = x + place.memory + stage.fiber[j].memory;
#pragma unroll
        for (int i = 0; i < kN; ++i) v[i][j] = __ldg(from + i * memory_step);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kFibers; ++j) {
        const float* const from = state + stage.fiber[j].shared;
#pragma unroll
        for (int i = 0; i < kN; ++i) v[i][j] = from[i * shared_step];
      }
    }
    if constexpr (kPair) {
      constexpr int kPart = 4;
#pragma unroll
      for (int part = 0; part < kN; part += kPart) {
        float in[kFibers][kPart], out[kFibers][kPart];
#pragma unroll
        for (int k = 0; k < kPart * kFibers; ++k) in[k % kFibers][k / kFibers] = v[part + k / kFibers][k % kFibers];
        multiply<kFibers, kPart, kFibers>(shared_at<float>(stage.weight[1]), in, out);
#pragma unroll
        for (int k = 0; k < kPart * kFibers; ++k) v[part + k / kFibers][k % kFibers] = out[k % kFibers][k / kFibers];
      }
    }
#pragma unroll 1
    for (int first = 0; first < kN; first += kOuts) {
      float acc[kOuts][kFibers];
      multiply<kN, kFibers, kOuts>(shared_at<float>(stage.weight[0]) + first * kN, v, acc);
      if (y) {
#pragma unroll
        for (int j = 0; j < kFibers; ++j) {
          float* const to = y + place.memory + stage.fiber[j].memory + first * memory_step;
#pragma unroll
          for (int o = 0; o < kOuts; ++o) to[o * memory_step] = acc[o][j];
        }
      } else if (unit) {
#pragma unroll
        for (int j = 0; j < kFibers; ++j) {
          Pack<float, kOuts> outs;
#pragma unroll
          for (int o = 0; o < kOuts; ++o) outs.at[o] = acc[o][j];
          *reinterpret_cast<Pack<float, kOuts>*>(state + stage.fiber[j].shared + first) = outs;
        }
      } else {
#pragma unroll
        for (int j = 0; j < kFibers; ++j) {
          float* const to = state + stage.fiber[j].shared + first * shared_step;
#pragma unroll
          for (int o = 0; o < kOuts; ++o) to[o * shared_step] = acc[o][j];
        }
      }
    }
  }
}

// The results with a bias, or where the last pass leaves neighbours in one thread.
__device__ __noinline__ void store_tile(long long first_sample, long long column) {
  const KronSmallParams& p = params();
#pragma unroll 1
  for (int i = threadIdx.x; i < p.items * (kEach / 4); i += blockDim.x) {
    const Place place(p.chunk, p.chunk_parts, i);
    float4 v = *reinterpret_cast<const float4*>(shared_at<float>(p.state) + place.shared);
    const long long sample = first_sample + place.sample, rest = place.memory + column;
    if (p.bias != nullptr) {
      const float* const bias = static_cast<const float*>(p.bias) + sample % p.bias_lead * p.sample_out + rest;
      v = make_float4(v.x + bias[0], v.y + bias[1], v.z + bias[2], v.w + bias[3]);
    }
    *reinterpret_cast<float4*>(static_cast<float*>(p.y.data) + sample * p.y.stride + rest) = v;
  }
}

}  // namespace cuops

extern "C" __global__ void __launch_bounds__(256, 1) kron_small(const __grid_constant__ cuops::KronSmallParams given) {
  using namespace cuops;
  wait_in_turn();
  ask_for_tile(given);
  load_params(given);
  __syncthreads();
  const KronSmallParams& p = params();
  load_factors();
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < p.stages; ++i) {
    merge_factors(p.stage[i], 0);
    if (p.stage[i].pair) merge_factors(p.stage[i], 1);
  }
  const bool copies_out = p.copies_out || p.bias != nullptr;
  for (long long tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const long long group = tile / p.column_tiles, column = (tile - group * p.column_tiles) * p.columns;
    const long long sample = min(group * p.samples, p.rows - p.samples);  // the last tile may do again what another does
#pragma unroll 1
    for (int i = 0; i < p.stages; ++i) {
      const KronSmallStage& stage = p.stage[i];
      const float* const x = i == 0 ? static_cast<const float*>(p.x.data) + sample * p.x.stride + column : nullptr;
      float* const y = i == p.stages - 1 && !copies_out ? static_cast<float*>(p.y.data) + sample * p.y.stride + column : nullptr;
      __syncthreads();
      if (stage.pair) {
        run_stage<8, true>(i, x, y);
      } else if (stage.log_size == 3) {
        run_stage<8, false>(i, x, y);
      } else {
        run_stage<16, false>(i, x, y);
      }
    }
    if (!copies_out) continue;
    __syncthreads();
    store_tile(sample, column);
  }
}
