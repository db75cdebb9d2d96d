// How the ranks of a host take turns on the memory they share.
//
// Each rank has a segment that it alone writes and its peers read: one page of control, then slots.
// Chunk i of all jobs goes through slot i mod `slots` of every rank. Three counters of a rank say
// how far it has come; each counts chunks since the start, modulo 2^32:
//
//   published   its slot of chunk i has its part of the chunk, for the peers to sum
//   reduced     the slot also has the sum of what this rank owns, for the peers to collect
//   collected   it will not look at anyone's slot of chunk i again
//
//   a rank may write its slot for chunk i      once all peers have collected chunk i - slots
//   it may read what peers have published      once they have published chunk i
//   it may read the sums of its peers          once they have reduced chunk i
//
// So no counter of a peer can pass this rank's `collected` by more than `slots`, and none goes
// back. A peer that breaks this is refused. Nothing that a peer writes is read twice, or trusted as
// a length, an offset or a count.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace zcomm::shm {

// A rank publishes chunk i before it collects chunk i - 2 (turns.cpp, zcomm/engine/host.py). With
// two slots, all ranks would wait in chunk i for what they do after it.
inline constexpr int kLeastSlots = 4, kMostSlots = 8;
// Of a host: each looks at all others, and is connected to them.
inline constexpr int kMostRanks = 128;
inline constexpr std::int64_t kControlBytes = 4096;

enum Counter { kPublished, kReduced, kCollected, kCounters };

// Each on a cache line of its own: its owner writes it while peers look at the others.
struct alignas(64) Line {
  std::atomic<std::uint32_t> value;
};
// So atomics work between processes, and the kernel can compare one (futex).
static_assert(std::atomic<std::uint32_t>::is_always_lock_free &&
              std::atomic<std::uint64_t>::is_always_lock_free &&
              sizeof(std::atomic<std::uint32_t>) == 4);
struct alignas(64) Header {
  std::atomic<std::uint64_t> signature;  // of the job that the slot's chunk belongs to
};

// The first page of a segment. All of it is 0 at first.
struct Control {
  Line counters[kCounters];
  Line asleep_on;  // 1 + the rank whose counter this rank sleeps on; 0: awake
  Line gave_up;    // not 0: this rank has failed and does nothing more
  Header slots[kMostSlots];
};
static_assert(sizeof(Control) <= kControlBytes);

// A rank of the host. `life_fd` is readable once its process is gone.
struct Peer {
  std::uint8_t* segment;
  int life_fd;
};

// What a look at the peers found. All but kReached and kNotYet are final.
enum class State { kReached, kNotYet, kDied, kGaveUp, kBroken, kOtherJob, kInterrupted };

struct Seen {
  State state;
  int rank = 0;                  // the first one that has not come so far, or is at fault
  Counter counter = kPublished;  // the one that is broken
  std::uint32_t got = 0, least = 0, most = 0;
};

class Ring {
 public:
  // `ranks` has this rank's own segment, too, all of whose counters are where it starts: at 0, but
  // in tests that start shortly before they wrap around.
  Ring(int rank, std::vector<Peer> ranks, int slots, std::int64_t slot_nbytes);

  int rank() const { return rank_; }
  int world() const { return static_cast<int>(ranks_.size()); }
  int slots() const { return slots_; }
  std::int64_t slot_nbytes() const { return slot_nbytes_; }
  std::uint32_t next() const { return next_; }

  std::uint8_t* slot(int rank, std::uint32_t chunk) const {
    return ranks_[rank].segment + kControlBytes + (chunk % slots_) * slot_nbytes_;
  }

  // The number of this rank's next chunk, whose slot is its own once it is free.
  std::uint32_t take() { return next_++; }

  // Whether all peers are past chunk i in a counter, and if it is `published`, whether theirs
  // belongs to the same job.
  Seen look(Counter counter, std::uint32_t chunk);
  // Whether the slot of chunk i may be written.
  Seen look_free(std::uint32_t chunk) { return look(kCollected, chunk - slots_); }

  // Looks until there is something else than kNotYet, for `timeout_s` at most; `spins` times before
  // it sleeps.
  Seen wait(Counter counter, std::uint32_t chunk, double timeout_s, int spins = 0);
  Seen wait_free(std::uint32_t chunk, double timeout_s, int spins = 0) {
    return wait(kCollected, chunk - slots_, timeout_s, spins);
  }

  // This rank is past chunk i. Earlier chunks may still be under way: the counter moves past the
  // first of them only when it is done.
  void publish(std::uint32_t chunk, std::uint64_t signature);
  void done(Counter counter, std::uint32_t chunk);

  void give_up();

  // From another thread: a wait that would go on ends soon, and so do later ones.
  void interrupt() { interrupted_.store(true, std::memory_order_relaxed); }

 private:
  struct Known {
    std::uint32_t counters[kCounters] = {};  // the last ones that were seen, or set by this rank
  };

  Control& mine() { return control(rank_); }
  Control& control(int rank) const { return *reinterpret_cast<Control*>(ranks_[rank].segment); }
  Seen look_at_own();
  Seen look_at(int rank, Counter counter, std::uint32_t chunk);
  Seen trouble(int waiting_for);
  void sleep_on(int rank, Counter counter, std::uint32_t chunk, double timeout_s);
  void set(Counter counter, std::uint32_t value);

  int rank_;
  std::vector<Peer> ranks_;
  std::uint32_t slots_;
  std::int64_t slot_nbytes_;
  std::uint32_t next_;
  std::vector<Known> known_;
  std::uint64_t signatures_[kMostSlots] = {};
  bool is_done_[kCounters][kMostSlots] = {};
  std::atomic<bool> interrupted_{false};
};

}  // namespace zcomm::shm
