// The launches of sample_normal's kernels.
#pragma once

#include "sample_normal_params.h"

namespace cuops {

// Draws: all parameters are set but for those that say which thread has what.
void launch_fwd(SampleNormalParams& p, DType dtype, int device, CUstream stream);

// By sample_tiles, if it can: whether it did.
bool launch_tiles(SampleNormalParams& p, DType dtype, int device, CUstream stream, const Hardware& hw);

// By sample_shared, if it can: whether it did.
bool launch_shared(SampleNormalParams& p, DType dtype, int device, CUstream stream, const Hardware& hw);

// Launches that overlap, and count their blocks where they count replays.
void launch_threads(Kernel& kernel, std::int64_t threads, int device, CUstream stream, SampleNormalParams* p,
                    int threads_a_block = kSampleThreads, unsigned shared_bytes = 0);

}  // namespace cuops
