#include "shm/ring.h"

#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <stdexcept>

#include "shm/clock.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace zcomm::shm {
namespace {

// How long a rank sleeps before it looks whether its peers live. A death is seen this late.
constexpr double kRestS = 0.05;

// Not private to a process: the word is in memory that several map.
long futex(const std::atomic<std::uint32_t>& word, int what, std::uint32_t value,
           const timespec* timeout) {
  return syscall(SYS_futex, &word, what, value, timeout, nullptr, 0);
}

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Counters wrap around, so only their differences mean anything.
bool is_before(std::uint32_t a, std::uint32_t b) { return static_cast<std::int32_t>(a - b) < 0; }

bool is_power_of_2(int n) { return n > 0 && (n & (n - 1)) == 0; }

}  // namespace

Ring::Ring(int rank, std::vector<Peer> ranks, int slots, std::int64_t slot_nbytes)
    : rank_(rank),
      ranks_(std::move(ranks)),
      slots_(static_cast<std::uint32_t>(slots)),
      slot_nbytes_(slot_nbytes) {
  // Slot numbers go on where chunk numbers wrap around only if 2^32 is a multiple of the slots.
  if (!is_power_of_2(slots) || slots < kLeastSlots || slots > kMostSlots || world() > kMostRanks ||
      slot_nbytes < 64 * world() || slot_nbytes % 64 != 0 || rank < 0 || rank >= world()) {
    throw std::invalid_argument(
        "Ring: expected a rank of at most 128, and 4 or 8 slots of a cache line for each");
  }
  next_ = mine().counters[kCollected].value.load(std::memory_order_relaxed);
  known_.assign(ranks_.size(), Known{{next_, next_, next_}});
  for (int c = 0; c < kCounters; ++c) {
    known_[rank_].counters[c] = mine().counters[c].value.load(std::memory_order_relaxed);
  }
}

Seen Ring::look_at(int rank, Counter counter, std::uint32_t chunk) {
  // Acquire: what the peer did before it moved the counter is done for this rank, too. It has
  // written its slot (published, reduced), or has read this rank's for the last time (collected).
  const std::uint32_t got = control(rank).counters[counter].value.load(std::memory_order_acquire);
  std::uint32_t& last = known_[rank].counters[counter];
  const std::uint32_t most = known_[rank_].counters[kCollected] + slots_;
  if (is_before(got, last) || is_before(most, got)) {
    return {State::kBroken, rank, counter, got, last, most};
  }
  last = got;
  if (is_before(got, chunk + 1)) return {State::kNotYet, rank, counter};
  if (counter == kPublished) {
    const std::size_t at = chunk % slots_;
    // Relaxed: `published` orders it. The peer writes the next one once this rank has collected.
    const std::uint64_t theirs = control(rank).slots[at].signature.load(std::memory_order_relaxed);
    if (theirs != signatures_[at]) return {State::kOtherJob, rank, counter};
  }
  return {State::kReached};
}

// This rank's own counters go by its own copy. If its page has others, something has spoiled it.
Seen Ring::look_at_own() {
  for (int c = 0; c < kCounters; ++c) {
    const std::uint32_t got = mine().counters[c].value.load(std::memory_order_relaxed);
    const std::uint32_t set = known_[rank_].counters[c];
    if (got != set) return {State::kBroken, rank_, static_cast<Counter>(c), got, set, set};
  }
  return {State::kReached};
}

Seen Ring::look(Counter counter, std::uint32_t chunk) {
  Seen found = look_at_own();
  if (found.state != State::kReached) return found;
  for (int r = 0; r < world(); ++r) {
    if (r == rank_) continue;
    const Seen seen = look_at(r, counter, chunk);
    // A rank that is late hides nothing that is wrong with those behind it.
    if (seen.state != State::kReached && seen.state != State::kNotYet) return seen;
    if (found.state == State::kReached) found = seen;
  }
  return found;
}

Seen Ring::wait(Counter counter, std::uint32_t chunk, double timeout_s, int spins) {
  Seen seen = look(counter, chunk);
  for (int i = 0; i < spins && seen.state == State::kNotYet; ++i) {
    pause();
    seen = look(counter, chunk);
  }
  if (seen.state != State::kNotYet) return seen;
  const double started = now_s();
  double asked = started;
  for (;;) {
    const double left_s = started + timeout_s - now_s();
    if (left_s <= 0) return seen;
    sleep_on(seen.rank, counter, chunk, std::min(left_s, kRestS));
    seen = look(counter, chunk);
    if (seen.state != State::kNotYet) return seen;
    if (interrupted_.load(std::memory_order_relaxed)) return {State::kInterrupted, seen.rank};
    if (now_s() < asked + kRestS && timeout_s > kRestS) continue;
    asked = now_s();
    const Seen found = trouble(seen.rank);
    // What a peer did before it died or gave up counts.
    seen = look(counter, chunk);
    if (seen.state != State::kNotYet) return seen;
    if (found.state != State::kNotYet) return found;
  }
}

// Whether a rank will never come: first of all the one that is waited for.
Seen Ring::trouble(int waiting_for) {
  for (int i = 0; i < world(); ++i) {
    const int r = (waiting_for + i) % world();
    if (r == rank_) continue;
    // Acquire: a look from here on finds all that the rank did before.
    if (control(r).gave_up.value.load(std::memory_order_acquire)) return {State::kGaveUp, r};
    pollfd life{ranks_[r].life_fd, POLLIN, 0};
    if (poll(&life, 1, 0) > 0) return {State::kDied, r};
  }
  return {State::kNotYet, waiting_for};
}

// The sleeper writes asleep_on, then reads the counter; the peer writes the counter, then reads
// asleep_on. All four are sequentially consistent, so at least one of them sees what the other
// wrote: either the sleeper does not sleep, or the peer wakes it. Release and acquire would let
// both loads come before the stores. A peer that wakes too early finds nobody, but then the kernel
// finds another value in the counter, which it compares in one step with the sleeper's going to
// sleep.
void Ring::sleep_on(int rank, Counter counter, std::uint32_t chunk, double timeout_s) {
  std::atomic<std::uint32_t>& asleep_on = mine().asleep_on.value;
  const std::atomic<std::uint32_t>& word = control(rank).counters[counter].value;
  asleep_on.store(static_cast<std::uint32_t>(rank) + 1, std::memory_order_seq_cst);
  const std::uint32_t value = word.load(std::memory_order_seq_cst);
  if (is_before(value, chunk + 1)) {
    timespec rest;
    rest.tv_sec = static_cast<time_t>(timeout_s);
    rest.tv_nsec = static_cast<long>((timeout_s - static_cast<double>(rest.tv_sec)) * 1e9);
    futex(word, FUTEX_WAIT, value, &rest);
  }
  asleep_on.store(0, std::memory_order_relaxed);  // who sees it late wakes nobody
}

void Ring::set(Counter counter, std::uint32_t value) {
  std::atomic<std::uint32_t>& word = mine().counters[counter].value;
  known_[rank_].counters[counter] = value;
  // Releases the bytes written to this rank's slot, or the reads of its peers' slots; sequentially
  // consistent for the sake of sleepers.
  word.store(value, std::memory_order_seq_cst);
  for (int r = 0; r < world(); ++r) {
    if (r == rank_) continue;
    const std::uint32_t on = control(r).asleep_on.value.load(std::memory_order_seq_cst);
    if (on == static_cast<std::uint32_t>(rank_) + 1) {
      futex(word, FUTEX_WAKE, INT_MAX, nullptr);
      return;
    }
  }
}

void Ring::publish(std::uint32_t chunk, std::uint64_t signature) {
  const std::size_t at = chunk % slots_;
  signatures_[at] = signature;
  mine().slots[at].signature.store(signature, std::memory_order_relaxed);  // set() releases it
  done(kPublished, chunk);
}

void Ring::done(Counter counter, std::uint32_t chunk) {
  bool* const is_done = is_done_[counter];
  is_done[chunk % slots_] = true;
  const std::uint32_t before = known_[rank_].counters[counter];
  std::uint32_t after = before;
  for (; is_done[after % slots_]; ++after) is_done[after % slots_] = false;
  // A spoiled counter stays as it is, for all to see.
  const std::uint32_t got = mine().counters[counter].value.load(std::memory_order_relaxed);
  if (after != before && got == before) set(counter, after);
}

void Ring::give_up() { mine().gave_up.value.store(1, std::memory_order_release); }

}  // namespace zcomm::shm
