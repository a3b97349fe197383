// The gradient of RMSNorm on the host: checks, the choice of a kernel, the launches.
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cmath>

#include "host/error.h"
#include "host/kernel.h"
#include "host/tensor.h"
#include "rms_norm.h"

namespace cuops {
namespace {

using OptionalTensor = tvm::ffi::Optional<TensorView>;

Kernel& bwd_kernel(DType dtype, int resident, bool aligned, bool bias) {
  struct Table {
    Kernel* at[4][9][2][2];  // for the life of the process
    Table() {
      for (DType t : {kFloat64, kFloat32, kFloat16, kBFloat16})
        for (int k = 0; k < 9; ++k)
          for (bool a : {false, true})
            for (bool b : {false, true})
              at[t][k][a][b] = new Kernel("rms_norm_bwd", std::string("rms_norm_bwd_") + name_of(t) + "_" + std::to_string(k) +
                                                              (a ? "_aligned" : "_unaligned") + (b ? "_bias" : ""));
    }
  };
  static const Table table;
  return *table.at[dtype][resident][aligned][bias];
}

// `resident` is how many packs (vectors, or single elements of unaligned rows) of h, and of dy, a thread keeps in registers. Blocks
// stay until all rows are done.
struct Plan {
  int resident;
  bool bias;
  std::int64_t partial_rows;  // as many as teams of blocks; 0 where the row is too wide
  LaunchShape shape;
};

Plan plan_bwd(std::int64_t rows, std::int64_t n, DType dtype, bool aligned, bool bias, const Hardware& hw) {
  constexpr unsigned kThreads = 512;  // of a multiprocessor, with the registers that four vectors each of h and dy take
  const std::int64_t width = aligned ? 16 / size_of(dtype) : 1, packs = (n + width - 1) / width;
  const bool few = aligned && !bias && dtype != kFloat64 && hw.capability >= 80;
  const unsigned most_blocks = hw.clusters ? 8 : 1;
  const int resident = !aligned ? 8 : few && packs > 2 * kThreads * most_blocks ? 4 : 2;
  Plan plan{resident, bias || !few, 0, {}};
  if (packs > resident * kThreads * most_blocks) return plan;
  if (packs <= 32 * resident) {
    unsigned lanes = 8;
    while (lanes * resident < packs) lanes *= 2;
    plan.shape = {0, lanes, kThreads / lanes};
  } else {
    unsigned cluster = 1;
    while (packs > resident * kThreads * cluster) cluster *= 2;
    plan.shape = {0, threads_for(packs, resident * cluster), 1, cluster};
  }
  const unsigned per_multiprocessor = std::max(1u, kThreads / (plan.shape.block_x * plan.shape.block_y));
  const std::int64_t teams = hw.multiprocessors * per_multiprocessor / plan.shape.cluster;
  plan.partial_rows = std::min<std::int64_t>(teams, (rows + plan.shape.block_y - 1) / plan.shape.block_y);
  plan.shape.blocks = static_cast<unsigned>(plan.partial_rows * plan.shape.cluster);
  return plan;
}

struct Matrix {
  std::int64_t rows, n;
};
Matrix matrix_of(TensorView h) {
  expect_at_least_1d(h, "h");
  const std::int64_t n = h.size(h.ndim() - 1);
  return {n > 0 ? h.numel() / n : 0, n};
}

// Whether all rows may be read in vectors. Results are contiguous.
bool rows_are_aligned(const Matrix& m, DType dtype, std::initializer_list<OptionalTensor> arrays, const OptionalTensor& weight) {
  const int width = 16 / size_of(dtype);
  bool aligned = m.n % width == 0 && (!weight.has_value() || aligned16(data_of(*weight)));
  for (const OptionalTensor& array : arrays) {
    if (array.has_value()) aligned = aligned && vectors_fit(rows_of(*array, "array"), width, dtype);
  }
  return aligned;
}

// How many rows of partial sums (for dweight, and as many again for dbias) the gradient needs; 0 where h's rows are too wide for
// it.
int64_t rms_norm_bwd_partial_rows(TensorView dy, OptionalTensor dh, TensorView h, OptionalTensor weight, bool bias) {
  const Matrix m = matrix_of(h);
  const DType dtype = dtype_of(h, "h");
  const bool aligned = rows_are_aligned(m, dtype, {h, dy, dh}, weight);
  return plan_bwd(m.rows, m.n, dtype, aligned, bias, hardware("rms_norm_bwd", h.device().device_id)).partial_rows;
}

Rows single_stride(TensorView t, const char* name) {
  const Rows rows = rows_of(t, name);
  if (rows.outer_stride != 0)
    raise("ValueError", std::string(name) + ": its rows need more than one stride; pass a contiguous copy");
  return rows;
}

void sum_rows(TensorView sum, const char* name, const char* partial, std::int64_t rows, std::int64_t n, DType sums,
              CUstream stream) {
  static Kernel kernels[] = {{"rms_norm_bwd", "sum_rows_f64"}, {"rms_norm_bwd", "sum_rows_f32"}};
  SumRowsParams p{partial, data_of(sum), rows, n, dtype_of(sum, name)};
  launch(kernels[sums == kFloat64 ? 0 : 1], sum.device().device_id, stream, {static_cast<unsigned>((n + 31) / 32), 32, 16}, &p);
}

// Gradients on one GPU, from those for y and h (none: zero). `partial` is scratch of rms_norm_bwd_partial_rows rows of n, and
// as many again where dbias is wanted, in the dtype of the sums. There is at least one row.
void rms_norm_bwd(TensorView dx, OptionalTensor dweight, OptionalTensor dbias, OptionalTensor partial, TensorView dy,
                  OptionalTensor dh, TensorView h, OptionalTensor weight, double eps, double weight_offset) {
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
  const bool aligned = rows_are_aligned(m, dtype, {h, dy, dh, dx}, weight);
  const Plan plan = plan_bwd(m.rows, m.n, dtype, aligned, dbias.has_value(), hardware("rms_norm_bwd", device));
  if (plan.partial_rows == 0) raise("ValueError", "h: its rows are too wide");
  const std::int64_t bytes = plan.partial_rows * m.n * size_of(sums);
  if (dweight.has_value() || dbias.has_value()) {
    const std::int64_t rows_needed = plan.partial_rows * (dbias.has_value() ? 2 : 1);
    if (!partial.has_value() || dtype_of(*partial, "partial") != sums || !partial.value().is_contiguous() ||
        partial.value().numel() < rows_needed * m.n) {
      raise("ValueError",
            "partial: expected a contiguous array of " + std::to_string(rows_needed) + " rows in the dtype of the sums");
    }
    expect_device(*partial, "partial", h.device());
  }
  if (dweight.has_value()) {
    expect_vector(*dweight, "dweight", h);
    p.dweight = data_of(*partial);
  }
  if (dbias.has_value()) {
    expect_vector(*dbias, "dbias", h);
    p.dbias = data_of(*partial) + bytes;
  }
  const ContextGuard context(device);
  const CUstream stream = current_stream(h.device());
  launch(bwd_kernel(dtype, plan.resident, aligned, plan.bias), device, stream, plan.shape, &p);
  if (dweight.has_value()) sum_rows(*dweight, "dweight", static_cast<char*>(p.dweight), plan.partial_rows, m.n, sums, stream);
  if (dbias.has_value()) sum_rows(*dbias, "dbias", static_cast<char*>(p.dbias), plan.partial_rows, m.n, sums, stream);
}

}  // namespace
}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_bwd_partial_rows, cuops::rms_norm_bwd_partial_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_bwd, cuops::rms_norm_bwd);
