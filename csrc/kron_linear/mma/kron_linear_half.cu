// Kronecker-factored linear layers of two factors of up to 64, or three of up to 32, in 16 bits: a warp finds 32 columns of a
// matrix times two factors, without a word to the others. What lies between the products is TF32, as precise as float16 and with
// the range of float32.
#include "device/overlap.cuh"
#include "device/tuned.cuh"
#include "kron_half.cuh"

CUOPS_ONLY_FOR(90)

namespace cuops {

template <class T, int kSize>
__device__ void kron_half(const KronInRegistersParams& p) {
  using C = Chain<T, kSize>;
  constexpr int kSamples = half_samples(kSize), kFirst = kHalfMaxima, kLast = kFirst + C::kFirst, kState = kLast + C::kLast;
  const int warp = threadIdx.x / 32, team = warp / C::kWarps, part = warp % C::kWarps;
  const int in_rows = p.factors[0].in, in_columns = p.factors[1].in, out_rows = p.factors[0].out, out_columns = p.factors[1].out;
  const long long stride = 1LL * gridDim.x * kSamples;
  long long sample = blockIdx.x + 1LL * gridDim.x * team;
  int state = kState + team * 2 * C::kMatrix, other = state + C::kMatrix;
  if (in_rows < kSize || in_columns < kSize) {
    for (int i = threadIdx.x % (32 * C::kWarps); i < 2 * C::kMatrix; i += 32 * C::kWarps) shared_at<uint4>(state)[i] = uint4{};
    C::sync(warp);
  }
  auto load = [&](int to, long long i) {
    if (i < p.rows) C::copy(to, static_cast<const T*>(p.x.data) + offset_of(p.x, i), in_rows * in_columns / 8, p.by_units);
    commit_copies();
  };
  load(state, sample);
  load(other, sample + stride);
  FactorPart<T, kSize, 32 * kHalfWarps> first, last;
  first.load(p.factors[0]);
  last.load(p.factors[1]);
  int exponents[2];
  find_exponents<T, kHalfWarps>(shared_at<int>(0), exponents, {first.magnitude(), last.magnitude()});
  C::store_first(kFirst, first, power_of_two(-exponents[0]));
  C::store_last(kLast, last, power_of_two(-exponents[1]));
  int exponent = exponents[0] + exponents[1];
  const float scale = take_power_of_two(exponent), scale_between = power_of_two(exponent);
  __syncthreads();
  for (; sample < p.rows; sample += stride) {
    wait_for_copies<1>();
    C::sync(warp);
    C chain;
    chain.multiply(kFirst, kLast, state, scale_between, part);
    C::sync(warp);
    load(state, sample + 2 * stride);
    const HalfOutput<T> output(p, sample, out_rows * out_columns, scale);
    chain.each([&](int row, int from, const Pack<float, 8>& v) {
      const int column = part * 32 + from;
      if (row < out_rows && column < out_columns) output.store(row * out_columns + column, v);
    });
    const int next = other;
    other = state;
    state = next;
  }
}

// Three factors: a warp has two slices of a sample, which it multiplies by the last two factors, and then two rows of slices across
// all of them, which it multiplies by the first.
template <class T>
__device__ void kron_half_cube(const KronInRegistersParams& p) {
  constexpr int kSize = 32, kPitch = kHalfPitch;
  using C = Chain<T, kSize>;
  constexpr int kOuter = kHalfMaxima, kFirst = kOuter + C::kFirst, kLast = kFirst + C::kFirst, kMatrices = kLast + C::kLast;
  constexpr int kState = kMatrices + kSize * C::kMatrix;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int in_slices = p.factors[0].in, in_rows = p.factors[1].in, in_columns = p.factors[2].in;
  const int out_slices = p.factors[0].out, out_rows = p.factors[1].out, out_columns = p.factors[2].out;
  for (int i = threadIdx.x; i < kSize * (C::kMatrix + kPitch); i += blockDim.x) shared_at<uint4>(kMatrices)[i] = uint4{};
  __syncthreads();
  auto load = [&](long long sample) {
#pragma unroll 1
    for (int slice = warp; slice < in_slices && sample < p.rows; slice += kHalfWarps)
      C::copy(kMatrices + slice * C::kMatrix,
              static_cast<const T*>(p.x.data) + offset_of(p.x, sample) + slice * in_rows * in_columns, in_rows * in_columns / 8,
              p.by_units);
    commit_copies();
  };
  long long sample = blockIdx.x;
  load(sample);
  FactorPart<T, kSize, 32 * kHalfWarps> outer, first, last;
  outer.load(p.factors[0]);
  first.load(p.factors[1]);
  last.load(p.factors[2]);
  int exponents[3];
  find_exponents<T, kHalfWarps>(shared_at<int>(0), exponents, {outer.magnitude(), first.magnitude(), last.magnitude()});
  // The first factor as the other operand.
  outer.each(power_of_two(-exponents[0]), [&](int row, int k, float a, float b) {
    float* const to =
        shared_at<float>(kOuter) + ((row / 16 * 4 + k / 8) * 32 + row % 8 * 4 + k % 4) * 4 + row / 8 % 2 + k % 8 / 4 * 2;
    to[0] = a;
    to[4] = b;
  });
  C::store_first(kFirst, first, power_of_two(-exponents[1]));
  C::store_last(kLast, last, power_of_two(-exponents[2]));
  int exponent = exponents[0] + exponents[1] + exponents[2];
  const float scale = take_power_of_two(exponent), scale_last = take_power_of_two(exponent);
  const float scale_between = power_of_two(exponent);
  __syncthreads();
  const uint4* const weight = shared_at<uint4>(kOuter) + lane;
  const uint4* const from = shared_at<uint4>(kState + lane % 4 * kPitch + warp * 16);
  for (; sample < p.rows; sample += gridDim.x) {
    wait_for_copies<0>();
    __syncwarp();
#pragma unroll 1
    for (int slice = warp; slice < in_slices; slice += kHalfWarps) {
      C chain;
      chain.multiply(kFirst, kLast, kMatrices + slice * C::kMatrix, scale_between);
      chain.each([&](int row, int column, const Pack<float, 8>& v) {
        float4* const to = shared_at<float4>(kState + slice * kPitch + row * 8);
#pragma unroll
        for (int i = 0; i < 8; i += 4)
          to[(column + i) / 4 ^ row % 2] = make_float4(near_tf32(v.at[i] * scale_last), near_tf32(v.at[i + 1] * scale_last),
                                                       near_tf32(v.at[i + 2] * scale_last), near_tf32(v.at[i + 3] * scale_last));
      });
    }
    __syncwarp();
    load(sample + gridDim.x);
    __syncthreads();
    float c[2][2][4][4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const Pack<unsigned, 4> a[2] = {load_pack<unsigned, 4>(weight + k * 32), load_pack<unsigned, 4>(weight + (4 + k) * 32)};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto low = load_pack<unsigned, 4>(from + k * 8 * kPitch + i * 8 + (lane / 4 ^ i));
        const auto high = load_pack<unsigned, 4>(from + (k * 8 + 4) * kPitch + i * 8 + (lane / 4 ^ i));
#pragma unroll
        for (int j = 0; j < 8; ++j) mma_tf32(c[j / 4][i][j % 4], a[j / 4].at, low.at[j % 4], high.at[j % 4]);
      }
    }
    const HalfOutput<T> output(p, sample, out_slices * out_rows * out_columns, scale);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int slice = i / 4 * 16 + i % 2 * 8 + lane / 4, row = warp * 2 + i / 2 % 2, column = lane % 4 * 8;
      Pack<float, 8> v;
#pragma unroll
      for (int e = 0; e < 8; ++e) v.at[e] = c[i / 4][i / 2 % 2][e % 4][i % 2 * 2 + e / 4];
      if (slice < out_slices && row < out_rows && column < out_columns)
        output.store((slice * out_rows + row) * out_columns + column, v);
    }
    __syncthreads();
  }
}

}  // namespace cuops

#define KRON_HALF(name, function, ...)                                                                                            \
  extern "C" __global__ void __launch_bounds__(512, 1) kron_half_##name(const __grid_constant__ cuops::KronInRegistersParams p) { \
    cuops::wait_in_turn();                                                                                                        \
    cuops::function<__VA_ARGS__>(p);                                                                                              \
  }

// Instances, as kron_plan_half.cc asks for them.
KRON_HALF(32_f16, kron_half, __half, 32)
KRON_HALF(64_f16, kron_half, __half, 64)
KRON_HALF(cube_f16, kron_half_cube, __half)
KRON_HALF(32_bf16, kron_half, __nv_bfloat16, 32)
KRON_HALF(64_bf16, kron_half, __nv_bfloat16, 64)
KRON_HALF(cube_bf16, kron_half_cube, __nv_bfloat16)
