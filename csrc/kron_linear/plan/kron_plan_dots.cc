#include "kron_plan_dots.h"

#include <algorithm>
#include <cmath>

namespace cuops {
namespace {

constexpr int kMostLanesLog = 5, kEachVectors = 4, kEachSingles = 8;  // lanes of a sum; packs for which a lane may be alone
constexpr std::int64_t kMostResults = 1 << 20, kMostThreads = 1 << 18, kMostSample = 1 << 12;
// Nanoseconds, measured on an H200: a launch; a thread of few lanes, which reads rows that are far apart, and one of more.
struct Costs {
  double start, apart, beside;
};
constexpr Costs kCosts = {4400, 0.016, 0.0085}, kCostsF64 = {4550, 0.025, 0.0105};
constexpr int kBesideLog = 2;
// Of gradients: a launch, loads that wait for others, and a product; of how many at most, of few rows and of many.
constexpr double kBwdStart = 4450, kBwdRound = 250, kBwdProduct = 0.006, kBwdMost = 1e5, kBwdMostOfMany = 1.6e5;
constexpr std::int64_t kMany = 1024;
// Of all factors at once: a launch, loads that wait for others, and an element of x or a factor that is read.
constexpr double kTermsStart = 4550, kTermsRound = 300, kTermsElement = 0.0009;
// Of all gradients behind another launch: one, and sums of several warps; elements of a row of x times those of dy, and terms.
constexpr double kTermsBwdStart = 1050, kTermsBwdTogether = 150;
constexpr std::int64_t kMostPairs = 1 << 20, kMostTermsBwd = 1 << 12;
constexpr int kMostLanesLogBwd = 7;  // a block's
constexpr double kTermsStartF64 = 4850, kTermsRoundF64 = 700, kTermsElementF64 = 0.0012;

int lanes_log_of(std::int64_t packs, int each) {
  int log = 0;
  while (log < kMostLanesLog && std::int64_t{each} << log < packs) ++log;
  return log;
}

bool fits(const KronProductProblem& p, const KronDevice& device) {
  return device.tuned == 90 && p.inner == 1 && std::max(p.in, p.out) <= kKronMostProduct &&
         p.rows * std::max(p.in, p.out) <= kMostResults;
}

struct Matrix {
  const void* data;
  std::int64_t rows, row, step;  // their number, and how far rows and elements of a sum are apart
};
KronDots dots_of(const Matrix& a, const Matrix& b, void* c, std::int64_t c_row, std::int64_t k, DType dtype) {
  const int width = width_of(dtype);
  auto in_vectors = [&](const Matrix& m) {
    return m.step == 1 && reinterpret_cast<std::uintptr_t>(m.data) % 16 == 0 && (m.rows == 1 || m.row % width == 0);
  };
  KronDots dots{};
  dots.a = a.data;
  dots.b = b.data;
  dots.c = c;
  dots.a_row = static_cast<int>(a.row);
  dots.a_step = static_cast<int>(a.step);
  dots.b_row = static_cast<int>(b.row);
  dots.b_step = static_cast<int>(b.step);
  dots.c_row = static_cast<int>(c_row);
  dots.bias_lead = 1;
  dots.k = static_cast<int>(k);
  dots.count = static_cast<int>(a.rows * b.rows);
  dots.by_n = kron_divisor(b.rows);
  dots.vectors = k % width == 0 && in_vectors(a) && in_vectors(b);
  const int log = dots.vectors ? lanes_log_of(k / width, kEachVectors) : lanes_log_of(k, kEachSingles);
  dots.lanes_log = static_cast<unsigned char>(log);
  dots.blocks = static_cast<int>(ceil_div(std::int64_t{dots.count} << log, kDotsThreads));
  return dots;
}

double time_of_one(const KronProblem& problem, const KronDevice& device) {
  const KronSize& size = problem.sizes[0];
  const KronProductProblem p{problem.dtype, problem.rows, problem.inner, size.out, size.in};
  if (!fits(p, device)) return INFINITY;
  const int width = width_of(p.dtype);
  const int log = p.in % width == 0 ? lanes_log_of(p.in / width, kEachVectors) : lanes_log_of(p.in, kEachSingles);
  const std::int64_t threads = p.rows * p.out << log;
  if (threads > kMostThreads) return INFINITY;
  const Costs& costs = p.dtype == kFloat64 ? kCostsF64 : kCosts;
  return costs.start + (log < kBesideLog ? costs.apart : costs.beside) * static_cast<double>(threads);
}

double time_of_terms(const KronProblem& problem, const KronDevice& device, KronTermsParams* p) {
  const int count = static_cast<int>(problem.sizes.size());
  if (device.tuned != 90 || problem.inner != 1 || count > kTermsFactors) return INFINITY;
  std::int64_t in = 1, out = 1;
  for (int k = 0; k < count; ++k) {
    const KronSize& size = problem.sizes[k];
    in *= size.in;
    out *= size.out;
    if (std::max(in, out) > kMostSample) return INFINITY;
    p->factor[k].by_out = kron_divisor(size.out);
    p->factor[k].by_in = kron_divisor(size.in);
  }
  if (problem.rows > kMostResults / out) return INFINITY;
  p->in = static_cast<int>(in);
  p->count = static_cast<int>(problem.rows * out);
  p->by_out = kron_divisor(out);
  p->lanes_log = lanes_log_of(in, kTermsBatch);
  const double rounds = static_cast<double>(ceil_div(in, std::int64_t{kTermsBatch} << p->lanes_log)) - 1;
  const double elements = static_cast<double>(p->count) * in * (count + 1);
  return problem.dtype == kFloat64 ? kTermsStartF64 + kTermsRoundF64 * rounds + kTermsElementF64 * elements
                                   : kTermsStart + kTermsRound * rounds + kTermsElement * elements;
}

}  // namespace

double plan_dots_bwd(const KronProductProblem& p, bool needs_dx, bool needs_dw, const KronDevice& device) {
  const double products = static_cast<double>(p.rows) * p.in * p.out;
  if (!(needs_dx || needs_dw) || !fits(p, device) || p.rows > kMany || products > (p.rows < kMany ? kBwdMost : kBwdMostOfMany))
    return INFINITY;
  const double rounds = static_cast<double>(ceil_div(needs_dw ? p.rows : 1, std::int64_t{kEachSingles} << kMostLanesLog)) - 1;
  return kBwdStart + kBwdRound * rounds + kBwdProduct * products;
}

KronDots dots_of_y(const KronProductProblem& p, const KronProductArray& y, const KronProductArray& x, const KronFactor& w) {
  return dots_of({x.data, p.rows, x.stride, 1}, {w.data, p.out, w.row_stride, w.column_stride}, y.data, y.stride, p.in, p.dtype);
}

KronDots dots_of_dx(const KronProductProblem& p, const KronProductArray& dx, const KronProductArray& dy, const KronFactor& w) {
  return dots_of({dy.data, p.rows, dy.stride, 1}, {w.data, p.in, w.column_stride, w.row_stride}, dx.data, dx.stride, p.out,
                 p.dtype);
}

KronDots dots_of_dw(const KronProductProblem& p, void* dw, const KronProductArray& dy, const KronProductArray& x) {
  return dots_of({dy.data, p.out, 1, dy.stride}, {x.data, p.in, 1, x.stride}, dw, p.in, p.rows, p.dtype);
}

Kernel& dots_kernel(DType dtype) {
  static const KernelTable table("kron_dots_", {{"kron_linear_dots", {""}}});
  return table.at(dtype, 0);
}

KronTermsParams terms_of(KronTermsParams p, const KronProductArray& y, const KronProductArray& x, const KronFactor* factors) {
  p.x = x.data;
  p.y = y.data;
  p.x_stride = static_cast<int>(x.stride);
  p.y_stride = static_cast<int>(y.stride);
  for (int k = 0; k < kTermsFactors && p.factor[k].by_in.divisor > 0; ++k) {
    p.factor[k].data = factors[k].data;
    p.factor[k].row_stride = static_cast<int>(factors[k].row_stride);
    p.factor[k].column_stride = static_cast<int>(factors[k].column_stride);
  }
  return p;
}

Kernel& terms_kernel(DType dtype, int factors) {
  static const KernelTable table("kron_terms_", {{"kron_linear_dots", {"_2", "_3", "_4"}}});
  return table.at(dtype, factors - 2);
}

double plan_terms_bwd(KronTermsBwdParams* p, DType dtype, std::int64_t rows, const std::vector<KronSize>& sizes,
                      const KronDevice& device) {
  const int count = static_cast<int>(sizes.size());
  if (device.tuned != 90 || count < 2 || count > kTermsFactors) return INFINITY;
  KronProblem back;  // of dx
  back.dtype = dtype;
  back.rows = rows;
  back.inner = 1;
  for (const KronSize& size : sizes) back.sizes.push_back({size.in, size.out});
  const double time_of_dx = time_of_terms(back, device, &p->back);
  if (std::isinf(time_of_dx)) return INFINITY;
  std::int64_t in = 1, out = 1;
  for (int k = count - 1; k >= 0; --k) {
    auto& f = p->factor[k];
    f.by_out = kron_divisor(sizes[k].out);
    f.by_in = kron_divisor(sizes[k].in);
    f.row_step = static_cast<int>(out);
    f.column_step = static_cast<int>(in);
    in *= sizes[k].in;
    out *= sizes[k].out;
  }
  if (in * out > kMostPairs || rows > kMostPairs / std::max(in, out)) return INFINITY;
  p->in = static_cast<int>(in);
  p->out = static_cast<int>(out);
  double elements = static_cast<double>(rows) * static_cast<double>(in * out) * (count + 1), most_rounds = 0;
  int most_log = 0;
  for (int k = 0; k < count; ++k) {
    auto& f = p->factor[k];
    const std::int64_t terms = rows * (in / sizes[k].in) * (out / sizes[k].out);
    if (terms > kMostTermsBwd) return INFINITY;
    f.terms = static_cast<int>(terms);
    while (f.lanes_log < kMostLanesLogBwd && std::int64_t{kTermsBatch} << f.lanes_log < terms) ++f.lanes_log;
    const double rounds = static_cast<double>(ceil_div(terms, std::int64_t{kTermsBatch} << f.lanes_log));
    elements += static_cast<double>(sizes[k].in * sizes[k].out * (kTermsBatch << f.lanes_log)) * rounds * (count + 1);
    most_rounds = std::max(most_rounds, rounds);
    most_log = std::max(most_log, f.lanes_log);
  }
  const double together = most_log > kMostLanesLog ? kTermsBwdTogether : 0;
  return std::max(kTermsBwdStart + together + (dtype == kFloat64 ? kTermsRoundF64 : kTermsRound) * (most_rounds - 1) +
                      (dtype == kFloat64 ? kTermsElementF64 : kTermsElement) * elements,
                  time_of_dx - kTermsStart + kTermsBwdStart);
}

unsigned terms_bwd_of(KronTermsBwdParams* p, const void* x, const void* dy, void* dx, void* const* dfactors,
                      const KronFactor* factors) {
  p->x = x;
  p->dy = dy;
  p->start = 0;
  for (int k = 0; k < kTermsFactors; ++k) {
    auto& f = p->factor[k];
    f.first = p->start;
    if (f.terms == 0) continue;  // beyond the last factor: no block is so far behind
    f.data = factors[k].data;
    f.row_stride = static_cast<int>(factors[k].row_stride);
    f.column_stride = static_cast<int>(factors[k].column_stride);
    f.gradient = dfactors[k];
    const std::int64_t results = f.gradient ? std::int64_t{f.by_out.divisor} * f.by_in.divisor : 0;
    p->start += static_cast<int>(ceil_div(results << f.lanes_log, kDotsThreads));
    p->back.factor[k].data = f.data;
    p->back.factor[k].row_stride = f.column_stride;
    p->back.factor[k].column_stride = f.row_stride;
  }
  if (!dx) return static_cast<unsigned>(p->start);
  p->back.x = dy;
  p->back.y = dx;
  p->back.x_stride = p->out;
  p->back.y_stride = p->in;
  p->back.bias_lead = 1;
  return static_cast<unsigned>(p->start + ceil_div(std::int64_t{p->back.count} << p->back.lanes_log, kDotsThreads));
}

Kernel& terms_bwd_kernel(DType dtype, int factors) {
  static const KernelTable table("kron_terms_bwd_", {{"kron_linear_dots", {"_2", "_3", "_4"}}});
  return table.at(dtype, factors - 2);
}

KronGroup plan_dots(const KronProblem& problem, const KronDevice& device) {
  KronGroup group(problem);
  if (!problem.linear || !problem.near) return group;
  int lanes_log = 0;
  if (group.count == 1) {
    group.params.emplace<KronOneDots>();
    group.nanoseconds = time_of_one(problem, device);
  } else {
    KronTermsParams& p = group.params.emplace<KronTermsParams>();
    group.nanoseconds = time_of_terms(problem, device, &p);
    lanes_log = p.lanes_log;
  }
  if (std::isinf(group.nanoseconds)) return group;
  group.fused = true;
  group.kernel = group.count == 1 ? &dots_kernel(problem.dtype) : &terms_kernel(problem.dtype, group.count);
  const double results = static_cast<double>(problem.rows) * problem.out(),
               terms = problem.in() / static_cast<double>(problem.inner);
  set_costs(problem, &group);
  group.operations = (group.count == 1 ? 2 : group.count + 1) * results * terms;
  group.shape = {static_cast<unsigned>(ceil_div(static_cast<std::int64_t>(results) << lanes_log, kDotsThreads)), kDotsThreads};
  return group;
}

}  // namespace cuops
