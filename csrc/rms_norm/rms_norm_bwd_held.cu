// The gradient of RMSNorm in the common case, and of long rows also with an offset or a weight of float32 beside 16 bits.
#include "rms_norm_bwd_held.cuh"

#include "device/tuned.cuh"

CUOPS_ONLY_FOR(80, 90)

// Instances, as rms_norm_bwd_plan.cc asks for them: of which threads and vectors; shared, wide, phased, cluster.
#define RMS_NORM_BWD(name, T, suffix, Kind, ...)                             \
  extern "C" __global__ void __launch_bounds__(cuops::k##Kind##Threads, 1)   \
      rms_norm_bwd_##name##_##suffix(cuops::RmsNormBwdParams p) {            \
    cuops::rms_norm_bwd_held<T, T, cuops::k##Kind##Vectors, __VA_ARGS__>(p); \
  }
#define RMS_NORM_BWD_OF(name, T)           \
  RMS_NORM_BWD(name, T, held, Held, false) \
  RMS_NORM_BWD(name, T, wide, Wide, true, true)
RMS_NORM_BWD_OF(f32, float)
RMS_NORM_BWD_OF(f16, __half)
RMS_NORM_BWD_OF(bf16, __nv_bfloat16)
RMS_NORM_BWD(f16, __half, held_long, HeldLong, true)
RMS_NORM_BWD(bf16, __nv_bfloat16, held_long, HeldLong, true)
#if CUOPS_TUNED == 90  // others have two passes for these: each instance costs half a second of every build
#define RMS_NORM_BWD_TUNED(name, T)                            \
  RMS_NORM_BWD(name, T, held_phased, Held, false, false, true) \
  RMS_NORM_BWD(name, T, wide_phased, Wide, true, true, true)
RMS_NORM_BWD_TUNED(f32, float)
RMS_NORM_BWD_TUNED(f16, __half)
RMS_NORM_BWD_TUNED(bf16, __nv_bfloat16)
#if CUOPS_CLUSTERS
#define RMS_NORM_BWD_CLUSTER(name, T)                                  \
  RMS_NORM_BWD(name, T, held_cluster, Held, false, false, false, true) \
  RMS_NORM_BWD(name, T, held_cluster_phased, Held, false, false, true, true)
RMS_NORM_BWD_CLUSTER(f32, float)
RMS_NORM_BWD_CLUSTER(f16, __half)
RMS_NORM_BWD_CLUSTER(bf16, __nv_bfloat16)
#endif
#endif
