// Host arrays of kron_linear: through the GPU in chunks of rows.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include "host/error.h"
#include "host/staging.h"
#include "host/tensor.h"
#include "kron_linear_launch.h"

namespace cuops {
namespace {

using Tensors = tvm::ffi::Array<tvm::ffi::Tensor>;

// Makes `stream` the current one, as a framework does, for the calls inside.
class CurrentStream {
 public:
  CurrentStream(int device, CUstream stream) : device_(device) { TVMFFIEnvSetStream(kDLCUDA, device, stream, &before_); }
  CurrentStream(const CurrentStream&) = delete;
  ~CurrentStream() { TVMFFIEnvSetStream(kDLCUDA, device_, before_, nullptr); }

 private:
  int device_;
  TVMFFIStreamHandle before_ = nullptr;
};

// A tensor on memory that someone else frees.
struct Borrowed {
  void* data;
  void AllocData(DLTensor* tensor) { tensor->data = data; }
  void FreeData(DLTensor*) {}
};

tvm::ffi::Tensor on_device(TensorView array, const char* name, DeviceMemory* memory, int device) {
  expect_device(array, name, {kDLCPU, 0});
  if (!array.is_contiguous()) raise("ValueError", std::string(name) + ": expected a contiguous array");
  void* data = memory->upload(data_of(array), array.numel() * size_of(dtype_of(array, name)), device);
  return tvm::ffi::Tensor::FromNDAlloc(Borrowed{data}, array.shape(), array.dtype(), DLDevice{kDLCUDA, device});
}

// y = x kron(factors)^T + bias for contiguous host arrays, by the GPU `device`. The factors must be one group of the plan. Returns
// when y is written.
void kron_linear_fwd_host(TensorView y, TensorView x, Tensors factors, OptionalTensor bias, int64_t device) {
  const int gpu = static_cast<int>(device);
  expect_at_least_1d(x, "x");
  expect_at_least_1d(y, "y");
  const DType dtype = dtype_of(x, "x");
  if (dtype_of(y, "y") != dtype) raise("TypeError", "y: expected x's dtype");
  for (const auto& [array, name] : {std::pair<TensorView, const char*>{x, "x"}, {y, "y"}}) {
    expect_device(array, name, {kDLCPU, 0});
    if (!array.is_contiguous() || array.numel() == 0)
      raise("ValueError", std::string(name) + ": expected a contiguous array, not empty");
  }
  const std::int64_t in = x.size(x.ndim() - 1), out = y.size(y.ndim() - 1), rows = x.numel() / in;
  if (y.numel() / out != rows) raise("ValueError", "y: expected x's leading dimensions");
  if (bias.has_value() && (*bias).numel() != out) raise("ValueError", "bias: expected " + std::to_string(out) + " elements");
  const ContextGuard context(gpu);
  std::vector<DeviceMemory> memory(factors.size() + 1);
  Tensors on_gpu;
  for (std::size_t i = 0; i < factors.size(); ++i) on_gpu.push_back(on_device(TensorView(factors[i]), "factors", &memory[i], gpu));
  std::optional<tvm::ffi::Tensor> bias_on_gpu;
  if (bias.has_value()) bias_on_gpu = on_device(*bias, "bias", &memory.back(), gpu);
  const auto host_rows = [&](TensorView array, std::int64_t n) {
    return HostRows{data_of(array), n * size_of(dtype), n * size_of(dtype)};
  };
  stream_rows(gpu, rows, {host_rows(x, in)}, {host_rows(y, out)},
              [&](const CUdeviceptr* from, const CUdeviceptr* to, std::int64_t, std::int64_t count, CUstream stream) {
                const CurrentStream current(gpu, stream);
                const auto chunk = [&](CUdeviceptr at, std::int64_t n) {
                  return tvm::ffi::Tensor::FromNDAlloc(Borrowed{reinterpret_cast<void*>(at)}, {count, n}, x.dtype(),
                                                       DLDevice{kDLCUDA, gpu});
                };
                OptionalTensor added;
                if (bias_on_gpu.has_value()) added = TensorView(*bias_on_gpu);
                const tvm::ffi::Tensor x_chunk = chunk(from[0], in), y_chunk = chunk(to[0], out);
                kron_linear_fwd(TensorView(y_chunk), TensorView(x_chunk), on_gpu, 1, added, false);
              });
}

}  // namespace
}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kron_linear_fwd_host, cuops::kron_linear_fwd_host);
