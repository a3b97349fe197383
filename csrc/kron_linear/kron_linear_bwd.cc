// Gradients of the factors of kron_linear on the host: checks, the choice of a tile, the launches.
#include <tvm/ffi/function.h>

#include <algorithm>

#include "host/error.h"
#include "host/tensor.h"
#include "kron_linear/plan/kron_plan.h"
#include "rms_norm.h"

namespace cuops {
namespace {

struct BwdPlan {
  KronBwdParams params{};
  LaunchShape shape{};
  std::int64_t blocks = 0;  // as many as rows of partial sums
};

BwdPlan plan_bwd(DType dtype, std::int64_t rows, std::int64_t inner, std::int64_t out, std::int64_t in, bool aligned,
                 const Hardware& hw) {
  constexpr int kTile = 32, kWarps = 16;  // as in kron_linear_bwd.cu
  BwdPlan plan;
  KronBwdParams& p = plan.params;
  p.rows = rows;
  p.inner = inner;
  p.out = static_cast<int>(out);
  p.in = static_cast<int>(in);
  p.dtype = dtype;
  p.out_blocks = static_cast<int>((out + kKronBlock - 1) / kKronBlock);
  p.in_blocks = static_cast<int>((in + kKronBlock - 1) / kKronBlock);
  p.depth_rows = aligned && inner == 1 && out % 8 == 0 && in % 8 == 0;
  p.vectors = p.depth_rows || (aligned && inner % 8 == 0);
  p.by_inner = kron_divisor(std::min<std::int64_t>(inner, INT32_MAX));
  const int units = dtype == kFloat64 ? 4 : 2;
  auto padded = [](std::int64_t size) {
    return static_cast<int>(std::min<std::int64_t>(kKronBlock, (size + kTile - 1) / kTile * kTile));
  };
  const int g_rows = padded(out), x_rows = padded(in), limit = hw.shared_bytes - 1024;
  int deepest = 256;
  while (deepest * std::max(g_rows, x_rows) * units > 32768) deepest /= 2;
  for (int depth = deepest; depth >= 16; depth /= 2) {
    for (int buffers = 2; buffers >= 1; --buffers) {
      auto pitch = [&](int size) { return units * (p.depth_rows ? size : depth) / 8 + kron_gap(dtype); };
      auto bytes = [&](int size) { return 16 * (p.depth_rows ? depth : size) * pitch(size); };
      const int g_bytes = bytes(g_rows), x_bytes = bytes(x_rows), states = buffers * (g_bytes + x_bytes);
      const int sums = kWarps / 2 * kTile * (kTile + 1) * (dtype == kFloat64 ? 8 : 4);
      const int shared = 16 + std::max(states, sums);
      if (shared > limit) continue;
      p.depth = depth;
      p.buffers = buffers;
      p.g_pitch = pitch(g_rows);
      p.x_pitch = pitch(x_rows);
      p.scales = 0;
      p.shared_units = shared / 16;
      for (int i = 0; i < 2; ++i) {
        p.g_state[i] = 1 + (i % buffers) * (g_bytes + x_bytes) / 16;
        p.x_state[i] = p.g_state[i] + g_bytes / 16;
      }
      const std::int64_t steps = (rows * inner + depth - 1) / depth, pairs = p.out_blocks * p.in_blocks;
      plan.blocks = std::min<std::int64_t>(steps, std::max<std::int64_t>(1, hw.multiprocessors / pairs));
      plan.shape = {static_cast<unsigned>(plan.blocks * pairs), 32 * kWarps, 1, 1, static_cast<unsigned>(shared)};
      return plan;
    }
  }
  raise("ValueError", "factors: no tile fits this GPU");
}

// How many rows of partial sums of out * in the gradient of a factor needs; 0 where the GPU has no kernel for it.
int64_t kron_linear_bwd_partial_rows(int64_t dtype, int64_t rows, int64_t inner, int64_t out, int64_t in, int64_t device) {
  if (dtype < kFloat64 || dtype > kBFloat16) raise("ValueError", "dtype: expected 0 to 3");
  const Hardware& hw = hardware("kron_linear_bwd", static_cast<int>(device));
  if (hw.tuned < 80) return 0;
  std::int64_t most = 0;
  for (const bool aligned : {false, true})
    most = std::max(most, plan_bwd(static_cast<DType>(dtype), rows, inner, out, in, aligned, hw).blocks);
  return most;
}

// dw (out, in) = the sum over rows and inner of g (rows, out, inner) times x (rows, in, inner); contiguous arrays on one GPU. dw
// has their dtype or that of the sums, and `partial` is scratch of kron_linear_bwd_partial_rows rows in the latter.
void kron_linear_bwd(TensorView dw, TensorView partial, TensorView g, TensorView x, bool allow_tf32) {
  const DType dtype = dtype_of(x, "x"), sums = accumulator_of(dtype);
  if (x.device().device_type != kDLCUDA) raise("ValueError", "x: expected an array on a CUDA device");
  if (dtype_of(g, "g") != dtype) raise("TypeError", "g: expected x's dtype");
  if (dtype_of(partial, "partial") != sums) raise("TypeError", "partial: expected the dtype of the sums");
  if (dw.ndim() != 2 || g.ndim() != 3 || x.ndim() != 3) raise("ValueError", "dw: expected a matrix, and g and x of 3 dimensions");
  if (g.size(0) != x.size(0) || g.size(2) != x.size(2) || dw.size(0) != g.size(1) || dw.size(1) != x.size(1))
    raise("ValueError", "g: expected (rows, out, inner), as x is (rows, in, inner) and dw (out, in)");
  for (const TensorView& t : {dw, partial, g, x}) {
    if (!t.is_contiguous()) raise("ValueError", "dw, partial, g, x: expected contiguous arrays");
    expect_device(t, "dw, partial, g", x.device());
  }
  if (g.numel() == 0 || x.numel() == 0) raise("ValueError", "x: expected no empty array");
  const int device = x.device().device_id;
  const Hardware& hw = hardware("kron_linear_bwd", device);
  if (hw.tuned < 80) raise("ValueError", "x: no kernel for this GPU; ask kron_linear_bwd_partial_rows");
  BwdPlan plan = plan_bwd(dtype, x.size(0), x.size(2), g.size(1), x.size(1), aligned16(data_of(g)) && aligned16(data_of(x)), hw);
  const std::int64_t n = dw.numel();
  if (partial.numel() < plan.blocks * round_up(n, 4) || !aligned16(data_of(partial)))
    raise("ValueError", "partial: expected " + std::to_string(plan.blocks) + " rows of dw's size, in fours");
  KronBwdParams& p = plan.params;
  p.g = data_of(g);
  p.x = data_of(x);
  p.partial = data_of(partial);
  p.pairs = dtype == kFloat32 && !allow_tf32;
  static Kernel kernels[] = {{"kron_linear_bwd", "kron_linear_bwd_f64"}, {"kron_linear_bwd", "kron_linear_bwd_f32"}};
  static Kernel sum_kernels[] = {{"rms_norm_bwd_any", "rms_norm_sum_rows_f64"}, {"rms_norm_bwd_any", "rms_norm_sum_rows_f32"}};
  const ContextGuard context(device);
  const CUstream stream = current_stream(x.device());
  plan.shape.overlaps = true;
  launch(kernels[sums != kFloat64], device, stream, plan.shape, &p);
  SumRowsParams sum{p.partial, data_of(dw), plan.blocks, n, dtype_of(dw, "dw")};
  launch(sum_kernels[sums != kFloat64], device, stream, {static_cast<unsigned>(ceil_div(n, 4 * 32)), 32, 16, 1, 0, true}, &sum);
}

}  // namespace
}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kron_linear_bwd_partial_rows, cuops::kron_linear_bwd_partial_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kron_linear_bwd, cuops::kron_linear_bwd);
