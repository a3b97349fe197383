#include "staging.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace cuops {
namespace {

constexpr std::int64_t kLargestChunk = 4 << 20, kSmallestChunk = 256 << 10;  // bytes; a chunk holds at least one row
constexpr unsigned kMaxWorkers = 8;                                          // saturate PCIe with copies to and from staging

// One chunk's way through the GPU: page-locked memory on the host, memory on the device, a stream. Kept for the next call.
class Lane {
 public:
  explicit Lane(int device) : device_(device) {
    const ContextGuard context(device_);
    check(driver().StreamCreate(&stream, 1), "cuStreamCreate");
  }
  Lane(const Lane&) = delete;

  void reserve(std::size_t in_bytes, std::size_t out_bytes) {
    grow(&in, &in_size_, in_bytes);
    grow(&out, &out_size_, out_bytes);
    const std::size_t staging = std::max(in_bytes, out_bytes);
    if (staging > staging_size_) {
      if (this->staging) check(driver().MemFreeHost(this->staging), "cuMemFreeHost");
      this->staging = nullptr;
      staging_size_ = 0;
      void* p;
      check(driver().MemHostAlloc(&p, staging, 1), "cuMemHostAlloc");
      this->staging = static_cast<char*>(p);
      staging_size_ = staging;
    }
  }

  char* staging = nullptr;
  CUdeviceptr in = 0, out = 0;
  CUstream stream = nullptr;

 private:
  void grow(CUdeviceptr* memory, std::size_t* size, std::size_t wanted) {
    if (wanted <= *size) return;
    if (*memory) check(driver().MemFree(*memory), "cuMemFree");
    *memory = 0;
    *size = 0;
    check(driver().MemAlloc(memory, wanted), "cuMemAlloc");
    *size = wanted;
  }

  int device_;
  std::size_t in_size_ = 0, out_size_ = 0, staging_size_ = 0;
};

// Lanes outlive calls, because page-locking costs more than copying; they are the process's, never returned to the driver.
class LanePool {
 public:
  std::unique_ptr<Lane> take(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& free = free_of(device);
    if (free.empty()) return std::make_unique<Lane>(device);
    auto lane = std::move(free.back());
    free.pop_back();
    return lane;
  }
  void give(int device, std::unique_ptr<Lane> lane) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_of(device).push_back(std::move(lane));
  }

 private:
  std::vector<std::unique_ptr<Lane>>& free_of(int device) {
    if (free_.size() <= static_cast<std::size_t>(device)) free_.resize(device + 1);
    return free_[device];
  }
  std::mutex mutex_;
  std::vector<std::vector<std::unique_ptr<Lane>>> free_;
};

LanePool& pool() {
  static LanePool* const lanes = new LanePool;  // not destroyed: the driver may be gone before the process is
  return *lanes;
}

bool page_locked(const void* p) {
  unsigned type = 0;
  return driver().PointerGetAttribute(&type, 2, reinterpret_cast<CUdeviceptr>(p)) == 0 && type == 1;
}

void copy_rows(char* to, std::int64_t to_stride, const char* from, std::int64_t from_stride, std::int64_t rows, std::int64_t bytes) {
  if (to_stride == bytes && from_stride == bytes) {
    std::memcpy(to, from, rows * bytes);
    return;
  }
  for (std::int64_t r = 0; r < rows; ++r) std::memcpy(to + r * to_stride, from + r * from_stride, bytes);
}

}  // namespace

void stream_rows(int device, const HostRows& in, const HostRows& out, std::int64_t rows, std::int64_t in_row_bytes,
                 std::int64_t out_row_bytes,
                 const std::function<void(CUdeviceptr, CUdeviceptr, std::int64_t, CUstream)>& compute) {
  if (rows == 0) return;
  const Driver& d = driver();
  const std::int64_t row_bytes = std::max(in_row_bytes, out_row_bytes);
  const unsigned most_workers = std::clamp(std::thread::hardware_concurrency(), 1u, kMaxWorkers);
  const std::int64_t chunk_bytes = std::clamp(rows * row_bytes / (2 * most_workers), kSmallestChunk, kLargestChunk);
  const std::int64_t chunk = std::clamp<std::int64_t>(chunk_bytes / std::max<std::int64_t>(row_bytes, 1), 1, rows);
  const std::int64_t chunks = (rows + chunk - 1) / chunk;
  const ContextGuard context(device);
  const bool in_locked = in.stride == in_row_bytes && page_locked(in.data);
  const bool out_locked = out.stride == out_row_bytes && page_locked(out.data);

  std::atomic<std::int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr failure;
  std::mutex failure_mutex;
  auto work = [&] {
    try {
      const ContextGuard worker_context(device);
      auto lane = pool().take(device);
      lane->reserve(chunk * in_row_bytes, chunk * out_row_bytes);
      for (std::int64_t c; !failed && (c = next++) < chunks;) {
        const std::int64_t first = c * chunk, count = std::min(chunk, rows - first);
        char* const from = in.data + first * in.stride;
        char* const to = out.data + first * out.stride;
        if (!in_locked) copy_rows(lane->staging, in_row_bytes, from, in.stride, count, in_row_bytes);
        check(d.MemcpyHtoDAsync(lane->in, in_locked ? from : lane->staging, count * in_row_bytes, lane->stream), "cuMemcpyHtoDAsync");
        compute(lane->in, lane->out, count, lane->stream);
        check(d.MemcpyDtoHAsync(out_locked ? to : lane->staging, lane->out, count * out_row_bytes, lane->stream), "cuMemcpyDtoHAsync");
        check(d.StreamSynchronize(lane->stream), "cuStreamSynchronize");
        if (!out_locked) copy_rows(to, out.stride, lane->staging, out_row_bytes, count, out_row_bytes);
      }
      pool().give(device, std::move(lane));
    } catch (...) {
      const std::lock_guard<std::mutex> lock(failure_mutex);
      if (!failed.exchange(true)) failure = std::current_exception();
    }
  };
  std::vector<std::thread> workers;
  for (std::int64_t i = 1; i < std::min<std::int64_t>(most_workers, chunks); ++i) workers.emplace_back(work);
  work();
  for (auto& worker : workers) worker.join();
  if (failure) std::rethrow_exception(failure);
}

DeviceMemory::~DeviceMemory() {
  if (at_) driver().MemFree(at_);
}

void* DeviceMemory::upload(const void* from, std::size_t bytes) {
  check(driver().MemAlloc(&at_, bytes), "cuMemAlloc");
  check(driver().MemcpyHtoDAsync(at_, from, bytes, nullptr), "cuMemcpyHtoDAsync");
  check(driver().StreamSynchronize(nullptr), "cuStreamSynchronize");
  return reinterpret_cast<void*>(at_);
}

}  // namespace cuops
