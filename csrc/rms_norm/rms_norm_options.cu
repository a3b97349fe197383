// RMSNorm of rows that registers hold, with any options.
#include "rms_norm.h"

#include "device/tuned.cuh"
#include "rms_norm/with_options.cuh"

CUOPS_ONLY_FOR(80, 90)

#define RMS_NORM_FWD_OF(name, T)                                               \
  RMS_NORM_FWD(name, T, short_options, 256, 3, kAll, 2, 2, false, false)       \
  RMS_NORM_FWD(name, T, middle_options, 384, 2, kAll, 4, 2, false, true)       \
  RMS_NORM_FWD(name, T, wide_options, 256, 2, kAll, 8, 2, false, true)         \
  RMS_NORM_FWD(name, T, phased_short_options, 256, 3, kAll, 2, 2, true, false) \
  RMS_NORM_FWD(name, T, phased_options, 256, 2, kAll, 8, 2, true, true)
RMS_NORM_FWD_OF(f32, float)
RMS_NORM_FWD_OF(f16, __half)
RMS_NORM_FWD_OF(bf16, __nv_bfloat16)
