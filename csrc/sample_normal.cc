// Normal samples on the host: checks, arrays on the GPU and those on the host.
#include <tvm/ffi/function.h>

#include <algorithm>

#include "host/error.h"
#include "host/staging.h"
#include "sample_normal/sample_normal_launch.h"

namespace cuops {
namespace {

constexpr std::int64_t kMostInRow = 1 << 22;  // samples of a column that are on the GPU at a time

bool expect_wide(TensorView t, const char* name, DType dtype) {
  const DType got = dtype_of(t, name);
  if (got != dtype && got != accumulator_of(dtype)) {
    raise("TypeError", std::string(name) + ": expected the dtype of the samples or of the arithmetic, got " + name_of(got));
  }
  return got != dtype;
}

void set_distribution(SampleNormalParams* p, TensorView samples, TensorView mu, OptionalTensor sigma, double sigma_value,
                      OptionalTensor low, OptionalTensor high) {
  const DType dtype = dtype_of(samples, "out");
  const DLDevice device = samples.device();
  p->one_mu = expect_columns(mu, "mu", *p, device);
  p->mu_wide = expect_wide(mu, "mu", dtype);
  p->mu = data_of(mu);
  p->sigma_value = sigma_value;
  if (sigma.has_value()) {
    p->one_sigma = expect_columns(*sigma, "sigma", *p, device);
    p->sigma_wide = expect_wide(*sigma, "sigma", dtype);
    p->sigma = data_of(*sigma);
  }
  if (low.has_value() != high.has_value()) raise("ValueError", "low: expected together with high");
  if (!low.has_value()) return;
  if (dtype_of(*low, "low") != dtype || dtype_of(*high, "high") != dtype) raise("TypeError", "low: expected the samples' dtype");
  p->one_low = expect_columns(*low, "low", *p, device);
  p->one_high = expect_columns(*high, "high", *p, device);
  p->low = data_of(*low);
  p->high = data_of(*high);
}

// Samples on a GPU: (..., N, d), or (..., d, N) with sample_dim -1.
void sample_normal_fwd(TensorView out, TensorView mu, OptionalTensor sigma, double sigma_value, OptionalTensor low,
                       OptionalTensor high, OptionalTensor state, int64_t replays, int64_t seed, int64_t stream, int64_t start,
                       int64_t sample_dim, bool shared, bool antithetic) {
  SampleNormalParams p = params_of(out, "out", {state, replays, seed, stream, start, sample_dim, shared, antithetic});
  expect_cuda(out, "out");
  if (p.columns == 0) return;
  set_distribution(&p, out, mu, sigma, sigma_value, low, high);
  const int device = out.device().device_id;
  const ContextGuard context(device);
  launch_fwd(p, dtype_of(out, "out"), device, current_stream(out.device()));
}

// Host arrays, through the GPU `device`. Returns when the samples are written.
void sample_normal_fwd_host(TensorView out, TensorView mu, TensorView sigma, OptionalTensor low, OptionalTensor high, int64_t seed,
                            int64_t start, int64_t sample_dim, bool shared, bool antithetic, int64_t device) {
  SampleNormalParams p = params_of(out, "out", {std::nullopt, 0, seed, 0, start, sample_dim, shared, antithetic});
  expect_device(out, "out", {kDLCPU, 0});
  if (p.columns == 0) return;
  set_distribution(&p, out, mu, sigma, 0, low, high);
  const DType dtype = dtype_of(out, "out");
  const int size = size_of(dtype);
  const ContextGuard context(static_cast<int>(device));
  DeviceMemory memory[4];
  auto upload = [&](DeviceMemory& to, TensorView t, const char* name) -> const char* {
    return static_cast<const char*>(to.upload(data_of(t), t.numel() * size_of(dtype_of(t, name)), static_cast<int>(device)));
  };
  const char* const on_device[] = {upload(memory[0], mu, "mu"), upload(memory[1], sigma, "sigma"),
                                   low.has_value() ? upload(memory[2], *low, "low") : nullptr,
                                   high.has_value() ? upload(memory[3], *high, "high") : nullptr};
  const int sizes[] = {size_of(dtype_of(mu, "mu")), size_of(dtype_of(sigma, "sigma")), size, size};
  auto draw = [&](std::int64_t column, std::int64_t columns, std::int64_t dim, std::int64_t sample, std::int64_t samples, char* at,
                  CUstream stream) {
    SampleNormalParams part = p;
    auto from = [&](int i, bool one) { return on_device[i] + (one ? 0 : column * sizes[i]); };
    part.mu = from(0, p.one_mu);
    part.sigma = from(1, p.one_sigma);
    if (p.low != nullptr) {
      part.low = from(2, p.one_low);
      part.high = from(3, p.one_high);
    }
    part.samples = at;
    part.columns = columns;
    part.dim = dim;
    part.first_column = column;
    part.num_samples = samples;
    part.start = p.start + sample;
    set_groups(&part);
    launch_fwd(part, dtype, static_cast<int>(device), stream);
  };
  char* const samples = static_cast<char*>(p.samples);
  if (p.along_columns) {  // a row has all samples of a column: many go by parts
    for (std::int64_t sample = 0; sample < p.num_samples; sample += kMostInRow) {
      const std::int64_t some = std::min<std::int64_t>(kMostInRow, p.num_samples - sample);
      stream_rows(static_cast<int>(device), p.columns, {}, {{samples + sample * size, p.num_samples * size, some * size}},
                  [&](const CUdeviceptr*, const CUdeviceptr* to, std::int64_t first, std::int64_t count, CUstream stream) {
                    draw(first, count, count, sample, some, reinterpret_cast<char*>(to[0]), stream);
                  });
    }
    return;
  }
  const std::int64_t rows = p.columns * p.num_samples / p.dim;
  stream_rows(static_cast<int>(device), rows, {}, {{samples, p.dim * size, p.dim * size}},
              [&](const CUdeviceptr*, const CUdeviceptr* to, std::int64_t first, std::int64_t count, CUstream stream) {
                char* at = reinterpret_cast<char*>(to[0]);
                while (count > 0) {  // a chunk may have rows of several distributions: of the first and the last one a part
                  const std::int64_t batch = first / p.num_samples, sample = first % p.num_samples;
                  const std::int64_t whole = sample == 0 ? count / p.num_samples : 0;
                  const std::int64_t some = whole > 0 ? p.num_samples : std::min<std::int64_t>(count, p.num_samples - sample);
                  const std::int64_t batches = std::max<std::int64_t>(whole, 1), drawn = batches * some;
                  draw(batch * p.dim, batches * p.dim, p.dim, sample, some, at, stream);
                  at += drawn * p.dim * size;
                  first += drawn;
                  count -= drawn;
                }
              });
}

// Zeroed memory on a GPU, for the life of the process: what a call in a CUDA graph counts its replays in.
int64_t sample_normal_replays(int64_t device) {
  const ContextGuard context(static_cast<int>(device));
  const std::int64_t zeros[kReplaysParts * kReplaysApart] = {};
  DeviceMemory memory;
  void* const at = memory.upload(zeros, sizeof(zeros), static_cast<int>(device));
  memory.keep();
  return reinterpret_cast<std::int64_t>(at);
}

}  // namespace
}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sample_normal_fwd, cuops::sample_normal_fwd);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sample_normal_replays, cuops::sample_normal_replays);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sample_normal_fwd_host, cuops::sample_normal_fwd_host);
