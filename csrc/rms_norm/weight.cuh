// The weight in the gradient of RMSNorm.
#pragma once

#include "device/numeric.cuh"
#include "rms_norm.h"
#include "rstd.cuh"

namespace cuops {

// The weight of a column as the sums want it: 1 where there is none. Narrow is what a weight may have beside T of float.
template <class T, class Narrow = T>
__device__ Accumulator<T> weight_of(const RmsNormBwdParams& p, long long column) {
  using Acc = Accumulator<T>;
  if (!p.weight) return 1;
  if (!kSame<T, Narrow> && p.weight_narrow)
    return scalars<Acc>(p).weight_offset + convert<Acc>(static_cast<const Narrow*>(p.weight)[column]);
  return scalars<Acc>(p).weight_offset +
         (p.weight_wide ? static_cast<const Acc*>(p.weight)[column] : convert<Acc>(static_cast<const T*>(p.weight)[column]));
}

}  // namespace cuops
