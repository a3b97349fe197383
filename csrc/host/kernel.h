// Kernels by name, loaded on first use on each GPU, and their launch.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "driver.h"

namespace cuops {

class Kernel {
 public:
  // `op` is the stem of the source, `name` that of the extern "C" function in it.
  Kernel(std::string op, std::string name) : op_(std::move(op)), name_(std::move(name)) {}

  CUfunction on(int device) {
    CUfunction loaded = 0 <= device && device < kDevices ? loaded_[device].load(std::memory_order_acquire) : nullptr;
    return loaded != nullptr ? loaded : load(device);
  }

 private:
  static constexpr int kDevices = 64;
  CUfunction load(int device);

  std::string op_, name_;
  std::atomic<CUfunction> loaded_[kDevices] = {};
};

struct LaunchShape {
  unsigned blocks;
  unsigned block_x, block_y = 1;
  unsigned cluster = 1;  // blocks that share memory; more than 1 only where clusters_available()
  unsigned shared_bytes = 0;
};

bool clusters_available(int device);

// The caller holds a ContextGuard of the device.
void launch(Kernel& kernel, int device, CUstream stream, const LaunchShape& shape, void* params);

}  // namespace cuops
