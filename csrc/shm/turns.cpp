#include "shm/turns.h"

#include "shm/clock.h"

namespace zcomm::shm {
namespace {

class Turns {
 public:
  Turns(Ring& ring, const Call& call, std::uint32_t count, Steps& steps)
      : ring_(ring), call_(call), steps_(steps), first_(call.begun.value_or(ring.next())) {
    end_.count = count;
    end_.begun = call.begun;
  }

  Outcome take() {
    const std::uint32_t count = end_.count, lag = call_.reduce && call_.gather ? 2 : 1;
    const bool is_one_exchange = count + lag == 2;
    if (call_.brief && !is_one_exchange) return end_;
    for (std::uint32_t i = 0; i < count + lag; ++i) {
      if (i < count && !call_.begun && !publish(i)) break;
      if (is_one_exchange) end_.begun = first_;
      if (call_.reduce && i >= 1 && i <= count && !reduce(i - 1)) break;
      if (call_.gather && i >= lag && !collect(i - lag)) break;
    }
    return end_;
  }

 private:
  bool publish(std::uint32_t t) {
    at(Step::kPublish, t);
    const std::uint32_t chunk = first_ + t;
    if (!reached(ring_.wait_free(chunk, call_.timeout_s, call_.spins))) return false;
    ring_.take();
    if (!run(&Steps::publish, t, end_.publish_s)) return false;
    ring_.publish(chunk, call_.signature);
    if (!call_.reduce) ring_.done(kReduced, chunk);
    return true;
  }

  bool reduce(std::uint32_t t) {
    at(Step::kReduce, t);
    const std::uint32_t chunk = first_ + t;
    if (!reached(ring_.wait(kPublished, chunk, call_.timeout_s, call_.spins))) return false;
    if (!run(&Steps::reduce, t, end_.reduce_s)) return false;
    ring_.done(kReduced, chunk);
    if (!call_.gather) ring_.done(kCollected, chunk);
    return true;
  }

  bool collect(std::uint32_t t) {
    at(Step::kCollect, t);
    const std::uint32_t chunk = first_ + t;
    const Counter ready = call_.reduce ? kReduced : kPublished;
    if (!reached(ring_.wait(ready, chunk, call_.timeout_s, call_.spins))) return false;
    if (!run(&Steps::collect, t, end_.collect_s)) return false;
    ring_.done(kCollected, chunk);
    return true;
  }

  void at(Step step, std::uint32_t t) {
    end_.step = step;
    end_.t = t;
  }

  bool reached(const Seen& seen) {
    end_.seen = seen;
    return seen.state == State::kReached;
  }

  bool run(bool (Steps::*step)(std::uint32_t, std::uint32_t), std::uint32_t t, double& total_s) {
    const double started = now_s();
    end_.refused = !(steps_.*step)(t, first_ + t);
    total_s += now_s() - started;
    return !end_.refused;
  }

  Ring& ring_;
  const Call& call_;
  Steps& steps_;
  std::uint32_t first_;
  Outcome end_;
};

}  // namespace

Outcome take_turns(Ring& ring, const Call& call, std::uint32_t count, Steps& steps) {
  return Turns(ring, call, count, steps).take();
}

}  // namespace zcomm::shm
