// The plan of kron_linear, as Python asks for it.
#include <tvm/ffi/any.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <algorithm>

#include "host/error.h"
#include "kron_linear/kron_factors.h"
#include "kron_plan.h"

namespace cuops {

namespace {

// The groups of factors that a chain of calls applies one after the other: for each, first, count, the kernel (of kron_linear_fwd,
// or GEMM: the vendor's matrix product), samples and slices of a tile, columns, bytes of shared memory, blocks, predicted
// nanoseconds, bytes, operations.
tvm::ffi::Array<tvm::ffi::Array<tvm::ffi::Any>> kron_linear_plan(int64_t dtype, int64_t rows, tvm::ffi::Array<int64_t> sizes,
                                                                 int64_t inner, bool allow_tf32, int64_t device) {
  if (std::min(rows, inner) < 1) raise("ValueError", "rows, inner: expected at least 1 each");
  const KronDevice facts = kron_device(static_cast<int>(device));
  KronProblem problem;
  problem.dtype = dtype_at(dtype);
  problem.arithmetic = kron_arithmetic(problem.dtype, facts);
  problem.tf32 = allow_tf32 && problem.dtype == kFloat32;
  problem.rows = rows;
  problem.inner = inner;
  problem.sizes = sizes_of(sizes);
  tvm::ffi::Array<tvm::ffi::Array<tvm::ffi::Any>> result;
  for (const KronGroup& group : plan_chain(problem, facts)) {
    const tvm::ffi::String kernel = group.fused ? group.kernel->name() : "GEMM";
    result.push_back({group.first, group.count, kernel, group.samples, group.slices, group.columns,
                      static_cast<int64_t>(group.shape.shared_bytes), static_cast<int64_t>(group.shape.blocks), group.nanoseconds,
                      group.bytes, group.operations});
  }
  return result;
}

}  // namespace
}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kron_linear_plan, cuops::kron_linear_plan);
