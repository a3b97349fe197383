// The gradient of RMSNorm with an offset, beside a weight of float32, or of h of float32 beside dy of 16 bits, as the residual
// stream of mixed precision is: what of these rms_norm_bwd_held.cu has not.
#include "rms_norm_bwd_held.cuh"

#include "device/tuned.cuh"

CUOPS_ONLY_FOR(80, 90)

// Instances, as rms_norm_bwd_plan.cc asks for them: threads a block; dtype of dy; vectors a thread; shared, wide, phased, cluster.
#define RMS_NORM_BWD(name, T, suffix, kThreads, ...)                                                                    \
  extern "C" __global__ void __launch_bounds__(kThreads, 1) rms_norm_bwd_##name##_##suffix(cuops::RmsNormBwdParams p) { \
    cuops::rms_norm_bwd_held<T, __VA_ARGS__>(p);                                                                        \
  }
RMS_NORM_BWD(f32, float, held_shared, 640, float, 2, true)
RMS_NORM_BWD(f16, __half, held_shared, 640, __half, 2, true)
RMS_NORM_BWD(bf16, __nv_bfloat16, held_shared, 640, __nv_bfloat16, 2, true)
#if CUOPS_TUNED == 90  // others have two passes for these: each instance costs half a second of every build
RMS_NORM_BWD(f32, float, held_shared_phased, 640, float, 2, true, false, true)
RMS_NORM_BWD(f16, __half, held_shared_phased, 640, __half, 2, true, false, true)
RMS_NORM_BWD(bf16, __nv_bfloat16, held_shared_phased, 640, __nv_bfloat16, 2, true, false, true)
#define RMS_NORM_BWD_DY(suffix, Dy)                                                  \
  RMS_NORM_BWD(f32, float, held_dy_##suffix, 640, Dy, 2, true)                       \
  RMS_NORM_BWD(f32, float, wide_dy_##suffix, 512, Dy, 4, true, true)                 \
  RMS_NORM_BWD(f32, float, held_dy_##suffix##_phased, 640, Dy, 2, true, false, true) \
  RMS_NORM_BWD(f32, float, wide_dy_##suffix##_phased, 512, Dy, 4, true, true, true)
RMS_NORM_BWD_DY(f16, __half)
RMS_NORM_BWD_DY(bf16, __nv_bfloat16)
#if CUOPS_CLUSTERS
RMS_NORM_BWD(f32, float, held_shared_cluster, 640, float, 2, true, false, false, true)
RMS_NORM_BWD(f16, __half, held_shared_cluster, 640, __half, 2, true, false, false, true)
RMS_NORM_BWD(bf16, __nv_bfloat16, held_shared_cluster, 640, __nv_bfloat16, 2, true, false, false, true)
RMS_NORM_BWD(f32, float, held_dy_f16_cluster, 640, __half, 2, true, false, false, true)
RMS_NORM_BWD(f32, float, held_dy_bf16_cluster, 640, __nv_bfloat16, 2, true, false, false, true)
#endif
#endif
