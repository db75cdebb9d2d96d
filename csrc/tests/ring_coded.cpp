// The coded loop, with ranks as threads: what every rank ends with, to the bit, how a call goes on
// whose time was up, and a peer that rewrites its slot while others read it.
//
// The last test is only for the address and undefined-behavior sanitizers, like ring_hostile.cpp.
#include <atomic>

#include "tests/coded_calls.h"
#include "tests/ring_ranks.h"

namespace zcomm::test {
namespace {

using shm::CodedOutcome;
using shm::Ring;
using shm::State;

std::vector<CodedCall> random_calls(int count, int world, std::uint64_t seed) {
  Random random(seed);
  std::vector<CodedCall> calls;
  for (int i = 0; i < count; ++i) {
    const auto collective = static_cast<Collective>(random.below(kCollectives));
    calls.emplace_back(collective, world, 1 + static_cast<int>(random.below(6)), random.next());
  }
  return calls;
}

std::int64_t largest_slot(const std::vector<CodedCall>& calls) {
  std::int64_t nbytes = 0;
  for (const CodedCall& call : calls) nbytes = std::max(nbytes, call.slot_nbytes());
  return nbytes;
}

void test_collectives() {
  for (int world : {2, 3, 4, 7}) {
    const std::vector<CodedCall> calls = random_calls(60, world, world);
    const Host host(world, largest_slot(calls));
    in_threads(world, [&](int rank) {
      Ring ring = host.ring(rank);
      for (std::size_t i = 0; i < calls.size(); ++i) {
        const Kernels* chosen = kernels(isas()[i % isas().size()]);
        const CodedOutcome outcome = run(ring, calls[i].job(rank, chosen));
        const State state = outcome.end.seen.state;
        CHECK(state == State::kReached && !outcome.refused, calls[i].describe());
      }
    });
    for (const CodedCall& call : calls) {
      for (int rank = 0; rank < world; ++rank) CHECK(call.is_right(rank), call.describe());
    }
  }
}

// ---- Calls of one exchange ----

void test_brief_call_of_several_exchanges_is_not_begun() {
  const CodedCall call(kAllReduce, 2, 3, 1);
  const Host host(2, call.slot_nbytes());
  Ring ring = host.ring(0);
  CodedJob job = call.job(0, kernels(kIsaScalar));
  job.call.brief = true;
  const CodedOutcome outcome = run(ring, job);
  CHECK(outcome.end.seen.state == State::kNotYet && !outcome.end.begun, "not begun");
  CHECK(ring.next() == 0 && host.control(0).counters[shm::kPublished].value == 0, "untouched");
}

// Rank 0 gives up waiting, and goes on where it was.
void test_call_goes_on_where_its_time_was_up() {
  for (Collective collective : {kAllReduce, kReduceScatter, kAllGather}) {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      const CodedCall call(collective, 2, 1, seed);
      const Host host(2, call.slot_nbytes());
      Ring ring = host.ring(0), late = host.ring(1);
      CodedJob job = call.job(0, kernels(kIsaScalar), 0.0);
      job.call.brief = true;
      const CodedOutcome first = run(ring, job);
      CHECK(first.end.seen.state == State::kNotYet && first.end.begun == 0u, call.describe());
      CHECK(host.control(0).counters[shm::kPublished].value == 1, "published");
      in_threads(2, [&](int rank) {
        CodedJob rest = call.job(rank, kernels(kIsaScalar));
        if (rank == 0) rest.call.begun = first.end.begun;
        const CodedOutcome outcome = run(rank ? late : ring, rest);
        CHECK(outcome.end.seen.state == State::kReached, call.describe());
      });
      CHECK(ring.next() == 1 && host.control(0).counters[shm::kPublished].value == 1, "once");
      for (int rank : {0, 1}) CHECK(call.is_right(rank), call.describe());
    }
  }
}

// ---- Parcels ----

// One rank's: those for the others, or those from them.
struct Mail {
  Mail(int rank, int world, std::int64_t nbytes)
      : bytes(static_cast<std::size_t>(world * nbytes)),
        parcels{rank, world, reinterpret_cast<std::uintptr_t>(bytes.data()), nbytes} {}

  Bytes bytes;
  shm::Parcels parcels;
};

void test_parcels() {
  for (int world : {2, 3, 5}) {
    for (std::uint64_t seed = 0; seed < 60; ++seed) {
      const CodedCall call(static_cast<Collective>(seed % kCollectives), world, 1, seed);
      const Kernels* chosen = kernels(isas()[seed % isas().size()]);
      const std::int64_t nbytes = call.slot_nbytes();
      std::vector<Mail> sent, arrived;
      for (int r = 0; r < world; ++r) {
        sent.emplace_back(r, world, nbytes);
        put(sent[r].parcels, call.job(r, chosen));
        arrived.emplace_back(r, world, nbytes);
      }
      for (int to = 0; to < world; ++to) {
        for (int from = 0; from < world; ++from) {
          std::memcpy(arrived[to].bytes.data() + from * nbytes,
                      sent[from].bytes.data() + to * nbytes, nbytes);
        }
        CHECK(!take(arrived[to].parcels, call.job(to, chosen)), call.describe());
        CHECK(call.is_right(to), call.describe());
      }
    }
  }
}

// ---- A hostile peer ----

// Rank 2 rewrites its slots all the time. Ranks refuse its frames or end with other numbers; they
// never read or write outside of what they were given.
void test_slots_rewritten_during_calls() {
  long refused = 0, ended = 0;
  for (std::uint64_t seed = 0; seed < 150; ++seed) {
    const auto collective = static_cast<Collective>(seed % kCollectives);
    const CodedCall call(collective, 3, 1 + static_cast<int>(seed % 3), seed);
    const Host host(3, call.slot_nbytes());
    std::vector<CodedOutcome> outcomes(3);
    std::atomic<bool> stop{false};
    std::thread nuisance([&] {
      Random noise(seed);
      while (!stop.load(std::memory_order_relaxed)) {
        const std::int64_t at = noise.below(host.slots_nbytes() - 8);
        store(host.slots(2) + at, noise.next() >> noise.below(64));
      }
    });
    in_threads(3, [&](int rank) {
      Ring ring = host.ring(rank);
      outcomes[rank] = run(ring, call.job(rank, kernels(isas()[seed % isas().size()]), 2));
      ring.give_up();
    });
    stop = true;
    nuisance.join();
    for (int rank : {0, 1}) {
      CHECK(call.left_the_rest_alone(rank), call.describe());
      ++(outcomes[rank].refused ? refused : ended);
    }
  }
  std::printf("        %ld refused a frame, %ld did not\n", refused, ended);
  CHECK(refused > 0 && ended > 0, "both happen");
}

}  // namespace
}  // namespace zcomm::test

int main(int argc, char**) {
  using namespace zcomm::test;
  std::vector<Test> tests = {
      {"collectives", test_collectives},
      {"a brief call of several exchanges is not begun",
       test_brief_call_of_several_exchanges_is_not_begun},
      {"a call goes on where its time was up", test_call_goes_on_where_its_time_was_up},
      {"parcels", test_parcels},
  };
  if (argc > 1)
    tests.push_back({"slots rewritten during calls", test_slots_rewritten_during_calls});
  return run_all(tests);
}
