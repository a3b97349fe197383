#include "sample_normal_params.h"

#include "host/error.h"

namespace cuops {
namespace {

const long long* seed_of(TensorView t, DLDevice device) {
  const DLDataType d = t.dtype();
  if (d.code != kDLInt || d.bits != 64 || d.lanes != 1 || t.numel() < 1 || t.numel() > 2 || !t.is_contiguous()) {
    raise("ValueError", "seed: expected one or two int64");
  }
  expect_device(t, "seed", device);
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

unsigned sample_blocks(std::int64_t threads, int threads_a_block) {
  const std::int64_t blocks = ceil_div(threads, threads_a_block);
  if (blocks > kMostBlocks) raise("ValueError", "num_samples: expected fewer samples in one call; split the draw with start");
  return static_cast<unsigned>(blocks);
}

Divider divider_of(std::int64_t divisor) {
  const unsigned shift = static_cast<unsigned>(log_from(divisor));
  const std::int64_t multiplier = ceil_div(std::int64_t{1} << (31 + shift), divisor);
  return {static_cast<unsigned>(divisor), static_cast<unsigned>(multiplier), shift};
}

void set_groups(SampleNormalParams* p) {
  const int copies = p->antithetic ? 2 : 1;
  p->group = p->start / copies / 4;
  p->end_group = (p->start + p->num_samples - 1) / copies / 4 + 1;
  p->whole_group = p->antithetic ? p->end_group : ceil_div(p->start, 4);
  p->end_whole = p->antithetic ? p->end_group : std::max((p->start + p->num_samples) / 4, p->whole_group);
}

SampleNormalParams params_of(TensorView samples, const char* name, const DrawArguments& draw) {
  const int ndim = samples.ndim();
  if (ndim < 2 || !samples.is_contiguous())
    raise("ValueError", std::string(name) + ": expected a contiguous array of at least 2 dimensions");
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
  p.dtype = dtype_of(samples, name);
  set_groups(&p);
  for (unsigned i = 0; i < 20; ++i) {
    const unsigned steps[] = {0x9E3779B9u, 0xBB67AE85u};
    p.keys[i] = static_cast<unsigned>(static_cast<std::uint64_t>(draw.seed) >> (i % 2 * 32)) + i / 2 * steps[i % 2];
  }
  p.seed = static_cast<std::uint64_t>(draw.seed);
  p.stream = static_cast<std::uint64_t>(draw.stream);
  if (draw.state.has_value()) {
    p.state = seed_of(*draw.state, samples.device());
    p.state_has_stream = (*draw.state).numel() == 2;
  }
  p.replays = reinterpret_cast<long long*>(draw.replays);
  return p;
}

}  // namespace cuops
