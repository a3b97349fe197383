// What operators in Python need beside the kernels.
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include "error.h"
#include "image.h"
#include "tensor.h"

namespace cuops {
namespace {

// One line an image: source, "sm" or "ptx", compute capability, bytes.
tvm::ffi::String describe_images() {
  std::string text;
  for (const Image& image : images()) {
    text +=
        image.source + (image.ptx ? " ptx " : " sm ") + std::to_string(image.capability) + " " + std::to_string(image.size) + "\n";
  }
  return text;
}

// Whether kernels that take rows of so many strides, 1 or 2, can read the rows where they are.
bool rows_are_readable(TensorView t, int64_t strides) {
  if (t.ndim() == 0 || t.numel() == 0) return true;
  const auto rows = find_rows(t);
  return rows.has_value() && (strides == 2 || has_one_stride(*rows));
}

// Memory comes and goes while a graph is captured, too: that of arrays that die then, say.
struct DeviceAllocator {
  void AllocData(DLTensor* tensor) {
    const ContextGuard context(tensor->device.device_id);
    const RelaxedCapture relaxed;
    CUdeviceptr at = 0;
    const std::size_t bytes = tvm::ffi::GetDataSize(*tensor);
    if (bytes > 0) check(driver().MemAlloc(&at, bytes), "cuMemAlloc");
    tensor->data = reinterpret_cast<void*>(at);
  }
  void FreeData(DLTensor* tensor) {
    if (tensor->data == nullptr) return;
    try {
      const ContextGuard context(tensor->device.device_id);
      const RelaxedCapture relaxed;
      driver().MemFree(reinterpret_cast<CUdeviceptr>(tensor->data));
    } catch (const tvm::ffi::Error&) {
      // In a forked child, or when the driver has shut down: the memory is no longer ours, and a deleter has nobody to tell.
    }
  }
};

tvm::ffi::Tensor empty(tvm::ffi::Shape shape, DLDataType dtype, int64_t device) {
  std::int64_t bytes = dtype.bits / 8;
  for (const std::int64_t size : shape)
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes))
      raise("ValueError", "an array of 2^63 bytes or more fits no memory");
  return tvm::ffi::Tensor::FromNDAlloc(DeviceAllocator(), shape, dtype, DLDevice{kDLCUDA, static_cast<int>(device)});
}

// Page-locked for every context of the process; the driver wants one to be current, whichever.
struct PinnedAllocator {
  void AllocData(DLTensor* tensor) {
    const ContextGuard context(0);
    const RelaxedCapture relaxed;
    check(driver().MemHostAlloc(&tensor->data, tvm::ffi::GetDataSize(*tensor), 1), "cuMemHostAlloc");
  }
  void FreeData(DLTensor* tensor) {
    try {
      const ContextGuard context(0);
      const RelaxedCapture relaxed;
      driver().MemFreeHost(tensor->data);
    } catch (const tvm::ffi::Error&) {
      // As for the memory on the device.
    }
  }
};

tvm::ffi::Tensor pinned_empty(int64_t bytes) {
  return tvm::ffi::Tensor::FromNDAlloc(PinnedAllocator(), {bytes}, DLDataType{kDLUInt, 8, 1}, DLDevice{kDLCUDAHost, 0});
}

// Waits for the work of this library's calls on the current stream of a GPU.
void synchronize(int64_t device) {
  const ContextGuard context(static_cast<int>(device));
  check(driver().StreamSynchronize(current_stream({kDLCUDA, static_cast<int>(device)})), "cuStreamSynchronize");
}

}  // namespace
}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(describe_images, cuops::describe_images);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rows_are_readable, cuops::rows_are_readable);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(empty, cuops::empty);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pinned_empty, cuops::pinned_empty);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(synchronize, cuops::synchronize);
