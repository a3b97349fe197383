#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>

#include <array>
#include <mutex>
#include <string>

#include "error.h"

namespace cuops {
namespace {

bool forked_since_init = false;

// Resolved, not initialised: naming an error needs no more.
Driver resolve() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) raise("cuops.errors.DriverNotFoundError", std::string(dlerror()));
  Driver d;
#define CUOPS_RESOLVE(name, symbol, ...) d.name = reinterpret_cast<decltype(d.name)>(dlsym(library, symbol));
#define CUOPS_REQUIRE(name, symbol, ...) \
  CUOPS_RESOLVE(name, symbol)            \
  if (d.name == nullptr) raise("cuops.errors.DriverTooOldError", "libcuda.so.1 has no symbol " symbol);
  CUOPS_DRIVER_FUNCTIONS(CUOPS_REQUIRE)
  CUOPS_OPTIONAL_DRIVER_FUNCTIONS(CUOPS_RESOLVE)
#undef CUOPS_REQUIRE
#undef CUOPS_RESOLVE
  return d;
}
const Driver& resolved() {
  static const Driver d = resolve();
  return d;
}

struct Device {
  std::once_flag once;
  CUcontext context;
  DeviceProperties properties;
};

Device& device_at(int index) {
  static std::array<Device, kDevices> devices;
  if (index < 0 || index >= kDevices) raise("ValueError", "device: index " + std::to_string(index) + " is out of range");
  Device& device = devices[index];
  std::call_once(device.once, [&] {
    const Driver& d = driver();
    CUdevice handle;
    int major, minor;
    check(d.DeviceGet(&handle, index), "cuDeviceGet");
    check(d.DeviceGetAttribute(&major, kComputeCapabilityMajor, handle), "cuDeviceGetAttribute");
    check(d.DeviceGetAttribute(&minor, kComputeCapabilityMinor, handle), "cuDeviceGetAttribute");
    check(d.DeviceGetAttribute(&device.properties.multiprocessors, kMultiprocessorCount, handle), "cuDeviceGetAttribute");
    check(d.DeviceGetAttribute(&device.properties.shared_bytes, kSharedBytesOptIn, handle), "cuDeviceGetAttribute");
    device.properties.capability = 10 * major + minor;
    check(d.DevicePrimaryCtxRetain(&device.context, handle), "cuDevicePrimaryCtxRetain");
  });
  return device;
}

}  // namespace

const Driver& driver() {
  static const Driver& initialised = []() -> const Driver& {
    check(resolved().Init(0), "cuInit");
    pthread_atfork(nullptr, nullptr, [] { forked_since_init = true; });
    return resolved();
  }();
  if (forked_since_init) {
    raise("cuops.errors.CudaError",
          "this process was forked after CUDA was initialised, and CUDA cannot be used in such a child; "
          "start workers with multiprocessing's \"spawn\" method");
  }
  return initialised;
}

void check(CUresult result, const char* call) {
  if (result == 0) return;
  const char *name = nullptr, *text = nullptr;
  resolved().GetErrorName(result, &name);
  resolved().GetErrorString(result, &text);
  const std::string what = name ? name : "error " + std::to_string(result);
  raise("cuops.errors.CudaError", std::string(call) + " failed with " + what + (text ? std::string(": ") + text : ""));
}

ContextGuard::ContextGuard(int device) : pushed_(false) {
  const Driver& d = driver();
  CUcontext wanted = device_at(device).context, current = nullptr;
  check(d.CtxGetCurrent(&current), "cuCtxGetCurrent");
  if (current != wanted) {
    check(d.CtxPushCurrent(wanted), "cuCtxPushCurrent");
    pushed_ = true;
  }
}

ContextGuard::~ContextGuard() {
  CUcontext popped;
  if (pushed_) driver().CtxPopCurrent(&popped);
}

const DeviceProperties& properties(int device) { return device_at(device).properties; }

}  // namespace cuops
