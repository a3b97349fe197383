// RMSNorm of rows of 16 bits that registers hold, with a weight of float32.
#include "rms_norm.h"

#include "device/tuned.cuh"
#include "rms_norm/with_options.cuh"

CUOPS_ONLY_FOR(90)

#define RMS_NORM_FWD_OF(name, T)                                                    \
  RMS_NORM_FWD(name, T, short_wide_weight, 256, 4, kWideWeight, 2, 2, false, false) \
  RMS_NORM_FWD(name, T, three_wide_weight, 128, 6, kWideWeight, 3, 3, false, false) \
  RMS_NORM_FWD(name, T, five_wide_weight, 128, 4, kWideWeight, 5, 5, false, false)  \
  RMS_NORM_FWD(name, T, middle_wide_weight, 384, 2, kWideWeight, 4, 4, false, true) \
  RMS_NORM_FWD(name, T, wide_wide_weight, 256, 2, kWideWeight, 8, 8, false, true)   \
  RMS_NORM_FWD(name, T, phased_wide_weight, 256, 2, kWideWeight, 4, 4, true, true)
RMS_NORM_FWD_OF(f16, __half)
RMS_NORM_FWD_OF(bf16, __nv_bfloat16)
