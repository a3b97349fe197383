// RMSNorm of rows that registers hold, of h = x + residual in float32, as the residual stream of mixed precision is: one of x and
// the residual has 16 bits, and so has y.
#include "rms_norm.h"

#include "device/tuned.cuh"
#include "rms_norm/with_options.cuh"

CUOPS_ONLY_FOR(90)

#define RMS_NORM_FWD_OF(suffix, kOptions)                                        \
  RMS_NORM_FWD(f32, float, short_##suffix, 256, 4, kOptions, 2, 2, false, false) \
  RMS_NORM_FWD(f32, float, three_##suffix, 128, 8, kOptions, 3, 3, false, false) \
  RMS_NORM_FWD(f32, float, five_##suffix, 128, 6, kOptions, 5, 5, false, false)  \
  RMS_NORM_FWD(f32, float, middle_##suffix, 384, 2, kOptions, 4, 4, false, true) \
  RMS_NORM_FWD(f32, float, wide_##suffix, 256, 2, kOptions, 8, 4, false, true)
RMS_NORM_FWD_OF(mixed_f16, kMixedF16)
RMS_NORM_FWD_OF(mixed_bf16, kMixedBF16)
