#include "cpu/pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

#include "cpu/float_mode.h"

namespace zcomm {
namespace {

struct Job {
  TaskFunction function = nullptr;
  void* context = nullptr;
  std::size_t tasks = 0;
  std::atomic<std::size_t> next{0};

  void work() {
    const FloatMode mode;
    for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      function(context, i);
    }
  }
};

// std::condition_variable's wait() needs GCC 12's C++ library. This one does not, so the wheel can
// have an older manylinux tag.
class Condition {
 public:
  template <class Ready>
  void wait(std::unique_lock<std::mutex>& lock, Ready ready) {
    while (!ready()) pthread_cond_wait(&condition_, lock.mutex()->native_handle());
  }
  void notify_one() { pthread_cond_signal(&condition_); }
  void notify_all() { pthread_cond_broadcast(&condition_); }

 private:
  pthread_cond_t condition_ = PTHREAD_COND_INITIALIZER;
};

class Pool {
 public:
  // False if another call has the threads.
  bool run(int helpers, Job& job) {
    std::unique_lock<std::mutex> only(busy_, std::try_to_lock);
    if (!only.owns_lock()) return false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (; started_ < helpers; ++started_) {
        std::thread([this, number = started_] { serve(number); }).detach();
      }
      job_ = &job;
      helpers_ = unfinished_ = helpers;
      ++generation_;
    }
    wake_.notify_all();
    job.work();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return unfinished_ == 0; });
    return true;
  }

 private:
  void serve(int number) {
    std::size_t seen = 0;
    for (;;) {
      Job* job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_ != seen; });
        seen = generation_;
        if (number >= helpers_) continue;
        job = job_;
      }
      job->work();
      std::lock_guard<std::mutex> lock(mutex_);
      if (--unfinished_ == 0) done_.notify_one();
    }
  }

  std::mutex busy_, mutex_;
  Condition wake_, done_;
  Job* job_ = nullptr;
  int started_ = 0, helpers_ = 0, unfinished_ = 0;
  std::size_t generation_ = 0;
};

// Never destroyed: its threads may outlive static destruction. A forked child has none of them and
// gets a new pool.
Pool* pool = nullptr;

Pool& current_pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
  });
  return *pool;
}

}  // namespace

void run_tasks(int threads, std::size_t tasks, TaskFunction function, void* context) {
  Job job;
  job.function = function;
  job.context = context;
  job.tasks = tasks;
  const int useful = static_cast<int>(std::min<std::size_t>(tasks, 256));
  const int helpers = std::min(threads, useful) - 1;
  if (helpers < 1 || !current_pool().run(helpers, job)) job.work();
}

}  // namespace zcomm
