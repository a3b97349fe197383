// The arguments that sample_normal and its backward share, checked.
#pragma once

#include <algorithm>

#include "host/integers.h"
#include "host/kernel.h"
#include "host/tensor.h"
#include "sample_normal.h"

namespace cuops {

using OptionalTensor = tvm::ffi::Optional<TensorView>;

// The arguments that say which numbers a call draws; seed and stream are those of `state` where there is one. With
// `replays`, what sample_normal_replays returned, the stream moves on with each launch.
struct DrawArguments {
  OptionalTensor state;
  std::int64_t replays;  // an address
  std::int64_t seed, stream, start, sample_dim;
  bool shared, antithetic;
};

// Parameters but for mu, sigma and the bounds; `samples` are those of `columns` distributions, or their gradients.
SampleNormalParams params_of(TensorView samples, const DrawArguments& draw);

// Which groups of four samples the draw has part in, from its start and num_samples.
void set_groups(SampleNormalParams* p);

// One parameter for every column, or one for all: whether it is one.
bool expect_columns(TensorView t, const char* name, const SampleNormalParams& p, DLDevice device);

Divider divider_of(std::int64_t divisor);

unsigned sample_blocks(std::int64_t threads, int threads_a_block = kSampleThreads);

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
