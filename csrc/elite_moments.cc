// A step of the Cross-Entropy Method on the host: checks and two launches.
#include "elite_moments.h"

#include <tvm/ffi/function.h>

#include <algorithm>

#include "host/error.h"
#include "host/integers.h"
#include "host/kernel.h"
#include "host/tensor.h"

namespace cuops {
namespace {

Kernel& select_kernel(DType dtype) {
  static const KernelTable table("elite_select_", {{"elite_moments", {""}}});
  return table.at(accumulator_of(dtype), 0);
}

Kernel& moments_kernel(DType dtype, bool aligned) {
  static const KernelTable table("elite_moments_", {{"elite_moments", {"_aligned", "_unaligned"}}});
  return aligned ? table.at(dtype, 0) : table.at(accumulator_of(dtype), 1);
}

// A contiguous array of this shape, on the population's device.
void* expect(TensorView t, const char* name, DLDataType dtype, std::initializer_list<std::int64_t> shape, TensorView population) {
  const DLDataType got = t.dtype();
  bool same = t.ndim() == static_cast<int>(shape.size()) && t.is_contiguous() && got.code == dtype.code && got.bits == dtype.bits;
  for (int i = 0; same && i < t.ndim(); ++i) same = t.size(i) == shape.begin()[i];
  if (!same) {
    std::string text;
    for (const std::int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
    raise("ValueError", std::string(name) + ": expected a contiguous array of shape (" + text + ") and dtype " +
                            std::string(tvm::ffi::DLDataTypeToString(dtype)));
  }
  expect_device(t, name, population.device());
  return data_of(t);
}

constexpr DLDataType kInt32{kDLInt, 32, 1}, kInt64{kDLInt, 64, 1}, kDouble{kDLFloat, 64, 1}, kFloat{kDLFloat, 32, 1};

// Changes the state of the method in place: finds the elites of problems x n scores, and refits mu and sigma to them. Arrays are
// on one GPU; those of values are in the dtype of the sums.
void elite_moments(TensorView population, TensorView scores, TensorView indices, TensorView kept_indices, TensorView counts,
                   TensorView summary, TensorView best_score, TensorView best_x, TensorView kept, TensorView kept_count,
                   TensorView mu, TensorView sigma, TensorView clock, bool maximize, double smoothing_mu, double smoothing_sigma,
                   double decay, double floor, double ceiling, double noise, double noise_decrease) {
  const DType dtype = dtype_of(population, "population");
  expect_cuda(population, "population");
  if (population.ndim() != 3 || !population.is_contiguous()) {
    raise("ValueError", "population: expected a contiguous array of 3 dimensions");
  }
  const std::int64_t problems = population.size(0), n = population.size(1), d = population.size(2);
  if (indices.ndim() != 2 || kept.ndim() != 3) raise("ValueError", "indices, kept: expected 2 and 3 dimensions");
  const std::int64_t elites = indices.size(1), kept_rows = kept.size(1);
  if (n > INT32_MAX) raise("ValueError", "population: expected at most 2147483647 samples, got " + std::to_string(n));
  if (elites < 1 || elites > n) {
    raise("ValueError", "indices: expected at least 1 elite and at most as many as samples, got " + std::to_string(elites));
  }
  if (kept_rows > elites) raise("ValueError", "kept: expected at most as many as elites, got " + std::to_string(kept_rows));
  const DLDataType state = accumulator_of(dtype) == kFloat64 ? kDouble : kFloat;

  EliteSelectParams select{};
  select.dtype = dtype_of(scores, "scores");
  if (scores.numel() != problems * n || !scores.is_contiguous()) {
    raise("ValueError", "scores: expected a contiguous array of one for each sample");
  }
  expect_device(scores, "scores", population.device());
  select.scores = data_of(scores);
  select.indices = static_cast<int*>(expect(indices, "indices", kInt32, {problems, elites}, population));
  select.kept_indices = static_cast<int*>(expect(kept_indices, "kept_indices", kInt32, {problems, kept_rows}, population));
  select.counts = static_cast<int*>(expect(counts, "counts", kInt32, {problems, 3}, population));
  select.summary = static_cast<double*>(expect(summary, "summary", kDouble, {problems, 4}, population));
  select.best_score = static_cast<double*>(expect(best_score, "best_score", kDouble, {problems}, population));
  select.kept_count = static_cast<int*>(expect(kept_count, "kept_count", kInt32, {problems}, population));
  select.clock = static_cast<long long*>(expect(clock, "clock", kInt64, {4}, population));
  select.n = n;
  select.elites = static_cast<int>(elites);
  select.kept = static_cast<int>(kept_rows);
  select.maximize = maximize;

  EliteMomentsParams moments{};
  moments.population = data_of(population);
  moments.indices = select.indices;
  moments.kept_indices = select.kept_indices;
  moments.counts = select.counts;
  moments.clock = select.clock;
  moments.mu = expect(mu, "mu", state, {problems, d}, population);
  moments.sigma = expect(sigma, "sigma", state, {problems, d}, population);
  moments.best_x = expect(best_x, "best_x", state, {problems, d}, population);
  moments.kept = expect(kept, "kept", state, {problems, kept_rows, d}, population);
  moments.dtype = dtype;
  moments.n = n;
  moments.d = d;
  moments.elites = select.elites;
  moments.kept_rows = select.kept;
  moments.smoothing_mu = smoothing_mu;
  moments.smoothing_sigma = smoothing_sigma;
  moments.decay = decay;
  moments.floor = floor;
  moments.ceiling = ceiling;
  moments.noise = noise;
  moments.noise_decrease = noise_decrease;
  if (problems == 0 || d == 0) return;

  const unsigned threads = std::min(threads_for(n, 1), 1024u);
  const int width = width_of(dtype);
  const int device = population.device().device_id;
  const bool aligned = hardware("elite_moments", device).tuned >= 80 && d % width == 0 && aligned16(moments.population) &&
                       aligned16(moments.mu) && aligned16(moments.sigma) && aligned16(moments.best_x) && aligned16(moments.kept);
  const std::int64_t columns = aligned ? 8 * width : 32, lanes = aligned ? 8 : 32;
  moments.tiles = static_cast<unsigned>((d + columns - 1) / columns);
  if (problems * moments.tiles > INT32_MAX) raise("ValueError", "population: too many problems and dimensions for one launch");
  unsigned block = 64;
  while (block < 1024 && 4 * block < elites * lanes) block *= 2;  // each thread has up to four elites on their way at once

  const ContextGuard context(device);
  const CUstream stream = current_stream(population.device());
  auto launch_overlapping = [&](Kernel& kernel, unsigned blocks, unsigned block_threads, void* params) {
    LaunchShape shape{blocks, block_threads};
    shape.overlaps = true;
    launch(kernel, device, stream, shape, params);
  };
  launch_overlapping(select_kernel(select.dtype), static_cast<unsigned>(problems), threads, &select);
  launch_overlapping(moments_kernel(dtype, aligned), static_cast<unsigned>(problems) * moments.tiles, block, &moments);
}

}  // namespace
}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(elite_moments, cuops::elite_moments);
