// Gradients of two factors and of their input on the host: checks, which kernel there is, the launches.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include <algorithm>

#include "host/error.h"
#include "host/integers.h"
#include "host/kernel.h"
#include "host/tensor.h"
#include "kron_double.h"
#include "kron_linear.h"
#include "kron_linear/wgmma/kron_wide_bwd.h"
#include "kron_linear/wgmma/kron_wide_f32.h"
#include "kron_squares.h"

namespace cuops {
namespace {

// What a block finds of its samples: all gradients, one, or half of each two blocks' share.
enum class Finds { kAll, kOne, kHalf };

// An instance of kron_linear_squares_bwd.cu or kron_linear_squares_bwd_f64.cu; where samples come by tensor maps, `box_rows` at a
// time, of kron_linear_wide_bwd.cu or kron_linear_wide_bwd_f32.cu.
struct SquaresKernel {
  DType dtype;
  int size, teams, buffers;
  Finds finds;
  Kernel kernel;
  int box_rows = 0;
  Kernel* plain = nullptr;  // where the first factor comes in vectors, too
  bool is_odd = false;      // kron_linear_wide_bwd.cu, of samples whose rows start anywhere

  int tile_size() const { return size <= 64 ? 64 : 128; }  // where products are those of compute capability 9.0
  int shared_bytes() const {
    if (dtype == kFloat32 && (is_odd || box_rows > 0)) return wide_f32_bytes(tile_size());
    if (is_odd) return wide_bwd_odd_bytes(tile_size());
    if (box_rows > 0) return wide_bwd_bytes(tile_size());
    if (dtype == kFloat64) return double_matrix(size, size) * (2 + 2 * teams * buffers);
    const int tile = size * squares_pitch(size, dtype == kFloat32);
    return 16 * (kSquaresMagnitudes + tile * ((finds == Finds::kOne ? 1 : 2) + 2 * teams * buffers));
  }
  unsigned threads() const {
    if (is_odd || box_rows > 0) return dtype == kFloat32 ? kWideBwdF32Threads : kWideBwdThreads;
    return static_cast<unsigned>(teams * (dtype == kFloat64 ? 32 * 3 * double_warps(size) : 2 * size));
  }
  // How many blocks share samples, of which so many gradients are wanted.
  int shares(int gradients) const { return finds == Finds::kHalf ? 2 : finds == Finds::kOne ? gradients : 1; }
};

// `is_odd`: where rows of the second factor are no whole vectors.
SquaresKernel* find_kernel(DType dtype, std::int64_t size, int wanted, bool is_odd, const Hardware& hw) {
  static const char *const op = "kron_linear_squares_bwd", *const op_f64 = "kron_linear_squares_bwd_f64";
  static const char *const op_wide = "kron_linear_wide_bwd", *const op_f32 = "kron_linear_wide_bwd_f32";
  static SquaresKernel kernels[] = {{kFloat64, 16, 8, 2, Finds::kAll, {op_f64, "kron_squares_16_f64"}},
                                    {kFloat64, 24, 2, 2, Finds::kAll, {op_f64, "kron_squares_24_f64"}},
                                    {kFloat64, 32, 2, 2, Finds::kAll, {op_f64, "kron_squares_32_f64"}},
                                    {kFloat64, 48, 1, 2, Finds::kAll, {op_f64, "kron_squares_48_f64"}},
                                    {kFloat64, 64, 1, 2, Finds::kAll, {op_f64, "kron_squares_64_f64"}},
                                    {kFloat32, 16, 16, 2, Finds::kAll, {op, "kron_squares_16_f32"}},
                                    {kFloat32, 32, 8, 2, Finds::kAll, {op, "kron_squares_32_f32"}},
                                    {kFloat32, 64, 2, 2, Finds::kAll, {op, "kron_squares_64_f32"}},
                                    {kFloat32, 96, 1, 2, Finds::kAll, {op, "kron_squares_96_f32"}},
                                    {kFloat32, 128, 1, 1, Finds::kOne, {op, "kron_squares_128_f32"}},
                                    {kFloat16, 16, 24, 2, Finds::kAll, {op, "kron_squares_16_f16"}},
                                    {kFloat16, 32, 8, 2, Finds::kAll, {op, "kron_squares_32_f16"}},
                                    {kFloat16, 64, 4, 2, Finds::kAll, {op, "kron_squares_64_f16"}},
                                    {kFloat16, 80, 3, 2, Finds::kAll, {op, "kron_squares_80_f16"}},
                                    {kFloat16, 96, 2, 2, Finds::kAll, {op, "kron_squares_96_f16"}},
                                    {kFloat16, 128, 1, 2, Finds::kAll, {op, "kron_squares_128_f16"}},
                                    {kBFloat16, 16, 24, 2, Finds::kAll, {op, "kron_squares_16_bf16"}},
                                    {kBFloat16, 32, 8, 2, Finds::kAll, {op, "kron_squares_32_bf16"}},
                                    {kBFloat16, 64, 4, 2, Finds::kAll, {op, "kron_squares_64_bf16"}},
                                    {kBFloat16, 80, 3, 2, Finds::kAll, {op, "kron_squares_80_bf16"}},
                                    {kBFloat16, 96, 2, 2, Finds::kAll, {op, "kron_squares_96_bf16"}},
                                    {kBFloat16, 128, 1, 2, Finds::kAll, {op, "kron_squares_128_bf16"}}};
  static Kernel plain_64{op_f32, "kron_wide_bwd_64_f32_plain"}, plain_96{op_f32, "kron_wide_bwd_96_f32_plain"},
      plain_128{op_f32, "kron_wide_bwd_128_f32_plain"};
  static SquaresKernel wide[] = {{kFloat32, 64, 1, 1, Finds::kAll, {op_f32, "kron_wide_bwd_64_f32"}, kWideF32Rows, &plain_64},
                                 {kFloat32, 96, 1, 1, Finds::kOne, {op_f32, "kron_wide_bwd_96_f32"}, kWideF32Rows, &plain_96},
                                 {kFloat32, 128, 1, 1, Finds::kOne, {op_f32, "kron_wide_bwd_128_f32"}, kWideF32Rows, &plain_128},
                                 {kFloat16, 64, 1, 1, Finds::kAll, {op_wide, "kron_wide_bwd_64_f16"}, 64},
                                 {kBFloat16, 64, 1, 1, Finds::kAll, {op_wide, "kron_wide_bwd_64_bf16"}, 64},
                                 {kFloat16, 80, 1, 2, Finds::kHalf, {op_wide, "kron_wide_bwd_80_f16"}, 128},
                                 {kFloat16, 96, 1, 2, Finds::kHalf, {op_wide, "kron_wide_bwd_96_f16"}, 128},
                                 {kFloat16, 128, 1, 2, Finds::kHalf, {op_wide, "kron_wide_bwd_128_f16"}, 128},
                                 {kBFloat16, 80, 1, 2, Finds::kHalf, {op_wide, "kron_wide_bwd_80_bf16"}, 128},
                                 {kBFloat16, 96, 1, 2, Finds::kHalf, {op_wide, "kron_wide_bwd_96_bf16"}, 128},
                                 {kBFloat16, 128, 1, 2, Finds::kHalf, {op_wide, "kron_wide_bwd_128_bf16"}, 128},
                                 {kFloat32, 64, 1, 1, Finds::kAll, {op_f32, "kron_wide_bwd_64_f32_odd"}, 0, nullptr, true},
                                 {kFloat32, 96, 1, 1, Finds::kOne, {op_f32, "kron_wide_bwd_96_f32_odd"}, 0, nullptr, true},
                                 {kFloat32, 128, 1, 1, Finds::kOne, {op_f32, "kron_wide_bwd_128_f32_odd"}, 0, nullptr, true},
                                 {kFloat16, 64, 1, 1, Finds::kAll, {op_wide, "kron_wide_bwd_64_f16_odd"}, 0, nullptr, true},
                                 {kBFloat16, 64, 1, 1, Finds::kAll, {op_wide, "kron_wide_bwd_64_bf16_odd"}, 0, nullptr, true},
                                 {kFloat16, 128, 1, 2, Finds::kHalf, {op_wide, "kron_wide_bwd_128_f16_odd"}, 0, nullptr, true},
                                 {kBFloat16, 128, 1, 2, Finds::kHalf, {op_wide, "kron_wide_bwd_128_bf16_odd"}, 0, nullptr, true}};
  if (hw.tuned != 90 || (hw.capability != 90 && dtype == kFloat32 && size == 128)) return nullptr;
  if (hw.capability == 90 && hw.cuda >= 128)  // ptxas 12.1 lets no products of these go on side by side
    for (SquaresKernel& k : wide)
      if (k.dtype == dtype && k.size == size && k.is_odd == is_odd && (k.finds != Finds::kHalf || (wanted & 3) == 3)) return &k;
  if (is_odd) return nullptr;
  for (SquaresKernel& k : kernels)
    if (k.dtype == dtype && k.size == size && k.shared_bytes() <= hw.shared_bytes - 1024) return &k;
  return nullptr;
}

const Hardware& squares_hardware(int device) { return hardware("kron_linear_squares_bwd", device); }

int count_of(int gradients) { return (gradients & 1) + (gradients >> 1 & 1) + (gradients >> 2 & 1); }

// How many blocks work on each gradient.
std::int64_t blocks_of(const SquaresKernel& k, std::int64_t rows, int wanted, const Hardware& hw) {
  const std::int64_t most = hw.multiprocessors / k.shares(count_of(wanted));
  const std::int64_t least = k.dtype == kFloat64 ? 1 : k.teams;  // samples of a block
  return std::min<std::int64_t>((rows + least - 1) / least, std::max<std::int64_t>(1, most));
}

void expect_aligned(TensorView t, const char* name, DType dtype, DLDevice device, std::int64_t rows, std::int64_t columns) {
  expect_matrix(t, name, dtype, device, rows, columns);
  if (!aligned16(data_of(t))) raise("ValueError", std::string(name) + ": expected a matrix that starts at a multiple of 16 bytes");
}

}  // namespace

// How many matrices of partial sums kron_linear_squares_bwd needs for each gradient of a factor; 0 where it has no kernel. `wanted`
// adds up 1 for the first factor, 2 for the second, and 4 for the input. `is_odd`: rows of the second factor are no whole vectors.
int64_t kron_linear_squares_bwd_blocks(int64_t dtype, int64_t rows, int64_t size, int64_t wanted, bool is_odd, int64_t device) {
  const Hardware& hw = squares_hardware(static_cast<int>(device));
  const SquaresKernel* const kernel = find_kernel(dtype_at(dtype), size, static_cast<int>(wanted), is_odd, hw);
  return kernel == nullptr ? 0 : blocks_of(*kernel, rows, static_cast<int>(wanted), hw);
}

// Whether all gradients, where they are wanted, are found with the products of compute capability 9.0, and so faster.
bool kron_linear_squares_bwd_is_wide(int64_t dtype, int64_t size, int64_t device) {
  const Hardware& hw = squares_hardware(static_cast<int>(device));
  const SquaresKernel* const kernel = find_kernel(dtype_at(dtype), size, 7, false, hw);
  return kernel != nullptr && kernel->box_rows > 0;
}

// The gradients of y = x kron(factors[0], factors[1])^T: those of the factors in `dfactors` and that of x in dx, each where
// `wanted` says so. `size` is that of a kernel, and no factor is larger. x and dy are (rows, columns); `partial` is scratch in the
// dtype of sums, of kron_linear_squares_bwd_blocks matrices of size^2 for each gradient of a factor. `dfactors` may be float32 for
// 16 bits.
void kron_linear_squares_bwd(tvm::ffi::Array<tvm::ffi::Tensor> dfactors, OptionalTensor dx, TensorView partial, TensorView dy,
                             TensorView x, tvm::ffi::Array<tvm::ffi::Tensor> factors, int64_t wanted, int64_t size) {
  expect_cuda(x, "x");
  const DType dtype = dtype_of(x, "x"), sums = accumulator_of(dtype);
  const int of_factors = count_of(static_cast<int>(wanted & 3)), width = width_of(dtype);
  if (wanted < 1 || wanted > 7 || static_cast<int>(dfactors.size()) != of_factors || dx.has_value() != (wanted >> 2 == 1))
    raise("ValueError", "wanted: expected 1 to 7, and an array for each gradient");
  if (factors.size() != 2) raise("ValueError", "factors: expected two matrices");
  const std::int64_t rows = x.size(0);
  KronSquaresParams p{data_of(x), data_of(dy), nullptr, nullptr, nullptr, nullptr, rows, static_cast<int>(wanted), {}, {}};
  for (int i = 0; i < 2; ++i) {
    const TensorView factor(factors[i]);
    if (factor.ndim() != 2 || factor.size(0) > size || factor.size(1) > size)
      raise("ValueError", "factors: expected matrices of at most " + std::to_string(size) + " rows and columns");
    expect_aligned(factor, "factors", dtype, x.device(), factor.size(0), factor.size(1));
    (i == 0 ? p.first : p.second) = data_of(factor);
    p.out[i] = static_cast<int>(factor.size(0));
    p.in[i] = static_cast<int>(factor.size(1));
  }
  const bool is_odd = p.out[1] % width != 0 || p.in[1] % width != 0;
  const auto expect_samples = is_odd ? expect_matrix : expect_aligned;
  expect_samples(x, "x", dtype, x.device(), rows, 1LL * p.in[0] * p.in[1]);
  expect_samples(dy, "dy", dtype, x.device(), rows, 1LL * p.out[0] * p.out[1]);
  const int device = x.device().device_id;
  const Hardware& hw = squares_hardware(device);
  SquaresKernel* const k = find_kernel(dtype, size, static_cast<int>(wanted), is_odd, hw);
  if (k == nullptr || x.numel() == 0 || dy.numel() == 0) raise("ValueError", "x: no kernel; ask kron_linear_squares_bwd_blocks");
  const std::int64_t blocks = blocks_of(*k, rows, static_cast<int>(wanted), hw), n = size * size;
  KronSquaresSum sum{nullptr, {}, static_cast<int>(blocks), static_cast<int>(size), of_factors, {}, {}, {}, {}};
  if (dx.has_value()) {
    expect_aligned(*dx, "dx", dtype, x.device(), rows, x.size(1));
    p.dx = data_of(*dx);
  }
  for (int i = 0; i < of_factors; ++i) {
    const TensorView dw(dfactors[i]);
    const int which = i == 1 || (wanted & 1) == 0;
    sum.dtype[i] = dtype_of(dw, "dfactors");
    sum.transposed[i] = which == 1;
    sum.out[i] = p.out[which];
    sum.in[i] = p.in[which];
    expect_aligned(dw, "dfactors", sum.dtype[i] == sums ? sums : dtype, x.device(), sum.out[i], sum.in[i]);
    sum.gradient[i] = data_of(dw);
  }
  if (of_factors > 0) {
    expect_aligned(partial, "partial", sums, x.device(), partial.size(0), n);
    if (partial.size(0) < blocks * of_factors) raise("ValueError", "partial: too few matrices");
    p.partial = data_of(partial);
    sum.partial = p.partial;
  }
  static Kernel sum_kernels[] = {{"kron_linear_squares_bwd_f64", "kron_squares_sum_f64"},
                                 {"kron_linear_squares_bwd", "kron_squares_sum"}};
  const ContextGuard context(device);
  const CUstream stream = current_stream(x.device());
  const auto shares = static_cast<unsigned>(k->shares(count_of(static_cast<int>(wanted))));
  const LaunchShape shape{static_cast<unsigned>(blocks) * shares,   k->threads(), 1, 1,
                          static_cast<unsigned>(k->shared_bytes()), true};
  if (k->box_rows > 0) {
    const auto map = [&](const void* data, const int (&size)[2]) {
      const Rows samples{const_cast<void*>(data), rows, 1LL * size[0] * size[1], 0};
      return matrices_map(samples, dtype, false, rows, size[0], size[1], k->box_rows);
    };
    KronWideSquaresParams wide{map(p.x, p.in), map(p.dy, p.out), p};
    const bool is_plain = k->plain != nullptr && p.in[0] % width == 0;
    launch(is_plain ? *k->plain : k->kernel, device, stream, shape, &wide);
  } else if (k->is_odd) {
    KronWideSquaresParams wide{{}, {}, p};
    launch(k->kernel, device, stream, shape, &wide);
  } else {
    launch(k->kernel, device, stream, shape, &p);
  }
  LaunchShape sum_shape{static_cast<unsigned>(n / (sums == kFloat64 ? 16 : 32) * of_factors), 512};
  sum_shape.overlaps = true;
  if (of_factors > 0) launch(sum_kernels[sums != kFloat64], device, stream, sum_shape, &sum);
}

}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kron_linear_squares_bwd_blocks, cuops::kron_linear_squares_bwd_blocks);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kron_linear_squares_bwd_is_wide, cuops::kron_linear_squares_bwd_is_wide);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kron_linear_squares_bwd, cuops::kron_linear_squares_bwd);
