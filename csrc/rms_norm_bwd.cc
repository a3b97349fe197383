// The gradient of RMSNorm on the host: checks, the choice of a kernel, the launches.
#include <tvm/ffi/function.h>

#include <algorithm>
#include <utility>

#include "host/error.h"
#include "host/kernel.h"
#include "host/tensor.h"
#include "rms_norm.h"

namespace cuops {
namespace {

using OptionalTensor = tvm::ffi::Optional<TensorView>;

// Which kernel: of the common case, several rows a block or several blocks a row (rms_norm_bwd_held.cu); of all others; and the two
// for any GPU (rms_norm_bwd_any.cu).
enum Variant { kHeld, kWide, kGeneral, kRowsAny, kRowsVectors, kColumnsAny, kColumnsVectors };

Kernel& bwd_kernel(DType dtype, Variant variant) {
  struct Table {
    Kernel* at[4][7];  // for the life of the process
    Table() {
      constexpr const char* suffixes[] = {"_held",         "_wide",        "_general",        "_rows_any",
                                          "_rows_vectors", "_columns_any", "_columns_vectors"};
      for (DType t : {kFloat64, kFloat32, kFloat16, kBFloat16})
        for (Variant v : {kHeld, kWide, kGeneral, kRowsAny, kRowsVectors, kColumnsAny, kColumnsVectors})
          at[t][v] = new Kernel(v < kGeneral   ? "rms_norm_bwd_held"
                                : v < kRowsAny ? "rms_norm_bwd"
                                               : "rms_norm_bwd_any",
                                std::string("rms_norm_bwd_") + name_of(t) + suffixes[v]);
    }
  };
  static const Table table;
  return *table.at[dtype][variant];
}

// How a gradient is computed; the constants are those of the instances. Blocks stay until all rows are done.
struct Plan {
  Variant variant;
  std::int64_t partial_rows;  // of sums for dweight and dbias
  LaunchShape shape;
};

// So many rows side by side in a block of up to `threads`: fewer where the multiprocessors have fewer rows each. Whole warps.
unsigned side_by_side(std::int64_t rows, unsigned block_x, unsigned threads, const Hardware& hw) {
  const unsigned in_warp = std::max(32 / block_x, 1u);
  const std::int64_t each = (rows + hw.multiprocessors - 1) / hw.multiprocessors;
  return static_cast<unsigned>(std::min<std::int64_t>(threads / block_x, (each + in_warp - 1) / in_warp * in_warp));
}

// The common case: 4 vectors a thread.
Plan plan_common(std::int64_t rows, std::int64_t packs, std::int64_t n, DType dtype, int device, const Hardware& hw) {
  LaunchShape shape{0, 1, 1, 1, 0, true};
  const Variant variant = packs <= 768 ? kHeld : kWide;
  std::int64_t at_once = hw.multiprocessors;
  if (variant == kHeld) {
    while (shape.block_x < 32 && shape.block_x * 4 < packs) shape.block_x *= 2;
    if (packs > 128) shape.block_x = threads_for(packs, 4);
    shape.block_y = side_by_side(rows, shape.block_x, 384, hw);
    const unsigned sums = shape.block_y / std::max(32 / shape.block_x, 1u);
    shape.shared_bytes = sums > 1 ? sums * static_cast<unsigned>(n) * 4 : 0;
  } else {
    // More blocks than the row needs where rows are few.
    while (packs > 2048 * shape.cluster ||
           (hw.clusters && shape.cluster < 8 && packs > 512 * shape.cluster && 2 * rows * shape.cluster <= hw.multiprocessors)) {
      shape.cluster *= 2;
    }
    shape.block_x = threads_for(packs, 4 * shape.cluster);
    at_once = shape.cluster > 1      ? clusters_at_once(bwd_kernel(dtype, variant), device, shape)
              : shape.block_x <= 256 ? 2 * at_once
                                     : at_once;
  }
  const std::int64_t partial_rows = std::min(at_once, (rows + shape.block_y - 1) / shape.block_y);
  shape.blocks = static_cast<unsigned>(partial_rows * shape.cluster);
  return {variant, partial_rows, shape};
}

Plan plan_bwd(std::int64_t rows, std::int64_t n, DType dtype, bool aligned, bool common, int device) {
  const Hardware& hw = hardware("rms_norm_bwd_any", device);
  const unsigned width = 16 / size_of(dtype);
  const std::int64_t packs = (n + width - 1) / width;
  if (common && hw.tuned && packs <= 2048 * (hw.clusters ? 16 : 1)) return plan_common(rows, packs, n, dtype, device, hw);
  const unsigned threads = 512, stages = 3, resident = 2;
  const unsigned bytes = stages * 2 * resident * (threads + threads / 4) * 16 + threads * resident * width * 4;
  const unsigned own_bytes = hw.tuned >= 90 ? 15 << 10 : 4 << 10;
  const std::int64_t most = static_cast<std::int64_t>(resident) * threads * (hw.clusters ? 16 : 1);
  if (!hw.tuned || dtype == kFloat64 || static_cast<int>(bytes + own_bytes) > hw.shared_bytes || packs > most) {
    const std::int64_t columns = aligned && dtype != kFloat64 ? packs : n;
    const unsigned block = std::min(256u, threads_for(columns, 1));
    const std::int64_t across = (columns + block - 1) / block;
    const std::int64_t groups = std::max<std::int64_t>(1, std::min<std::int64_t>(rows, 8 * hw.multiprocessors / across));
    return {columns == n ? kColumnsAny : kColumnsVectors, groups, {static_cast<unsigned>(across * groups), block, 1, 1, 0, true}};
  }
  LaunchShape shape{0, 4, 1, 1, bytes, true};
  while (shape.block_x < 32 && shape.block_x * resident < packs) shape.block_x *= 2;
  while (packs > static_cast<std::int64_t>(resident) * threads * shape.cluster) shape.cluster *= 2;
  if (shape.block_x * resident < packs) shape.block_x = threads_for(packs, resident * shape.cluster);
  if (shape.cluster == 1) shape.block_y = side_by_side(rows, shape.block_x, threads, hw);
  const std::int64_t at_once =
      shape.cluster == 1 ? hw.multiprocessors : clusters_at_once(bwd_kernel(dtype, kGeneral), device, shape);
  const std::int64_t partial_rows = std::min(at_once, (rows + shape.block_y - 1) / shape.block_y);
  shape.blocks = static_cast<unsigned>(partial_rows * shape.cluster);
  return {kGeneral, partial_rows, shape};
}

// For the first of two kernels: a block a row, or several where rows are few.
LaunchShape rows_shape(const std::int64_t rows, std::int64_t n, int device) {
  const Hardware& hw = hardware("rms_norm_bwd_any", device);
  const unsigned threads = n > 32768 ? 512 : n > 2048 ? 256 : 128;
  unsigned cluster = 1;
  while (hw.clusters && cluster < 16 && threads * 16 * cluster < n && rows * cluster < 2 * hw.multiprocessors) cluster *= 2;
  return {static_cast<unsigned>(rows) * cluster, threads, 1, cluster, 0, true};
}

struct Matrix {
  std::int64_t rows, n;
};
Matrix matrix_of(TensorView h) {
  expect_at_least_1d(h, "h");
  const std::int64_t n = h.size(h.ndim() - 1);
  return {n > 0 ? h.numel() / n : 0, n};
}

// Whether all rows, and the weight, may be read in vectors. Results are contiguous.
bool is_aligned(const Matrix& m, DType dtype, std::initializer_list<OptionalTensor> arrays, const OptionalTensor& weight) {
  const int width = 16 / size_of(dtype);
  bool aligned = m.n % width == 0 && (!weight.has_value() || aligned16(data_of(*weight)));
  for (const OptionalTensor& array : arrays) {
    if (array.has_value()) aligned = aligned && vectors_fit(rows_of(*array, "array"), width, dtype);
  }
  return aligned;
}

Plan plan_bwd(const Matrix& m, DType dtype, bool aligned, const OptionalTensor& weight, double weight_offset, bool bias,
              int device) {
  const bool common =
      aligned && dtype != kFloat64 && weight.has_value() && dtype_of(*weight, "weight") == dtype && weight_offset == 0 && !bias;
  return plan_bwd(m.rows, m.n, dtype, aligned, common, device);
}

std::int64_t scratch_of(const Plan& plan, const Matrix& m, bool weight, bool bias) {
  return plan.partial_rows * m.n * (weight + bias) + (plan.variant >= kColumnsAny ? 3 * m.rows : 0);
}

// How many elements of scratch the gradient needs, in the dtype of the sums.
int64_t rms_norm_bwd_scratch(TensorView dy, OptionalTensor dh, TensorView h, OptionalTensor weight, bool bias,
                             double weight_offset) {
  const Matrix m = matrix_of(h);
  const DType dtype = dtype_of(h, "h");
  const bool aligned = is_aligned(m, dtype, {h, dy, dh}, weight);
  const Plan plan = plan_bwd(m, dtype, aligned, weight, weight_offset, bias, h.device().device_id);
  return scratch_of(plan, m, weight.has_value(), bias);
}

Rows single_stride(TensorView t, const char* name) {
  const Rows rows = rows_of(t, name);
  if (rows.outer_stride != 0)
    raise("ValueError", std::string(name) + ": its rows need more than one stride; pass a contiguous copy");
  return rows;
}

void sum_rows(TensorView sum, const char* name, const char* partial, std::int64_t rows, std::int64_t n, DType sums,
              CUstream stream) {
  static Kernel kernels[] = {{"rms_norm_bwd_any", "rms_norm_sum_rows_f64"}, {"rms_norm_bwd_any", "rms_norm_sum_rows_f32"}};
  SumRowsParams p{partial, data_of(sum), rows, n, dtype_of(sum, name)};
  unsigned side_by_side = 1;  // so that a thread adds up a few rows
  while (side_by_side < 32 && 8 * side_by_side < rows) side_by_side *= 2;
  LaunchShape shape{static_cast<unsigned>((n + 31) / 32), 32, side_by_side};
  shape.overlaps = true;
  launch(kernels[sums == kFloat64 ? 0 : 1], sum.device().device_id, stream, shape, &p);
}

// Gradients on one GPU, from those for y and h (none: zero). `scratch` has as many elements as
// rms_norm_bwd_scratch says. There is at least one row.
void rms_norm_bwd(TensorView dx, OptionalTensor dweight, OptionalTensor dbias, TensorView scratch, TensorView dy, OptionalTensor dh,
                  TensorView h, OptionalTensor weight, double eps, double weight_offset) {
  const Matrix m = matrix_of(h);
  const DType dtype = dtype_of(h, "h"), sums = accumulator_of(dtype);
  if (h.device().device_type != kDLCUDA) raise("ValueError", "h: expected an array on a CUDA device");
  RmsNormBwdParams p{};
  p.rows = m.rows;
  p.n = m.n;
  set_scalars(&p, m.n, eps, weight_offset);
  expect_like(dx, "dx", h, dtype);
  expect_like(dy, "dy", h, dtype);
  p.h = single_stride(h, "h");
  p.dy = single_stride(dy, "dy");
  p.dx = single_stride(dx, "dx");
  if (dh.has_value()) {
    expect_like(*dh, "dh", h, dtype);
    p.dh = single_stride(*dh, "dh");
  }
  if (weight.has_value()) {
    p.weight_wide = expect_parameter(*weight, "weight", h, dtype);
    p.weight = data_of(*weight);
  }
  const int device = h.device().device_id;
  const bool aligned = is_aligned(m, dtype, {h, dy, dh, dx}, weight);
  const Plan plan = plan_bwd(m, dtype, aligned, weight, weight_offset, dbias.has_value(), device);
  const std::int64_t needed = scratch_of(plan, m, weight.has_value(), dbias.has_value());
  if (dtype_of(scratch, "scratch") != sums || !scratch.is_contiguous() || scratch.numel() < needed) {
    raise("ValueError", "scratch: expected a contiguous array of " + std::to_string(needed) + " elements in the dtype of the sums");
  }
  expect_device(scratch, "scratch", h.device());
  char* free = data_of(scratch);
  const std::int64_t bytes = plan.partial_rows * m.n * size_of(sums);
  if (dweight.has_value()) {
    expect_vector(*dweight, "dweight", h);
    p.dweight = std::exchange(free, free + bytes);
  }
  if (dbias.has_value()) {
    expect_vector(*dbias, "dbias", h);
    p.dbias = std::exchange(free, free + bytes);
  }
  p.found = free;
  const ContextGuard context(device);
  const CUstream stream = current_stream(h.device());
  if (plan.variant >= kColumnsAny) {
    const Variant rows = plan.variant == kColumnsAny ? kRowsAny : kRowsVectors;
    launch(bwd_kernel(dtype, rows), device, stream, rows_shape(m.rows, m.n, device), &p);
  }
  launch(bwd_kernel(dtype, plan.variant), device, stream, plan.shape, &p);
  if (dweight.has_value()) sum_rows(*dweight, "dweight", static_cast<char*>(p.dweight), plan.partial_rows, m.n, sums, stream);
  if (dbias.has_value()) sum_rows(*dbias, "dbias", static_cast<char*>(p.dbias), plan.partial_rows, m.n, sums, stream);
}

}  // namespace
}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_bwd_scratch, cuops::rms_norm_bwd_scratch);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_bwd, cuops::rms_norm_bwd);
