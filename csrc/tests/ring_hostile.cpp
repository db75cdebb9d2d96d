// A peer of the ring that breaks the rules: its counters go back or run ahead, its signatures are
// noise, and it rewrites its slot while others read it. Ranks may refuse it or end with other
// numbers; they never crash, never read or write outside of what they were given, and the rank that
// they name is the culprit.
//
// Only for the address and undefined-behavior sanitizers. Reading what a peer writes is a data race
// here by design, so ThreadSanitizer would report every case.
#include <atomic>

#include "cpu/topk.h"
#include "tests/ring_calls.h"
#include "tests/ring_ranks.h"

namespace zcomm::test {
namespace {

using shm::Counter;
using shm::kCollected;
using shm::kPublished;
using shm::kReduced;
using shm::Outcome;
using shm::Ring;
using shm::Seen;
using shm::State;

constexpr Counter kAllCounters[] = {kPublished, kReduced, kCollected};

// A thread that does the same over and over.
class Nuisance {
 public:
  template <class Body>
  explicit Nuisance(Body body)
      : thread_([this, body] {
          while (!stop_.load(std::memory_order_relaxed)) body();
        }) {}
  ~Nuisance() {
    stop_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

void fill_randomly(Random& random, std::uint8_t* at, std::int64_t nbytes) {
  for (std::int64_t i = 0; i < nbytes; ++i) at[i] = static_cast<std::uint8_t>(random.next());
}

// ---- Counters ----

// Rank 0 of two, and what rank 1 says of itself.
struct Pair {
  Host host;
  Ring ring;

  explicit Pair(std::uint32_t start) : host(2, 128, 4, start), ring(host.ring(0)) {}
  Seen look(Counter counter, std::uint32_t says, std::uint32_t chunk) {
    host.control(1).counters[counter].value = says;
    return ring.look(counter, chunk);
  }
};

void test_counters_that_run_ahead() {
  for (std::uint32_t start : {0u, 0xfffffffeu}) {
    for (Counter counter : kAllCounters) {
      Pair pair(start);
      CHECK(pair.look(counter, start + 4, start).state == State::kReached, "as far as it may");
      const Seen seen = pair.look(counter, start + 5, start);
      CHECK(seen.state == State::kBroken && seen.rank == 1 && seen.counter == counter, "too far");
      CHECK(seen.got == start + 5 && seen.least == start + 4 && seen.most == start + 4, "numbers");
    }
  }
}

void test_counters_that_go_back() {
  for (std::uint32_t start : {0u, 0xfffffffeu}) {
    for (Counter counter : kAllCounters) {
      Pair pair(start);
      CHECK(pair.look(counter, start - 1, start).state == State::kBroken, "before the start");
      CHECK(pair.look(counter, start + 3, start).state == State::kReached, "forward");
      const Seen seen = pair.look(counter, start + 2, start);
      CHECK(seen.state == State::kBroken && seen.rank == 1, "back");
      CHECK(seen.got == start + 2 && seen.least == start + 3, "numbers");
    }
  }
}

void test_counters_of_any_bits() {
  Random random(5);
  for (int i = 0; i < 20000; ++i) {
    const auto start = static_cast<std::uint32_t>(random.next());
    const auto says = random.below(2) ? static_cast<std::uint32_t>(random.next())
                                      : start + static_cast<std::uint32_t>(random.below(20)) - 10;
    Pair pair(start);
    const State state = pair.look(kReduced, says, start).state;
    const std::uint32_t ahead = says - start;
    const State expected = ahead > 4 ? State::kBroken : ahead ? State::kReached : State::kNotYet;
    CHECK(state == expected, std::to_string(start) + " " + std::to_string(says));
  }
}

// ---- Calls ----

// How much of its segment the hostile rank rewrites while it takes part.
enum Reach : int { kSlots, kSignaturesToo, kCountersToo, kReaches };

void scribble(Random& random, const Host& host, int rank, Reach reach) {
  shm::Control& control = host.control(rank);
  const std::int64_t n = 1 + random.below(64);
  const std::int64_t at = random.below(host.slots_nbytes() - n + 1);
  fill_randomly(random, host.slots(rank) + at, n);
  if (reach >= kSignaturesToo && random.below(500) == 0) {
    control.slots[random.below(4)].signature = random.next();
  }
  if (reach < kCountersToo || random.below(500)) return;
  std::atomic<std::uint32_t>& counter = control.counters[random.below(3)].value;
  const auto near = counter + static_cast<std::uint32_t>(random.below(9)) - 3;
  counter = random.below(2) ? near : static_cast<std::uint32_t>(random.next());
  control.asleep_on.value = static_cast<std::uint32_t>(random.below(5));
}

long ended[6];  // the calls of ranks 0 and 1, by state

// One call of three ranks, of which the last is hostile.
void run_hostile_call(std::uint64_t seed, Reach reach) {
  Random random(seed);
  const Host host(3, 192, 4, static_cast<std::uint32_t>(random.next()));
  const RingCall call(random_kind(random), 3, random.below(6000), 1 + random.below(200),
                      random.next());
  std::vector<Outcome> outcomes(3);
  {
    const Nuisance nuisance([&] {
      thread_local Random noise(seed);
      scribble(noise, host, 2, reach);
    });
    in_threads(3, [&](int rank) {
      Ring ring = host.ring(rank);
      outcomes[rank] = run(ring, call.job(rank, kernels(isas()[seed % isas().size()]), 10, 2));
      ring.give_up();
    });
  }
  bool blame_each_other = true;
  for (int rank : {0, 1}) {
    const Seen& seen = outcomes[rank].seen;
    const std::string where = call.describe() + " state " + std::to_string(int(seen.state));
    CHECK(call.left_the_rest_alone(rank), where);
    CHECK(reach != kSlots || seen.state == State::kReached, where);
    const bool refused = seen.state == State::kBroken || seen.state == State::kOtherJob;
    CHECK(!refused || seen.rank == 2, where);
    blame_each_other &= seen.state != State::kReached && seen.rank != 2;
    ++ended[static_cast<int>(seen.state)];
  }
  CHECK(!blame_each_other, call.describe());
}

void run_hostile_calls(Reach reach) {
  std::fill(std::begin(ended), std::end(ended), 0);
  for (std::uint64_t seed = 0; seed < 200; ++seed) run_hostile_call(seed, reach);
  std::printf(
      "        ranks that reached the end %ld, waited in vain %ld, saw one give up %ld,\n"
      "        a broken counter %ld, another call %ld\n",
      ended[0], ended[1], ended[3], ended[4], ended[5]);
}

void test_hostile_slots() { run_hostile_calls(kSlots); }
void test_hostile_signatures() { run_hostile_calls(kSignaturesToo); }
void test_hostile_counters() { run_hostile_calls(kCountersToo); }

// ---- Wires that change while they are decoded ----

Bytes wire_of(const Layout& layout, int kind, std::uint64_t seed) {
  const Bytes grad = make_grad(span(layout), kGradF32, kind, seed, 0);
  Bytes wire(static_cast<std::size_t>(wire_nbytes(layout)));
  encode({&layout, kernels(kIsaScalar), 1, grad.data(), kGradF32, 1.0, nullptr, nullptr,
          kResidualNone, wire.data(), true});
  return wire;
}

// Frames in memory of their own, whose bytes change. Others to take bytes from.
class Target {
 public:
  Target(const Layout& layout, std::uint64_t seed) : layout_(layout), random_(seed) {
    for (int kind : {int{kGaussian}, int{kZeros}, int{kWithNan}, int{kHuge}, int{kKinds}}) {
      donors_.push_back(wire_of(layout, kind, seed + donors_.size()));
    }
    for (const Frame& frame : layout.frames) {
      frames_.emplace_back(static_cast<std::size_t>(frame.nbytes));
      addresses_.push_back(frames_.back().data());
    }
    restore();
  }

  const Layout& layout() const { return layout_; }
  const std::uint8_t* const* frames() const { return addresses_.data(); }

  // All bytes as in one valid wire.
  void restore() {
    const Bytes& donor = pick();
    for (std::size_t f = 0; f < frames_.size(); ++f) {
      std::memcpy(frames_[f].data(), donor.data() + layout_.frames[f].start, frames_[f].size());
    }
  }

  // Some bytes of a frame, seldom of its header, as in another wire or as they come.
  void scribble() {
    const std::size_t f = below(frames_.size());
    const std::size_t size = frames_[f].size(), first = below(100) ? sizeof(Header) : 0;
    if (size == first) return;
    const std::size_t room = size - first, at = first + below(room);
    const std::size_t n = 1 + below(std::min<std::size_t>(size - at, below(4) ? 16 : room));
    std::uint8_t* const to = frames_[f].data() + at;
    if (below(8)) {
      std::memcpy(to, pick().data() + layout_.frames[f].start + at, n);
    } else {
      fill_randomly(random_, to, static_cast<std::int64_t>(n));
    }
  }

 private:
  std::size_t below(std::size_t n) {
    return static_cast<std::size_t>(random_.below(static_cast<std::int64_t>(n)));
  }
  const Bytes& pick() { return donors_[below(donors_.size())]; }

  const Layout& layout_;
  Random random_;
  std::vector<Bytes> donors_, frames_;
  std::vector<const std::uint8_t*> addresses_;
};

void decode_apart(const Target& target, const Kernels* kernels, int turn, const Bytes& out) {
  const auto fault = decode_sum({&target.layout(), kernels, 1 + turn % 2, target.frames(), 1,
                                 reinterpret_cast<float*>(out.data()), turn % 3 == 0, true});
  const std::size_t frames = target.layout().frames.size();
  if (fault) CHECK(fault->wire == 0 && fault->frame.value_or(0) < frames, fault->message);
}

// The same memory as several wires of one frame, as peers' parts are summed.
void decode_together(const Target& target, const Kernels* kernels, const Bytes& out) {
  const std::uint8_t* const wires[] = {target.frames()[0], target.frames()[0], target.frames()[0]};
  decode_sum({&target.layout(), kernels, 1, wires, 3, reinterpret_cast<float*>(out.data()), false});
}

// Between the kernels' looks at a wire its bytes change, wherever that is. In one thread.
thread_local Target* changing = nullptr;
thread_local const Kernels* steady = nullptr;

template <int Codec>
std::uint64_t scan_and_change(const std::uint8_t* words, std::size_t count, std::uint64_t first,
                              bool* unused) {
  const std::uint64_t sum = steady->scan[Codec](words, count, first, unused);
  for (int i = 0; i < 3; ++i) changing->scribble();
  return sum;
}

bool check_and_change(const std::uint8_t* scales, std::size_t count) {
  const bool tame = steady->scales_are_tame(scales, count);
  for (int i = 0; i < 3; ++i) changing->scribble();
  return tame;
}

template <int... Codecs>
Kernels changing_kernels(const Kernels* from, std::integer_sequence<int, Codecs...>) {
  steady = from;
  Kernels k = *from;
  ((k.scan[Codecs] = scan_and_change<Codecs>), ...);
  k.scales_are_tame = check_and_change;
  return k;
}

// Every codec alone, in one task, several, and a last block that is short; then all in three
// frames.
std::vector<Layout> hostile_layouts() {
  std::vector<Layout> layouts;
  std::vector<Part> frames;
  for (int codec = kNone; codec < kCodecs; ++codec) {
    for (std::int64_t n : {5, 333, 4099, 70001}) {
      layouts.push_back(make_layout({part(codec, 5 + static_cast<int>(n % 3), n)}));
    }
    frames.push_back(part(codec, 5, 1045));
    frames.back().frame = (codec - 1) / 4;
  }
  layouts.push_back(make_layout(frames, 3));
  return layouts;
}

void test_wires_that_change_between_looks() {
  for (const Layout& layout : hostile_layouts()) {
    const Bytes out = make_output(layout);
    for (int isa : isas()) {
      Target target(layout, static_cast<std::uint64_t>(isa) + 1);
      changing = &target;
      const Kernels k = changing_kernels(kernels(isa), std::make_integer_sequence<int, kCodecs>());
      for (int i = 0; i < 10; ++i) {
        target.restore();
        decode_apart(target, &k, 2 * i, out);
        if (layout.frames.size() == 1) decode_together(target, &k, out);
      }
    }
  }
}

void test_wires_that_change_at_any_time() {
  for (const Layout& layout : hostile_layouts()) {
    const Bytes out = make_output(layout);
    Target target(layout, 3);
    const Nuisance nuisance([&] {
      target.restore();
      for (int i = 0; i < 20; ++i) target.scribble();
    });
    for (int i = 0; i < 30; ++i) {
      for (int isa : isas()) {
        decode_apart(target, kernels(isa), i, out);
        if (layout.frames.size() == 1) decode_together(target, kernels(isa), out);
      }
    }
  }
}

// All entries move from range 0 to range 1 and back. Every count is valid at all times, and most of
// the time they add up to k: only a decoder that reads a count twice is led past the end. It reads
// 62 others before it could read that of range 1 again.
void test_topk_counts_that_change() {
  constexpr std::int64_t kEntries = 16, kWanted = 64;
  const Layout layout = make_layout({part(kTopk, 0, 64 * kTopkRange, kEntries)});
  const Segment& segment = layout.segments[0];
  const Bytes wire(static_cast<std::size_t>(wire_nbytes(layout)), 0, 0);
  for (std::int64_t i = 0; i < kEntries; ++i) {
    store(wire.data() + segment.section(1) + 2 * i, static_cast<std::uint16_t>(i));
  }
  const auto counts = reinterpret_cast<volatile std::uint32_t*>(wire.data() + segment.section(0));
  const Nuisance nuisance([&] {
    for (int full : {0, 1}) {
      counts[1 - full] = 0;
      counts[full] = kEntries;
      for (int i = 0; i < 50; ++i) asm volatile("");
    }
  });
  const Bytes out((kTopkRange + kWanted) * sizeof(float));
  const std::uint8_t* const wires[] = {wire.data()};
  const DecodeArgs args{
      &layout, kernels(kIsaScalar), 1, wires, 1, reinterpret_cast<float*>(out.data()), false};
  long accepted = 0;
  for (int i = 0; i < 200000; ++i) {
    accepted += !decode_topk(args, {0, kTopkRange, kTopkRange + kWanted});
  }
  std::printf("        %ld of 200000 accepted\n", accepted);
}

}  // namespace
}  // namespace zcomm::test

int main() {
  using namespace zcomm::test;
  return run_all({
      {"counters that run ahead", test_counters_that_run_ahead},
      {"counters that go back", test_counters_that_go_back},
      {"counters of any bits", test_counters_of_any_bits},
      {"slots rewritten during calls", test_hostile_slots},
      {"signatures rewritten during calls", test_hostile_signatures},
      {"counters rewritten during calls", test_hostile_counters},
      {"wires that change between looks", test_wires_that_change_between_looks},
      {"wires that change at any time", test_wires_that_change_at_any_time},
      {"topk counts that change", test_topk_counts_that_change},
  });
}
