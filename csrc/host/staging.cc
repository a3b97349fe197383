#include "staging.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>

#include "integers.h"
#include "workers.h"

namespace cuops {
namespace {

constexpr std::int64_t kLargestChunk = 2 << 20, kSmallestChunk = 256 << 10;  // bytes; a chunk holds at least one row
constexpr unsigned kMaxWorkers = 12;                                         // enough to fill staging as fast as PCIe empties it
constexpr std::int64_t kMostBytes = 256 << 20, kMostKeptBytes = 128 << 20;   // of all lanes of a call, of those that are kept
constexpr std::int64_t kMostTogether = 64 << 20;                             // of rows that go together so as to begin alike
constexpr std::int64_t kAlignment = 256;                                     // of every array in a lane
constexpr std::int64_t kVector = 16;                                         // bytes that kernels move at once

// One chunk's way through the GPU: memory on the device, page-locked memory for those arrays that are not so themselves, a stream.
class Lane {
 public:
  explicit Lane(int device) {
    const ContextGuard context(device);
    check(driver().StreamCreate(&stream, 1), "cuStreamCreate");
  }
  Lane(const Lane&) = delete;
  ~Lane() {                              // after a failure, or where too much is kept
    driver().StreamSynchronize(stream);  // copies under way may be of the caller's memory
    if (on_device) driver().MemFree(on_device);
    if (on_host) driver().MemFreeHost(on_host);
    driver().StreamDestroy(stream);
  }

  void reserve(std::int64_t device_bytes, std::int64_t host_bytes) {
    if (device_bytes > device_size_) {
      device_size_ = 0;
      if (on_device) check(driver().MemFree(on_device), "cuMemFree");
      on_device = 0;
      check(driver().MemAlloc(&on_device, device_bytes), "cuMemAlloc");
      device_size_ = device_bytes;
    }
    if (host_bytes > host_size_) {
      host_size_ = 0;
      if (on_host) check(driver().MemFreeHost(on_host), "cuMemFreeHost");
      on_host = nullptr;
      void* host;
      check(driver().MemHostAlloc(&host, host_bytes, 1), "cuMemHostAlloc");
      on_host = static_cast<char*>(host);
      host_size_ = host_bytes;
    }
  }
  std::int64_t size() const { return std::max(device_size_, host_size_); }

  char* on_host = nullptr;
  CUdeviceptr on_device = 0;
  CUstream stream = nullptr;

 private:
  std::int64_t device_size_ = 0, host_size_ = 0;
};

// Lanes outlive calls, because page-locking costs more than copying.
class LanePool {
 public:
  std::unique_ptr<Lane> take(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& free = free_of(device);
    if (free.empty()) return std::make_unique<Lane>(device);
    auto lane = std::move(free.back());
    free.pop_back();
    bytes_ -= lane->size();
    return lane;
  }
  void give(int device, std::unique_ptr<Lane> lane) {  // or lets it end, where too much is kept
    const std::lock_guard<std::mutex> lock(mutex_);
    if (bytes_ + lane->size() > kMostKeptBytes) return;
    bytes_ += lane->size();
    free_of(device).push_back(std::move(lane));
  }
  void release(int device) {  // whose context is current
    std::vector<std::unique_ptr<Lane>> released;
    const std::lock_guard<std::mutex> lock(mutex_);
    released.swap(free_of(device));
    for (const auto& lane : released) bytes_ -= lane->size();
  }

 private:
  std::vector<std::unique_ptr<Lane>>& free_of(int device) {
    if (free_.size() <= static_cast<std::size_t>(device)) free_.resize(device + 1);
    return free_[device];
  }
  std::mutex mutex_;
  std::vector<std::vector<std::unique_ptr<Lane>>> free_;
  std::int64_t bytes_ = 0;
};

LanePool& pool() {
  static LanePool* const lanes = new LanePool;  // not destroyed: the driver may be gone before the process is
  return *lanes;
}

void copy_rows(char* to, std::int64_t to_stride, const char* from, std::int64_t from_stride, std::int64_t rows,
               std::int64_t bytes) {
  if (to_stride == bytes && from_stride == bytes) {
    std::memcpy(to, from, rows * bytes);
    return;
  }
  for (std::int64_t r = 0; r < rows; ++r) std::memcpy(to + r * to_stride, from + r * from_stride, bytes);
}

// An array's place in a lane, and whether the driver can copy it without staging.
struct Slot {
  HostRows rows;
  bool page_locked;
  std::int64_t offset = 0;

  char* at(std::int64_t row) const { return rows.data + row * rows.stride; }
};

bool is_page_locked(const HostRows& rows, std::int64_t count) {
  if (count > 1 && rows.stride != rows.bytes) return false;
  constexpr int kMemoryType = 2, kRangeStart = 11, kRangeSize = 12;
  constexpr unsigned kHost = 1;
  // These stay 0 for memory that the driver does not know. Of an array it may know a part.
  unsigned type = 0;
  CUdeviceptr start = 0;
  std::size_t size = 0;
  int attributes[] = {kMemoryType, kRangeStart, kRangeSize};
  void* to[] = {&type, &start, &size};
  const auto data = reinterpret_cast<CUdeviceptr>(rows.data);
  check(driver().PointerGetAttributes(3, attributes, to, data), "cuPointerGetAttributes");
  return type == kHost && start <= data && data + count * rows.bytes <= start + size;
}

void upload(const Lane& lane, const Slot& slot, std::int64_t first, std::int64_t count) {
  char* from = slot.at(first);
  if (!slot.page_locked) {
    copy_rows(lane.on_host + slot.offset, slot.rows.bytes, from, slot.rows.stride, count, slot.rows.bytes);
    from = lane.on_host + slot.offset;
  }
  check(driver().MemcpyHtoDAsync(lane.on_device + slot.offset, from, count * slot.rows.bytes, lane.stream), "cuMemcpyHtoDAsync");
}

void download(const Lane& lane, const Slot& slot, std::int64_t first, std::int64_t count) {
  char* const to = slot.page_locked ? slot.at(first) : lane.on_host + slot.offset;
  check(driver().MemcpyDtoHAsync(to, lane.on_device + slot.offset, count * slot.rows.bytes, lane.stream), "cuMemcpyDtoHAsync");
}

}  // namespace

void stream_rows(int device, std::int64_t rows, const std::vector<HostRows>& inputs, const std::vector<HostRows>& outputs,
                 const ComputeChunk& compute) {
  if (rows == 0) return;
  const ContextGuard context(device);
  // Rows that chunks have a multiple of: each then starts as far from a whole vector as in an array that is whole, where a kernel
  // adds up its sums in the same order.
  std::int64_t row_bytes = 0, together = 1;
  for (const auto* arrays : {&inputs, &outputs}) {
    for (const HostRows& array : *arrays) {
      row_bytes = std::max(row_bytes, array.bytes);
      if (array.bytes >= kVector) together = std::max(together, kVector / std::gcd(kVector, array.bytes));
    }
  }
  // As many chunks as the most workers, where that is no more than a chunk may be: with one more, one of them would have two. Fewer
  // workers have as many, as kernels are chosen, and sums added up, by a chunk's rows.
  const std::int64_t largest = std::max<std::int64_t>(kLargestChunk / std::max<std::int64_t>(row_bytes, 1), 1);
  const std::int64_t smallest = std::max<std::int64_t>(kSmallestChunk / std::max<std::int64_t>(row_bytes, 1), 1);
  const std::int64_t wanted = std::clamp(ceil_div(rows, kMaxWorkers), smallest, largest);
  const std::int64_t chunk = std::min(rows, together * row_bytes <= kMostTogether ? round_up(wanted, together) : wanted);
  const std::int64_t chunks = ceil_div(rows, chunk);

  auto slots_of = [&](const std::vector<HostRows>& arrays) {
    std::vector<Slot> slots;
    for (const HostRows& array : arrays) slots.push_back({array, is_page_locked(array, rows)});
    return slots;
  };
  std::vector<Slot> ins = slots_of(inputs), outs = slots_of(outputs);
  std::int64_t lane_bytes = 0, staged_bytes = 0;
  for (const bool page_locked : {false, true}) {  // those that are staged come first, which is all that the host has
    for (auto* slots : {&ins, &outs}) {
      for (Slot& slot : *slots) {
        if (slot.page_locked != page_locked) continue;
        slot.offset = lane_bytes;
        lane_bytes += (chunk * slot.rows.bytes + kAlignment - 1) / kAlignment * kAlignment;
      }
    }
    if (!page_locked) staged_bytes = lane_bytes;
  }

  auto new_lane = [&] {
    const RelaxedCapture relaxed;  // of another thread's graph
    auto lane = pool().take(device);
    lane->reserve(lane_bytes, staged_bytes);
    return lane;
  };
  // One lane is enough, and is there before anything is written. Others that there is no memory for are done without.
  std::mutex mutex;
  std::unique_ptr<Lane> first_lane;
  try {
    first_lane = new_lane();
  } catch (...) {  // as what waits for other calls takes the memory
    const RelaxedCapture relaxed;
    pool().release(device);
    first_lane = new_lane();
  }
  auto lane_of_worker = [&]() -> std::unique_ptr<Lane> {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (first_lane) return std::move(first_lane);
    }
    try {
      return new_lane();
    } catch (...) {
      return nullptr;
    }
  };

  std::atomic<std::int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr failure;
  auto work = [&] {
    if (failed) return;
    try {
      const ContextGuard worker_context(device);
      const RelaxedCapture relaxed;
      auto lane = lane_of_worker();
      if (!lane) return;
      std::vector<CUdeviceptr> in, out;
      for (const Slot& slot : ins) in.push_back(lane->on_device + slot.offset);
      for (const Slot& slot : outs) out.push_back(lane->on_device + slot.offset);
      for (std::int64_t c; !failed && (c = next++) < chunks;) {
        const std::int64_t first = c * chunk, count = std::min(chunk, rows - first);
        for (const Slot& slot : ins) upload(*lane, slot, first, count);
        compute(in.data(), out.data(), first, count, lane->stream);
        for (const Slot& slot : outs) download(*lane, slot, first, count);
        check(driver().StreamSynchronize(lane->stream), "cuStreamSynchronize");
        for (const Slot& slot : outs) {
          if (slot.page_locked) continue;
          copy_rows(slot.at(first), slot.rows.stride, lane->on_host + slot.offset, slot.rows.bytes, count, slot.rows.bytes);
        }
      }
      if (!failed) pool().give(device, std::move(lane));
    } catch (...) {
      if (!failed.exchange(true)) failure = std::current_exception();
    }
  };
  const std::int64_t fitting = std::max<std::int64_t>(kMostBytes / std::max<std::int64_t>(lane_bytes, 1), 1);
  const std::int64_t most_workers = std::clamp(std::thread::hardware_concurrency(), 1u, kMaxWorkers);
  run_together(static_cast<unsigned>(std::min({most_workers, chunks, fitting})) - 1, work);
  if (failure) std::rethrow_exception(failure);
}

DeviceMemory::~DeviceMemory() {
  const RelaxedCapture relaxed;
  if (at_) driver().MemFree(at_);
}

void* DeviceMemory::upload(const void* from, std::size_t bytes, int device) {
  const RelaxedCapture relaxed;
  if (driver().MemAlloc(&at_, bytes) != 0) {
    pool().release(device);
    check(driver().MemAlloc(&at_, bytes), "cuMemAlloc");
  }
  auto lane = pool().take(device);  // the default stream would break a capture on a stream that waits for it
  check(driver().MemcpyHtoDAsync(at_, from, bytes, lane->stream), "cuMemcpyHtoDAsync");
  check(driver().StreamSynchronize(lane->stream), "cuStreamSynchronize");
  pool().give(device, std::move(lane));
  return reinterpret_cast<void*>(at_);
}

}  // namespace cuops
