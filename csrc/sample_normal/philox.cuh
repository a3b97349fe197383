// Philox-4x32-10 (Salmon et al., 2011), and the normals that cuops makes of its words.
// packages/cuops/src/cuops/_sample_normal/noise.py says which counter belongs to which number; here is the same, in float32 and
// float64.
#pragma once

#include "device/numeric.cuh"

namespace cuops {

struct Words {
  unsigned at[4];
};

// The schedule from a seed on the device.
struct SeedKey {
  unsigned low, high;

  __device__ unsigned operator()(int i) const { return i % 2 ? high + i / 2 * 0xBB67AE85u : low + i / 2 * 0x9E3779B9u; }
};

// The schedule as the host made it, among the kernel's parameters, where instructions take it from at no cost.
struct HostKey {
  const unsigned* words;

  __device__ unsigned operator()(int i) const { return words[i]; }
};

// 32 bits by 32 to 64. With a schedule that is made here, the compiler adds zero to the upper half of a plain product, so it is
// written as the instruction; with the host's it adds none, and a plain product is faster.
template <class Key>
__device__ unsigned long long multiply(unsigned a, unsigned b) {
  if constexpr (kSame<Key, HostKey>) {
    return static_cast<unsigned long long>(a) * b;
  } else {
    unsigned long long product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
  }
}

// key(i) is word i of the key schedule: two words a round.
template <class Key>
__device__ Words philox(unsigned c0, unsigned c1, unsigned c2, unsigned c3, const Key& key) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned long long first = multiply<Key>(c0, 0xD2511F53), second = multiply<Key>(c2, 0xCD9E8D57);
    c0 = static_cast<unsigned>(second >> 32) ^ c1 ^ key(2 * round);
    c1 = static_cast<unsigned>(second);
    c2 = static_cast<unsigned>(first >> 32) ^ c3 ^ key(2 * round + 1);
    c3 = static_cast<unsigned>(first);
  }
  return {{c0, c1, c2, c3}};
}

// Random numbers by group (four samples) and column. Every operation is exact or rounded as IEEE 754 says, so that each GPU
// gives the same bits; the compiler must not contract what is not written as fma.
template <class Key>
struct Noise {
  Key key;
  unsigned stream, stream_high;

  // What is above the lower 32 bits of the counter.
  __device__ unsigned top(unsigned long long group, unsigned long long column) const {
    return stream_high | static_cast<unsigned>(column >> 32) << 10 | static_cast<unsigned>(group >> 32);
  }
  template <int kPart>
  __device__ Words words(unsigned group, unsigned column, unsigned top) const {
    return philox(group, column, stream, top | kPart << 30, key);
  }
};

// A constant in a register, where an instruction has room for one immediate only: no launch has a grid of a third dimension.
__device__ inline int in_register(int constant) { return constant * static_cast<int>(gridDim.z); }

// sqrt, correctly rounded, for v in [2^-60, 2^60]: the reciprocal square root and one step of Newton and Markstein.
__device__ inline float sqrt_in_range(float v) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  const float root = __fmul_rn(v, r);
  return fmaf(fmaf(-root, root, v), __fmul_rn(0.5f, r), root);
}

// The polynomial of the coefficients, the constant one first.
template <class... Coefficients>
__device__ float polynomial(float t, float constant, Coefficients... others) {
  if constexpr (sizeof...(others) == 0) {
    return constant;
  } else {
    return fmaf(polynomial(t, others...), t, constant);
  }
}

// The radius sqrt(-2 ln u), u being the 24 leading bits of (word + 1/2) / 2^32: exponent and mantissa of the float apart, and
// a polynomial for -2 ln(1 - t / 2) / t, within 2e-7; with kShort, for samples of eight bits, within 7e-6.
template <bool kShort>
__device__ float radius_of(unsigned word) {
  const int bits = __float_as_int(__fadd_rz(__uint2float_rz(word), 0.5f));
  const float halvings = __fsub_rn(8388608.0f + 158, __int_as_float(__funnelshift_r(bits, 0x4b000000 >> 9, 23)));
  const float t = __fsub_rn(2.0f, __int_as_float((bits & 0x7fffff) | in_register(0x3f800000)));
  const float p = kShort ? polynomial(t, 0.9999935030937195f, 0.2504478394985199f, 0.07841774821281433f, 0.05041886866092682f,
                                      -0.019440466538071632f, 0.026447860524058342f)
                         : polynomial(t, 1.0f, 0.2500123083591461f, 0.08303225785493851f, 0.0337081104516983f,
                                      0.0031759124249219894f, 0.023488663136959076f, -0.016190478578209877f, 0.009067370556294918f);
  return sqrt_in_range(fmaf(halvings, 1.3862943611198906f, __fmul_rn(t, p)));
}

template <class Acc>
struct Pair {
  Acc first, second;
};

// A point of the unit circle: an angle within an eighth of a turn of 0, mirrored and swapped by two more bits. The
// polynomials are cos and sin of pi/4 sqrt(t), the latter over sqrt(t), within 4e-8; with kShort, 2e-5.
template <bool kShort>
__device__ Pair<float> circle_of(unsigned word) {
  const float a = __fsub_rn(__int_as_float((word & 0x7ffffe) | in_register(0x40000001)), 3.0f), t = __fmul_rn(a, a);
  const float sine = __fmul_rn(
      a, kShort ? polynomial(t, 0.7853969931602478f, -0.0807248055934906f, 0.002435660921037197f)
                : polynomial(t, 0.7853981852531433f, -0.08074583113193512f, 0.0024910164065659046f, -3.6609148082789034e-05f));
  const float cosine = kShort ? polynomial(t, 0.9999881982803345f, -0.3082309365272522f, 0.015357828699052334f)
                              : polynomial(t, 1.0f, -0.3084244132041931f, 0.01585014909505844f, -0.0003189770213793963f);
  const float mirrored = __int_as_float(__float_as_int(cosine) ^ (word & 0x80000000));
  Pair<float> point;  // as the compiler would not write it: one test, two choices
  asm("{\n\t.reg .pred p;\n\t.reg .b32 bit;\n\t"
      "and.b32 bit, %4, 0x40000000;\n\tsetp.ne.b32 p, bit, 0;\n\t"
      "selp.f32 %0, %2, %3, p;\n\tselp.f32 %1, %3, %2, p;\n\t}"
      : "=f"(point.first), "=f"(point.second)
      : "f"(sine), "f"(mirrored), "r"(word));
  return point;
}

// The same in float64, whose words are continued by `more`, within 3e-16. Coefficients are in constant memory, where instructions
// take them from at no cost. No conversion is needed: 2^52 + v has the word v for its lower half.
__constant__ double kLogarithm[] = {0.020833333333333343,  0.0007812499999980165, 3.4877232209960074e-05, 1.695420156313575e-06,
                                    8.670279130561465e-08, 4.569171949024699e-09, 2.722790992357268e-10};
__constant__ double kSine[] = {0.7853981633974483,    -0.08074551218828054,  0.002490394570188846, -3.657620415892392e-05,
                               3.133616225627117e-07, -1.75715009191594e-09, 6.877366312268398e-12};
__constant__ double kCosine[] = {1.0,
                                 -0.30842513753403783,
                                 0.015854344243741596,
                                 -0.00032599188648375736,
                                 3.5908591802691053e-06,
                                 -2.460950746634765e-08,
                                 1.1365481618193415e-10};

template <int kCount>
__device__ double polynomial(double t, const double (&coefficients)[kCount]) {
  double sum = coefficients[kCount - 1];
#pragma unroll
  for (int i = kCount - 2; i >= 0; --i) sum = fma(sum, t, coefficients[i]);
  return sum;
}

__device__ inline double above_2_52(unsigned word) { return __hiloint2double(0x43300000, static_cast<int>(word)); }

// sqrt, rounded as IEEE 754 says for all that an estimate could tell: a step of Goldschmidt of third order, and one of Markstein.
__device__ inline double sqrt_in_range(double v) {
  double r;
  asm("rsqrt.approx.ftz.f64 %0, %1;" : "=d"(r) : "d"(v));
  const double first = __dmul_rn(v, r), half = __dmul_rn(0.5, r), error = fma(-first, half, 0.5);
  const double root = fma(first, fma(__dmul_rn(1.5, error), error, error), first);
  return fma(fma(-root, root, v), fma(half, error, half), root);
}

// u is cut to 53 bits, and below 1. Of 2^k m, m being within sqrt(2) of 1, the logarithm is k ln 2 + 2 atanh((m - 1) / (m + 1)).
__device__ inline double radius_of(unsigned word, unsigned more) {
  const double v = __fma_rz(above_2_52(more) - (0x1p52 - 0.5), 0x1p-32, above_2_52(word) - 0x1p52);  // 2^32 u
  const int high = __double2hiint(v);
  const unsigned k = static_cast<unsigned>(high - 0x3fe6a09e + (64 << 20)) >> 20;  // and 64 more
  const double m = __hiloint2double(high + (64 << 20) - static_cast<int>(k << 20), __double2loint(v));
  const double numerator = fma(m, -4.0, 4.0), denominator = m + 1.0;
  double r;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(r) : "d"(denominator));
  const double error = fma(-denominator, r, 1.0);
  r = fma(r, fma(error, error, error), r);
  const double first = __dmul_rn(numerator, r), s = fma(fma(-denominator, first, numerator), r, first), t = __dmul_rn(s, s);
  const double halvings = above_2_52(k) - (0x1p52 + 64 + 32);
  return sqrt_in_range(fma(halvings, -1.3862943611198906, fma(__dmul_rn(s, t), polynomial(t, kLogarithm), s)));
}

__device__ inline Pair<double> circle_of(unsigned word, unsigned more) {
  const double a = __hiloint2double((word & 0x7ffffe) >> 3 | 0x40000000, __funnelshift_r(more, word >> 1, 2)) - 3.0;
  const double t = __dmul_rn(a, a), sine = __dmul_rn(a, polynomial(t, kSine)), cosine = polynomial(t, kCosine);
  const double mirrored = __hiloint2double(__double2hiint(cosine) ^ (word & 0x80000000), __double2loint(cosine));
  const bool swapped = word & 0x40000000;
  return {swapped ? sine : mirrored, swapped ? mirrored : sine};
}

// The normals of a group's four samples, as exact as samples of T need them.
template <class T, class Key>
__device__ Pack<Accumulator<T>, 4> normals_of(const Noise<Key>& noise, unsigned group, unsigned column, unsigned top) {
  using Acc = Accumulator<T>;
  constexpr bool kShort = kSame<T, __nv_bfloat16>;
  Pack<Acc, 4> z;
  const Words w = noise.template words<0>(group, column, top);
  Words more{};
  if constexpr (kSame<Acc, double>) more = noise.template words<1>(group, column, top);
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    if constexpr (kSame<Acc, double>) {
      const double radius = radius_of(w.at[i], more.at[i]);
      const Pair<double> point = circle_of(w.at[i + 1], more.at[i + 1]);
      z.at[i] = __dmul_rn(radius, point.first);
      z.at[i + 1] = __dmul_rn(radius, point.second);
    } else {
      const float radius = radius_of<kShort>(w.at[i]);
      const Pair<float> point = circle_of<kShort>(w.at[i + 1]);
      z.at[i] = __fmul_rn(radius, point.first);
      z.at[i + 1] = __fmul_rn(radius, point.second);
    }
  }
  return z;
}

}  // namespace cuops
