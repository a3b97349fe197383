// Sums of matrices: checks, how many threads share a sum, the launches.
#include <tvm/ffi/function.h>

#include <algorithm>

#include "host/error.h"
#include "host/integers.h"
#include "host/kernel.h"
#include "host/tensor.h"
#include "kron_sum.h"

namespace cuops {
namespace {

constexpr int kLogMost = 8, kLogLeast = 2;  // columns of a block, or vectors of them
constexpr std::int64_t kEach = 8;           // rows of a thread, at most, while a block may have more threads
// From so many bytes on, no block reads less of a row than a sector has; about the rows of a part, of these and of others.
constexpr std::int64_t kMany = 4 << 20, kSector = 32, kRowsOfMany = 1 << 10, kRowsOfFew = 1 << 12;

struct Columns {
  bool are_wide;
  int log;  // of a block
  std::int64_t blocks, parts;
};

Columns share_out(const char* x, DType dtype, std::int64_t n, std::int64_t rows, int multiprocessors, bool in_parts) {
  const std::int64_t size = size_of(dtype), width = 16 / size, wanted = 4LL * multiprocessors;
  const bool many = n * rows * size >= kMany;
  Columns of{n % width == 0 && aligned16(x) && (many || n >= (width * wanted << kLogLeast)), kLogMost, 0, 1};
  const std::int64_t all = of.are_wide ? n / width : n;
  const int least = many && !of.are_wide ? log_from(kSector / size) : kLogLeast;
  while (of.log > least && ceil_div(all, std::int64_t{1} << of.log) < wanted) --of.log;
  of.blocks = ceil_div(all, std::int64_t{1} << of.log);
  if (!in_parts) return of;
  if (many) {
    of.parts = std::min(ceil_div(wanted, of.blocks), ceil_div(rows, kRowsOfMany));
  } else if (of.blocks < multiprocessors) {
    of.parts = ceil_div(std::max<std::int64_t>(rows, 1), kRowsOfFew);
  }
  return of;
}

void launch_sum(const Columns& columns, const char* x, DType dtype, char* y, DType to, std::int64_t n, std::int64_t rows,
                int device, CUstream stream) {
  static const KernelTable table("kron_sum_", {{"kron_linear_sum", {"", "_wide"}}});
  if (columns.blocks * columns.parts > INT32_MAX) raise("ValueError", "x: too large for one launch");
  const std::int64_t rows_of_part = ceil_div(rows, columns.parts);
  int threads = 1 << columns.log;
  while (threads < 32 || (threads < kSumThreads && (threads >> columns.log) * kEach < rows_of_part)) threads *= 2;
  KronSumParams p{x, y, n, rows, rows_of_part, static_cast<int>(columns.blocks), columns.log, to};
  LaunchShape shape{static_cast<unsigned>(columns.blocks * columns.parts), static_cast<unsigned>(threads)};
  shape.overlaps = true;
  launch(table.at(dtype, columns.are_wide), device, stream, shape, &p);
}

// y = the sum over the first dimension of x (rows, ...), both without gaps.
void kron_linear_sum(TensorView y, TensorView x) {
  const DType dtype = dtype_of(x, "x"), sums = accumulator_of(dtype);
  expect_cuda(x, "x");
  if (dtype_of(y, "y") != dtype) raise("TypeError", "y: expected x's dtype");
  expect_device(y, "y", x.device());
  if (x.ndim() < 1 || !x.is_contiguous()) raise("ValueError", "x: expected a contiguous array of rows");
  const std::int64_t rows = x.size(0), n = y.numel();
  if (!y.is_contiguous() || n * rows != x.numel()) raise("ValueError", "y: expected a contiguous array of the shape of a row of x");
  if (n == 0) return;
  const int device = x.device().device_id, multiprocessors = hardware("kron_linear_sum", device).multiprocessors;
  const ContextGuard context(device);
  const CUstream stream = current_stream(x.device());
  const Columns columns = share_out(data_of(x), dtype, n, rows, multiprocessors, can_allocate());
  if (columns.parts == 1) return launch_sum(columns, data_of(x), dtype, data_of(y), dtype, n, rows, device, stream);
  const tvm::ffi::Tensor parts = allocate(columns.parts * n, sums, x.device());
  char* const found = data_of(TensorView(parts));
  launch_sum(columns, data_of(x), dtype, found, sums, n, rows, device, stream);
  const Columns last = share_out(found, sums, n, columns.parts, multiprocessors, false);
  launch_sum(last, found, sums, data_of(y), dtype, n, columns.parts, device, stream);
}

}  // namespace
}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kron_linear_sum, cuops::kron_linear_sum);
