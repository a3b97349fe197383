#include "kron_plan_gemm.h"

#include <algorithm>

namespace cuops {
namespace {

// As _kron_linear/gemm.py has them: rows of the second of two factors, from which on nothing is rearranged, if the second one's
// products of a column are more than these; and what a batch of small products is. About as it has them: columns beyond a factor's
// own, from which on products are a batch, and of fewer if they, of at least so many rows and columns, are no more, and sums no
// longer. It weighs what a batch and what copies take; a plan needs no more than their time.
constexpr int kAcross = 26, kLeastAcross = 18, kFew = 32;
constexpr double kFewOfColumn = 2 << 20, kTile = 48, kFewTerms = 512;
constexpr double kFewProducts = 3 << 19, kFewElements = 1 << 15;
constexpr std::int64_t kFewRows = 1024;
constexpr double kRearrange = 1500;  // ns of a launch that copies

// What a product takes, fitted to 6,700 chains of GEMMs on an H100 (2 to 600 rows and columns, 2^9 to 2^26 elements), within 15 %
// for two thirds of them, and made for the speed of an H200's memory: ns; ns of a term of the sum; ps of a vector of columns, for
// each element of its and of the result, for itself, and for each product; ns of a matrix of a batch.
struct GemmTimes {
  double start, depth, element, vector, product, matrix;
};
constexpr GemmTimes kGemmTimes[][6] = {
    // float32; float64 of multiples of 16, and other; 16 bits of rows in whole vectors, of an even number of elements, and other
    {{4600, 12.8, 0.95, 0, 0.0414, 0},
     {4300, 4.2, 0.89, 31.4, 0.0369, 0},
     {4000, 8.6, 3.3, 0, 0.0372, 0},
     {4200, 1.9, 0.07, 51.9, 0.0026, 0},
     {4100, 7.2, 0.56, 58.4, 0.0088, 0},
     {4800, 9.1, 0.7, 46.5, 0.0155, 0}},
    {{3600, 18.3, 1.02, 0, 0.0451, 0.11},
     {3600, 9, 1.91, 25.8, 0.0295, 2.36},
     {4000, 10.7, 2.44, 0, 0.0474, 0.73},
     {3700, 1.3, 0.24, 16.3, 0.0052, 3.48},
     {3500, 8.2, 1.1, 4.9, 0.0074, 0.24},
     {3700, 13.9, 0.83, 43, 0.017, 0.57}},
};
constexpr GemmTimes kSmallTimes = {4000, 9};
constexpr double kMeasured = 132;  // multiprocessors
constexpr double kLeast = 16;      // rows and columns, as fewer take as long
// ps of a product as TF32, and of one of 16 bits in whole vectors, of factors from so many rows and columns on.
constexpr double kProductTf32 = 0.0054, kProductLarge = 0.0024, kLarge = 256;

// Up to how many products of a factor without columns beyond it _kron_linear/gemm.py takes a batch.
double few_alone(DType dtype) { return dtype == kFloat32 ? 3 << 20 : dtype == kFloat64 ? 3 << 19 : 1 << 20; }

// Whether a batch of products of a factor, one for each row, is no slower than one product and a copy.
bool is_in_batch(const KronProblem& problem) {
  const KronSize& size = problem.sizes[0];
  const double products = static_cast<double>(problem.rows) * std::max<double>(size.out, kTile) * std::max<double>(size.in, kTile);
  return problem.inner >= kFew || (size.in <= kFewTerms && products <= kFewOfColumn);
}

}  // namespace

Gemm how_in_gemms(const KronProblem& problem) {
  const KronSize& size = problem.sizes[0];
  const double elements = static_cast<double>(problem.rows) * problem.inner * size.in;
  const bool one = problem.inner == 1, whole = size_of(problem.dtype) == 2 && size.in % 8 == 0 && size.out % 8 == 0;
  if (problem.rows <= kFewRows && elements < kFewElements &&
      elements * size.out <= (one ? few_alone(problem.dtype) : kFewProducts) && !(one && whole))
    return kSmall;
  return one ? kOne : is_in_batch(problem) ? kBatched : kCopied;
}

Gemm how_in_chain(const KronProblem& problem) {
  if (problem.inner == 1) return how_in_gemms(problem);
  return is_in_batch(problem) ? kBatched : kBetweenCopies;
}

bool are_two(const KronProblem& problem) {
  if (problem.sizes.size() != 2 || problem.inner > 1 || problem.rows == 1) return false;
  const KronSize &first = problem.sizes[0], &second = problem.sizes[1];
  const int least = std::max(first.out, first.in) <= second.out ? kLeastAcross : kAcross;
  return second.out >= least && static_cast<double>(problem.rows) * first.in * second.out * second.in > kFewOfColumn;
}

KronGroup plan_gemm(const KronProblem& problem, Gemm gemm, const KronDevice& device) {
  KronGroup group(problem);
  const KronSize& size = problem.sizes[0];
  const double rows = static_cast<double>(problem.rows), vectors = rows * problem.inner, in = size.in, out = size.out;
  group.bytes = vectors * (in + out) * size_of(problem.dtype);
  group.operations = 2 * vectors * in * out;
  if (gemm == kSmall) {
    group.nanoseconds = kSmallTimes.start + kSmallTimes.depth * in;
    return group;
  }
  const bool one = gemm != kBatched;
  const std::int64_t lengths = size.in | (one ? size.out : problem.inner);  // of rows: what all are multiples of
  const bool sixteens = (size.in | size.out) % 16 == 0 && (one || problem.inner % 2 == 0);
  const int kind = problem.dtype == kFloat32   ? 0
                   : problem.dtype == kFloat64 ? (sixteens ? 1 : 2)
                   : lengths % 8 == 0          ? 3
                   : lengths % 2 == 0          ? 4
                                               : 5;
  const GemmTimes& times = kGemmTimes[one ? kOne : kBatched][kind];
  const double product = problem.tf32                               ? kProductTf32
                         : kind == 3 && std::min(in, out) >= kLarge ? std::min(kProductLarge, times.product)
                                                                    : times.product;
  const double i = std::max(in, kLeast), o = std::max(out, kLeast);
  group.nanoseconds = times.start + times.depth * i +
                      (vectors * (times.element * (i + o) + times.vector + product * i * o) * 1e-3 + rows * times.matrix) *
                          kMeasured / device.multiprocessors;
  const int copies = gemm == kBetweenCopies ? 2 : gemm == kCopied ? 1 : 0;
  group.nanoseconds += copies * (kRearrange + group.bytes / 31 / device.multiprocessors);
  return group;
}

}  // namespace cuops
