// The launch of a group of factors, by the kernel that its plan names.
#pragma once

#include <tvm/ffi/container/array.h>

#include "host/tensor.h"
#include "kron_linear/plan/kron_plan.h"

namespace cuops {

// y = x kron(factors)^T + bias, for arrays that are what the problem says.
struct KronCall {
  const KronProblem& problem;
  const tvm::ffi::Array<tvm::ffi::Tensor>& factors;
  Rows x, y;
  std::int64_t in;  // elements of a row of x
  const void* bias;
  std::int64_t bias_lead;  // rows of it, for rows of y in turn
};

// The caller holds a ContextGuard of the device.
void launch_group(const KronGroup& group, const KronCall& call, int device, CUstream stream);

// y = x kron(factors)^T + bias along the leading part of the last dimension, whose trailing part has `inner` elements; arrays on
// one GPU. The factors must be a group of the plan.
void kron_linear_fwd(TensorView y, TensorView x, tvm::ffi::Array<tvm::ffi::Tensor> factors, int64_t inner, OptionalTensor bias,
                     bool allow_tf32);

}  // namespace cuops
