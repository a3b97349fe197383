// Gradients of two factors of 64 x 64 on the host: checks, the choice of a tile, the launches.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include <algorithm>

#include "host/error.h"
#include "host/tensor.h"
#include "kron_factors.h"
#include "kron_plan.h"
#include "rms_norm.h"

namespace cuops {
namespace {

struct SquarePlan {
  KronTunedParams params{};
  LaunchShape shape{};
  std::int64_t partial_rows = 0;  // 0: no kernel does it
};

SquarePlan plan_square(std::int64_t rows, std::int64_t size, int gradients, const Hardware& hw) {
  SquarePlan plan;
  if (hw.tuned != 90 || size != 64) return plan;
  KronTunedParams& p = plan.params;
  const int n = static_cast<int>(size), warps = 8, teams = warps / (n / 16), both = gradients == 3 ? 2 : 1;
  p.columns_log = 6;
  p.units = 2;
  p.pitch = n / 8 * p.units + 1;
  p.slice_pitch = n * p.pitch;
  p.samples = teams;
  p.rows = rows;
  p.tiles = (rows + p.samples - 1) / p.samples;
  p.sample_chunks = n * n / 8;
  p.sample_pieces = n * n / 4;
  p.by_sample_chunks = kron_divisor(p.sample_chunks);
  p.by_sample_pieces = kron_divisor(p.sample_pieces);
  p.by_in_rows = kron_divisor(n);
  int at = 0;
  auto reserve = [&](int units) {
    at += units;
    return at - units;
  };
  p.factors_at = reserve((sizeof(KronFactor) * kKronFactors + 15) / 16);
  p.scales = reserve((4 * (kKronFactors + 4 * p.samples) + 15) / 16);
  const int pitch = n / 8 + 1, weight = reserve(n * pitch), weight_low = reserve(n * pitch);
  for (KronTunedStep& w : p.step) {
    w.out = w.in = w.rows = w.columns = n;
    w.pitch = pitch;
    w.by_rows = w.by_columns = kron_divisor(n);
    w.weight = weight;
    w.weight_low = weight_low;
  }
  const int state = 2 * p.samples * p.slice_pitch;
  p.state[0] = p.state[1] = reserve(state);
  p.buffers = 1;
  if (16 * (at + state) <= hw.shared_bytes / 2 - 2048) {
    p.buffers = 2;
    p.state[1] = reserve(state);
  }
  if (16 * at > hw.shared_bytes - 1024) return plan;
  const int resident = std::min(2, (hw.shared_bytes + 1024) / (16 * at + 1024));
  const std::int64_t blocks = std::max<std::int64_t>(1, std::min<std::int64_t>(p.tiles, hw.multiprocessors * resident / both));
  plan.partial_rows = blocks * teams * both;
  plan.shape = {static_cast<unsigned>(blocks * both), 32 * warps, 1, 1, static_cast<unsigned>(16 * at)};
  p.shift = kWeightTop + p.columns_log;
  p.last_shift = p.shift - 28 - kWeightTop;
  p.dtype = kFloat32;
  p.x_linear = true;
  p.gradients = static_cast<unsigned char>(gradients);
  return plan;
}

// How many matrices of partial sums of size^2 the gradients of two float32 factors of this size need, both of them at a time; 0
// where kron_linear_bwd_square has no kernel.
int64_t kron_linear_bwd_square_rows(int64_t rows, int64_t size, int64_t device) {
  const Hardware& hw = hardware("kron_linear_tuned_bwd", static_cast<int>(device));
  std::int64_t most = 0;
  for (const int gradients : {1, 3}) most = std::max(most, plan_square(rows, size, gradients, hw).partial_rows);
  return most;
}

// The gradients of two factors (size, size) of y = x kron(W1, W2)^T, the first where `first` and the second where `second`, from dy
// and x, (rows, size^2). W1 is the Kronecker product of the first `cut` of `factors` and W2 that of the others. All are float32;
// `partial` is scratch of kron_linear_bwd_square_rows matrices.
void kron_linear_bwd_square(tvm::ffi::Array<tvm::ffi::Tensor> gradients, TensorView partial, TensorView dy, TensorView x,
                            tvm::ffi::Array<tvm::ffi::Tensor> factors, int64_t cut, bool first, bool second) {
  if (x.device().device_type != kDLCUDA) raise("ValueError", "x: expected an array on a CUDA device");
  for (const TensorView& t : {partial, dy, x})
    if (dtype_of(t, "partial, dy, x") != kFloat32) raise("TypeError", "partial, dy, x: expected float32");
  const std::int64_t wanted = first + second, count = factors.size();
  if (wanted == 0 || static_cast<std::int64_t>(gradients.size()) != wanted)
    raise("ValueError", "gradients: expected as many as asked for");
  const std::int64_t size = gradients[0].size(0), n = size * size;
  if (x.ndim() != 2 || dy.ndim() != 2 || x.size(1) != n || dy.size(1) != n || dy.size(0) != x.size(0) || x.size(0) == 0)
    raise("ValueError", "dy: expected (rows, size^2), as x");
  for (const TensorView& t : {partial, dy, x}) {
    if (!t.is_contiguous() || !aligned16(data_of(t))) raise("ValueError", "partial, dy, x: expected contiguous arrays");
    expect_device(t, "partial, dy", x.device());
  }
  for (const tvm::ffi::Tensor& gradient : gradients) {
    const TensorView dw(gradient);
    if (dw.ndim() != 2 || dw.size(0) != size || dw.size(1) != size || !dw.is_contiguous())
      raise("ValueError", "gradients: expected contiguous square matrices");
    if (dtype_of(dw, "gradients") != kFloat32) raise("TypeError", "gradients: expected float32");
    expect_device(dw, "gradients", x.device());
  }
  if (cut < 1 || cut >= count || count > kKronFactors) raise("ValueError", "cut: expected factors on both sides");
  std::int64_t out[2] = {1, 1}, in[2] = {1, 1};
  for (std::int64_t i = 0; i < count; ++i) {
    const tvm::ffi::Tensor factor = factors[i];
    if (factor.ndim() != 2 || dtype_of(factor, "factors") != kFloat32) raise("TypeError", "factors: expected float32 matrices");
    expect_device(factor, "factors", x.device());
    out[i >= cut] *= factor.size(0);
    in[i >= cut] *= factor.size(1);
  }
  if (out[0] != size || in[0] != size || out[1] != size || in[1] != size)
    raise("ValueError", "factors: expected two products of the gradients' size");
  const int device = x.device().device_id;
  SquarePlan plan = plan_square(x.size(0), size, first + 2 * second, hardware("kron_linear_tuned_bwd", device));
  if (plan.partial_rows == 0) raise("ValueError", "gradients: no kernel for this size; ask kron_linear_bwd_square_rows");
  if (partial.numel() < plan.partial_rows * n) raise("ValueError", "partial: too few matrices");
  KronTunedParams& p = plan.params;
  fill_factors(p.factors, factors, kFloat32);
  p.factor_count = static_cast<int>(count);
  p.step[1].first = static_cast<int>(cut);  // what the first gradient needs is the second factor
  p.step[1].count = static_cast<int>(count - cut);
  p.step[2].first = 0;
  p.step[2].count = static_cast<int>(cut);
  p.x = {data_of(x), p.rows, n, 0};
  p.y = {data_of(dy), p.rows, n, 0};
  p.partial = reinterpret_cast<float*>(data_of(partial));
  static Kernel kernel{"kron_linear_tuned_bwd", "kron_gradient_64"};
  static Kernel sum_rows{"rms_norm_bwd_any", "rms_norm_sum_rows_f32"};
  const ContextGuard context(device);
  const CUstream stream = current_stream(x.device());
  launch(kernel, device, stream, plan.shape, &p);
  const std::int64_t rows = plan.partial_rows / wanted;
  for (std::int64_t i = 0; i < wanted; ++i) {
    const TensorView dw(gradients[i]);
    SumRowsParams sum{p.partial + i * rows * n, data_of(dw), rows, n, kFloat32};
    launch(sum_rows, device, stream, {static_cast<unsigned>((n + 31) / 32), 32, 16}, &sum);
  }
}

}  // namespace
}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kron_linear_bwd_square_rows, cuops::kron_linear_bwd_square_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kron_linear_bwd_square, cuops::kron_linear_bwd_square);
