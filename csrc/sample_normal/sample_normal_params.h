// The arguments that sample_normal and its backward share, checked.
#pragma once

#include <algorithm>

#include "host/integers.h"
#include "host/kernel.h"
#include "host/tensor.h"
#include "sample_normal.h"

namespace cuops {

// The arguments that say which numbers a call draws; seed and stream are those of `state` where there is one. With
// `replays`, what sample_normal_replays returned, the stream moves on with each launch.
struct DrawArguments {
  OptionalTensor state;
  std::int64_t replays;  // an address
  std::int64_t seed, stream, start, sample_dim;
  bool shared, antithetic;
};

// Parameters but for mu, sigma and the bounds; `samples` are those of `columns` distributions, or their gradients.
SampleNormalParams params_of(TensorView samples, const char* name, const DrawArguments& draw);

// Which groups of four samples the draw has part in, from its start and num_samples.
void set_groups(SampleNormalParams* p);

// One parameter for every column, or one for all: whether it is one.
bool expect_columns(TensorView t, const char* name, const SampleNormalParams& p, DLDevice device);

Divider divider_of(std::int64_t divisor);

unsigned sample_blocks(std::int64_t threads, int threads_a_block = kSampleThreads);

}  // namespace cuops
