// RMSNorm of rows that registers hold, without a weight.
#include "rms_norm.h"

#include "device/tuned.cuh"
#include "rms_norm/with_options.cuh"

CUOPS_ONLY_FOR(80, 90)

#define RMS_NORM_FWD_OF(name, T)                                                \
  RMS_NORM_FWD(name, T, short_no_weight, 256, 6, kNoWeight, 2, 2, false, false) \
  RMS_NORM_FWD(name, T, middle_no_weight, 512, 2, kNoWeight, 4, 4, false, true) \
  RMS_NORM_FWD(name, T, wide_no_weight, 256, 3, kNoWeight, 8, 4, false, true)
RMS_NORM_FWD_OF(f32, float)
RMS_NORM_FWD_OF(f16, __half)
RMS_NORM_FWD_OF(bf16, __nv_bfloat16)
#if CUOPS_TUNED == 90
RMS_NORM_FWD(f32, float, three_no_weight, 128, 10, kNoWeight, 3, 3, false, false)
RMS_NORM_FWD(f16, __half, three_no_weight, 128, 10, kNoWeight, 3, 3, false, false)
RMS_NORM_FWD(bf16, __nv_bfloat16, three_no_weight, 128, 10, kNoWeight, 3, 3, false, false)
#endif
