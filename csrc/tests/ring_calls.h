// Calls of the plain loop for the tests of the ring: random ones of every kind, and what each rank
// must end with, to the bit.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <algorithm>

#include "shm/plain.h"
#include "tests/harness.h"

namespace zcomm::test {

using shm::Place;
using shm::PlainJob;
using shm::Strip;

enum Collective : int { kAllReduce, kReduceScatter, kAllGather, kCollectives };

// What differs between calls. All ranks make the same.
struct CallKind {
  Collective collective;
  std::uint8_t codec;
  GradType source, target;
  bool accumulate = false;  // of a reduce-scatter
  bool in_place = false;    // of an all-reduce
  float prescale = 1.0f;
};

// A tensor and elements of it, in the order of a strip.
struct Tensor {
  Bytes bytes;
  GradType type;

  Tensor(std::int64_t numel, GradType given)
      : bytes(static_cast<std::size_t>(numel * (given == kGradF32 ? 4 : 2))), type(given) {}
  Tensor(Bytes given, GradType of) : bytes(std::move(given)), type(of) {}

  Place place() const { return {bytes.data(), type}; }
  float get(std::int64_t i) const { return grad_value(bytes, type, i); }
  void set(std::int64_t i, float x) {
    if (type == kGradF32) store(bytes.data() + 4 * i, x);
    if (type == kGradBf16) store(bytes.data() + 2 * i, bf16_saturate(x));
    if (type == kGradF16) store(bytes.data() + 2 * i, fp16_saturate(x));
  }
};

inline std::vector<std::int64_t> elements(const Strip& strip) {
  std::vector<std::int64_t> all;
  for (const shm::Run& run : strip.runs) {
    for (std::int64_t i = 0; i < run.n; ++i) all.push_back(run.at + i);
  }
  return all;
}

inline std::int64_t end_of(const Strip& strip) {
  return strip.runs.empty() ? 0 : strip.runs.back().at + strip.runs.back().n;
}

// What a number is after it went through a slot.
inline float sent(std::uint8_t codec, float x) {
  if (codec == kBf16) return bf16_value(bf16_saturate(x));
  return codec == kFp16 ? fp16_value(fp16_saturate(x)) : x;
}

// Runs of random lengths up to `longest`, with elements between them that are nobody's.
inline std::vector<Strip> random_strips(Random& random, int world, std::int64_t numel,
                                        std::int64_t longest) {
  std::vector<std::vector<shm::Run>> runs(static_cast<std::size_t>(world));
  for (std::int64_t at = 0; at < numel;) {
    const std::int64_t n = std::min(1 + random.below(longest), numel - at);
    runs[random.below(world)].push_back({at, n});
    at += n + (random.below(4) ? 0 : 1 + random.below(5));
  }
  return {runs.begin(), runs.end()};
}

// The same number of elements elsewhere.
inline Strip moved(Random& random, std::int64_t numel) {
  std::vector<shm::Run> runs;
  for (std::int64_t at = random.below(3); numel > 0;) {
    const std::int64_t n = std::min(numel, 1 + random.below(700));
    runs.push_back({at, n});
    at += n + random.below(3);
    numel -= n;
  }
  return Strip(std::move(runs));
}

// One call of all ranks.
class RingCall {
 public:
  RingCall(const CallKind& kind, int world, std::int64_t numel, std::int64_t longest_run,
           std::uint64_t seed)
      : kind_(kind), seed_(seed) {
    Random random(seed);
    strips_ = random_strips(random, world, numel, longest_run);
    for (int r = 0; r < world; ++r) add_rank(random, r, numel);
    if (kind.collective == kAllGather) {
      expect_gathered();
    } else {
      expect_sums();
    }
  }

  PlainJob job(int rank, const Kernels* kernels, int spins, double timeout_s = 60) const {
    const Rank& mine = ranks_[rank];
    const bool reduce = kind_.collective != kAllGather, gather = kind_.collective != kReduceScatter;
    const Tensor& source = kind_.in_place ? mine.written : mine.source;
    return {{reduce, gather, seed_, timeout_s, spins},
            kernels,
            kind_.codec,
            kind_.prescale,
            &strips_,
            reduce ? source.place() : Place{},
            gather ? mine.written.place() : Place{},
            &mine.own,
            reduce ? mine.written.place() : source.place(),
            kind_.accumulate};
  }

  // Whether a rank's memory is what it must be; what is nobody's is as it was.
  bool is_right(int rank) const {
    return ranks_[rank].written.bytes == ranks_[rank].expected.bytes;
  }
  bool left_the_rest_alone(int rank) const {
    const Rank& r = ranks_[rank];
    std::vector<bool> owned(r.written.bytes.size() / width(r));
    const auto take = [&](const Strip& strip) {
      for (std::int64_t i : elements(strip)) owned[i] = true;
    };
    if (kind_.collective == kReduceScatter) {
      take(r.own);
    } else {
      std::for_each(strips_.begin(), strips_.end(), take);
    }
    for (std::size_t i = 0; i < owned.size(); ++i) {
      const std::size_t at = i * width(r);
      if (!owned[i] &&
          std::memcmp(r.written.bytes.data() + at, r.expected.bytes.data() + at, width(r))) {
        return false;
      }
    }
    return true;
  }

  std::string describe() const {
    return "collective " + std::to_string(kind_.collective) + " codec " +
           std::to_string(kind_.codec) + " source " + std::to_string(kind_.source) + " target " +
           std::to_string(kind_.target) + (kind_.accumulate ? " accumulate" : "") +
           (kind_.in_place ? " in place" : "") + " seed " + std::to_string(seed_);
  }

 private:
  struct Rank {
    Strip own;  // in its own memory, which one hop reads or writes
    Tensor source, written, expected;
  };

  static std::size_t width(const Rank& r) { return r.written.type == kGradF32 ? 4 : 2; }

  // Integers whose sums are exact in every type, or numbers whose sums depend on their order.
  Bytes numbers(std::int64_t numel, GradType type, std::uint64_t seed) const {
    return make_grad(numel, type, seed_ % 2 ? kIntegers : kGaussian, seed, 0);
  }

  void add_rank(Random& random, int r, std::int64_t numel) {
    Strip own = moved(random, strips_[r].numel);
    const std::int64_t packed = end_of(own);
    const bool gathers = kind_.collective == kAllGather,
               scatters = kind_.collective == kReduceScatter;
    Tensor source(numbers(gathers ? packed : numel, kind_.source, random.next()), kind_.source);
    Tensor written(scatters ? packed : numel, kind_.target);
    if (kind_.accumulate) written.bytes = numbers(packed, kind_.target, random.next());
    if (kind_.in_place) written.bytes = Bytes(source.bytes);
    Tensor expected = written;
    ranks_.push_back({std::move(own), std::move(source), std::move(written), std::move(expected)});
  }

  void expect_gathered() {
    for (std::size_t owner = 0; owner < ranks_.size(); ++owner) {
      const std::vector<std::int64_t> from = elements(ranks_[owner].own);
      const std::vector<std::int64_t> to = elements(strips_[owner]);
      for (std::size_t i = 0; i < to.size(); ++i) {
        const float x = ranks_[owner].source.get(from[i]);
        for (Rank& r : ranks_) r.expected.set(to[i], sent(kind_.codec, x * kind_.prescale));
      }
    }
  }

  void expect_sums() {
    for (std::size_t owner = 0; owner < ranks_.size(); ++owner) {
      const std::vector<std::int64_t> from = elements(strips_[owner]);
      const std::vector<std::int64_t> to = elements(ranks_[owner].own);
      for (std::size_t i = 0; i < from.size(); ++i) expect_sum(owner, from[i], to[i]);
    }
  }

  void expect_sum(std::size_t owner, std::int64_t from, std::int64_t to) {
    float sum = -0.0f;  // -0 + x is x, zeros included
    for (const Rank& r : ranks_) sum += sent(kind_.codec, r.source.get(from) * kind_.prescale);
    Tensor& packed = ranks_[owner].expected;
    if (kind_.collective == kReduceScatter) {
      packed.set(to, kind_.accumulate ? sum + packed.get(to) : sum);
      return;
    }
    for (Rank& r : ranks_) r.expected.set(from, sent(kind_.codec, sum));
  }

  CallKind kind_;
  std::uint64_t seed_;
  std::vector<Strip> strips_;
  std::vector<Rank> ranks_;
};

// One of the kinds that zcomm/engine/plain.py lets through.
inline CallKind random_kind(Random& random) {
  CallKind kind;
  kind.collective = static_cast<Collective>(random.below(kCollectives));
  kind.codec = static_cast<std::uint8_t>(kNone + random.below(3));
  kind.source = static_cast<GradType>(random.below(3));
  kind.target = kGradF32;
  if (kind.collective == kReduceScatter) {
    kind.accumulate = random.below(2);
  } else if (kind.codec != kNone && random.below(2)) {
    kind.target = kind.codec == kBf16 ? kGradBf16 : kGradF16;
  }
  kind.in_place =
      kind.collective == kAllReduce && kind.source == kind.target && random.below(2) > 0;
  kind.prescale = random.below(2) ? 1.0f : 0.25f;
  return kind;
}

// ---- Ranks that hesitate ----

inline thread_local Random hesitations(0);
inline thread_local const Kernels* swift = nullptr;

inline void hesitate() {
  const std::int64_t turn = hesitations.below(64);
  if (turn == 0) usleep(static_cast<useconds_t>(hesitations.below(300)));
  if (turn > 56) sched_yield();
}

template <GradType Type>
void load_late(const void* grad, float prescale, const void* residual, std::size_t n, float* v) {
  hesitate();
  swift->load[Type][kResidualNone](grad, prescale, residual, n, v);
}

template <CodecId Codec>
void decode_late(const std::uint8_t* const* codes, int count, std::size_t n, float* out,
                 bool stream) {
  hesitate();
  swift->decode_plain[Codec](codes, count, n, out, stream);
}

// Kernels that pause at random, before they read and before they sum. For this thread.
inline Kernels hesitant(int isa, std::uint64_t seed) {
  hesitations = Random(seed);
  swift = kernels(isa);
  Kernels k = *swift;
  k.load[kGradF32][kResidualNone] = load_late<kGradF32>;
  k.load[kGradBf16][kResidualNone] = load_late<kGradBf16>;
  k.load[kGradF16][kResidualNone] = load_late<kGradF16>;
  k.decode_plain[kNone] = decode_late<kNone>;
  k.decode_plain[kBf16] = decode_late<kBf16>;
  k.decode_plain[kFp16] = decode_late<kFp16>;
  return k;
}

}  // namespace zcomm::test
