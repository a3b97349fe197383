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

// Which kernel: of the common case, for 2 or 4 vectors a thread; of all others; and the two for any GPU (rms_norm_bwd_any.cu).
enum Variant { kVectors2, kVectors4, kGeneral, kRowsAny, kRowsVectors, kColumnsAny, kColumnsVectors };

Kernel& bwd_kernel(DType dtype, Variant variant) {
  struct Table {
    Kernel* at[4][7];  // for the life of the process
    Table() {
      constexpr const char* suffixes[] = {"_vectors2",     "_vectors4",    "_general",        "_rows_any",
                                          "_rows_vectors", "_columns_any", "_columns_vectors"};
      for (DType t : {kFloat64, kFloat32, kFloat16, kBFloat16})
        for (Variant v : {kVectors2, kVectors4, kGeneral, kRowsAny, kRowsVectors, kColumnsAny, kColumnsVectors})
          at[t][v] = new Kernel(v < kRowsAny ? "rms_norm_bwd" : "rms_norm_bwd_any",
                                std::string("rms_norm_bwd_") + name_of(t) + suffixes[v]);
    }
  };
  static const Table table;
  return *table.at[dtype][variant];
}

// How a gradient is computed; the constants are those of the instances in rms_norm_bwd.cu. Blocks stay until all rows are done.
struct Plan {
  Variant variant;
  std::int64_t partial_rows;  // of sums for dweight and dbias
  LaunchShape shape;
};

Plan plan_bwd(std::int64_t rows, std::int64_t n, DType dtype, bool aligned, bool common, int device) {
  const Hardware& hw = hardware("rms_norm_bwd_any", device);
  const unsigned width = 16 / size_of(dtype);
  const std::int64_t packs = (n + width - 1) / width;
  // What is fastest, as measured: 4 vectors where they make a row one warp's, and for wide rows; for those of float32 smaller
  // blocks.
  const bool four = common && ((packs > 64 && packs <= 128) || packs > 2048) && hw.tuned >= 90;
  const bool small = common && dtype == kFloat32 && packs > 1024 && packs <= 4096 && hw.clusters;
  const Variant variant = !common ? kGeneral : four && !small ? kVectors4 : kVectors2;
  const unsigned threads = 512, stages = 3, resident = variant == kVectors4 ? 4 : 2;
  const unsigned line = common ? threads : threads + threads / 4;
  const unsigned bytes = stages * 2 * resident * line * 16 + (common ? 0 : threads * resident * width * 4);
  const unsigned own_bytes = hw.tuned >= 90 ? 15 << 10 : 4 << 10;
  const std::int64_t most = static_cast<std::int64_t>(resident) * threads * (hw.clusters ? 16 : 1);
  if (!hw.tuned || dtype == kFloat64 || static_cast<int>(bytes + own_bytes) > hw.shared_bytes || packs > most) {
    const std::int64_t columns = aligned && dtype != kFloat64 ? packs : n;
    const unsigned block = std::min(256u, threads_for(columns, 1));
    const std::int64_t across = (columns + block - 1) / block;
    const std::int64_t groups = std::max<std::int64_t>(1, std::min<std::int64_t>(rows, 8 * hw.multiprocessors / across));
    return {columns == n ? kColumnsAny : kColumnsVectors, groups, {static_cast<unsigned>(across * groups), block}};
  }
  LaunchShape shape{0, common ? 1u : 4u, 1, 1, bytes};
  while (shape.block_x < 32 && shape.block_x * resident < packs) shape.block_x *= 2;
  while (packs > static_cast<std::int64_t>(resident) * (small ? 256 : threads) * shape.cluster) shape.cluster *= 2;
  if (shape.block_x * resident < packs) shape.block_x = threads_for(packs, resident * shape.cluster);
  if (shape.cluster == 1) shape.block_y = threads / shape.block_x;
  const std::int64_t at_once =
      shape.cluster == 1 ? hw.multiprocessors : clusters_at_once(bwd_kernel(dtype, variant), device, shape);
  const std::int64_t partial_rows = std::min(at_once, (rows + shape.block_y - 1) / shape.block_y);
  shape.blocks = static_cast<unsigned>(partial_rows * shape.cluster);
  return {variant, partial_rows, shape};
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
    const unsigned blocks = static_cast<unsigned>(m.rows);
    const Variant rows = plan.variant == kColumnsAny ? kRowsAny : kRowsVectors;
    launch(bwd_kernel(dtype, rows), device, stream, {blocks, m.n > 32768 ? 512u : m.n > 2048 ? 256u : 128u}, &p);
  }
  launch(bwd_kernel(dtype, plan.variant), device, stream, plan.shape, &p);
  if (dweight.has_value()) sum_rows(*dweight, "dweight", static_cast<char*>(p.dweight), plan.partial_rows, m.n, sums, stream);
  if (dbias.has_value()) sum_rows(*dbias, "dbias", static_cast<char*>(p.dbias), plan.partial_rows, m.n, sums, stream);
}

}  // namespace
}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_bwd_scratch, cuops::rms_norm_bwd_scratch);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_bwd, cuops::rms_norm_bwd);
