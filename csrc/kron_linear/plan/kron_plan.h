// Which factors of a Kronecker product run in which kernel, with which tile: chosen by a model of what each would cost.
#pragma once

#include <cmath>
#include <cstdint>
#include <variant>
#include <vector>

#include "host/integers.h"
#include "host/kernel.h"
#include "kron_linear.h"
#include "kron_linear/axes/kron_axes.h"
#include "kron_linear/axes/kron_bits.h"
#include "kron_linear/axes/kron_small.h"
#include "kron_linear/fibers/kron_fibers.h"
#include "kron_linear/mma/kron_cube.h"
#include "kron_linear/mma/kron_direct.h"
#include "kron_linear/mma/kron_half.h"
#include "kron_linear/mma/kron_whole.h"
#include "kron_linear/products/kron_dots.h"
#include "kron_linear/slices/kron_slices.h"
#include "kron_linear/wgmma/kron_wide.h"

namespace cuops {

struct KronSize {
  std::int64_t out, in;
};

constexpr std::int64_t kKronMostStride = 1 << 22;  // from sample to sample of a linear problem: those of a tile are within 2^31

struct KronProblem {
  DType dtype;
  KronArithmetic arithmetic;
  bool tf32;                 // float32 as TF32
  bool aligned = true;       // rows of x and y are whole vectors
  bool linear = true;        // and have one stride, of at most kKronMostStride
  bool mapped = true;        // and, in x, do not overlap
  bool near = true;          // strides of factors are small
  std::int64_t rows, inner;  // samples; columns beyond the factors' axes
  std::vector<KronSize> sizes;

  // Elements of a row of x, and of y.
  double in() const;
  double out() const;
};

// What plans say to kernels that take one factor, and no more than it and arrays: kron_linear_product.cu and kron_linear_dots.cu.
struct KronOneProduct {};
struct KronOneDots {};

// One group of neighbouring factors: a launch, or one factor, or the product of two, for the vendor's matrix product.
struct KronGroup {
  int first = 0, count = 0;
  bool fused = false;
  Kernel* kernel = nullptr;
  Kernel* plain = nullptr;  // where there is one for factors that come in vectors, without a bias
  std::variant<KronFwdParams, KronWholeParams, KronSmallParams, KronAxesParams, KronDirectParams, KronInRegistersParams,
               KronWideParams, KronCubeParams, KronBitsParams, KronFibersParams, KronSlicesParams, KronTermsParams, KronOneProduct,
               KronOneDots>
      params;  // all but the arrays
  LaunchShape shape{};
  int samples = 1, slices = 1, columns = 0;  // of a tile; slices: blocks that share one
  double nanoseconds = INFINITY, bytes = 0, operations = 0;

  KronGroup() = default;
  explicit KronGroup(const KronProblem& problem) : count(static_cast<int>(problem.sizes.size())) {}

  template <class Params>
  bool has() const {
    return std::holds_alternative<Params>(params);
  }
};

struct KronDevice {
  int capability, tuned, cuda, multiprocessors, shared_bytes, shared_bytes_a_multiprocessor;
  bool clusters;
};

KronDevice kron_device(int device);

// What predictions take for granted, as on an H200.
constexpr double kClock = 1.7;           // GHz
constexpr double kLaunch = 2500;         // ns
constexpr double kBytesACycle = 17.5;    // of device memory, for each multiprocessor
constexpr double kMostBytesACycle = 40;  // where few multiprocessors work
constexpr double kMmaCycles = 1.9;       // of a multiprocessor, for one m16n8k16
constexpr double kOldCompiler = 1.35;    // times the arithmetic, in code of CUDA 11

// Whether it is square, and of a size that kron_linear_small.cu and its like have.
inline bool is_small_power(const KronSize& s) { return s.in == s.out && (s.in == 2 || s.in == 4 || s.in == 8 || s.in == 16); }

// What a plan is known by: numbers, and the sizes.
inline std::vector<std::int64_t> plan_key(std::vector<std::int64_t> numbers, const std::vector<KronSize>& sizes) {
  for (const KronSize& size : sizes) numbers.insert(numbers.end(), {size.out, size.in});
  return numbers;
}

KronDivisor kron_divisor(std::int64_t d);
KronArithmetic kron_arithmetic(DType dtype, const KronDevice& device);

// Multiplications and additions that a row of `state` elements takes, factor after factor.
template <class Factor>
double operations_of(Factor factor, Factor end, double state) {
  double operations = 0;
  for (; factor != end; ++factor) {
    operations += 2 * state * static_cast<double>(factor->out);
    state *= static_cast<double>(factor->out) / static_cast<double>(factor->in);
  }
  return operations;
}

// What a group that applies all factors, the last one first, reads and writes, and its operations.
void set_costs(const KronProblem& problem, KronGroup* group);

// The best launch of the general kernel, and of those for certain sizes; not fused where there is none.
KronGroup plan_general(const KronProblem& problem, const KronDevice& device);
KronGroup plan_whole(const KronProblem& problem, const KronDevice& device);
KronGroup plan_small(const KronProblem& problem, const KronDevice& device);
KronGroup plan_sixteens(const KronProblem& problem, const KronDevice& device);
KronGroup plan_four_sixteens(const KronProblem& problem, const KronDevice& device);
KronGroup plan_eights(const KronProblem& problem, const KronDevice& device);
KronGroup plan_direct(const KronProblem& problem, const KronDevice& device);
KronGroup plan_cube(const KronProblem& problem, const KronDevice& device);
KronGroup plan_half(const KronProblem& problem, const KronDevice& device);
KronGroup plan_double(const KronProblem& problem, const KronDevice& device);
KronGroup plan_wide(const KronProblem& problem, const KronDevice& device);
KronGroup plan_bits(const KronProblem& problem, const KronDevice& device);
KronGroup plan_fibers(const KronProblem& problem, const KronDevice& device);
KronGroup plan_dots(const KronProblem& problem, const KronDevice& device);
KronGroup plan_product(const KronProblem& problem, const KronDevice& device);
KronGroup plan_slices(const KronProblem& problem, const KronDevice& device);

// The best fused launch for all of the problem's factors; not fused where none fits.
KronGroup plan_group(const KronProblem& problem, const KronDevice& device);

// The chain of groups for a problem, in the order in which they run: that of GEMMs alone may begin with the last factor.
std::vector<KronGroup> plan_chain(const KronProblem& problem, const KronDevice& device);

}  // namespace cuops
