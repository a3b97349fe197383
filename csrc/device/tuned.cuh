// Which code gets the instances that are tuned, as Hardware::tuned says on the host. They take most of the time of a build, and are
// for GPUs whose memory is fast enough to need them: 8.0 (A100), 9.0 (H100, H200), 10.0 (B200, by the code of 9.0), and PTX of
// these.
#pragma once

#if __CUDA_ARCH__ == 800
#define CUOPS_TUNED 80
#elif __CUDA_ARCH__ == 900
#define CUOPS_TUNED 90
#else
#define CUOPS_TUNED 0
#endif
