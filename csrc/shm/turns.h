// The order in which a collective's steps take place in the ring.
//
// A chunk passes through three steps on each rank:
//
//   publish   this rank's part of the chunk            -> its own slot
//   reduce    what it owns, from the slots of all ranks -> the sum, and its own slot
//   collect   what the others own, from their slots     -> the caller's memory
//
// While chunk t is published, chunk t - 1 is reduced and chunk t - 2 collected, so a rank seldom
// waits for what another has not finished. A reduce-scatter ends with the sum; an all-gather
// collects what was published.
#pragma once

#include <optional>

#include "codec/types.h"
#include "shm/ring.h"

namespace zcomm::shm {

// A collective, what its ranks compare, and how long they wait for each other. A `brief` one is not
// even begun if it takes more than one exchange. `begun` is the ring's number of an exchange whose
// time was up; the call goes on with it.
struct Call {
  bool reduce, gather;
  std::uint64_t signature;
  double timeout_s;
  int spins;
  bool brief = false;
  std::optional<std::uint32_t> begun = std::nullopt;
};

// The caller's memory: what offsets count from, and the type of its numbers.
struct Place {
  std::uint8_t* base = nullptr;
  GradType type = kGradF32;

  std::uint8_t* at(std::int64_t element) const {
    return base + element * (type == kGradF32 ? 4 : 2);
  }
};

// What a collective does with its chunk t, which is `chunk` in the ring. A step that returns false
// ends it.
class Steps {
 public:
  virtual bool publish(std::uint32_t t, std::uint32_t chunk) = 0;
  virtual bool reduce(std::uint32_t t, std::uint32_t chunk) = 0;
  virtual bool collect(std::uint32_t t, std::uint32_t chunk) = 0;

 protected:
  ~Steps() = default;
};

enum class Step : int { kPublish, kReduce, kCollect };

// How a collective ended: what its last wait saw (kReached and not refused: all is done), and in
// which step of which of its chunks. The rest of the time it waited. `begun` is the number of the
// exchange, if it takes but one and has published that.
struct Outcome {
  Seen seen{State::kNotYet};
  bool refused = false;
  Step step = Step::kPublish;
  std::uint32_t t = 0, count = 0;
  std::optional<std::uint32_t> begun = std::nullopt;
  double publish_s = 0, reduce_s = 0, collect_s = 0;
};

// An all-reduce in which every rank publishes all that it has, and sums all that was published.
inline Call as_one_exchange(Call call) {
  call.reduce = false;
  return call;
}

Outcome take_turns(Ring& ring, const Call& call, std::uint32_t count, Steps& steps);

}  // namespace zcomm::shm
