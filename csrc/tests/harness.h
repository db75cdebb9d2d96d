// What the native tests share: counted checks, layouts, inputs, buffers without slack.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "cpu/encode.h"

namespace zcomm::test {

// Counts what was checked, in any thread; prints the first failures.
class Tally {
 public:
  bool check(bool ok, const char* what, int line, const std::string& where) {
    ++(ok ? passed_ : failed_);
    if (!ok && failed_ <= 20) {
      std::printf("FAILED line %d: %s [%s]\n", line, what, where.c_str());
      std::fflush(stdout);
    }
    return ok;
  }
  int finish() const {
    std::printf("%ld passed, %ld failed\n", passed_.load(), failed_.load());
    return failed_ ? 1 : 0;
  }
  long failed() const { return failed_; }

 private:
  std::atomic<long> passed_{0}, failed_{0};
};

inline Tally tally;

#define CHECK(ok, where) ::zcomm::test::tally.check((ok), #ok, __LINE__, (where))

// The instruction sets to test: those of this processor, and an emulated one if it is linked in.
inline const Kernels* kernels(int isa) {
#if defined(ZCOMM_EMULATED_AVX512)
  if (isa == kIsaAvx512) return &kAvx512Kernels;
#endif
  return kernels_for(isa);
}

inline std::vector<int> isas() {
  std::vector<int> found;
  for (int isa = 0; isa < kIsas; ++isa) {
    if (kernels(isa)) found.push_back(isa);
  }
  return found;
}

inline void print_isas() {
  std::printf("instruction sets:");
  for (int isa : isas()) std::printf(" %s", kIsaNames[isa]);
  std::printf("\n");
}

struct Test {
  const char* name;
  void (*run)();
};

// The whole of main: runs the tests and says how each went; the exit code.
inline int run_all(const std::vector<Test>& tests) {
  print_isas();
  for (const Test& test : tests) {
    const long before = tally.failed();
    test.run();
    std::printf("%-8s%s\n", tally.failed() == before ? "ok" : "FAILED", test.name);
    std::fflush(stdout);
  }
  return tally.finish();
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {  // splitmix64
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(n));
  }
  float uniform() { return static_cast<float>(next() >> 40) * 0x1p-24f; }
  float gaussian() {  // near enough: twelve uniforms
    float sum = -6.0f;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  }

 private:
  std::uint64_t state_;
};

// Heap bytes that end exactly where the allocation ends, `shift` bytes after its aligned start.
class Bytes {
 public:
  explicit Bytes(std::size_t size, std::size_t shift = 0, int fill = 0xa5)
      : heap_(std::malloc(size + shift), std::free), size_(size), shift_(shift) {
    std::memset(heap_.get(), fill, size + shift);
  }
  Bytes(const Bytes& other) : Bytes(other.size_, other.shift_) {
    std::memcpy(data(), other.data(), size_);
  }
  Bytes(Bytes&&) = default;
  Bytes& operator=(Bytes&&) = default;

  std::uint8_t* data() const { return static_cast<std::uint8_t*>(heap_.get()) + shift_; }
  std::size_t size() const { return size_; }
  bool operator==(const Bytes& other) const {
    return size_ == other.size_ && std::memcmp(data(), other.data(), size_) == 0;
  }

 private:
  std::unique_ptr<void, decltype(&std::free)> heap_;
  std::size_t size_, shift_;
};

// One segment to lay out: `gap` elements of the gradient lie unused before it.
struct Part {
  std::uint8_t codec;
  int log2_block;
  std::int64_t n, k;
  int frame = 0;
  std::int64_t gap = 0;
};

inline Part part(int codec, int log2_block, std::int64_t n, std::int64_t k = -1) {
  const auto id = static_cast<std::uint8_t>(codec);
  const std::int64_t default_k = (n + 9) / 10;
  return {id, has_blocks(id) ? log2_block : 0, n, id != kTopk ? 0 : k < 0 ? default_k : k};
}

inline std::uint32_t layout_hash(std::uint32_t hash, const Part& p) {
  const auto feed = [&](std::uint64_t x, int nbytes) {
    for (int i = 0; i < nbytes; ++i) hash = (hash ^ (x >> (8 * i) & 0xff)) * 0x01000193u;
  };
  feed(p.codec, 1);
  feed(static_cast<std::uint64_t>(p.log2_block), 1);
  feed(static_cast<std::uint64_t>(p.n), 8);
  feed(static_cast<std::uint64_t>(p.k), 8);
  return hash;
}

// Parts come in the order of their frames.
inline Layout make_layout(const std::vector<Part>& parts, int frames = 1) {
  CountedVector<Segment> segments;
  CountedVector<Frame> all;
  std::int64_t offset = 0, start = 0;
  for (int f = 0; f < frames; ++f) {
    Frame frame{start, static_cast<std::int64_t>(sizeof(Header)), 0, 0, 0x811c9dc5u};
    for (const Part& p : parts) {
      if (p.frame != f) continue;
      offset += p.gap;
      segments.push_back({p.codec, p.log2_block, p.n, p.k, offset, f, start + frame.nbytes, {}});
      offset += p.n;
      frame.nbytes += sections(p.codec, p.log2_block, p.n, p.k).nbytes();
      frame.codec = frame.codec == 0 || frame.codec == p.codec ? p.codec : std::uint8_t{kMixed};
      frame.elements += p.n;
      frame.hash = layout_hash(frame.hash, p);
    }
    start += frame.nbytes;
    all.push_back(frame);
  }
  return Layout(std::move(segments), std::move(all));
}

inline std::int64_t span(const Layout& layout) {
  return layout.segments.empty() ? 0 : layout.segments.back().offset + layout.segments.back().n;
}
inline std::int64_t wire_nbytes(const Layout& layout) {
  return layout.frames.back().start + layout.frames.back().nbytes;
}

// What gradients can look like.
enum Kind : int {
  kGaussian,
  kIntegers,   // many ties
  kSubnormal,  // mostly below the least normal number
  kTiny,       // around 1e-38
  kHuge,       // around 1e38
  kZeros,      // of both signs, a few other values
  kOutlier,
  kConstant,
  kAnyBits,  // NaN and infinities among them
  kWithNan,
  kWithInf,
  kKinds
};

inline float sample(Kind kind, Random& random, int i) {
  const float x = random.gaussian();
  switch (kind) {
    case kIntegers:
      return static_cast<float>(random.below(9) - 4);
    case kSubnormal:
      return x * 1e-39f;
    case kTiny:
      return x * 2e-38f;
    case kHuge:
      return x * 0.6e38f;
    case kZeros:
      return random.below(40) ? (x < 0 ? -0.0f : 0.0f) : x;
    case kOutlier:
      return random.below(70) ? x : x * 1e6f;
    case kConstant:
      return 0.37f;
    case kAnyBits:
      return from_bits(static_cast<std::uint32_t>(random.next()));
    case kWithNan:
      return i % 211 == 5 ? from_bits(0x7f812345u) : x;
    case kWithInf:
      return i % 307 == 7 ? (x < 0 ? -1.0f : 1.0f) / 0.0f : x;
    default:
      return x;
  }
}

// n gradients of one type; kKinds: every 50 elements another kind, all of them finite but rarely.
inline Bytes make_grad(std::int64_t n, GradType type, int kind, std::uint64_t seed,
                       std::size_t shift) {
  Random random(seed);
  const std::size_t width = type == kGradF32 ? 4 : 2;
  Bytes grad(static_cast<std::size_t>(n) * width, shift);
  auto now = static_cast<Kind>(kind);
  for (std::int64_t i = 0; i < n; ++i) {
    if (kind == kKinds && i % 50 == 0) now = static_cast<Kind>(random.below(kKinds));
    const float x = sample(now, random, static_cast<int>(i));
    std::uint8_t* at = grad.data() + static_cast<std::size_t>(i) * width;
    if (type == kGradF32) {
      store(at, x);
    } else if (now == kAnyBits) {
      store(at, static_cast<std::uint16_t>(random.next()));
    } else {
      store(at, type == kGradBf16 ? bf16_saturate(x) : fp16_saturate(x));
    }
  }
  return grad;
}

inline float grad_value(const Bytes& grad, GradType type, std::int64_t i) {
  if (type == kGradF32) return load<float>(grad.data() + 4 * i);
  const auto half = load<std::uint16_t>(grad.data() + 2 * i);
  return type == kGradBf16 ? bf16_value(half) : fp16_value(half);
}

// Floats that end exactly where the allocation ends.
inline Bytes make_output(const Layout& layout) {
  return Bytes(static_cast<std::size_t>(span(layout)) * sizeof(float));
}

inline std::optional<Fault> decode(const Layout& layout, int isa, int threads,
                                   const std::vector<const std::uint8_t*>& wires, const Bytes& out,
                                   bool verify = true) {
  return decode_sum({&layout, kernels(isa), threads, wires.data(), static_cast<int>(wires.size()),
                     reinterpret_cast<float*>(out.data()), verify});
}

}  // namespace zcomm::test
