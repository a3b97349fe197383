// Gradients of the factors of kron_linear on the host: checks, the choice of a tile, the launches.
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cmath>

#include "host/error.h"
#include "host/integers.h"
#include "host/kernel.h"
#include "host/tensor.h"
#include "kron_factor_bwd.h"

namespace cuops {
namespace {

struct BwdProblem {
  DType dtype;
  std::int64_t rows, inner, out, in;
  bool across_g, across_x;  // rather than along the depth
  bool with_dx;
};

struct BwdPlan {
  KronFactorBwdParams params{};
  LaunchShape shape{};
  std::int64_t blocks = 0;  // as many as rows of partial sums
};

// Whether rows along the depth are no whole vectors.
bool has_partial_vectors(const BwdProblem& problem) {
  return !problem.across_g && !problem.across_x && problem.inner * size_of(problem.dtype) % 16 != 0;
}

// Whether some of these begin in the middle of a word.
bool has_partial_words(const BwdProblem& problem) {
  return has_partial_vectors(problem) && problem.inner * size_of(problem.dtype) % 4 != 0;
}

// Elements of the depth, with those that are missing to whole vectors.
std::int64_t depth_of(const BwdProblem& problem) {
  return problem.rows * (has_partial_vectors(problem) ? round_up(problem.inner, width_of(problem.dtype)) : problem.inner);
}

BwdPlan plan_bwd(const BwdProblem& problem, const Hardware& hw) {
  BwdPlan plan;
  KronFactorBwdParams& p = plan.params;
  const int bytes = size_of(problem.dtype), step = 64 / bytes;
  const std::int64_t depth = depth_of(problem);
  p.depth = static_cast<unsigned>(depth);
  p.inner = static_cast<unsigned>(problem.inner);
  p.row_vectors = static_cast<unsigned>(ceil_div(problem.inner, 16 / bytes));
  // Blocks have tiles of one size, warps those of whole multiples.
  auto set_tile = [&](KronFactorBwdOperand& o, std::int64_t size, int& blocks) {
    blocks = static_cast<int>(ceil_div(size, kBwdBlock));
    o.size = static_cast<int>(size);
    o.tile = static_cast<int>(round_up(ceil_div(size, blocks), 16));
    while (1 << o.unit_bits < o.tile * bytes / 16) ++o.unit_bits;
  };
  set_tile(p.g, problem.out, p.out_blocks);
  set_tile(p.x, problem.in, p.in_blocks);
  auto warps_of = [](const KronFactorBwdOperand& o) { return (o.tile + kBwdTile - 1) / kBwdTile; };
  const int tiles = warps_of(p.g) * warps_of(p.x);
  // Units of an operand's part of a stage.
  auto units_of = [&](KronFactorBwdOperand& o, bool across) {
    const int rows = warps_of(o) * kBwdTile;
    o.pitch = across ? static_cast<int>(round_up(rows * bytes / 16, 8)) : p.steps * 4;
    return o.pitch * (across ? p.steps * step : rows);
  };
  constexpr int kMostUnits = 2048;  // of a stage, where two steps are not more
  for (p.steps = 8;; p.steps /= 2) {
    p.x_at = units_of(p.g, problem.across_g);
    p.stage_units = p.x_at + units_of(p.x, problem.across_x);
    if (p.steps == 2 || p.stage_units <= kMostUnits) break;
  }
  const int parts = std::max(1, std::min(kBwdMostWarps / tiles, problem.with_dx ? p.steps : p.steps / 2));
  // With dx, whole multiples of 8 rows of a stage have a thread for each vector, and its steps as many warps each.
  const int threads = static_cast<int>(round_up(32 * tiles * parts, 64));
  for (KronFactorBwdOperand* o : {&p.g, &p.x}) {
    if (!has_partial_words(problem)) continue;
    o->fifths_at = p.stage_units - (o == &p.x ? p.x_at : 0);
    p.stage_units += static_cast<int>(ceil_div(o->tile, threads / (p.steps * 4))) * threads / 4;
  }
  const int sums = parts > 1 ? tiles * kBwdTile * kBwdTile * std::max(bytes, 4) : 0;
  p.w_at = kBwdStages * p.stage_units;
  const std::int64_t w = problem.with_dx ? round_up(problem.in, 16) * round_up(problem.out, 16) * bytes : 0;
  const int shared = static_cast<int>(std::max<std::int64_t>(p.w_at * 16 + w, sums));
  // More blocks read faster, and write more partial sums.
  constexpr double kBlockBytes = 33, kSumBytes = 2500;  // in a nanosecond
  const std::int64_t pairs = p.out_blocks * p.in_blocks, stages = ceil_div(depth, p.steps * step);
  const int together = std::max(1, std::min(512 / threads, hw.shared_bytes / (shared + 1024)));
  const double depth_bytes = static_cast<double>(depth) * bytes;
  const double read = depth_bytes * (p.g.tile + p.x.tile) * together / kBlockBytes;
  const double add = static_cast<double>(problem.out) * problem.in * std::max(bytes, 4) / kSumBytes;
  const std::int64_t wanted = std::max<std::int64_t>(1, std::llround(std::sqrt(read / add)));
  plan.blocks = std::min({stages, wanted, std::max<std::int64_t>(1, hw.multiprocessors * together / pairs)});
  plan.shape = {static_cast<unsigned>(plan.blocks * pairs), static_cast<unsigned>(threads)};
  plan.shape.shared_bytes = static_cast<unsigned>(shared);
  plan.shape.overlaps = true;
  return plan;
}

// Whether there is a kernel: for rows of whole vectors, or any where both operands lie along the depth and end with a word, and g
// along it where only one of the two does; with dx, where both do, and blocks find all of the gradient.
bool has_kernel(const BwdProblem& problem, const Hardware& hw) {
  const std::int64_t width = width_of(problem.dtype);
  auto in_vectors = [&](bool across, std::int64_t size) { return (across ? size : problem.inner) % width == 0; };
  const bool is_whole = in_vectors(problem.across_g, problem.out) && in_vectors(problem.across_x, problem.in);
  const bool end_in_words = !has_partial_words(problem) || problem.rows % 2 == 0 || (problem.out % 2 == 0 && problem.in % 2 == 0);
  const bool has = hw.tuned >= 80 && (is_whole || has_partial_vectors(problem)) && end_in_words &&
                   (problem.across_x || !problem.across_g) && depth_of(problem) < INT32_MAX &&
                   std::max(problem.out, problem.in) < INT32_MAX && problem.out * problem.in < INT32_MAX;
  const bool finds_dx = problem.dtype != kFloat32 && !problem.across_x && std::max(problem.out, problem.in) <= kBwdBlock;
  return has && (finds_dx || !problem.with_dx) && static_cast<int>(plan_bwd(problem, hw).shape.shared_bytes) <= hw.shared_bytes;
}

// How many rows of partial sums of out * in the gradient of a factor needs, with dx or without; 0 where there is no kernel.
int64_t kron_linear_factor_bwd_partial_rows(int64_t dtype, int64_t rows, int64_t inner, int64_t out, int64_t in, bool across_g,
                                            bool across_x, bool with_dx, int64_t device) {
  if (std::min({rows, inner, out, in}) < 1) raise("ValueError", "rows, inner, out, in: expected at least 1 each");
  const BwdProblem problem{dtype_at(dtype), rows, inner, out, in, across_g, across_x, with_dx};
  const Hardware& hw = hardware("kron_linear_factor_bwd", static_cast<int>(device));
  return has_kernel(problem, hw) ? plan_bwd(problem, hw).blocks : 0;
}

// Whether an array (rows, size, inner) has its rows across the depth: (rows, inner, size) in memory.
bool is_across(TensorView t, const char* name) {
  if (t.ndim() != 3) raise("ValueError", std::string(name) + ": expected (rows, size, inner)");
  const std::int64_t size = t.size(1), inner = t.size(2);
  auto has_strides = [&](std::int64_t second, std::int64_t third) {
    const std::int64_t expected[] = {size * inner, second, third};
    for (int i = 0; i < 3; ++i)
      if (t.size(i) != 1 && t.stride(i) != expected[i]) return false;
    return true;
  };
  if (inner > 1 && has_strides(inner, 1)) return false;
  if (!has_strides(1, size)) raise("ValueError", std::string(name) + ": expected rows along or across the depth, without gaps");
  return true;
}

// dw (out, in) = the sum over rows and inner of g (rows, out, inner) times x (rows, in, inner), on one GPU. Each of these is
// contiguous, or would be with its last two dimensions swapped. dw has their dtype or that of the sums, and `partial` is scratch of
// kron_linear_factor_bwd_partial_rows rows in the latter. With dx, (rows, in, inner), the factor's transpose is applied to g too.
void kron_linear_factor_bwd(TensorView dw, OptionalTensor dx, TensorView partial, TensorView g, TensorView x, OptionalTensor w,
                            bool allow_tf32) {
  const DType dtype = dtype_of(x, "x"), sums = accumulator_of(dtype);
  expect_cuda(x, "x");
  if (dtype_of(g, "g") != dtype) raise("TypeError", "g: expected x's dtype");
  if (dtype_of(partial, "partial") != sums) raise("TypeError", "partial: expected the dtype of the sums");
  if (g.numel() == 0 || x.numel() == 0) raise("ValueError", "x: expected no empty array");
  const bool across_g = is_across(g, "g"), across_x = is_across(x, "x");
  if (dx.has_value() != w.has_value()) raise("ValueError", "w: expected with dx, and only then");
  const BwdProblem problem{dtype, x.size(0), x.size(2), g.size(1), x.size(1), across_g, across_x, dx.has_value()};
  if (g.size(0) != problem.rows || g.size(2) != problem.inner)
    raise("ValueError", "g: expected (rows, out, inner), as x is (rows, in, inner)");
  expect_matrix(dw, "dw", dtype_of(dw, "dw"), x.device(), problem.out, problem.in);
  for (const TensorView& t : {partial, g}) expect_device(t, "partial, g", x.device());
  const int device = x.device().device_id;
  const Hardware& hw = hardware("kron_linear_factor_bwd", device);
  if (!has_kernel(problem, hw) || !aligned16(data_of(g)) || !aligned16(data_of(x)))
    raise("ValueError", "x: no kernel; ask kron_linear_factor_bwd_partial_rows, and begin g and x at multiples of 16 bytes");
  BwdPlan plan = plan_bwd(problem, hw);
  const std::int64_t n = dw.numel();
  if (!partial.is_contiguous() || partial.numel() < plan.blocks * sums_stride(n) || !aligned16(data_of(partial)))
    raise("ValueError", "partial: expected " + std::to_string(plan.blocks) + " rows of dw's size, in fours");
  KronFactorBwdParams& p = plan.params;
  if (problem.with_dx) {
    const TensorView& to = dx.value();
    expect_matrix(w.value(), "w", dtype, x.device(), problem.out, problem.in);
    expect_device(to, "dx", x.device());
    const bool alike = to.ndim() == 3 && to.size(0) == x.size(0) && to.size(1) == x.size(1) && to.size(2) == x.size(2);
    if (!alike || dtype_of(to, "dx") != dtype || !to.is_contiguous() || !aligned16(data_of(to)))
      raise("ValueError", "dx: expected a contiguous array like x, which begins at a multiple of 16 bytes");
    p.w = data_of(w.value());
    p.dx = data_of(to);
  }
  p.g.data = data_of(g);
  p.x.data = data_of(x);
  p.partial = data_of(partial);
  static const KernelTable table(
      "kron_factor_bwd_",
      {{"kron_linear_factor_bwd", {"_along", "_along_across", "_across", "_dx", "_pieces", "_dx_pieces", "_words", "_dx_words"}}});
  static const KernelTable tf32_table("kron_factor_bwd_t",  // of f32: tf32, which there is no dx of
                                      {{"kron_linear_factor_bwd", {"_along", "_along_across", "_across", "_dx", "_pieces"}}});
  static Kernel sum_kernels[] = {{"kron_linear_factor_bwd", "kron_factor_bwd_sum_f64"},
                                 {"kron_linear_factor_bwd", "kron_factor_bwd_sum_f32"}};
  const ContextGuard context(device);
  const CUstream stream = current_stream(x.device());
  const bool with_dx = problem.with_dx;  // not of float32
  const int kind = has_partial_vectors(problem) ? 4 + with_dx + 2 * has_partial_words(problem) : with_dx ? 3 : across_g + across_x;
  const KernelTable& kernels = dtype == kFloat32 && allow_tf32 ? tf32_table : table;
  launch(kernels.at(dtype, kind), device, stream, plan.shape, &p);
  KronFactorBwdSum sum{p.partial, data_of(dw), n, static_cast<int>(plan.blocks), dtype_of(dw, "dw")};
  const bool wide = sums == kFloat64;
  LaunchShape shape{static_cast<unsigned>(ceil_div(n, wide ? 16 : 32)), 512};
  shape.overlaps = true;
  launch(sum_kernels[!wide], device, stream, shape, &sum);
}

}  // namespace
}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kron_linear_factor_bwd_partial_rows, cuops::kron_linear_factor_bwd_partial_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kron_linear_factor_bwd, cuops::kron_linear_factor_bwd);
