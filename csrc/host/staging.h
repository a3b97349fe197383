// Host arrays through the GPU in chunks, so that upload, kernel and download overlap and device memory stays bounded.
#pragma once

#include <cstdint>
#include <functional>

#include "driver.h"

namespace cuops {

// Rows of `row_bytes` in host memory, `stride` bytes apart.
struct HostRows {
  char* data;
  std::int64_t stride;
};

// Calls `compute(in, out, rows, stream)` on device memory for consecutive chunks of rows; `in` and `out` may be the same rows.
void stream_rows(int device, const HostRows& in, const HostRows& out, std::int64_t rows, std::int64_t in_row_bytes,
                 std::int64_t out_row_bytes,
                 const std::function<void(CUdeviceptr in, CUdeviceptr out, std::int64_t rows, CUstream stream)>& compute);

// Memory of the current context's GPU for the length of one call.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  ~DeviceMemory();
  void* upload(const void* from, std::size_t bytes);  // returns when the bytes are there

 private:
  CUdeviceptr at_ = 0;
};

}  // namespace cuops
