// The gradient of RMSNorm with an offset, beside a weight of float32, or of h of float32 beside dy of 16 bits, as the residual
// stream of mixed precision is: what of these rms_norm_bwd_held.cu has not.
#include "rms_norm_bwd_held.cuh"

#include "device/tuned.cuh"

CUOPS_ONLY_FOR(80, 90)

// Instances, as rms_norm_bwd_plan.cc asks for them: of which threads and vectors; dtype of dy; shared, wide, phased, cluster.
#define RMS_NORM_BWD(name, T, suffix, Kind, Dy, ...)                          \
  extern "C" __global__ void __launch_bounds__(cuops::k##Kind##Threads, 1)    \
      rms_norm_bwd_##name##_##suffix(cuops::RmsNormBwdParams p) {             \
    cuops::rms_norm_bwd_held<T, Dy, cuops::k##Kind##Vectors, __VA_ARGS__>(p); \
  }
RMS_NORM_BWD(f32, float, held_shared, Held, float, true)
RMS_NORM_BWD(f16, __half, held_shared, Held, __half, true)
RMS_NORM_BWD(bf16, __nv_bfloat16, held_shared, Held, __nv_bfloat16, true)
#if CUOPS_TUNED == 90  // others have two passes for these: each instance costs half a second of every build
RMS_NORM_BWD(f32, float, held_shared_phased, Held, float, true, false, true)
RMS_NORM_BWD(f16, __half, held_shared_phased, Held, __half, true, false, true)
RMS_NORM_BWD(bf16, __nv_bfloat16, held_shared_phased, Held, __nv_bfloat16, true, false, true)
#define RMS_NORM_BWD_DY(suffix, Dy)                                                \
  RMS_NORM_BWD(f32, float, held_dy_##suffix, Held, Dy, true)                       \
  RMS_NORM_BWD(f32, float, wide_dy_##suffix, Wide, Dy, true, true)                 \
  RMS_NORM_BWD(f32, float, held_dy_##suffix##_phased, Held, Dy, true, false, true) \
  RMS_NORM_BWD(f32, float, wide_dy_##suffix##_phased, Wide, Dy, true, true, true)
RMS_NORM_BWD_DY(f16, __half)
RMS_NORM_BWD_DY(bf16, __nv_bfloat16)
#if CUOPS_CLUSTERS
RMS_NORM_BWD(f32, float, held_shared_cluster, Held, float, true, false, false, true)
RMS_NORM_BWD(f16, __half, held_shared_cluster, Held, __half, true, false, false, true)
RMS_NORM_BWD(bf16, __nv_bfloat16, held_shared_cluster, Held, __nv_bfloat16, true, false, false, true)
RMS_NORM_BWD(f32, float, held_dy_f16_cluster, Held, __half, true, false, false, true)
RMS_NORM_BWD(f32, float, held_dy_bf16_cluster, Held, __nv_bfloat16, true, false, false, true)
#endif
#endif
