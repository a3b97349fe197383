#include "kernel.h"

#include <cstdlib>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "error.h"
#include "image.h"
#include "tensor.h"

namespace cuops {
namespace {

// What the image of one source became on one GPU: a library where the driver knows them (12.0), else a module.
struct Loaded {
  CUlibrary library = nullptr;
  CUmodule module = nullptr;
};

Loaded load_image(const std::string& source, int device) {
  const Driver& d = driver();
  const std::vector<char> code = choose_image(source, properties(device).capability).decompress();
  Loaded loaded;
  if (d.LibraryLoadData != nullptr) {
    check(d.LibraryLoadData(&loaded.library, code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0), "cuLibraryLoadData");
  } else {
    check(d.ModuleLoadData(&loaded.module, code.data()), "cuModuleLoadData");
  }
  return loaded;
}

}  // namespace

CUfunction Kernel::load(int device) {
  static std::mutex mutex;
  static auto& by_source = *new std::map<std::pair<std::string, int>, Loaded>;
  const Driver& d = driver();
  const std::lock_guard<std::mutex> lock(mutex);
  const ContextGuard context(device);  // ValueError for one that is out of range
  const RelaxedCapture relaxed;
  const auto key = std::make_pair(source_, device);
  auto found = by_source.find(key);
  if (found == by_source.end()) found = by_source.emplace(key, load_image(source_, device)).first;
  CUfunction function = nullptr;
  const std::string what = " of " + name_ + " in " + source_;
  if (found->second.library != nullptr) {
    CUkernel kernel = nullptr;
    check(d.LibraryGetKernel(&kernel, found->second.library, name_.c_str()), ("cuLibraryGetKernel" + what).c_str());
    check(d.KernelGetFunction(&function, kernel), "cuKernelGetFunction");  // launches faster than the kernel itself
  } else {
    check(d.ModuleGetFunction(&function, found->second.module, name_.c_str()), ("cuModuleGetFunction" + what).c_str());
  }
  // Launches may take all the shared memory that there is, and clusters of more than 8 blocks.
  int own = 0;
  check(d.FuncGetAttribute(&own, kStaticSharedBytes, function), "cuFuncGetAttribute");
  check(d.FuncSetAttribute(function, kMaxDynamicSharedBytes, properties(device).shared_bytes - own), "cuFuncSetAttribute");
  if (hardware(source_.c_str(), device).largest_cluster > 8)
    check(d.FuncSetAttribute(function, kNonPortableClusters, 1), "cuFuncSetAttribute");
  loaded_[device].store(function, std::memory_order_release);
  return function;
}

KernelTable::KernelTable(const std::string& prefix, const std::vector<Part>& parts) {
  for (DType t : {kFloat64, kFloat32, kFloat16, kBFloat16})
    for (const Part& part : parts)
      for (const std::string& suffix : part.suffixes) kernels_[t].push_back(new Kernel(part.source, prefix + name_of(t) + suffix));
}

const Hardware& hardware(const char* source, int device) {
  thread_local const Hardware* last = nullptr;  // most calls ask what the call before asked
  thread_local std::pair<const char*, int> last_asked;
  if (last != nullptr && last_asked == std::make_pair(source, device)) return *last;
  static std::mutex mutex;
  static auto& known = *new std::map<std::pair<std::string, int>, Hardware>;
  driver();  // not in a forked child, where the lock may be held for good
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find({source, device});
  if (found == known.end()) {
    const DeviceProperties& device_properties = properties(device);
    const int capability = device_properties.capability;
    const Image& image = choose_image(source, capability);
    // What CUOPS_TUNED is in an image's code (device/tuned.cuh); 10.0 has that of 9.0.
    const int tuned = image.capability == 80 ? 80 : image.capability == 90 || image.capability == 100 ? 90 : 0;
    const bool clusters = image.capability >= 90 && driver().LaunchKernelEx != nullptr && image.cuda >= 120;
    // Beyond Hopper and data centers' Blackwell, clusters end at the portable size, which is also all that some tools know.
    const bool portable = capability >= 110 || std::getenv("CUOPS_PORTABLE_CLUSTERS") != nullptr;
    const unsigned largest_cluster = !clusters ? 1 : portable ? 8 : 16;
    const Hardware hardware{capability,     tuned, image.cuda, device_properties.multiprocessors, device_properties.shared_bytes,
                            largest_cluster};
    found = known.emplace(std::make_pair(source, device), hardware).first;
  }
  last_asked = {source, device};
  return *(last = &found->second);
}

namespace {

// A launch with its attributes, where there are any.
struct Configuration {
  CUlaunchAttribute attributes[2] = {};
  CUlaunchConfig config;

  Configuration(const LaunchShape& shape, bool overlaps, CUstream stream)
      : config{{shape.blocks, 1, 1}, {shape.block_x, shape.block_y, 1}, shape.shared_bytes, stream, attributes, 0} {
    if (shape.cluster > 1) {
      CUlaunchAttribute& attribute = attributes[config.attribute_count++];
      attribute.id = kClusterDimension;
      attribute.value.cluster[0] = shape.cluster;
      attribute.value.cluster[1] = attribute.value.cluster[2] = 1;
    }
    if (overlaps) {
      CUlaunchAttribute& attribute = attributes[config.attribute_count++];
      attribute.id = kProgrammaticStreamSerialization;
      attribute.value.flag = 1;
    }
  }
  Configuration(const Configuration&) = delete;
};

// Since CUDA 12.3 graphs capture launches that overlap.
bool can_overlap(int device) {
  static const int version = [] {
    int found = 0;
    check(driver().DriverGetVersion(&found), "cuDriverGetVersion");
    return found;
  }();
  return version >= 12030 && driver().LaunchKernelEx != nullptr && properties(device).capability >= 90;
}

}  // namespace

int clusters_at_once(Kernel& kernel, int device, const LaunchShape& shape) {
  static std::mutex mutex;
  static auto& known = *new std::map<std::tuple<CUfunction, unsigned, unsigned, unsigned, unsigned>, int>;
  driver();  // as above
  const std::lock_guard<std::mutex> lock(mutex);
  const CUfunction function = kernel.on(device);
  const std::tuple key(function, shape.cluster, shape.block_x, shape.block_y, shape.shared_bytes);
  if (const auto found = known.find(key); found != known.end()) return found->second;
  const ContextGuard context(device);
  LaunchShape one = shape;
  one.blocks = shape.cluster;
  const Configuration launch(one, false, nullptr);
  int at_once = 0;
  check(driver().OccupancyMaxActiveClusters(&at_once, function, &launch.config), "cuOccupancyMaxActiveClusters");
  return known[key] = at_once;
}

TensorMap matrices_map(const Rows& x, DType dtype, bool tf32, std::int64_t count, int rows, int columns, int box_rows) {
  constexpr int kTypes[] = {8, 7, 6, 9}, kAsTf32 = 11;  // CUtensorMapDataType
  const std::uint64_t size = size_of(dtype), line = columns * size;
  const std::uint64_t sizes[] = {std::uint64_t(columns), std::uint64_t(rows), std::uint64_t(count)};
  const std::uint64_t strides[] = {line, count > 1 ? x.stride * size : rows * line};
  const unsigned box[] = {static_cast<unsigned>(128 / size), static_cast<unsigned>(box_rows), 1}, steps[] = {1, 1, 1};
  constexpr int kNotInterleaved = 0, kSwizzled = 3, kWhole256 = 3, kZeros = 0;
  TensorMap map;
  if (driver().TensorMapEncodeTiled == nullptr)
    raise("cuops.errors.DriverTooOldError", "libcuda.so.1 has no symbol cuTensorMapEncodeTiled");
  check(driver().TensorMapEncodeTiled(&map, tf32 ? kAsTf32 : kTypes[dtype], 3, x.data, sizes, strides, box, steps, kNotInterleaved,
                                      kSwizzled, kWhole256, kZeros),
        "cuTensorMapEncodeTiled");
  return map;
}

void launch(Kernel& kernel, int device, CUstream stream, const LaunchShape& shape, void* params) {
  const Driver& d = driver();
  void* arguments[] = {params};
  const bool overlaps = shape.overlaps && can_overlap(device);
  if (shape.cluster == 1 && !overlaps) {
    check(d.LaunchKernel(kernel.on(device), shape.blocks, 1, 1, shape.block_x, shape.block_y, 1, shape.shared_bytes, stream,
                         arguments, nullptr),
          "cuLaunchKernel");
    return;
  }
  const Configuration launch(shape, overlaps, stream);
  check(d.LaunchKernelEx(&launch.config, kernel.on(device), arguments, nullptr), "cuLaunchKernelEx");
}

}  // namespace cuops
