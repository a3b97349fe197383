// Normal samples on the host: checks, the choice of a kernel, the launch.
#include <tvm/ffi/function.h>

#include <algorithm>

#include "host/error.h"
#include "host/staging.h"
#include "sample_normal_params.h"

namespace cuops {
namespace {

enum Variant { kRows1, kRows1Host, kRows2, kRows4, kRows4State, kRows4Shared, kSpreadShared, kColumns, kColumnsWhole };

Kernel& kernel_for(DType dtype, Variant variant) {
  struct Table {
    Kernel* at[4][9];  // for the life of the process
    Table() {
      constexpr const char* suffixes[] = {"_rows_1",        "_rows_1_host",   "_rows_2",  "_rows_4",       "_rows_4_state",
                                          "_rows_4_shared", "_spread_shared", "_columns", "_columns_whole"};
      for (DType t : {kFloat64, kFloat32, kFloat16, kBFloat16})
        for (int v = kRows1; v <= kColumnsWhole; ++v)
          at[t][v] = new Kernel("sample_normal", std::string("sample_normal_fwd_") + name_of(t) + suffixes[v]);
    }
  };
  static const Table table;
  return *table.at[dtype][variant];
}

// Enough turns a thread that its preparations do not count, as long as one wave of threads fills the GPU.
std::int64_t step_for(std::int64_t turns, std::int64_t lines, std::int64_t most, const Hardware& hw) {
  return std::clamp<std::int64_t>(divide_up(turns * lines, std::int64_t{hw.multiprocessors} * 1024), 1, std::min(most, turns));
}

void launch_threads(Kernel& kernel, std::int64_t threads, int device, CUstream stream, SampleNormalParams* p) {
  LaunchShape shape{sample_blocks(threads), kSampleThreads};
  shape.overlaps = true;
  launch(kernel, device, stream, shape, p);
}

void launch_truncated(SampleNormalParams& p, int device, CUstream stream) {
  static Kernel* const kernel = new Kernel("sample_normal", "sample_normal_fwd_truncated");
  launch_threads(*kernel, (p.end_group - p.group) * p.columns, device, stream, &p);
}

// Threads of a block side by side in a column, and blocks over columns and their parts.
void launch_columns(SampleNormalParams& p, DType dtype, bool wide, int device, CUstream stream, const Hardware& hw) {
  const std::int64_t groups = p.end_group - p.group;
  p.lanes = 1;
  while (p.lanes < kSampleThreads && p.lanes < groups) p.lanes *= 2;
  const std::int64_t turns = divide_up(groups, p.lanes), columns = divide_up(p.columns, kSampleThreads / p.lanes);
  p.step = step_for(turns, columns * kSampleThreads, 32, hw);
  const bool whole = wide && dtype != kFloat16 && !p.antithetic && p.state == nullptr && p.num_samples % 4 == 0 &&
                     p.start % 4 == 0 && reinterpret_cast<std::uintptr_t>(p.samples) % std::min(16, 4 * size_of(dtype)) == 0;
  const std::int64_t threads = columns * divide_up(turns, p.step) * kSampleThreads;
  launch_threads(kernel_for(dtype, whole ? kColumnsWhole : kColumns), threads, device, stream, &p);
}

void launch_rows(SampleNormalParams& p, DType dtype, bool wide, int device, CUstream stream, const Hardware& hw) {
  const std::int64_t groups = p.end_group - p.group;
  const int size = size_of(dtype);
  auto fits = [&](int width) { return p.dim % width == 0 && reinterpret_cast<std::uintptr_t>(p.samples) % (width * size) == 0; };
  Variant variant = kRows1;
  int width = 1;
  const bool tuned = wide && p.state == nullptr;
  if (wide && p.state != nullptr && dtype == kFloat32 && fits(4) && !p.shared) {
    variant = kRows4State;
    width = 4;
  } else if (tuned && dtype != kFloat64 && fits(4)) {
    variant = p.shared ? kRows4Shared : kRows4;
    width = 4;
  } else if (tuned && p.shared && p.columns == p.dim) {
    variant = kSpreadShared;
    width = 4;
  } else if (tuned && size >= 4 && fits(2)) {
    variant = kRows2;
    width = 2;
  } else if (tuned && dtype == kFloat32) {
    variant = kRows1Host;
  }
  const std::int64_t lines = divide_up(p.columns, width);
  // Shared noise costs so little that the writes count: neighbouring rows at about the same time.
  const bool writes = size >= 4 && (variant == kRows4Shared || variant == kSpreadShared);
  p.step = step_for(groups, lines, writes ? 2 : 32, hw);
  // Four columns take longer to compute than to write, and a part of a wave of threads as long as a whole one: two waves.
  const std::int64_t wave = std::int64_t{hw.multiprocessors} * kRows4Blocks * kSampleThreads;
  if (variant == kRows4 && groups * lines >= 4 * wave) p.step = divide_up(groups, std::max<std::int64_t>(2 * wave / lines, 1));
  launch_threads(kernel_for(dtype, variant), lines * divide_up(groups, p.step), device, stream, &p);
}

void launch_fwd(SampleNormalParams& p, DType dtype, int device, CUstream stream) {
  if (p.low != nullptr) return launch_truncated(p, device, stream);
  const Hardware& hw = hardware("sample_normal", device);
  (p.along_columns ? launch_columns : launch_rows)(p, dtype, hw.tuned >= 80, device, stream, hw);
}

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
  SampleNormalParams p = params_of(out, {state, replays, seed, stream, start, sample_dim, shared, antithetic});
  if (out.device().device_type != kDLCUDA) raise("ValueError", "out: expected an array on a CUDA device");
  if (p.columns == 0) return;
  set_distribution(&p, out, mu, sigma, sigma_value, low, high);
  const int device = out.device().device_id;
  const ContextGuard context(device);
  launch_fwd(p, dtype_of(out, "out"), device, current_stream(out.device()));
}

// Host arrays, through the GPU `device`. Returns when the samples are written.
void sample_normal_fwd_host(TensorView out, TensorView mu, TensorView sigma, OptionalTensor low, OptionalTensor high, int64_t seed,
                            int64_t start, int64_t sample_dim, bool shared, bool antithetic, int64_t device) {
  SampleNormalParams p = params_of(out, {std::nullopt, 0, seed, 0, start, sample_dim, shared, antithetic});
  expect_device(out, "out", {kDLCPU, 0});
  if (p.columns == 0) return;
  set_distribution(&p, out, mu, sigma, 0, low, high);
  const DType dtype = dtype_of(out, "out");
  const int size = size_of(dtype);
  const ContextGuard context(static_cast<int>(device));
  DeviceMemory memory[4];
  auto upload = [&](DeviceMemory& to, TensorView t, const char* name) -> const char* {
    return static_cast<const char*>(to.upload(data_of(t), t.numel() * size_of(dtype_of(t, name))));
  };
  const char* const on_device[] = {upload(memory[0], mu, "mu"), upload(memory[1], sigma, "sigma"),
                                   low.has_value() ? upload(memory[2], *low, "low") : nullptr,
                                   high.has_value() ? upload(memory[3], *high, "high") : nullptr};
  const int sizes[] = {size_of(dtype_of(mu, "mu")), size_of(dtype_of(sigma, "sigma")), size, size};
  const std::int64_t row = p.along_columns ? p.num_samples : p.dim, rows = p.columns * p.num_samples / row;
  const HostRows host_out{static_cast<char*>(p.samples), row * size, row * size};
  stream_rows(static_cast<int>(device), rows, {}, {host_out},
              [&](const CUdeviceptr*, const CUdeviceptr* to, std::int64_t first, std::int64_t count, CUstream stream) {
                auto draw = [&](std::int64_t column, std::int64_t columns, std::int64_t sample, std::int64_t samples, char* at) {
                  SampleNormalParams part = p;
                  auto from = [&](int i, bool one) { return on_device[i] + (one ? 0 : column * sizes[i]); };
                  part.mu = from(0, p.one_mu);
                  part.sigma = from(1, p.one_sigma);
                  if (p.low != nullptr) {
                    part.low = from(2, p.one_low);
                    part.high = from(3, p.one_high);
                  }
                  part.samples = at;
                  part.columns = part.dim = columns;
                  part.first_column = column;
                  part.num_samples = samples;
                  part.start = p.start + sample;
                  set_groups(&part);
                  launch_fwd(part, dtype, static_cast<int>(device), stream);
                };
                char* at = reinterpret_cast<char*>(to[0]);
                if (p.along_columns) return draw(first, count, 0, p.num_samples, at);
                while (count > 0) {  // a chunk may have rows of several distributions
                  const std::int64_t batch = first / p.num_samples, sample = first % p.num_samples;
                  const std::int64_t samples = std::min<std::int64_t>(count, p.num_samples - sample);
                  draw(batch * p.dim, p.dim, sample, samples, at);
                  at += samples * row * size;
                  first += samples;
                  count -= samples;
                }
              });
}

// Zeroed memory on a GPU, for the life of the process: what a call in a CUDA graph counts its replays in.
int64_t sample_normal_replays(int64_t device) {
  const ContextGuard context(static_cast<int>(device));
  const RelaxedCapture relaxed;
  const Driver& d = driver();
  const std::int64_t zeros[kReplaysParts * kReplaysApart] = {};
  CUdeviceptr at = 0;
  CUstream stream = nullptr;
  check(d.MemAlloc(&at, sizeof(zeros)), "cuMemAlloc");
  check(d.StreamCreate(&stream, 1), "cuStreamCreate");  // one that no capture waits for
  check(d.MemcpyHtoDAsync(at, zeros, sizeof(zeros), stream), "cuMemcpyHtoDAsync");
  check(d.StreamSynchronize(stream), "cuStreamSynchronize");
  check(d.StreamDestroy(stream), "cuStreamDestroy");
  return static_cast<std::int64_t>(at);
}

}  // namespace
}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sample_normal_fwd, cuops::sample_normal_fwd);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sample_normal_replays, cuops::sample_normal_replays);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sample_normal_fwd_host, cuops::sample_normal_fwd_host);
