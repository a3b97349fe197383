#include "workers.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace cuops {
namespace {

struct Job {
  const std::function<void()>& work;
  unsigned running = 0;
  std::condition_variable ended{};
};

class Workers {
 public:
  void run(unsigned others, Job& job) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      start(others);
      waiting_.insert(waiting_.end(), std::min(others, threads_), &job);
    }
    wake_.notify_all();
    job.work();
    std::unique_lock<std::mutex> lock(mutex_);
    // What no thread has begun by now is left undone: there is nothing more to do.
    waiting_.erase(std::remove(waiting_.begin(), waiting_.end(), &job), waiting_.end());
    job.ended.wait(lock, [&] { return job.running == 0; });
  }

 private:
  void start(unsigned wanted) {
    try {
      for (; threads_ < wanted; ++threads_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
      // The system gives no more threads: those that there are do the work.
    }
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return !waiting_.empty(); });
      Job& job = *waiting_.front();
      waiting_.pop_front();
      ++job.running;
      lock.unlock();
      job.work();
      lock.lock();
      if (--job.running == 0) job.ended.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job*> waiting_;
  unsigned threads_ = 0;
};

}  // namespace

void run_together(unsigned others, const std::function<void()>& work) {
  static Workers* const workers = new Workers;  // not destroyed: its threads wait until the process ends
  Job job{work};
  workers->run(others, job);
}

}  // namespace cuops
