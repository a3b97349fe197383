// The launch of kron_linear for arrays on a GPU, for those that bring host arrays there.
#pragma once

#include <tvm/ffi/container/array.h>

#include "host/tensor.h"

namespace cuops {

// y = x kron(factors)^T + bias along the leading part of the last dimension, whose trailing part has `inner` elements; arrays on
// one GPU. The factors must be a group of the plan.
void kron_linear_fwd(TensorView y, TensorView x, tvm::ffi::Array<tvm::ffi::Tensor> factors, int64_t inner, OptionalTensor bias,
                     bool allow_tf32);

}  // namespace cuops
