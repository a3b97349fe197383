// Host arrays through the GPU in chunks, so that upload, kernel and download overlap and device memory stays bounded.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "driver.h"

namespace cuops {

// Rows of `bytes` in host memory, `stride` bytes apart.
struct HostRows {
  char* data;
  std::int64_t stride, bytes;
};

// Calls `compute` on device memory for consecutive chunks of rows, from row `first` on: one pointer for each of `inputs`, one
// for each of `outputs`. An output may be an input. Returns when all outputs are written.
using ComputeChunk =
    std::function<void(const CUdeviceptr* in, const CUdeviceptr* out, std::int64_t first, std::int64_t rows, CUstream stream)>;
void stream_rows(int device, std::int64_t rows, const std::vector<HostRows>& inputs, const std::vector<HostRows>& outputs,
                 const ComputeChunk& compute);

// Memory of a GPU, whose context is current, for the length of one call.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  ~DeviceMemory();
  void* upload(const void* from, std::size_t bytes, int device);  // returns when the bytes are there
  void keep() { at_ = 0; }                                        // for the life of the process

 private:
  CUdeviceptr at_ = 0;
};

}  // namespace cuops
