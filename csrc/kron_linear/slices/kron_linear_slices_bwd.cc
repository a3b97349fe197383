// All gradients of few small samples in one launch: checks, the plan, the launch.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cmath>

#include "host/error.h"
#include "host/plan_cache.h"
#include "host/tensor.h"
#include "kron_linear/kron_factors.h"
#include "kron_linear/plan/kron_plan_dots.h"

namespace cuops {
namespace {

constexpr std::int64_t kMostSample = 1 << 15, kMostElements = 1 << 17;  // elements of a sample of x or dy; of all
constexpr std::int64_t kMostSize = 128, kMostBlocks = 1 << 13;          // rows and columns of a factor; of a launch
constexpr int kMostGroupsLog = 3;

// Microseconds, measured on an H200: of a launch behind another one; of a thread's way through a factor, a sum of it, a product,
// and loads that wait for others; of an element of a factor on its way to shared memory, where it is converted and where not.
constexpr double kStart = 1.4, kStep = 0.27, kSum = 0.275, kProduct = 0.0071, kProductF64 = 0.0263, kLoad = 0.28;
constexpr double kConverted = 0.3, kCopied = 0.065;
constexpr int kLoads = 4;                           // of a thread at a time
constexpr double kTogether = 0.85, kLargest = 1.2;  // where blocks add up what they found, and where these are the largest
// Of a multiprocessor: a block's threads, their products, its elements of x and dy; and, where blocks come one after the other, one
// of as many as it holds: alone, in clusters, in the largest ones of these.
constexpr double kThread = 0.86e-3, kProducts = 0.95e-4, kElement = 2.15e-4;
constexpr double kTurn = 1.2, kTurnTogether = 2.7, kTurnLargest = 4.2;
constexpr int kMostThreads = 2048;

struct SlicesPlan {
  KronSlicesBwdParams params{};  // but for the arrays, and where blocks start
  LaunchShape shape{};
  double nanoseconds = INFINITY;
  KronTermsBwdParams terms{};  // where that is faster, of which sizes say all
  double terms_nanoseconds = INFINITY;

  double least() const { return std::min(nanoseconds, terms_nanoseconds); }
};

SlicesPlan evaluate(DType dtype, std::int64_t rows, const std::vector<KronSize>& sizes, int groups_log, int threads_log,
                    const KronDevice& device) {
  SlicesPlan plan;
  KronSlicesBwdParams& p = plan.params;
  const int count = static_cast<int>(sizes.size()), threads = 1 << threads_log;
  std::int64_t in = 1, out = 1, weights = 0;
  for (int i = 0; i < count; ++i) {
    const KronSize& size = sizes[i];
    in *= size.in;
    out *= size.out;
    if (std::max(size.in, size.out) > kMostSize || std::max(in, out) > kMostSample) return plan;
    KronSlicesFactor& f = p.factor[i];
    f.out = static_cast<int>(size.out);
    f.in = static_cast<int>(size.in);
    f.by_in = kron_divisor(size.in);
    f.weight = static_cast<int>(weights);
    f.pitch = f.out | 1;
    weights += round_up(1LL * f.pitch * f.in, 4);
  }
  const std::int64_t samples = ceil_div(rows, 1 << groups_log);
  std::int64_t blocks = rows * sizes[0].in;
  for (const KronSize& size : sizes) blocks += size.out << groups_log;
  if (rows * std::max(in, out) > kMostElements || blocks > kMostBlocks) return plan;
  p.in = static_cast<int>(in);
  p.out = static_cast<int>(out);
  p.rows = static_cast<int>(rows);
  p.factors = count;
  p.samples = static_cast<int>(samples);
  p.groups_log = groups_log;
  p.parts_log = std::clamp(threads_log - log_from(out / sizes[0].out), 0, std::min(5, log_from(sizes[0].out)));
  std::int64_t state[2] = {0, 0};
  const double product = dtype == kFloat64 ? kProductF64 : kProduct, copy = size_of(dtype) == 2 ? kConverted : kCopied;
  double longest = 0,
         work = kThread * static_cast<double>(blocks * threads) + kElement * static_cast<double>(rows * sizes[0].in * in);
  for (int own = 0; own < count; ++own) {
    KronSlicesFactor& f = p.factor[own];
    std::int64_t before = 1, in_after = 1, out_after = 1, after = out / f.out, done = 1;
    for (int i = 0; i < own; ++i) before *= sizes[i].in;
    for (int i = own + 1; i < count; ++i) in_after *= sizes[i].in, out_after *= sizes[i].out;
    f.rest = static_cast<int>(after);
    f.out_after = static_cast<int>(out_after);
    f.by_out_after = kron_divisor(out_after);
    f.before = static_cast<int>(before);
    f.after = static_cast<int>(in_after);
    f.lanes = static_cast<int>(std::min<std::int64_t>(in_after, threads / f.in));
    f.parts = static_cast<int>(std::min<std::int64_t>(threads / (f.in * f.lanes), samples * before));
    f.ways_log = std::clamp(threads_log - log_from(f.in), 0, std::min(5, log_from(f.parts * f.lanes)));
    f.by_lanes = kron_divisor(f.lanes);
    state[0] = std::max(state[0], samples * after);
    const std::int64_t loads = ceil_div(samples * before, f.parts) * ceil_div(in_after, f.lanes);
    double us = kLoad * static_cast<double>(ceil_div(loads, kLoads)), products = 0;
    for (int i = 0, turn = 0; i < count; ++i) {
      if (i == own) continue;
      after /= sizes[i].out;
      done *= sizes[i].in;
      const std::int64_t sums = samples * done * after;
      KronSlicesTurn& t = p.turn[own][turn++];
      t.by_after = kron_divisor(after);
      t.results = static_cast<int>(done * after);
      t.ways_log = std::clamp(threads_log - log_from(sums), 0, std::clamp(log_from(sizes[i].out) - 2, 0, 5));
      state[turn % 2] = std::max(state[turn % 2], sums);
      const double of_thread = static_cast<double>(ceil_div(sums << t.ways_log, threads));
      products += of_thread * static_cast<double>(ceil_div(sizes[i].out, 1 << t.ways_log));
      us += kStep + kSum * of_thread + copy * static_cast<double>(ceil_div(sizes[i].in * sizes[i].out, threads));
    }
    longest = std::max(longest, us + product * products);
    work += static_cast<double>(f.out << groups_log) *
            (kElement * static_cast<double>(samples * (in + out / f.out)) + kProducts * products * threads);
  }
  const std::int64_t states = round_up(state[0], 4) + round_up(state[1], 4);
  const std::int64_t bytes = (weights + states + threads) * size_of(accumulator_of(dtype));
  if (bytes > device.shared_bytes) return plan;
  p.state[0] = static_cast<int>(weights);
  p.state[1] = static_cast<int>(weights + round_up(state[0], 4));
  p.sums = static_cast<int>(weights + states);
  plan.shape = {0, static_cast<unsigned>(threads), 1, 1U << groups_log, static_cast<unsigned>(bytes), true};
  const bool largest = threads_log == kSlicesMostLogBwd;
  const double together = groups_log == 0 ? 0 : kTogether + (largest ? kLargest : 0);
  const double turn = groups_log == 0 ? kTurn : largest ? kTurnLargest : kTurnTogether;
  const std::int64_t held = std::min<std::int64_t>(device.shared_bytes_a_multiprocessor / (bytes + 1024), kMostThreads / threads);
  const double turns = static_cast<double>(blocks) / static_cast<double>(device.multiprocessors * held);
  plan.nanoseconds = 1e3 * (kStart + longest + std::max(work / device.multiprocessors, turn * (turns - 1)) + together);
  return plan;
}

Kernel& slices_kernel(DType dtype) {
  static const KernelTable table("kron_slices_bwd_", {{"kron_linear_slices_bwd", {""}}});
  return table.at(dtype, 0);
}

// Plans are made once for each problem on each device.
std::shared_ptr<const SlicesPlan> cached_plan(DType dtype, std::int64_t rows, const std::vector<KronSize>& sizes, int device) {
  static auto& known = *new PlanCache<SlicesPlan>;
  return known.find(plan_key({device, dtype, rows}, sizes), [&] {
    SlicesPlan best;
    const KronDevice facts = kron_device(device);
    const Hardware& hw = hardware("kron_linear_slices_bwd", device);
    if (hw.tuned != 90 || sizes.size() < 2 || sizes.size() > kSlicesFactors) return best;
    for (int groups_log = 0; groups_log <= (hw.clusters() ? kMostGroupsLog : 0) && 1 << groups_log <= rows; ++groups_log) {
      for (int threads_log = 7; threads_log <= kSlicesMostLogBwd; ++threads_log) {
        SlicesPlan plan = evaluate(dtype, rows, sizes, groups_log, threads_log, facts);
        if (plan.nanoseconds < best.nanoseconds) best = std::move(plan);
      }
    }
    best.terms_nanoseconds = plan_terms_bwd(&best.terms, dtype, rows, sizes, facts);
    return best;
  });
}

}  // namespace

// The predicted nanoseconds of kron_linear_slices_bwd for these sizes behind another launch; 0 where there is no kernel. `sizes`:
// out and in of each factor.
int64_t kron_linear_slices_bwd_time(int64_t dtype, int64_t rows, tvm::ffi::Array<int64_t> sizes, int64_t device) {
  const std::vector<KronSize> all = sizes_of(sizes);
  if (rows < 1) raise("ValueError", "rows: expected at least 1");
  const auto plan = cached_plan(dtype_at(dtype), rows, all, static_cast<int>(device));
  return std::isinf(plan->least()) ? 0 : static_cast<int64_t>(plan->least());
}

// The gradients of y = x kron(factors)^T: those of the factors in `dfactors`, where it has an element, and that of x in dx. x, dy
// and dx are (rows, elements), without gaps.
void kron_linear_slices_bwd(tvm::ffi::Array<tvm::ffi::Optional<tvm::ffi::Tensor>> dfactors, OptionalTensor dx, TensorView dy,
                            TensorView x, tvm::ffi::Array<tvm::ffi::Tensor> factors) {
  expect_cuda(x, "x");
  const DType dtype = dtype_of(x, "x");
  if (dfactors.size() != factors.size()) raise("ValueError", "dfactors: expected one a factor");
  const std::vector<KronSize> sizes = sizes_of(factors, dtype, x.device());
  std::int64_t in = 1, out = 1;
  for (const KronSize& size : sizes) in *= size.in, out *= size.out;
  const std::int64_t rows = x.size(0);
  expect_matrix(x, "x", dtype, x.device(), rows, in);
  expect_matrix(dy, "dy", dtype, x.device(), rows, out);
  if (x.numel() == 0 || dy.numel() == 0) raise("ValueError", "x: expected no empty array");
  const int device = x.device().device_id;
  const auto plan = cached_plan(dtype, rows, sizes, device);
  if (std::isinf(plan->least())) raise("ValueError", "factors: no kernel; ask kron_linear_slices_bwd_time");

  KronFactor factor[kSlicesFactors];
  fill_factors(factor, factors, dtype);
  auto gradient_of = [&](int i) -> void* {
    if (!dfactors[i].has_value()) return nullptr;
    const tvm::ffi::Tensor dw = *dfactors[i];
    expect_matrix(TensorView(dw), "dfactors", dtype, x.device(), sizes[i].out, sizes[i].in);
    return data_of(TensorView(dw));
  };
  if (dx.has_value()) expect_matrix(*dx, "dx", dtype, x.device(), rows, in);
  const bool near = std::all_of(factors.begin(), factors.end(), [](const tvm::ffi::Tensor& w) { return has_small_strides(w); });
  if (plan->terms_nanoseconds < plan->nanoseconds && near) {
    KronTermsBwdParams p = plan->terms;
    void* gradients[kTermsFactors] = {};
    for (int i = 0; i < static_cast<int>(sizes.size()); ++i) gradients[i] = gradient_of(i);
    LaunchShape shape{terms_bwd_of(&p, data_of(x), data_of(dy), dx.has_value() ? data_of(*dx) : nullptr, gradients, factor),
                      kDotsThreads};
    shape.overlaps = true;
    if (shape.blocks == 0) return;
    const ContextGuard context(device);
    return launch(terms_bwd_kernel(dtype, static_cast<int>(sizes.size())), device, current_stream(x.device()), shape, &p);
  }
  if (std::isinf(plan->nanoseconds)) raise("ValueError", "factors: strides are too large for a kernel of so many factors");
  KronSlicesBwdParams p = plan->params;
  LaunchShape shape = plan->shape;
  for (int i = 0; i < p.factors; ++i) {
    KronSlicesFactor& f = p.factor[i];
    f.data = factor[i].data;
    f.row_stride = factor[i].row_stride;
    f.column_stride = factor[i].column_stride;
    f.start = static_cast<int>(shape.blocks);
    f.gradient = gradient_of(i);
    if (f.gradient == nullptr) continue;
    shape.blocks += f.out * shape.cluster;
  }
  p.x = data_of(x);
  p.dy = data_of(dy);
  p.start = static_cast<int>(shape.blocks);
  if (dx.has_value()) {
    p.dx = data_of(*dx);
    shape.blocks += static_cast<unsigned>(round_up(rows * sizes[0].in, shape.cluster));
  }
  if (shape.blocks == 0) return;
  const ContextGuard context(device);
  launch(slices_kernel(dtype), device, current_stream(x.device()), shape, &p);
}

}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kron_linear_slices_bwd_time, cuops::kron_linear_slices_bwd_time);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kron_linear_slices_bwd, cuops::kron_linear_slices_bwd);
