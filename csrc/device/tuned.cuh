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

// Says of a source, on a line of its own, which of these it is for alone, as in (80, 90) or, for what 9.0 alone has, (90a), and
// from which CUDA version on, as in (90, CUDA 12.0): wheels have no code of it for others (build_backend/cuops_build/nvrtc.py).
#define CUOPS_ONLY_FOR(...)
