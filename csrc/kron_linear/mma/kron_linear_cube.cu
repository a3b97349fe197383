// Kronecker-factored linear layers of three factors of up to 32 in float32, or as TF32. Slabs of a sample, matrices of its last two
// axes, come from device memory to the registers of some warps, one each, which multiply them by the last two factors, and leave
// the results in shared memory. Other warps multiply by the first factor what all slabs of a sample have in one row. Meanwhile the
// first ones go on to the next sample. Numbers are two float16 each, or one as TF32, scaled by powers of two.
#include "device/arrivals.cuh"
#include "device/overlap.cuh"
#include "device/tuned.cuh"
#include "kron_cube.cuh"

CUOPS_ONLY_FOR(90)

namespace cuops {

// The slabs that a warp makes, in turn, and the places that they have in shared memory.
struct CubeCursor {
  int slab, sample, in_sample, place;  // slab: of all those of the block; sample: of those of the block

  __device__ CubeCursor(int first, int slabs)
      : slab(first), sample(first / slabs), in_sample(first - sample * slabs), place(first % kCubeSlabs) {}

  __device__ void advance(int slabs) {
    slab += kCubeMakers;
    for (in_sample += kCubeMakers; in_sample >= slabs; in_sample -= slabs) ++sample;
    place += kCubeMakers;
    if (place >= kCubeSlabs) place -= kCubeSlabs;
  }
};

// A warp's slabs: W2 X W3^T.
template <bool kPairs>
class CubeMaker {
 public:
  // The first one is on its way.
  __device__ CubeMaker(const KronCubeParams& p, int warp)
      : p_(p),
        own_(warp, p.factors[0].in),
        next_(own_),
        before_(first_again(warp), p.factors[0].in),
        count_(static_cast<int>((p.rows - blockIdx.x + gridDim.x - 1) / gridDim.x) * p.factors[0].in) {
    load();
  }

  // `exponent` is that of the factors.
  __device__ void make(CubeShared& shared, const uint4* factors, char* slabs, int exponent) {
    const int ins0 = p_.factors[0].in, ins1 = p_.factors[1].in, ins2 = p_.factors[2].in;
    constexpr float kDown = 1.0f / (1 << (15 + 5));  // what sums of 32 products below 2^30 are multiplied by
    int finished = 0;                                // samples, as far as is known
#pragma unroll 1
    for (; own_.slab < count_; own_.advance(ins0)) {
      const int own_exponent = exponent_of(__float_as_int(largest_of_warp(reinterpret_cast<const float (&)[32]>(raw_))));
      const float scale = power_of_two(14 - own_exponent);
      HalfOperand<kPairs, 2> x[2][4];  // X^T: 16 of the depth, and 8 columns each
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4& v = raw_[i / 2][i % 2];
        x[i % 2][i / 2].set(0, v.x * scale, v.y * scale);
        x[i % 2][i / 2].set(1, v.z * scale, v.w * scale);
      }
      float t[2][4][4] = {};  // W3 X^T
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if (k * 16 >= ins2) continue;
        HalfOperand<kPairs, 4> a[2];
        CubeFactors<kPairs>::load_last(factors, k, a);
        add_products(t, a, x[k]);
      }
      next_.advance(ins0);
      load();
      float y[2][4][4] = {};  // times W2^T, whose first operand is in registers now
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if (k * 16 >= ins1) continue;
        HalfOperand<kPairs, 4> a[2];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float* const two = &t[i / 4][k * 2 + i % 4 / 2][i % 2 * 2];
          a[i / 4].set(i % 4, two[0] * kDown, two[1] * kDown);
        }
        HalfOperand<kPairs, 2> b[4];
        CubeFactors<kPairs>::load_second(factors, k, b);
        add_products(y, a, b);
      }
      const PowerOfTwo up(own_exponent + exponent - (3 * 14 - 20));
#pragma unroll
      for (int i = 0; i < 32; ++i) y[i / 16][i / 4 % 4][i % 4] = up.of(y[i / 16][i / 4 % 4][i % 4]);
      const float largest = largest_of_warp(reinterpret_cast<const float (&)[32]>(y));
      // Its place is free once the sample is finished that had it before.
      int needed = own_.sample - (kCubeAhead - 1);
      if (own_.slab >= kCubeSlabs) {
        needed = max(needed, before_.sample + 1);
        before_.advance(ins0);
      }
      for (; finished < needed; ++finished)
        wait_for_arrivals(&shared.finished[finished % kCubeFinished], finished / kCubeFinished % 2);
      char* const slab = slabs + own_.place * kCubeSlab;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int n = i / 2, c = i % 2;
        *reinterpret_cast<float4*>(slab + cube_place(own_.in_sample, n * 8 + lane_ % 4 * 2 + c, lane_ / 4)) =
            make_float4(y[0][n][c], y[0][n][c + 2], y[1][n][c], y[1][n][c + 2]);
      }
      if (lane_ == 0) shared.largest[own_.sample % kCubeAhead][own_.in_sample] = largest;
      arrive(&shared.made[own_.sample % kCubeAhead]);
    }
  }

 private:
  // The slab that the first one takes the place of: of another warp, or the same.
  __device__ static int first_again(int warp) {
    return warp + (kCubeSlabs - warp + kCubeMakers - 1) / kCubeMakers * kCubeMakers - kCubeSlabs;
  }

  // Of 8 rows, a lane has one, and 4 neighbours in each 16 columns.
  __device__ void load() {
    if (next_.slab >= count_) return;
    const int ins1 = p_.factors[1].in, ins2 = p_.factors[2].in;
    const float* const from = static_cast<const float*>(p_.x.data) + offset_of(p_.x, blockIdx.x + 1LL * next_.sample * gridDim.x) +
                              (next_.in_sample * ins1 + lane_ / 4) * ins2 + lane_ % 4 * 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool valid = i / 2 * 8 + lane_ / 4 < ins1 && lane_ % 4 * 4 + i % 2 * 16 < ins2;
      raw_[i / 2][i % 2] = valid ? *reinterpret_cast<const float4*>(from + i / 2 * 8 * ins2 + i % 2 * 16) : float4{};
    }
  }

  const KronCubeParams& p_;
  const int lane_ = threadIdx.x % 32;
  CubeCursor own_, next_, before_;  // before_: the slab that had own_'s place
  const int count_;
  float4 raw_[4][2];  // next_
};

// Multiplies all slabs of a sample by W1: a warp, what these have in some of the rows.
template <bool kPairs>
__device__ void finish_samples(const KronCubeParams& p, CubeShared& shared, const char* slabs, const float (&first)[32], int warp) {
  const int lane = threadIdx.x % 32, outs0 = p.factors[0].out, outs1 = p.factors[1].out, outs2 = p.factors[2].out;
  const int ins0 = p.factors[0].in;
  const int own_exponent = exponent_of(__float_as_int(largest_of_warp(first)));
  HalfOperand<kPairs, 2> w[2][4];  // W1^T: 16 of the depth, and 8 columns each
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float scale = power_of_two(14 - own_exponent);
    w[i / 8][i / 2 % 4].set(i % 2, first[2 * i] * scale, first[2 * i + 1] * scale);
  }
  int place = 0;  // of the sample's first slab
  int number = 0;
#pragma unroll 1
  for (long long sample = blockIdx.x; sample < p.rows; sample += gridDim.x, ++number) {
    wait_for_arrivals(&shared.made[number % kCubeAhead], number / kCubeAhead % 2);
    const float largest = lane < ins0 ? shared.largest[number % kCubeAhead][lane] : 0;
    const int exponent = exponent_of(__reduce_max_sync(~0u, __float_as_int(largest)));
    const float scale = power_of_two(14 - exponent);
    const PowerOfTwo up(exponent + own_exponent - 2 * 14);
    float* const y = static_cast<float*>(p.y.data) + offset_of(p.y, sample);
    const float* const bias = p.bias ? static_cast<const float*>(p.bias) + sample % p.bias_lead * (outs0 * outs1 * outs2) : nullptr;
#pragma unroll 1
    for (int row = warp; row < outs1; row += kCubeFinishers) {
      float c[2][4][4] = {};
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if (k * 16 >= ins0) continue;
        HalfOperand<kPairs, 4> a[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float4 v[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int slab = k * 16 + half * 8 + lane % 4 * 2 + i,
                      at = place + slab - (place + slab >= kCubeSlabs ? kCubeSlabs : 0);
            v[i] =
                slab < ins0 ? *reinterpret_cast<const float4*>(slabs + at * kCubeSlab + cube_place(slab, row, lane / 4)) : float4{};
          }
          a[0].set(half * 2, v[0].x * scale, v[1].x * scale);
          a[0].set(half * 2 + 1, v[0].y * scale, v[1].y * scale);
          a[1].set(half * 2, v[0].z * scale, v[1].z * scale);
          a[1].set(half * 2 + 1, v[0].w * scale, v[1].w * scale);
        }
        add_products(c, a, w[k]);
      }
      if (lane / 4 * 4 >= outs2) continue;
      const int step = outs1 * outs2, at = lane % 4 * 2 * step + row * outs2 + lane / 4 * 4;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int rows = i / 2 * 8 + i % 2;  // from the lane's first one
        if (lane % 4 * 2 + rows >= outs0) continue;
        const float *const u = c[0][i / 2] + i % 2, *const v = c[1][i / 2] + i % 2;
        const auto whole = [&](float sum) { return kPairs ? fmaf(up.of(sum), 3 * kCutOff, up.of(sum)) : up.of(sum); };
        float4 four = {whole(u[0]), whole(u[2]), whole(v[0]), whole(v[2])};
        if (bias) {
          const float* const b = bias + at + rows * step;
          four = {four.x + b[0], four.y + b[1], four.z + b[2], four.w + b[3]};
        }
        *reinterpret_cast<float4*>(y + at + rows * step) = four;
      }
    }
    arrive(&shared.finished[number % kCubeFinished]);
    place += ins0;
    while (place >= kCubeSlabs) place -= kCubeSlabs;
  }
}

template <bool kPairs>
__device__ void kron_cube(const KronCubeParams& p) {
  __shared__ CubeShared shared;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  uint4* const factors = shared_at<uint4>(0);
  char* const slabs = reinterpret_cast<char*>(factors + CubeFactors<kPairs>::kLast + CubeFactors<kPairs>::kSecond);
  if (threadIdx.x == 0) {
    init_all_arrivals(shared.made, 32 * p.factors[0].in);
    init_arrivals(&shared.stored, kCubeThreads);
  }
  if (threadIdx.x == 32) init_all_arrivals(shared.finished, 32 * kCubeFinishers);
  __syncthreads();
  const CubeFactors<kPairs> own(p);
  if (warp < kCubeMakers) {
    CubeMaker<kPairs> maker(p, warp);
    own.find_exponent(shared);
    arrive_and_wait(&shared.stored, 0);
    const int exponent = own.store(shared, factors);
    arrive_and_wait(&shared.stored, 1);
    maker.make(shared, factors, slabs, exponent);
  } else {
    float first[32];  // elements of W1, in twos along the depth
#pragma unroll
    for (int i = 0; i < 32; ++i)
      first[i] = element_of(p.factors[0], i / 4 % 4 * 8 + lane / 4, i / 16 * 16 + i / 2 % 2 * 8 + lane % 4 * 2 + i % 2);
    own.find_exponent(shared);
    arrive_and_wait(&shared.stored, 0);
    own.store(shared, factors);
    arrive_and_wait(&shared.stored, 1);
    finish_samples<kPairs>(p, shared, slabs, first, warp - kCubeMakers);
  }
}

}  // namespace cuops

#define KRON_CUBE(name, pairs)                                            \
  extern "C" __global__ void __launch_bounds__(cuops::kCubeThreads, 1)    \
      kron_cube_##name(const __grid_constant__ cuops::KronCubeParams p) { \
    cuops::wait_in_turn();                                                \
    cuops::kron_cube<pairs>(p);                                           \
  }

// Instances, as kron_plan_cube.cc asks for them.
KRON_CUBE(f32, true)
KRON_CUBE(tf32, false)
