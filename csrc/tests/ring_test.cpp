// The ring and its plain loop, with ranks as threads: what every rank ends with, to the bit, and
// what a rank is told whose peers do not come.
//
// Built twice: with the address and undefined-behavior sanitizers, and with ThreadSanitizer, which
// knows nothing of futexes and so sees only what the counters order. Peers that break the rules are
// in ring_hostile.cpp: they race by design.
#include <fcntl.h>

#include <chrono>
#include <stdexcept>

#include "tests/ring_calls.h"
#include "tests/ring_ranks.h"

namespace zcomm::test {
namespace {

using shm::kCollected;
using shm::kPublished;
using shm::kReduced;
using shm::Outcome;
using shm::Ring;
using shm::Seen;
using shm::State;

constexpr double kLongS = 30;  // no test waits so long, however busy the machine
constexpr double kSoonS = 20;

class Stopwatch {
 public:
  double s() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count();
  }

 private:
  std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
};

// ---- Collectives ----

// Tensors of 0 to a few thousand elements, in strips of many runs, or of few and uneven ones.
std::vector<RingCall> random_calls(int count, int world, std::uint64_t seed) {
  constexpr std::int64_t kSizes[] = {0, 1, 2, 63, 257, 1000, 2999};
  constexpr std::int64_t kLongest[] = {3, 40, 1000, 1 << 20};
  Random random(seed);
  std::vector<RingCall> calls;
  for (int i = 0; i < count; ++i) {
    const CallKind kind = random_kind(random);
    const std::int64_t numel = kSizes[random.below(7)], longest = kLongest[random.below(4)];
    calls.emplace_back(kind, world, numel, longest, random.next());
  }
  return calls;
}

// One rank's calls, one after the other; how many ended well.
std::size_t run_calls(Ring& ring, const std::vector<RingCall>& calls, bool spins) {
  Random random(static_cast<std::uint64_t>(ring.rank()) + 1);
  const std::vector<int> sets = isas();
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const int isa = sets[i % sets.size()];
    const Kernels chosen = random.below(2) ? hesitant(isa, random.next()) : *kernels(isa);
    const int most_spins = spins ? static_cast<int>(random.below(300)) : 0;
    if (random.below(4) == 0) usleep(static_cast<useconds_t>(random.below(500)));
    const PlainJob job = calls[i].job(ring.rank(), &chosen, most_spins, kLongS);
    if (run(ring, job).seen.state != State::kReached) return i;
  }
  return calls.size();
}

void compare_calls(const Host& host, const std::vector<RingCall>& calls, bool spins) {
  const int world = host.world();
  std::vector<std::size_t> ended(static_cast<std::size_t>(world));
  in_threads(world, [&](int rank) {
    Ring ring = host.ring(rank);
    ended[rank] = run_calls(ring, calls, spins);
  });
  for (int rank = 0; rank < world; ++rank) {
    const std::string where = " world " + std::to_string(world) + " rank " + std::to_string(rank);
    CHECK(ended[rank] == calls.size(), where + " call " + std::to_string(ended[rank]));
    for (const RingCall& call : calls) CHECK(call.is_right(rank), call.describe() + where);
  }
}

// Many calls on one ring, so slots are used again and again.
void test_collectives() {
  for (int world : {2, 3, 4, 16}) {
    const std::vector<RingCall> calls = random_calls(world < 16 ? 400 : 150, world, world);
    compare_calls(Host(world, 64 * world), calls, false);
  }
}

void test_collectives_of_ranks_that_look_often() {
  for (int world : {2, 3, 4, 16}) {
    const std::vector<RingCall> calls = random_calls(world < 16 ? 400 : 100, world, world + 100);
    compare_calls(Host(world, 192 * world, 8), calls, true);
  }
}

void test_counters_wrap_around() {
  for (int slots : {4, 8}) {
    for (std::uint32_t before : {1, 2, 3, 7, 50}) {
      const Host host(3, 64 * 3, slots, 0 - before);
      compare_calls(host, random_calls(10, 3, before), before % 2);
    }
  }
}

// All of a chunk in one slot, and tiles of several runs.
void test_large_slots() { compare_calls(Host(2, 1 << 16), random_calls(40, 2, 7), false); }

// ---- Counters ----

void test_counters_pass_chunks_in_order() {
  const Host host(2, 128);
  Ring ring = host.ring(0), peer = host.ring(1);
  const auto& counter = host.control(0).counters[kCollected].value;
  for (int i = 0; i < 3; ++i) ring.publish(ring.take(), 5);
  for (int i = 0; i < 3; ++i) peer.publish(peer.take(), 5);
  ring.done(kCollected, 1);
  CHECK(counter == 0, "chunk 0 is under way");
  CHECK(peer.look(kCollected, 0).state == State::kNotYet, "chunk 0");
  ring.done(kCollected, 0);
  CHECK(counter == 2, "chunks 0 and 1 are done");
  CHECK(peer.look(kCollected, 1).state == State::kReached, "chunk 1");
  ring.done(kCollected, 2);
  CHECK(counter == 3, "chunk 2 is done");
}

void test_slot_is_free_once_all_have_collected() {
  const Host host(3, 192);
  Ring ring = host.ring(0), first = host.ring(1), second = host.ring(2);
  for (std::uint32_t chunk = 0; chunk < 4; ++chunk) {
    CHECK(ring.look_free(chunk).state == State::kReached, "a slot not used yet");
    ring.publish(ring.take(), 5);
  }
  CHECK(ring.look_free(4).state == State::kNotYet, "nobody has collected");
  first.done(kCollected, 0);
  CHECK(ring.look_free(4).rank == 2, "who has not collected");
  second.done(kCollected, 0);
  CHECK(ring.look_free(4).state == State::kReached, "all have collected");
  CHECK(ring.look_free(5).state == State::kNotYet, "the next slot");
}

// Ranks publish as far ahead as slots allow, which no collective does: there, the wait for what
// peers publish already keeps ranks within two chunks of each other.
bool walks_ahead(Ring& ring, std::uint32_t chunks) {
  const std::uint32_t first = ring.next(), lag = static_cast<std::uint32_t>(ring.slots()) - 1;
  const auto nbytes = static_cast<std::size_t>(ring.slot_nbytes());
  const auto fill = [](int rank, std::uint32_t t) {
    return static_cast<std::uint8_t>(t * 5 + rank);
  };
  bool good = true;
  for (std::uint32_t t = 0; t < chunks + lag; ++t) {
    if (t < chunks) {
      if (ring.wait_free(first + t, kLongS).state != State::kReached) return false;
      std::memset(ring.slot(ring.rank(), ring.take()), fill(ring.rank(), t), nbytes);
      ring.publish(first + t, 5);
      hesitate();
    }
    if (t < lag) continue;
    const std::uint32_t chunk = first + t - lag;
    if (ring.wait(kPublished, chunk, kLongS).state != State::kReached) return false;
    for (int r = 0; r < ring.world(); ++r) {
      const std::uint8_t* const slot = ring.slot(r, chunk);
      for (std::size_t i = 0; i < nbytes; ++i) {
        if (i % 64 == 0) hesitate();
        good &= slot[i] == fill(r, t - lag);
      }
    }
    ring.done(kReduced, chunk);
    ring.done(kCollected, chunk);
  }
  return good;
}

void test_slots_are_kept_until_collected() {
  for (int world : {2, 3, 4, 16}) {
    for (int slots : {4, 8}) {
      const Host host(world, 64 * world, slots, 0 - 100u);
      std::vector<char> good(static_cast<std::size_t>(world));
      in_threads(world, [&](int rank) {
        hesitations = Random(static_cast<std::uint64_t>(rank));
        Ring ring = host.ring(rank);
        good[rank] = walks_ahead(ring, world < 16 ? 500 : 150);
      });
      for (int rank = 0; rank < world; ++rank) {
        CHECK(good[rank], "world " + std::to_string(world) + " rank " + std::to_string(rank));
      }
    }
  }
}

bool is_refused(const std::vector<shm::Peer>& ranks, int rank, int slots, std::int64_t nbytes) {
  try {
    Ring(rank, ranks, slots, nbytes);
    return false;
  } catch (const std::invalid_argument&) {
    return true;
  }
}

// With two slots, ranks would wait for each other.
void test_wrong_sizes_are_refused() {
  alignas(64) static std::uint8_t page[shm::kControlBytes] = {};
  const std::vector<shm::Peer> ranks(2, {page, -1});
  CHECK(!is_refused(ranks, 1, 4, 128), "fits");
  for (int slots : {0, 1, 2, 3, 5, 16}) CHECK(is_refused(ranks, 0, slots, 128), "slots");
  for (int rank : {-1, 2}) CHECK(is_refused(ranks, rank, 4, 128), "rank");
  for (int nbytes : {0, 64, 130}) CHECK(is_refused(ranks, 0, 4, nbytes), "bytes");
}

// ---- Ranks that do not come ----

// Of three ranks, all but `absent` have published chunk 0; rank 0 waits.
struct Waiting {
  Host host{3, 192};
  int absent = 2;

  Seen wait(double timeout_s, int spins = 0) const {
    Ring ring = host.ring(0);
    ring.publish(ring.take(), 5);
    for (int r = 1; r < 3; ++r) {
      Ring peer = host.ring(r);
      if (r != absent) peer.publish(peer.take(), 5);
    }
    return ring.wait(kPublished, 0, timeout_s, spins);
  }
};

void test_rank_that_never_comes() {
  for (int absent : {1, 2}) {
    for (double timeout_s : {0.0, 0.01, 0.2}) {
      const Stopwatch watch;
      const Seen seen = Waiting{Host(3, 192), absent}.wait(timeout_s, 10);
      const double took_s = watch.s();
      CHECK(seen.state == State::kNotYet && seen.rank == absent, "rank " + std::to_string(absent));
      CHECK(took_s >= timeout_s && took_s < timeout_s + kSoonS, std::to_string(took_s));
    }
  }
}

void test_rank_that_gives_up() {
  for (int culprit : {1, 2}) {  // also one that is not waited for first
    const Waiting waiting;
    std::thread later([&] {
      usleep(20000);
      waiting.host.ring(culprit).give_up();
    });
    const Stopwatch watch;
    const Seen seen = waiting.wait(kLongS);
    later.join();
    CHECK(seen.state == State::kGaveUp && seen.rank == culprit, std::to_string(culprit));
    CHECK(watch.s() < kSoonS, "it is seen soon");
  }
}

void test_rank_that_dies() {
  for (int culprit : {1, 2}) {
    Waiting waiting;
    int ends[2];
    CHECK(pipe2(ends, O_CLOEXEC) == 0, "pipe");
    waiting.host.watch(culprit, ends[0]);
    std::thread later([&] {
      usleep(20000);
      close(ends[1]);
    });
    const Stopwatch watch;
    const Seen seen = waiting.wait(kLongS);
    later.join();
    close(ends[0]);
    CHECK(seen.state == State::kDied && seen.rank == culprit, std::to_string(culprit));
    CHECK(watch.s() < kSoonS, "it is seen soon");
  }
}

// What it did before counts: the others may not need more of it.
void test_last_steps_of_a_rank_count() {
  for (int round = 0; round < 200; ++round) {
    const Host host(2, 128);
    Seen seen{};
    in_threads(2, [&](int rank) {
      Ring ring = host.ring(rank);
      if (rank == 1 && round % 4) usleep(static_cast<useconds_t>(round));
      ring.publish(ring.take(), 5);
      if (rank == 1) return ring.give_up();
      seen = ring.wait(kPublished, 0, kLongS);
    });
    CHECK(seen.state == State::kReached, "round " + std::to_string(round));
    if (round % 20) continue;
    CHECK(host.ring(0).wait(kReduced, 0, kLongS).state == State::kGaveUp, "the next step");
  }
}

// Ranks 0 and 1 are in a call that rank 2 leaves after its first steps.
void test_call_that_a_rank_leaves() {
  const CallKind kind{kAllReduce, kNone, kGradF32, kGradF32};
  const RingCall call(kind, 3, 3000, 40, 1);
  const Host host(3, 192);
  std::vector<Outcome> outcomes(3);
  in_threads(3, [&](int rank) {
    Ring ring = host.ring(rank);
    if (rank < 2) {
      outcomes[rank] = run(ring, call.job(rank, kernels(kIsaScalar), 0));
      return;
    }
    for (int i = 0; i < 3; ++i) ring.publish(ring.take(), call.job(0, nullptr, 0).call.signature);
    for (std::uint32_t i = 0; i < 2; ++i) ring.done(kReduced, i);
    ring.give_up();
  });
  for (int rank : {0, 1}) {
    const Outcome& outcome = outcomes[rank];
    CHECK(outcome.seen.state == State::kGaveUp && outcome.seen.rank == 2, "who is at fault");
    CHECK(outcome.t > 0 && outcome.t + 1 < outcome.count, std::to_string(outcome.t));
    CHECK(call.left_the_rest_alone(rank), "what is nobody's");
  }
}

void test_other_call() {
  const CallKind kind{kAllGather, kBf16, kGradF32, kGradBf16};
  const RingCall call(kind, 2, 300, 40, 1), other(kind, 2, 300, 40, 2);
  const Host host(2, 128);
  std::vector<Seen> seen(2);
  in_threads(2, [&](int rank) {
    Ring ring = host.ring(rank);
    seen[rank] = run(ring, (rank ? other : call).job(rank, kernels(kIsaScalar), 0)).seen;
  });
  for (int rank : {0, 1}) {
    CHECK(seen[rank].state == State::kOtherJob && seen[rank].rank == 1 - rank, "rank");
  }
}

}  // namespace
}  // namespace zcomm::test

int main() {
  using namespace zcomm::test;
  return run_all({
      {"collectives", test_collectives},
      {"collectives of ranks that look often", test_collectives_of_ranks_that_look_often},
      {"counters wrap around", test_counters_wrap_around},
      {"large slots", test_large_slots},
      {"counters pass chunks in order", test_counters_pass_chunks_in_order},
      {"a slot is free once all have collected", test_slot_is_free_once_all_have_collected},
      {"slots are kept until they are collected", test_slots_are_kept_until_collected},
      {"wrong sizes are refused", test_wrong_sizes_are_refused},
      {"a rank that never comes", test_rank_that_never_comes},
      {"a rank that gives up", test_rank_that_gives_up},
      {"a rank that dies", test_rank_that_dies},
      {"the last steps of a rank count", test_last_steps_of_a_rank_count},
      {"a call that a rank leaves", test_call_that_a_rank_leaves},
      {"another call", test_other_call},
  });
}
