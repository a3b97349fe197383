// Plans that were made before, by what they depend on.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "driver.h"

namespace cuops {

template <class Plan>
class PlanCache {
 public:
  using Key = std::vector<std::int64_t>;

  // The plan of this key, by `make` where it is not known.
  template <class Make>
  std::shared_ptr<const Plan> find(Key key, Make&& make) {
    driver();  // not in a forked child, where the lock may be held for good
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find(key);
    if (found != known_.end()) return found->second;
    if (known_.size() >= kMost) known_.clear();  // every length of a sequence may have come by
    return known_.emplace(std::move(key), std::make_shared<const Plan>(make())).first->second;
  }

 private:
  static constexpr std::size_t kMost = 4096;
  std::mutex mutex_;
  std::map<Key, std::shared_ptr<const Plan>> known_;
};

}  // namespace cuops
