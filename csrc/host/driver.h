// The CUDA driver, opened on first use, so that the library loads where there is none.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cuops {

// The part of the driver's C interface that cuops uses, declared here so that no CUDA header is needed.
using CUresult = int;
using CUdevice = int;
using CUdeviceptr = std::uint64_t;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUlibrary = struct CUlib_st*;
using CUkernel = struct CUkern_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;

struct CUlaunchAttribute {
  int id;
  char pad[4];
  union {
    char bytes[64];
    unsigned cluster[3];
    int flag;
  } value;
};
struct CUlaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  CUstream stream;
  CUlaunchAttribute* attributes;
  unsigned attribute_count;
};

constexpr int kComputeCapabilityMajor = 75, kComputeCapabilityMinor = 76, kMultiprocessorCount = 16;  // CUdevice_attribute
constexpr int kSharedBytesOptIn = 97;                                                                 // likewise
constexpr int kStaticSharedBytes = 1, kMaxDynamicSharedBytes = 8, kNonPortableClusters = 14;          // CUfunction_attribute
constexpr int kClusterDimension = 4, kProgrammaticStreamSerialization = 6;                            // CUlaunchAttributeID

// F(name, exported symbol, parameter types). A suffix like _v2 names the version of the entry point that the types are of.
#define CUOPS_DRIVER_FUNCTIONS(F)                                                                                               \
  F(Init, "cuInit", unsigned)                                                                                                   \
  F(DriverGetVersion, "cuDriverGetVersion", int*)                                                                               \
  F(GetErrorName, "cuGetErrorName", CUresult, const char**)                                                                     \
  F(GetErrorString, "cuGetErrorString", CUresult, const char**)                                                                 \
  F(DeviceGet, "cuDeviceGet", CUdevice*, int)                                                                                   \
  F(DeviceGetAttribute, "cuDeviceGetAttribute", int*, int, CUdevice)                                                            \
  F(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", CUcontext*, CUdevice)                                                   \
  F(CtxGetCurrent, "cuCtxGetCurrent", CUcontext*)                                                                               \
  F(CtxPushCurrent, "cuCtxPushCurrent_v2", CUcontext)                                                                           \
  F(CtxPopCurrent, "cuCtxPopCurrent_v2", CUcontext*)                                                                            \
  F(ModuleLoadData, "cuModuleLoadData", CUmodule*, const void*)                                                                 \
  F(ModuleGetFunction, "cuModuleGetFunction", CUfunction*, CUmodule, const char*)                                               \
  F(FuncGetAttribute, "cuFuncGetAttribute", int*, int, CUfunction)                                                              \
  F(FuncSetAttribute, "cuFuncSetAttribute", CUfunction, int, int)                                                               \
  F(LaunchKernel, "cuLaunchKernel", CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, \
    void**, void**)                                                                                                             \
  F(MemAlloc, "cuMemAlloc_v2", CUdeviceptr*, std::size_t)                                                                       \
  F(MemFree, "cuMemFree_v2", CUdeviceptr)                                                                                       \
  F(MemHostAlloc, "cuMemHostAlloc", void**, std::size_t, unsigned)                                                              \
  F(MemFreeHost, "cuMemFreeHost", void*)                                                                                        \
  F(MemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", CUdeviceptr, const void*, std::size_t, CUstream)                                   \
  F(MemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", void*, CUdeviceptr, std::size_t, CUstream)                                         \
  F(PointerGetAttributes, "cuPointerGetAttributes", unsigned, int*, void**, CUdeviceptr)                                        \
  F(StreamCreate, "cuStreamCreate", CUstream*, unsigned)                                                                        \
  F(StreamDestroy, "cuStreamDestroy_v2", CUstream)                                                                              \
  F(StreamSynchronize, "cuStreamSynchronize", CUstream)                                                                         \
  F(ThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", int*)

// Younger than the oldest driver that cuops runs on: nullptr where the driver has none.
#define CUOPS_OPTIONAL_DRIVER_FUNCTIONS(F)                                                                                   \
  F(LibraryLoadData, "cuLibraryLoadData", CUlibrary*, const void*, void*, void**, unsigned, void*, void**, unsigned)         \
  F(LibraryGetKernel, "cuLibraryGetKernel", CUkernel*, CUlibrary, const char*)                                               \
  F(KernelGetFunction, "cuKernelGetFunction", CUfunction*, CUkernel)                                                         \
  F(OccupancyMaxActiveClusters, "cuOccupancyMaxActiveClusters", int*, CUfunction, const CUlaunchConfig*)                     \
  F(LaunchKernelEx, "cuLaunchKernelEx", const CUlaunchConfig*, CUfunction, void**, void**)                                   \
  F(TensorMapEncodeTiled, "cuTensorMapEncodeTiled", void*, int, unsigned, void*, const std::uint64_t*, const std::uint64_t*, \
    const unsigned*, const unsigned*, int, int, int, int)

struct Driver {
#define CUOPS_FIELD(name, symbol, ...) CUresult (*name)(__VA_ARGS__) = nullptr;
  CUOPS_DRIVER_FUNCTIONS(CUOPS_FIELD)
  CUOPS_OPTIONAL_DRIVER_FUNCTIONS(CUOPS_FIELD)
#undef CUOPS_FIELD
};

// Opens and initialises the driver once. Throws DriverNotFoundError, and CudaError in a child that was forked after that.
const Driver& driver();

// Throws CudaError with the driver's own name for a result other than success.
void check(CUresult result, const char* call);

constexpr int kDevices = 64;  // of a process, at most

// A GPU's primary context, current for the life of the object.
class ContextGuard {
 public:
  explicit ContextGuard(int device);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;

 private:
  bool pushed_;
};

// While a stream captures a graph, loading code and allocating memory are legal only in this mode.
class RelaxedCapture {
 public:
  RelaxedCapture() { driver().ThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { driver().ThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;

 private:
  int mode_ = 2;
};

struct DeviceProperties {
  int capability;  // 90 is compute capability 9.0
  int multiprocessors;
  int shared_bytes;  // that a block may have
};
const DeviceProperties& properties(int device);

}  // namespace cuops
