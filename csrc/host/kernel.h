// Kernels by name, loaded on first use on each GPU, and their launch; what plans ask of the hardware; tensor maps.
#pragma once

#include <atomic>
#include <string>
#include <type_traits>
#include <vector>

#include "driver.h"
#include "dtype.h"
#include "rows.h"
#include "tensor_map.h"

namespace cuops {

// Nothing of it is destroyed when the process ends: other threads may launch it until the very end.
class Kernel {
 public:
  // `source` is the stem of its file, `name` that of the extern "C" function in it.
  Kernel(const std::string& source, const std::string& name) : source_(*new std::string(source)), name_(*new std::string(name)) {}

  const std::string& name() const { return name_; }

  CUfunction on(int device) {
    CUfunction loaded = 0 <= device && device < kDevices ? loaded_[device].load(std::memory_order_acquire) : nullptr;
    return loaded != nullptr ? loaded : load(device);
  }

 private:
  CUfunction load(int device);

  const std::string &source_, &name_;
  std::atomic<CUfunction> loaded_[kDevices] = {};
};

static_assert(std::is_trivially_destructible_v<Kernel>);

// The kernels of each dtype, by number, for the life of the process.
class KernelTable {
 public:
  // `source` is the stem of the file of some of them, and each name begins with `prefix` and the dtype, and ends with one of these.
  struct Part {
    std::string source;
    std::vector<std::string> suffixes;
  };
  KernelTable(const std::string& prefix, const std::vector<Part>& parts);

  Kernel& at(DType dtype, int number) const { return *kernels_[dtype][number]; }

 private:
  std::vector<Kernel*>* const kernels_ = new std::vector<Kernel*>[4];
};

struct LaunchShape {
  unsigned blocks;
  unsigned block_x, block_y = 1;
  unsigned cluster = 1;  // blocks that share memory; up to Hardware::largest_cluster
  unsigned shared_bytes = 0;
  bool overlaps = false;  // may be launched while the kernel before it ends, and waits for it itself (griddepcontrol)
};

// What plans depend on.
struct Hardware {
  int capability;  // 90 is compute capability 9.0
  int tuned;       // CUOPS_TUNED of its code (device/tuned.cuh)
  int cuda;        // 121: its code is of the compiler of CUDA 12.1
  int multiprocessors;
  int shared_bytes;          // that a block may have
  unsigned largest_cluster;  // blocks that can work together in kernels of this source; 1 without clusters

  bool clusters() const { return largest_cluster > 1; }
};
const Hardware& hardware(const char* source, int device);  // source: a string that stays

// As many threads as handle `items` with `each` items a thread, in whole warps.
inline unsigned threads_for(std::int64_t items, std::int64_t each) {
  return static_cast<unsigned>(((items + each - 1) / each + 31) / 32 * 32);
}

// How many clusters of this shape the GPU runs at a time.
int clusters_at_once(Kernel& kernel, int device, const LaunchShape& shape);

// Whether it runs any. Every GPU with clusters has room for one of 8, but a part of a GPU may not for a larger one.
inline bool has_room(Kernel& kernel, int device, const LaunchShape& shape) {
  return shape.cluster <= 8 || clusters_at_once(kernel, device, shape) > 0;
}

// Of `count` matrices, which are rows of `x` of one stride, for copies of `box_rows` rows and 128 bytes to shared memory: elements
// outside of a matrix are zero, float32 is rounded to TF32 where that is asked for, and the 16-byte pieces of row r are at their
// number XOR r % 8.
TensorMap matrices_map(const Rows& x, DType dtype, bool tf32, std::int64_t count, int rows, int columns, int box_rows);

// The caller holds a ContextGuard of the device.
void launch(Kernel& kernel, int device, CUstream stream, const LaunchShape& shape, void* params);

}  // namespace cuops
