#include "sample_normal_params.h"

#include "host/error.h"

namespace cuops {
namespace {

const long long* int64s(TensorView t, const char* name, std::int64_t least, DLDevice device) {
  const DLDataType d = t.dtype();
  if (d.code != kDLInt || d.bits != 64 || d.lanes != 1 || t.numel() < least || t.numel() > 2 || !t.is_contiguous()) {
    raise("ValueError", std::string(name) + ": expected one or two int64");
  }
  expect_device(t, name, device);
  return reinterpret_cast<const long long*>(data_of(t));
}

}  // namespace

bool expect_columns(TensorView t, const char* name, const SampleNormalParams& p, DLDevice device) {
  if ((t.numel() != p.columns && t.numel() != 1) || !t.is_contiguous()) {
    raise("ValueError",
          std::string(name) + ": expected a contiguous array of " + std::to_string(p.columns) + " numbers, or of one");
  }
  expect_device(t, name, device);
  return t.numel() == 1;
}

unsigned sample_blocks(std::int64_t threads) {
  const std::int64_t blocks = divide_up(threads, kSampleThreads);
  if (blocks > INT32_MAX) raise("ValueError", "num_samples: expected fewer samples in one call; split the draw with start");
  return static_cast<unsigned>(blocks);
}

SampleNormalParams params_of(TensorView samples, const DrawArguments& draw) {
  const int ndim = samples.ndim();
  if (ndim < 2 || !samples.is_contiguous()) raise("ValueError", "out: expected a contiguous array of at least 2 dimensions");
  if (draw.start < 0) raise("ValueError", "start: expected at least 0");
  SampleNormalParams p{};
  p.along_columns = draw.sample_dim != 0;
  p.num_samples = samples.size(p.along_columns ? ndim - 1 : ndim - 2);
  p.dim = samples.size(p.along_columns ? ndim - 2 : ndim - 1);
  p.columns = p.num_samples > 0 ? samples.numel() / p.num_samples : 0;
  p.samples = data_of(samples);
  p.start = draw.start;
  p.shared = draw.shared;
  p.antithetic = draw.antithetic;
  p.seed = static_cast<std::uint64_t>(draw.seed);
  p.stream = static_cast<std::uint64_t>(draw.stream);
  if (draw.state.has_value()) {
    p.state = int64s(*draw.state, "seed", 1, samples.device());
    p.state_has_stream = draw.state->numel() == 2;
  }
  if (draw.replays.has_value()) p.replays = const_cast<long long*>(int64s(*draw.replays, "replays", 2, samples.device()));
  return p;
}

}  // namespace cuops
