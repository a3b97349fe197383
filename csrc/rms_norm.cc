// RMSNorm on the host: checks, the choice of a kernel, the launch.
#include "rms_norm.h"

#include <tvm/ffi/function.h>

#include <algorithm>
#include <cmath>

#include "host/error.h"
#include "host/kernel.h"
#include "host/staging.h"
#include "host/tensor.h"

namespace cuops {
namespace {

using OptionalTensor = tvm::ffi::Optional<TensorView>;

// Which kernel: those whose rows stay in registers are in rms_norm.cu, the last three in rms_norm_any.cu. All but the last two are
// for the common case, the second with a residual.
enum Variant { kShort, kResidual, kWide, kStay, kPhased, kLong, kVectors, kAny };

Kernel& fwd_kernel(DType dtype, Variant variant) {
  struct Table {
    Kernel* at[4][8];  // for the life of the process
    Table() {
      constexpr const char* suffixes[] = {"_short", "_residual", "_wide", "_stay", "_phased", "_long", "_vectors", "_any"};
      for (DType t : {kFloat64, kFloat32, kFloat16, kBFloat16})
        for (Variant v : {kShort, kResidual, kWide, kStay, kPhased, kLong, kVectors, kAny})
          at[t][v] = new Kernel(v < kLong ? "rms_norm" : "rms_norm_any", std::string("rms_norm_fwd_") + name_of(t) + suffixes[v]);
    }
  };
  static const Table table;
  return *table.at[dtype][variant];
}

struct Plan {
  Variant variant;
  LaunchShape shape;
  int chunk = 1;  // packs that a thread brings to shared memory at a time
};

unsigned power_of_two_from(std::int64_t least, unsigned from) {
  while (from < least) from *= 2;
  return from;
}

// The shape for rows of `packs`, each thread having up to `resident` of them, in blocks of up to `most` threads.
LaunchShape resident_shape(std::int64_t rows, std::int64_t packs, unsigned resident, unsigned most) {
  const unsigned blocks = static_cast<unsigned>(rows);
  if (packs <= 32 * resident) {  // parts of warps
    const unsigned lanes = power_of_two_from((packs + resident - 1) / resident, 1);
    const unsigned side_by_side = 128 / lanes;
    return {(blocks + side_by_side - 1) / side_by_side, lanes, side_by_side};
  }
  const unsigned cluster = power_of_two_from((packs + most * resident - 1) / (most * resident), 1);
  return {blocks * cluster, threads_for(packs, resident * cluster), 1, cluster};
}

// For wide rows, 8 vectors a thread: clusters that stay until all rows are done.
LaunchShape stay_shape(std::int64_t rows, std::int64_t packs, DType dtype, int device) {
  const unsigned cluster = packs <= 12288 || (packs > 16384 && packs <= 32768) ? 8 : 16;
  LaunchShape shape{0, threads_for(packs, 8 * cluster), 1, cluster};
  shape.blocks =
      cluster * static_cast<unsigned>(std::min<std::int64_t>(rows, clusters_at_once(fwd_kernel(dtype, kStay), device, shape)));
  return shape;
}

// What is fastest where, as measured (docs/design.md). `common`: the common case, with or without a residual; `alike`: x and y
// start alike, so that unaligned rows can be moved in vectors.
Plan plan_fwd(std::int64_t rows, std::int64_t n, DType dtype, bool common, bool residual, bool aligned, bool alike, int device) {
  const Hardware& hw = hardware("rms_norm_any", device);
  const int width = 16 / size_of(dtype);
  const std::int64_t packs = n / width;
  if (common && hw.tuned) {
    const bool is_double = dtype == kFloat64;
    if (residual && aligned && packs <= 1024 && !is_double) return {kResidual, resident_shape(rows, packs, 2, 512)};
    if (!residual && aligned && packs <= 512 && !is_double) return {kShort, resident_shape(rows, packs, 2, 256)};
    if (!residual && aligned && packs <= 2048 * (!hw.clusters ? 1 : is_double ? 16 : 2)) {
      LaunchShape shape = resident_shape(rows, packs, 8, 256);
      // Small blocks, also for few rows, where that takes no more threads.
      while (hw.clusters && !is_double && shape.cluster < (packs < 4096 ? 2 : 4) && packs >= 1024 &&
             2 * threads_for(packs, 16 * shape.cluster) == shape.block_x) {
        shape.block_x /= 2;
        shape.cluster *= 2;
        shape.blocks *= 2;
      }
      return {kWide, shape};
    }
    if (!residual && aligned && packs <= 65536 && hw.clusters && !is_double) return {kStay, stay_shape(rows, packs, dtype, device)};
    if (!residual && alike && packs <= 2048 && !is_double)
      return {kPhased, resident_shape(rows, std::max<std::int64_t>(packs, 32), 8, 256)};
  }
  // Through shared memory: 64 KiB a block, and more where clusters end.
  const bool is_long = common && !residual && alike && hw.tuned && dtype != kFloat64;
  const Variant variant = is_long ? kLong : aligned ? kVectors : kAny;
  const std::int64_t items = variant == kAny ? n : packs;
  const unsigned cluster = std::min(power_of_two_from((items + 4607) / 4608, 1), hw.clusters ? 16u : 1u);
  const unsigned threads = std::max(32u, std::min(threads_for(items, 8 * cluster), 512u));
  const std::int64_t each = (items + threads * cluster - 1) / (threads * cluster);
  const int chunk = static_cast<int>(
      std::max<std::int64_t>(1, std::min<std::int64_t>(each, std::min(hw.shared_bytes - 4096, 72 << 10) / (16 * threads))));
  return {variant, {static_cast<unsigned>(rows) * cluster, threads, 1, cluster, variant == kAny ? 0 : chunk * threads * 16}, chunk};
}

// Whether two arrays have all rows at the same distance from a multiple of 16 bytes.
bool start_alike(const Rows& a, const Rows& b, int size) {
  const auto apart = static_cast<const char*>(a.data) - static_cast<const char*>(b.data);
  return apart % 16 == 0 && (a.stride - b.stride) * size % 16 == 0;
}

void launch_fwd(RmsNormFwdParams& p, DType dtype, int device, CUstream stream) {
  const int size = size_of(dtype), width = 16 / size;
  const bool fits = p.n / width <= INT32_MAX;  // indices of vectors
  const bool aligned = fits && p.n % width == 0 && vectors_fit(p.x, width, dtype) && vectors_fit(p.residual, width, dtype) &&
                       vectors_fit(p.h, width, dtype) && vectors_fit(p.y, width, p.y_dtype) && aligned16(p.weight) &&
                       aligned16(p.bias);
  const bool common = p.weight != nullptr && !p.weight_wide && p.float64.weight_offset == 0 && p.bias == nullptr &&
                      p.y_dtype == dtype && p.x.inner >= p.rows && p.y.inner >= p.rows &&
                      p.residual.inner >= p.rows == (p.residual.data != nullptr) && p.h.inner >= p.rows == (p.h.data != nullptr);
  const bool alike = fits && aligned16(p.weight) && start_alike(p.x, p.y, size);
  Plan plan = plan_fwd(p.rows, p.n, dtype, common, p.residual.data != nullptr, aligned, alike, device);
  // The start of a launch counts where rows are few; where they are many, asking costs each block more than it gains.
  plan.shape.overlaps = p.overlaps = p.rows * p.n <= 1 << 22;
  const std::int64_t threads = plan.shape.block_x * plan.shape.cluster, packs = plan.variant == kAny ? p.n : p.n / width;
  const std::int64_t each = std::max<std::int64_t>((packs + threads - 1) / threads, 1);
  p.chunk = plan.chunk;
  p.chunks = static_cast<int>((each + plan.chunk - 1) / plan.chunk);
  p.first_chunk = static_cast<int>(each - static_cast<std::int64_t>(p.chunks - 1) * plan.chunk);
  launch(fwd_kernel(dtype, plan.variant), device, stream, plan.shape, &p);
}

// The part of the parameters that does not depend on where the rows are.
RmsNormFwdParams fwd_params(TensorView x, double eps, double weight_offset) {
  expect_at_least_1d(x, "x");
  RmsNormFwdParams p{};
  p.n = x.size(x.ndim() - 1);
  p.rows = p.n > 0 ? x.numel() / p.n : 0;
  set_scalars(&p, p.n, eps, weight_offset);
  return p;
}

void expect_rstd(TensorView rstd, TensorView x, std::int64_t rows, DType dtype) {
  if (rstd.numel() != rows || !rstd.is_contiguous() || dtype_of(rstd, "rstd") != accumulator_of(dtype)) {
    raise("ValueError", "rstd: expected a contiguous array of one value a row, in the dtype of the sums");
  }
  expect_device(rstd, "rstd", x.device());
}

// Arrays on one GPU. y = norm(x), or h = x + residual and y = norm(h); y and h may be x or residual.
void rms_norm_fwd(TensorView y, OptionalTensor h, OptionalTensor rstd, TensorView x, OptionalTensor residual, OptionalTensor weight,
                  OptionalTensor bias, double eps, double weight_offset) {
  RmsNormFwdParams p = fwd_params(x, eps, weight_offset);
  const DType dtype = dtype_of(x, "x");
  if (x.device().device_type != kDLCUDA) raise("ValueError", "x: expected an array on a CUDA device");
  p.y_dtype = dtype_of(y, "y");
  expect_like(y, "y", x, p.y_dtype);
  if (weight.has_value()) {
    p.weight_wide = expect_parameter(*weight, "weight", x, dtype);
    p.weight = data_of(*weight);
  }
  if (bias.has_value()) {
    p.bias_wide = expect_parameter(*bias, "bias", x, dtype);
    p.bias = data_of(*bias);
  }
  if (residual.has_value() != h.has_value()) raise("ValueError", "h: expected together with residual");
  if (residual.has_value()) {
    expect_like(*residual, "residual", x, dtype);
    expect_like(*h, "h", x, dtype);
    p.residual = rows_of(*residual, "residual");
    p.h = rows_of(*h, "h");
  }
  if (rstd.has_value()) {
    expect_rstd(*rstd, x, p.rows, dtype);
    p.rstd = data_of(*rstd);
  }
  if (p.rows == 0) return;
  p.x = rows_of(x, "x");
  p.y = rows_of(y, "y");
  const int device = x.device().device_id;
  const ContextGuard context(device);
  launch_fwd(p, dtype, device, current_stream(x.device()));
}

// Host arrays, through the GPU `device`; y may be x. Returns when y is written.
void rms_norm_fwd_host(TensorView y, OptionalTensor rstd, TensorView x, OptionalTensor weight, OptionalTensor bias, double eps,
                       double weight_offset, int64_t device) {
  RmsNormFwdParams p = fwd_params(x, eps, weight_offset);
  const DType dtype = dtype_of(x, "x");
  expect_device(x, "x", {kDLCPU, 0});
  p.y_dtype = dtype_of(y, "y");
  expect_like(y, "y", x, p.y_dtype);
  if (p.rows == 0) return;
  const Rows in = rows_of(x, "x"), out = rows_of(y, "y");
  if (in.inner < p.rows || out.inner < p.rows) raise("ValueError", "x: its rows need more than one stride; pass a contiguous copy");
  const ContextGuard context(device);
  DeviceMemory weight_memory, bias_memory;
  if (weight.has_value()) {
    p.weight_wide = expect_parameter(*weight, "weight", x, dtype);
    p.weight = weight_memory.upload(data_of(*weight), p.n * size_of(dtype_of(*weight, "weight")));
  }
  if (bias.has_value()) {
    p.bias_wide = expect_parameter(*bias, "bias", x, dtype);
    p.bias = bias_memory.upload(data_of(*bias), p.n * size_of(dtype_of(*bias, "bias")));
  }
  const HostRows host_in{static_cast<char*>(in.data), in.stride * size_of(dtype), p.n * size_of(dtype)};
  const HostRows host_out{static_cast<char*>(out.data), out.stride * size_of(p.y_dtype), p.n * size_of(p.y_dtype)};
  std::vector<HostRows> outputs{host_out};
  if (rstd.has_value()) {
    expect_rstd(*rstd, x, p.rows, dtype);
    const std::int64_t rstd_size = size_of(accumulator_of(dtype));
    outputs.push_back({data_of(*rstd), rstd_size, rstd_size});
  }
  stream_rows(static_cast<int>(device), p.rows, {host_in}, outputs,
              [&](const CUdeviceptr* from, const CUdeviceptr* to, std::int64_t, std::int64_t rows, CUstream stream) {
                RmsNormFwdParams chunk = p;
                chunk.rows = rows;
                chunk.x = {reinterpret_cast<void*>(from[0]), INT64_MAX, p.n, 0};
                chunk.y = {reinterpret_cast<void*>(to[0]), INT64_MAX, p.n, 0};
                if (rstd.has_value()) chunk.rstd = reinterpret_cast<void*>(to[1]);
                launch_fwd(chunk, dtype, static_cast<int>(device), stream);
              });
}

}  // namespace
}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_fwd, cuops::rms_norm_fwd);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_fwd_host, cuops::rms_norm_fwd_host);
