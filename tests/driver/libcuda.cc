// A stand-in for the CUDA driver on machines without a GPU: device memory is the host's, the kernels of RMSNorm are run here.
// STAND_IN_VERSION (12080), STAND_IN_CAPABILITY (90), STAND_IN_DEVICES (1), STAND_IN_MULTIPROCESSORS (132) and STAND_IN_ROOM (16),
// the blocks that a cluster has room for, describe it; a launch with more shared memory than that capability has is refused.
// STAND_IN_FAIL, like cuLaunchKernelEx=719, makes a function fail with that result; STAND_IN_LOG names a file for a line on every
// load and launch, STAND_IN_IMAGE one for the last image loaded, up to the table of sections. STAND_IN_PAGE_LOCKED (0) is 1 where
// all memory of the host is page-locked, 2 where the first 8 bytes of each array are. STAND_IN_MEMORY is how many bytes there are.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rms_norm.h"

#define DRIVER(name, ...) extern "C" __attribute__((visibility("default"))) int name(__VA_ARGS__)
#define MAY_FAIL \
  if (const int failure = failure_of(__func__)) return failure

namespace {

using cuops::DType;
using cuops::RmsNormFwdParams;
using cuops::Rows;

struct Context {
  int device;
};
Context contexts[8] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};
thread_local Context* stack[64];
thread_local int depth = 0;
int64_t allocated = 0, most_allocated = 0, pinned_blocks = 0;
constexpr int kInvalidValue = 1, kOutOfMemory = 2, kInvalidContext = 201, kNotFound = 500;
constexpr int kImplicitCapture = 906;  // of the default stream, as if another one was being captured

int setting(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text ? atoi(text) : otherwise;
}

int failure_of(const char* function) {
  const char* text = getenv("STAND_IN_FAIL");
  const size_t length = strlen(function);
  return text && strncmp(text, function, length) == 0 && text[length] == '=' ? atoi(text + length + 1) : 0;
}

template <class... Args>
void log(const char* format, Args... args) {
  const char* path = getenv("STAND_IN_LOG");
  if (path == nullptr) return;
  char line[256];  // written at once, so that the lines of threads do not mix
  const int size = snprintf(line, sizeof line, format, args...);
  FILE* file = fopen(path, "a");
  fwrite(line, 1, size, file);
  fclose(file);
}

// An image, of which the names of its kernels are known, and, in machine code, the shared memory of their own.
struct Loaded {
  char* code;
  size_t size;  // of what precedes the table of sections, or of the text

  bool has(const char* name) const {
    char entry[256];  // in the text of PTX, or a string among those of machine code
    const bool is_text = memcmp(code, "\x7f\x45LF", 4) != 0;
    const int length =
        is_text ? snprintf(entry, sizeof entry, ".entry %s(", name) : snprintf(entry, sizeof entry, "%c%s%c", 0, name, 0);
    return memmem(code, size, entry, length) != nullptr;
  }

  template <class Field>
  Field field(uint64_t at) const {
    Field value;
    memcpy(&value, code + at, sizeof value);
    return value;
  }
  int own_shared(const char* name) const {
    if (memcmp(code, "\x7f\x45LF", 4) != 0) return 0;
    auto section = [&](int i) { return size + i * field<uint16_t>(58); };  // in the table
    const uint64_t names = field<uint64_t>(section(field<uint16_t>(62)) + 24);
    char wanted[256];
    snprintf(wanted, sizeof wanted, ".nv.shared.%s", name);
    for (int i = 0; i < field<uint16_t>(60); ++i)
      if (strcmp(code + names + field<uint32_t>(section(i)), wanted) == 0)
        return static_cast<int>(field<uint64_t>(section(i) + 32));
    return 0;
  }
};

struct Function {
  char* name;
  int own_shared;
};

// What a block may have of shared memory (CUDA C++ Programming Guide, table of technical specifications per compute capability).
int most_shared() {
  const int capability = setting("STAND_IN_CAPABILITY", 90);
  return capability < 70                        ? 49152
         : capability < 75                      ? 98304
         : capability < 80                      ? 65536
         : capability == 80 || capability == 87 ? 166912
         : capability < 90 || capability >= 120 ? 101376
                                                : 232448;
}
bool has_shared(const void* function, unsigned bytes) {
  return static_cast<int>(bytes) + static_cast<const Function*>(function)->own_shared <= most_shared();
}

int load(void** loaded, const void* image, const char* as) {
  const char* const bytes = static_cast<const char*>(image);
  const bool is_elf = memcmp(bytes, "\x7f\x45LF", 4) == 0;
  uint64_t size, all;
  if (is_elf) {
    uint32_t flags;
    uint16_t sections[2];  // the size of an entry of their table, and how many there are
    memcpy(&flags, bytes + 48, 4);
    memcpy(&size, bytes + 40, 8);
    memcpy(sections, bytes + 58, 4);
    all = size + sections[0] * sections[1];
    log("%s sm_%d\n", as, (bytes[8] >= 8 ? flags >> 8 : flags) & 255);
  } else {
    const char* target = strstr(bytes, ".target sm_");
    if (target == nullptr) return 200;
    all = size = strlen(bytes);
    log("%s compute_%d\n", as, atoi(target + 11));
  }
  auto* const found = static_cast<Loaded*>(malloc(sizeof(Loaded)));
  *found = {static_cast<char*>(malloc(all)), size};
  memcpy(found->code, bytes, all);
  if (const char* path = getenv("STAND_IN_IMAGE")) {
    FILE* file = fopen(path, "wb");
    fwrite(bytes, 1, size, file);
    fclose(file);
  }
  *loaded = found;
  return 0;
}

double read(const void* data, DType dtype, long long i) {
  return dtype == cuops::kFloat64 ? static_cast<const double*>(data)[i] : static_cast<const float*>(data)[i];
}
void write(void* data, DType dtype, long long i, double value) {
  if (dtype == cuops::kFloat64) {
    static_cast<double*>(data)[i] = value;
  } else {
    static_cast<float*>(data)[i] = static_cast<float>(value);
  }
}
long long start(const Rows& rows, long long r) { return r / rows.inner * rows.outer_stride + r % rows.inner * rows.stride; }

// Of a y of 16 bits, as rows of float32 may have, launches are all that counts.
void rms_norm_fwd(const RmsNormFwdParams& p, DType dtype) {
  if (p.y_dtype != cuops::kFloat32 && p.y_dtype != cuops::kFloat64) return;
  for (long long r = 0; r < p.rows; ++r) {
    const long long in = start(p.x, r), out = start(p.y, r);
    double sum = 0;
    for (long long i = 0; i < p.n; ++i) sum += pow(read(p.x.data, dtype, in + i), 2);
    const double rstd = 1 / sqrt(sum / p.n + p.float64.eps);
    for (long long i = 0; i < p.n; ++i) {
      const double scale = p.weight ? read(p.weight, dtype, i) + p.float64.weight_offset : 1,
                   shift = p.bias ? read(p.bias, dtype, i) : 0;
      write(p.y.data, p.y_dtype, out + i, read(p.x.data, dtype, in + i) * rstd * scale + shift);
    }
    if (p.rstd) write(p.rstd, dtype, r, rstd);
  }
}

int run(const void* function, void** arguments, unsigned blocks, const char* how, unsigned cluster = 1) {
  const char* name = static_cast<const Function*>(function)->name;
  log("%s %s device %d blocks %u cluster %u\n", how, name, depth ? stack[depth - 1]->device : -1, blocks, cluster);
  if (depth == 0) return kInvalidContext;
  const auto& params = *static_cast<const RmsNormFwdParams*>(arguments[0]);
  if (strncmp(name, "rms_norm_fwd_f32_", 17) == 0) rms_norm_fwd(params, cuops::kFloat32);
  if (strncmp(name, "rms_norm_fwd_f64_", 17) == 0) rms_norm_fwd(params, cuops::kFloat64);
  return 0;
}

int find_function(void** function, const void* loaded, const char* name) {
  const auto& image = *static_cast<const Loaded*>(loaded);
  if (!image.has(name)) return kNotFound;
  auto* const found = static_cast<Function*>(malloc(sizeof(Function)));
  *found = {strdup(name), image.own_shared(name)};
  *function = found;
  return 0;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int64_t stand_in_context_depth() { return depth; }
extern "C" __attribute__((visibility("default"))) int64_t stand_in_allocated() { return allocated; }
extern "C" __attribute__((visibility("default"))) int64_t stand_in_most_allocated() { return most_allocated; }
extern "C" __attribute__((visibility("default"))) int64_t stand_in_pinned_blocks() { return pinned_blocks; }

DRIVER(cuInit, unsigned) { return failure_of(__func__); }
DRIVER(cuDriverGetVersion, int* version) {
  MAY_FAIL;
  *version = setting("STAND_IN_VERSION", 12080);
  return 0;
}
DRIVER(cuGetErrorName, int result, const char** name) {
  const struct {
    int result;
    const char* name;
  } known[] = {{1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"},     {34, "CUDA_ERROR_STUB_LIBRARY"},
               {100, "CUDA_ERROR_NO_DEVICE"},   {201, "CUDA_ERROR_INVALID_CONTEXT"}, {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
               {500, "CUDA_ERROR_NOT_FOUND"},   {719, "CUDA_ERROR_LAUNCH_FAILED"}};
  *name = nullptr;
  for (const auto& each : known)
    if (each.result == result) *name = each.name;
  return *name ? 0 : kInvalidValue;
}
DRIVER(cuGetErrorString, int result, const char** text) {
  *text = result == 719 ? "unspecified launch failure" : nullptr;
  return *text ? 0 : kInvalidValue;
}
DRIVER(cuDeviceGetCount, int* count) {
  MAY_FAIL;
  *count = setting("STAND_IN_DEVICES", 1);
  return 0;
}
DRIVER(cuDeviceGet, int* device, int index) {
  MAY_FAIL;
  *device = index;
  return index < setting("STAND_IN_DEVICES", 1) ? 0 : 101;
}
DRIVER(cuDeviceGetName, char* name, int size, int device) {
  MAY_FAIL;
  snprintf(name, size, "Stand-in %d", device);
  return 0;
}
DRIVER(cuDeviceTotalMem_v2, size_t* bytes, int) {
  MAY_FAIL;
  *bytes = size_t(8) << 30;
  return 0;
}
DRIVER(cuDeviceGetAttribute, int* value, int attribute, int) {
  MAY_FAIL;
  const int capability = setting("STAND_IN_CAPABILITY", 90);
  *value = attribute == 75   ? capability / 10
           : attribute == 76 ? capability % 10
           : attribute == 16 ? setting("STAND_IN_MULTIPROCESSORS", 132)
           : attribute == 97 ? most_shared()
                             : 0;
  return 0;
}
DRIVER(cuDevicePrimaryCtxRetain, Context** context, int device) {
  MAY_FAIL;
  *context = &contexts[device];
  return 0;
}
DRIVER(cuCtxGetCurrent, Context** context) {
  MAY_FAIL;
  *context = depth ? stack[depth - 1] : nullptr;
  return 0;
}
DRIVER(cuCtxPushCurrent_v2, Context* context) {
  MAY_FAIL;
  stack[depth++] = context;
  return 0;
}
DRIVER(cuCtxPopCurrent_v2, Context** context) {
  if (depth == 0) return kInvalidContext;
  *context = stack[--depth];
  return 0;
}
DRIVER(cuModuleLoadData, void** module, const void* image) {
  MAY_FAIL;
  return load(module, image, "module");
}
DRIVER(cuModuleGetFunction, void** function, void* module, const char* name) {
  MAY_FAIL;
  return find_function(function, module, name);
}
DRIVER(cuFuncGetAttribute, int* value, int attribute, const Function* function) {
  MAY_FAIL;
  *value = attribute == 1 ? function->own_shared : 0;
  return 0;
}
DRIVER(cuFuncSetAttribute, void*, int, int) { return failure_of(__func__); }
DRIVER(cuLaunchKernel, void* function, unsigned blocks, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared_bytes,
       void*, void** arguments, void**) {
  MAY_FAIL;
  return has_shared(function, shared_bytes) ? run(function, arguments, blocks, "launch") : kInvalidValue;
}
DRIVER(cuMemAlloc_v2, void** at, size_t bytes) {
  MAY_FAIL;
  if (depth == 0) return kInvalidContext;
  const int64_t now = __atomic_add_fetch(&allocated, bytes, __ATOMIC_SEQ_CST);
  if (getenv("STAND_IN_MEMORY") && now > setting("STAND_IN_MEMORY", 0)) {
    __atomic_sub_fetch(&allocated, bytes, __ATOMIC_SEQ_CST);
    return kOutOfMemory;
  }
  auto* block = static_cast<size_t*>(calloc(1, bytes + 256));
  *block = bytes;
  *at = block + 32;
  int64_t most = __atomic_load_n(&most_allocated, __ATOMIC_SEQ_CST);
  while (now > most && !__atomic_compare_exchange_n(&most_allocated, &most, now, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return 0;
}
DRIVER(cuMemFree_v2, void* at) {
  MAY_FAIL;
  size_t* block = static_cast<size_t*>(at) - 32;
  __atomic_sub_fetch(&allocated, *block, __ATOMIC_SEQ_CST);
  free(block);
  return 0;
}
DRIVER(cuMemHostAlloc, void** at, size_t bytes, unsigned) {
  MAY_FAIL;
  if (depth == 0) return kInvalidContext;
  *at = malloc(bytes);
  __atomic_add_fetch(&pinned_blocks, 1, __ATOMIC_SEQ_CST);
  return 0;
}
DRIVER(cuMemFreeHost, void* at) {
  MAY_FAIL;
  if (depth == 0) return kInvalidContext;
  free(at);
  __atomic_sub_fetch(&pinned_blocks, 1, __ATOMIC_SEQ_CST);
  return 0;
}
DRIVER(cuMemcpyHtoDAsync_v2, void* to, const void* from, size_t bytes, void* stream) {
  MAY_FAIL;
  if (stream == nullptr) return kImplicitCapture;
  memcpy(to, from, bytes);
  return 0;
}
DRIVER(cuMemcpyDtoHAsync_v2, void* to, const void* from, size_t bytes, void* stream) {
  MAY_FAIL;
  if (stream == nullptr) return kImplicitCapture;
  memcpy(to, from, bytes);
  return 0;
}
DRIVER(cuPointerGetAttributes, unsigned, int*, void** data, uint64_t at) {
  const int page_locked = setting("STAND_IN_PAGE_LOCKED", 0);
  *static_cast<unsigned*>(data[0]) = page_locked != 0;
  *static_cast<uint64_t*>(data[1]) = at;
  *static_cast<uint64_t*>(data[2]) = page_locked == 1 ? UINT64_MAX - at : 8;
  return 0;
}
DRIVER(cuStreamCreate, void** stream, unsigned) {
  MAY_FAIL;
  *stream = contexts;
  return 0;
}
DRIVER(cuStreamDestroy_v2, void*) { return failure_of(__func__); }
DRIVER(cuStreamSynchronize, void*) { return failure_of(__func__); }
DRIVER(cuThreadExchangeStreamCaptureMode, int*) { return 0; }

#ifndef BEFORE_CUDA_12
struct LaunchAttribute {
  int id;
  char pad[4];
  unsigned value[16];
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
};
DRIVER(cuLibraryLoadData, void** library, const void* image, void*, void**, unsigned, void*, void**, unsigned) {
  MAY_FAIL;
  return load(library, image, "library");
}
DRIVER(cuLibraryGetKernel, void** function, void* library, const char* name) {
  MAY_FAIL;
  return find_function(function, library, name);
}
DRIVER(cuKernelGetFunction, void** function, void* kernel) {
  MAY_FAIL;
  *function = kernel;
  return 0;
}
int cluster_of(const LaunchConfig* config) {
  int cluster = 1;
  for (unsigned i = 0; i < config->attribute_count; ++i)
    if (config->attributes[i].id == 4) cluster = config->attributes[i].value[0];
  return cluster;
}
DRIVER(cuLaunchKernelEx, const LaunchConfig* config, void* function, void** arguments, void**) {
  MAY_FAIL;
  if (!has_shared(function, config->shared_bytes) || config->grid[0] % cluster_of(config) != 0) return kInvalidValue;
  return run(function, arguments, config->grid[0], "launch", cluster_of(config));
}
DRIVER(cuTensorMapEncodeTiled, void*, int, unsigned, void*, const uint64_t*, const uint64_t*, const unsigned*, const unsigned*, int,
       int, int, int) {
  MAY_FAIL;
  return 0;
}
DRIVER(cuOccupancyMaxActiveClusters, int* count, void*, const LaunchConfig* config) {
  MAY_FAIL;
  *count = cluster_of(config) <= setting("STAND_IN_ROOM", 16);
  return 0;
}
#endif
