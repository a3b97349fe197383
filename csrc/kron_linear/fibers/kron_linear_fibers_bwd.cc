// Gradients of small factors and of their input on the host: checks, how the factors are grouped, the launches.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cmath>

#include "host/error.h"
#include "host/plan_cache.h"
#include "host/tensor.h"
#include "kron_linear/kron_factors.h"
#include "kron_linear/plan/kron_fibers_layout.h"

namespace cuops {
namespace {

constexpr double kStart = 9000;  // ns, of two launches
constexpr double kLoad = 1500;   // cycles until a tile is there
constexpr double kAddUp = 1500;  // cycles until the lanes of a warp have added up a larger factor's gradient

// Where shared memory has what, behind the weights: their transposes, the states, what the end of the launch takes, and the sums of
// each warp. Returns its elements.
int place(KronFibersBwdParams* p, const std::vector<int>& states, int warps) {
  KronFibersChain& chain = p->chain;
  int at = chain.weights;
  for (int s = 0; s < chain.steps; ++s) {
    KronFibersStep& step = chain.step[s];
    step.transposed = fibers_matrix(at, step.in, step.out);
    at += step.transposed.count;
  }
  for (int s = 0; s <= chain.steps; ++s) {
    (s < chain.steps ? chain.step[s].state : p->gradient) = at;
    at += static_cast<int>(round_up(states[s], 4));
  }
  p->raw = at;
  at += chain.sums + kFibersFactors;  // the factors of a product have no more elements than it, but for factors of 1 x 1
  p->total = at;
  p->found = at + chain.sums;
  return p->found + warps * chain.sums;
}

int shared_elements(const KronFibersLayout& layout, int threads) {
  KronFibersBwdParams p;
  p.chain = layout.chain;
  return place(&p, layout.states, threads / 32);
}

void add_steps(const KronFibersLayout& layout, KronFibersCost* cost) {
  const KronFibersChain& chain = layout.chain;
  for (int s = 0; s < chain.steps; ++s) {
    const KronFibersStep& step = chain.step[s];
    const int size = step.weight.size;
    const bool small = size <= (cost->words == 2 ? 4 : kFibersSmall);
    const double warps = 1.0 * chain.samples * step.fibers / 32, both = step.in + step.out;
    const double weights = small ? 0 : 1.0 * step.out * step.in / (32 * warps > cost->threads ? 2 : 1);
    const double products = small ? size * size : step.in * step.out;
    auto multiply = [&] { cost->add(warps, 1, products + 3 * both + weights / 4 + 25, both + weights); };
    if (s + 1 < chain.steps) multiply();
    if (small) {
      cost->add(warps, 1, 2 * products + 3 * both + 3 * step.in + 25, both + step.in);
    } else {
      multiply();
      cost->add(warps * std::ceil(step.out / 4.0) * std::ceil(step.in / 4.0) * 1.1, 1, 40, 10);
      cost->waits += kAddUp;
    }
    cost->add(std::min(std::ceil(warps), cost->threads / 32.0), 1, small ? 4 * products : 100,
              small ? products : 60);  // the sums of a warp
  }
}

Kernel& bwd_kernel(DType dtype) {
  static Kernel kernels[] = {{"kron_linear_fibers_bwd", "kron_fibers_bwd_f64"}, {"kron_linear_fibers_bwd", "kron_fibers_bwd_f32"}};
  return kernels[dtype != kFloat64];
}

// Plans are made once for each problem on each device.
std::shared_ptr<const KronFibersPlan> cached_plan(DType dtype, std::int64_t rows, const std::vector<KronSize>& sizes,
                                                  std::int64_t inner, int device) {
  static auto& known = *new PlanCache<KronFibersPlan>;
  return known.find(plan_key({device, dtype, rows, inner}, sizes), [&] {
    KronProblem problem;
    problem.dtype = dtype;
    problem.arithmetic = kKronPlain;
    problem.tf32 = false;
    problem.rows = rows;
    problem.inner = inner;
    problem.sizes = sizes;
    KronFibersPlan plan;
    for (int together = hardware("kron_linear_fibers_bwd", device).largest_cluster;; together /= 2) {
      const KronFibersKernel kernel{true, kFibersThreadsBwd, together, 2, kStart, kLoad, shared_elements, add_steps};
      plan = plan_tiles(problem, kron_device(device), kernel);
      // Where blocks have much shared memory, some GPUs have no place for so many side by side.
      if (plan.shape.cluster == 1 || clusters_at_once(bwd_kernel(dtype), device, plan.shape) > 0) return plan;
    }
  });
}

// Whether a launch adds up what its blocks find; else there is scratch for it, and a second launch.
bool is_together(const KronFibersPlan& plan) { return plan.shape.blocks == plan.shape.cluster; }
std::int64_t scratch_elements(const KronFibersPlan& plan) {
  return is_together(plan) ? 0 : std::int64_t{plan.shape.blocks} * plan.layout.chain.sums;
}

}  // namespace

// The groups of neighbouring factors that kron_linear_fibers_bwd takes one after the other: for each first, count, the elements
// of scratch, and predicted nanoseconds. Empty where there is no kernel. `sizes`: out and in of each factor; `inner`: columns
// beyond all of them.
tvm::ffi::Array<tvm::ffi::Array<int64_t>> kron_linear_fibers_bwd_plan(int64_t dtype, int64_t rows, tvm::ffi::Array<int64_t> sizes,
                                                                      int64_t inner, int64_t device) {
  const DType of = dtype_at(dtype);
  if (inner < 1) raise("ValueError", "inner: expected at least 1");
  const std::vector<KronSize> all = sizes_of(sizes);
  const int n = static_cast<int>(all.size());
  for (const KronSize& size : all) {
    if (std::max(size.out, size.in) > kFibersMost) return {};
  }
  std::vector<std::int64_t> before(n + 1, rows), after(n + 1, inner);
  for (int i = 0; i < n; ++i) before[i + 1] = before[i] * all[i].out;
  for (int i = n - 1; i >= 0; --i) after[i] = after[i + 1] * all[i].in;
  std::vector<double> cost(n + 1, INFINITY);
  std::vector<int> count(n + 1, 0);
  cost[n] = 0;
  auto part = [&](int i, int end) { return std::vector<KronSize>(all.begin() + i, all.begin() + end); };
  for (int i = n - 1; i >= 0; --i) {
    for (int end = i + 1; end <= n; ++end) {
      const auto plan = cached_plan(of, before[i], part(i, end), after[end], static_cast<int>(device));
      // What the groups behind it start from is computed before.
      const double nanoseconds = plan->nanoseconds * (end < n ? 1.6 : 1) + cost[end];
      if (nanoseconds < cost[i]) cost[i] = nanoseconds, count[i] = end - i;
    }
  }
  tvm::ffi::Array<tvm::ffi::Array<int64_t>> groups;
  for (int i = 0; i < n; i += count[i]) {
    if (count[i] == 0) return {};
    const auto plan = cached_plan(of, before[i], part(i, i + count[i]), after[i + count[i]], static_cast<int>(device));
    groups.push_back({i, count[i], scratch_elements(*plan), static_cast<int64_t>(plan->nanoseconds)});
  }
  return groups;
}

// The gradients of y = x kron(factors)^T along the leading part of the last dimension, whose trailing part has `inner` elements:
// those of the factors in `dfactors`, where it has an element, and that of x in dx. x, dy and dx are (rows, elements), `partial` is
// scratch in the dtype of the sums; the factors must be a group of the plan.
void kron_linear_fibers_bwd(tvm::ffi::Array<tvm::ffi::Optional<tvm::ffi::Tensor>> dfactors, OptionalTensor dx, TensorView partial,
                            TensorView dy, TensorView x, tvm::ffi::Array<tvm::ffi::Tensor> factors, int64_t inner) {
  expect_cuda(x, "x");
  const DType dtype = dtype_of(x, "x");
  if (dfactors.size() != factors.size()) raise("ValueError", "dfactors: expected one a factor");
  const std::vector<KronSize> sizes = sizes_of(factors, dtype, x.device());
  std::int64_t in = inner, out = inner;
  for (const KronSize& size : sizes) {
    out *= size.out;
    in *= size.in;
  }
  const std::int64_t rows = x.size(0);
  expect_matrix(x, "x", dtype, x.device(), rows, in);
  expect_matrix(dy, "dy", dtype, x.device(), rows, out);
  if (x.numel() == 0 || dy.numel() == 0) raise("ValueError", "x: expected no empty array");
  const int device = x.device().device_id;
  const std::shared_ptr<const KronFibersPlan> cached = cached_plan(dtype, rows, sizes, inner, device);
  const KronFibersPlan& plan = *cached;
  if (std::isinf(plan.nanoseconds)) raise("ValueError", "factors: no kernel; ask kron_linear_fibers_bwd_plan");
  const DType sums = accumulator_of(dtype);
  if (dtype_of(partial, "partial") != sums || partial.numel() < scratch_elements(plan))
    raise("ValueError", "partial: expected what kron_linear_fibers_bwd_plan says, in the dtype of the sums");
  expect_device(partial, "partial", x.device());

  KronFibersBwdParams p{};
  p.chain = plan.layout.chain;
  p.together = is_together(plan);
  place(&p, plan.layout.states, static_cast<int>(plan.shape.block_x) / 32);
  const KronFibersChain& chain = p.chain;
  fill_factors(p.chain.factors, factors, dtype);
  for (int s = 0; s < chain.steps; ++s) {
    const KronFibersStep& step = chain.step[s];
    int raw = p.together ? step.sums + step.first - s : 0;
    for (int j = step.first; j < step.first + step.count; ++j) {
      p.chain.factors[j].raw = raw;
      raw += p.chain.factors[j].out * p.chain.factors[j].in;
    }
  }
  p.x = fibers_array(plan.layout.in, chain, {data_of(x), rows, in, 0});
  p.dy = fibers_array(plan.layout.out, chain, {data_of(dy), rows, out, 0});
  p.dx = plan.layout.in;
  if (dx.has_value()) {
    expect_matrix(*dx, "dx", dtype, x.device(), rows, in);
    p.dx = fibers_array(plan.layout.in, chain, {data_of(*dx), rows, in, 0});
  }
  p.partial = data_of(partial);
  KronFibersSum sum{p.partial, plan.shape.blocks, chain.sums, 0, {}, {}, {}, dtype};
  std::copy(chain.factors, chain.factors + kFibersFactors, sum.factors);
  for (int s = 0; s < chain.steps; ++s) {
    const KronFibersStep& step = chain.step[s];
    bool wanted = false;
    for (int j = step.first; j < step.first + step.count; ++j) {
      if (!dfactors[j].has_value()) continue;
      const tvm::ffi::Tensor dw = *dfactors[j];
      expect_matrix(TensorView(dw), "dfactors", dtype, x.device(), sizes[j].out, sizes[j].in);
      sum.gradient[j] = p.gradients[j] = data_of(TensorView(dw));
      wanted = true;
    }
    if (!wanted) continue;
    p.wanted |= 1 << s;
    sum.step[sum.steps++] = {step.first, step.count, step.out, step.in, step.sums};
  }
  static Kernel sum_kernels[] = {{"kron_linear_fibers_bwd", "kron_fibers_sum_f64"},
                                 {"kron_linear_fibers_bwd", "kron_fibers_sum_f32"}};
  const ContextGuard context(device);
  const CUstream stream = current_stream(x.device());
  launch(bwd_kernel(dtype), device, stream, plan.shape, &p);
  if (p.together) return;
  // Threads enough for eight or so numbers each.
  const std::int64_t threads = kFibersMost * kFibersMost * ceil_div(plan.shape.blocks, 8);
  LaunchShape sum_shape{static_cast<unsigned>(sum.steps), static_cast<unsigned>(std::min<std::int64_t>(threads, 1024))};
  sum_shape.overlaps = true;
  if (sum.steps > 0) launch(sum_kernels[sums != kFloat64], device, stream, sum_shape, &sum);
}

}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kron_linear_fibers_bwd_plan, cuops::kron_linear_fibers_bwd_plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kron_linear_fibers_bwd, cuops::kron_linear_fibers_bwd);
