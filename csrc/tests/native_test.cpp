// The native core without Python: every instruction set gives the bytes, residuals and sums of the
// scalar one, touches nothing outside its buffers, and leaves the caller's floating point alone.
//
// `native_test [EVERY]`: with EVERY > 1 only each EVERY-th case, for slow emulators.
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "codec/lm.h"
#include "tests/encode_calls.h"

namespace zcomm::test {
namespace {

constexpr std::int64_t kSizes[] = {0, 1, 2, 31, 127, 128, 129, 1000, 4099, 70001};
constexpr GradType kGradTypes[] = {kGradF32, kGradBf16, kGradF16};
constexpr ResidualType kResidualTypes[] = {kResidualNone, kResidualF32, kResidualBf16,
                                           kResidualInt8};

long every = 1;

bool is_chosen() {
  static long number = 0;
  return number++ % every == 0;
}

bool same_float(float a, float b) { return bits(a) == bits(b); }

// r' = v - d, or the residual as it was where d is not finite, for fp32 storage.
bool residual_is_exact(const Call& call, const Bytes& grad, const std::vector<Bytes>& before,
                       const Encoded& after) {
  const Bytes decoded = make_output(call.layout);
  if (decode(call.layout, kIsaScalar, 1, {after.wire.data()}, decoded, call.checksum)) return false;
  const auto factor = static_cast<float>(call.prescale);
  for (std::size_t s = 0; s < call.layout.segments.size(); ++s) {
    const Segment& segment = call.layout.segments[s];
    for (std::int64_t i = 0; i < segment.n; ++i) {
      const auto r = load<float>(before[s].data() + 4 * i);
      const auto d = load<float>(decoded.data() + 4 * (segment.offset + i));
      const float product = grad_value(grad, call.grad_type, segment.offset + i) * factor;
      const float v = product + r;
      const float left = is_lm(segment.codec) ? lm_residual(v, d) : v - d;
      const float expected = finite(d) ? left : r;
      const auto got = load<float>(after.residuals[s].data() + 4 * i);
      // A zero block of lm* decodes to zeros of both signs; its residual is v.
      const bool is_v = is_lm(segment.codec) && d == 0.0f && same_float(got, v);
      if (!same_float(got, expected) && !is_v) return false;
    }
  }
  return true;
}

// Two steps of feedback on every instruction set.
void compare_encoders(const Call& call, int kind, std::uint64_t seed) {
  if (!is_chosen()) return;
  const Bytes first = make_grad(span(call.layout), call.grad_type, kind, seed, call.shift);
  const Bytes second = make_grad(span(call.layout), call.grad_type, kGaussian, ~seed, call.shift);
  const std::vector<Bytes> before = make_residuals(call, seed);
  const Encoded a = run(call, kIsaScalar, first, before);
  const Encoded b = run(call, kIsaScalar, second, a.residuals);
  if (call.residual_type == kResidualF32) {
    CHECK(residual_is_exact(call, first, before, a), describe(call, kIsaScalar));
    CHECK(residual_is_exact(call, second, a.residuals, b), describe(call, kIsaScalar));
  }
  for (int isa : isas()) {
    if (isa == kIsaScalar) continue;
    const std::string where = describe(call, isa) + " kind " + std::to_string(kind);
    const Encoded x = run(call, isa, first, before);
    CHECK(x.wire == a.wire, where);
    CHECK(x.residuals == a.residuals, where);
    const Encoded y = run(call, isa, second, a.residuals);
    CHECK(y.wire == b.wire, where);
    CHECK(y.residuals == b.residuals, where);
  }
}

// Sums of 1 ... 9 wires on every instruction set, written exactly where they belong.
void compare_decoders(const Layout& layout, std::uint64_t seed) {
  if (!is_chosen()) return;
  std::vector<Bytes> wires;
  for (int w = 0; w < 9; ++w) {
    const Call call{layout, kGradF32, kResidualNone, false, 1, static_cast<std::size_t>(w),
                    1.0,    true};
    const int kind = w % 3 == 0 ? kGaussian : w % 3 == 1 ? kKinds : static_cast<int>(seed % kKinds);
    const Bytes grad =
        make_grad(span(layout), kGradF32, kind, seed * 9 + static_cast<std::uint64_t>(w), 0);
    wires.push_back(run(call, kIsaScalar, grad, {}).wire);
  }
  for (std::size_t count = 1; count <= wires.size(); ++count) {
    std::vector<const std::uint8_t*> at;
    for (std::size_t w = 0; w < count; ++w) at.push_back(wires[w].data());
    const Bytes expected = make_output(layout);
    const int threads = 1 + static_cast<int>(count % 3);
    const Call call{layout};
    CHECK(!decode(layout, kIsaScalar, 1, at, expected), describe(call, kIsaScalar));
    for (int isa : isas()) {
      const Bytes out = make_output(layout);
      const std::string where = describe(call, isa) + " wires " + std::to_string(count);
      CHECK(!decode(layout, isa, threads, at, out), where);
      CHECK(out == expected, where);
    }
  }
}

template <class Body>
void for_each_shape(Body body) {
  std::uint64_t seed = 0;
  for (int codec = kNone; codec < kCodecs; ++codec) {
    const bool blocks = has_blocks(static_cast<std::uint8_t>(codec));
    for (int log2_block = 5; log2_block <= (blocks ? 10 : 5); ++log2_block) {
      for (std::int64_t n : kSizes) body(make_layout({part(codec, log2_block, n)}), ++seed);
    }
  }
}

void test_every_encoder() {
  int turn = 0;
  for_each_shape([&](const Layout& layout, std::uint64_t seed) {
    for (GradType grad : kGradTypes) {
      for (ResidualType residual : kResidualTypes) {
        for (bool separate : {false, true}) {
          if (separate && residual == kResidualNone) continue;
          ++turn;
          const double prescales[] = {1.0, 1.0 / 3, 1.0, 0.25, 1e-39};
          Call call{layout, grad, residual, separate};
          call.threads = 1 + turn % 3;
          call.shift = turn % 2 ? 0 : static_cast<std::size_t>(turn % 8 + 1);
          call.prescale = prescales[turn % 5];
          call.checksum = turn % 7 != 0;
          compare_encoders(call, turn % (kKinds + 1), seed * 31 + static_cast<std::uint64_t>(turn));
        }
      }
    }
  });
}

// Every kind of input where whole blocks, short blocks and several tiles meet.
void test_every_kind_of_input() {
  for (int codec = kNone; codec < kCodecs; ++codec) {
    for (int kind = 0; kind <= kKinds; ++kind) {
      for (int log2_block : {5, 7, 10}) {
        const Layout layout = make_layout({part(codec, log2_block, 3 * 1024 + 77)});
        for (ResidualType residual : kResidualTypes) {
          const Call call{layout, kGradF32, residual};
          compare_encoders(call, kind, static_cast<std::uint64_t>(codec * 100 + kind));
        }
        if (!has_blocks(static_cast<std::uint8_t>(codec))) break;
      }
    }
  }
}

void test_every_sum() {
  for_each_shape([](const Layout& layout, std::uint64_t seed) { compare_decoders(layout, seed); });
}

std::vector<Part> mixed_parts(int frames) {
  std::vector<Part> parts;
  for (int f = 0; f < frames; ++f) {
    for (int codec = kNone; codec < kCodecs; ++codec) {
      Part p = part(codec, 5 + (codec + f) % 6, 200 + 137 * codec + f);
      p.frame = f;
      p.gap = codec % 3;
      parts.push_back(p);
    }
  }
  return parts;
}

void test_many_segments_and_frames() {
  for (int frames = 1; frames <= 3; ++frames) {
    const Layout layout = make_layout(mixed_parts(frames), frames);
    for (ResidualType residual : kResidualTypes) {
      for (int threads = 1; threads <= 3; ++threads) {
        Call call{layout, kGradBf16, residual, threads == 2, threads};
        call.shift = static_cast<std::size_t>(threads);
        compare_encoders(call, kKinds, static_cast<std::uint64_t>(frames * 10 + threads));
      }
    }
    compare_decoders(layout, 77);
  }
}

void test_decoder_leaves_gaps_alone() {
  const Layout layout = make_layout(mixed_parts(1));
  const Bytes grad = make_grad(span(layout), kGradF32, kGaussian, 5, 0);
  const Bytes wire = run(Call{layout}, kIsaScalar, grad, {}).wire;
  for (int isa : isas()) {
    const Bytes out = make_output(layout);
    CHECK(!decode(layout, isa, 2, {wire.data()}, out), kIsaNames[isa]);
    std::int64_t at = 0;
    for (const Segment& s : layout.segments) {
      for (; at < s.offset; ++at) {
        CHECK(load<std::uint32_t>(out.data() + 4 * at) == 0xa5a5a5a5u, kIsaNames[isa]);
      }
      at += s.n;
    }
  }
}

void test_topk_of_any_k() {
  for (std::int64_t n : {1, 600, 5000, 70001}) {
    for (std::int64_t k : {std::int64_t{1}, n / 100 + 1, n / 2 + 1, n}) {
      const Layout layout = make_layout({part(kTopk, 0, n, std::min(k, n))});
      for (int kind : {kGaussian, kIntegers, kZeros, kConstant, kWithNan}) {
        for (ResidualType residual : kResidualTypes) {
          const Call call{layout, kGradF32, residual, kind == kZeros, 2};
          compare_encoders(call, kind, static_cast<std::uint64_t>(n + k + kind));
        }
      }
    }
  }
}

// Scales that encoders leave alone: sums that overflow must do so alike.
void test_sums_of_the_largest_scales() {
  for (int codec = kInt8; codec <= kSign; ++codec) {
    for (int log2_block : {5, 7}) {
      const Layout layout = make_layout({part(codec, log2_block, 4 * 128)});
      Random random(static_cast<std::uint64_t>(codec));
      std::vector<Bytes> wires;
      std::vector<const std::uint8_t*> at;
      for (int w = 0; w < 5; ++w) {
        const Bytes grad = make_grad(512, kGradF32, kGaussian, random.next(), 0);
        wires.push_back(run(Call{layout}, kIsaScalar, grad, {}).wire);
        at.push_back(wires.back().data());
        std::uint8_t* scales = wires.back().data() + layout.segments[0].section(0);
        for (int i = 0; i < 512 >> log2_block; ++i) {
          const auto scale = static_cast<std::uint16_t>(0x7f7f - random.below(0x480));
          store(scales + 2 * i, scale);
        }
      }
      const Bytes expected = make_output(layout);
      CHECK(!decode(layout, kIsaScalar, 1, at, expected, false), "scalar");
      for (int isa : isas()) {
        const Bytes out = make_output(layout);
        const std::string where = describe(Call{layout}, isa);
        CHECK(!decode(layout, isa, 1, at, out, false), where);
        CHECK(out == expected, where);
      }
    }
  }
}

// So much output that it is streamed past the cache.
void test_large_outputs() {
  for (int codec = kNone; codec < kCodecs; ++codec) {
    const std::int64_t n = (4 << 20) + 4099;
    if (!is_chosen()) continue;
    const Layout layout = make_layout({part(codec, 7, n)});
    const Bytes grad = make_grad(n, kGradBf16, kConstant, 3, 0);
    for (std::int64_t i = 0; i < n; ++i) grad.data()[2 * i] ^= static_cast<std::uint8_t>(i * 37);
    const Call call{layout, kGradBf16, kResidualNone, false, 2};
    const Bytes wire = run(call, isas().back(), grad, {}).wire;
    const Bytes expected = make_output(layout);
    CHECK(!decode(layout, kIsaScalar, 2, {wire.data(), wire.data()}, expected), "scalar");
    for (int isa : isas()) {
      if (isa == kIsaScalar) continue;
      void* aligned = nullptr;
      CHECK(posix_memalign(&aligned, 64, static_cast<std::size_t>(n) * 4) == 0, "memory");
      const std::uint8_t* wires[] = {wire.data(), wire.data()};
      CHECK(!decode_sum({&layout, kernels(isa), 2, wires, 2, static_cast<float*>(aligned), true}),
            describe(call, isa));
      CHECK(!std::memcmp(aligned, expected.data(), expected.size()), describe(call, isa));
      std::free(aligned);
    }
  }
}

// Flush-to-zero and another rounding.
#if defined(__x86_64__)
std::uint64_t float_mode() { return _mm_getcsr() & 0xffc0u; }
void set_float_mode(std::uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
constexpr std::uint64_t kOddMode = 0x1f80 | 0x8040 | 0x4000;
#elif defined(__aarch64__)
std::uint64_t float_mode() {
  std::uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
void set_float_mode(std::uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
constexpr std::uint64_t kOddMode = 1u << 24 | 1u << 22;
#endif

void test_float_mode_is_kept_and_ignored() {
  const std::uint64_t usual = float_mode();
  for (int isa : isas()) {
    for (int codec = kNone; codec < kCodecs; ++codec) {
      for (int kind : {kGaussian, kSubnormal, kTiny}) {
        if (!is_chosen()) continue;
        const Layout layout = make_layout({part(codec, 7, 70001)});
        const Call call{layout, kGradF32, kResidualF32, false, 3, 0, 1e-39, true};
        const Bytes grad = make_grad(span(layout), kGradF32, kind, 11, 0);
        const std::vector<Bytes> before = make_residuals(call, 6);
        const Encoded expected = run(call, isa, grad, before);
        const Bytes sum = make_output(layout), out = make_output(layout);
        const std::vector<const std::uint8_t*> wires(2, expected.wire.data());
        decode(layout, isa, 1, wires, sum);

        Encoded got{Bytes(expected.wire.size()), before};
        set_float_mode(kOddMode);
        run_encode(call, isa, grad, got.residuals, got.residuals, got.wire);
        const std::uint64_t after_encode = float_mode();
        decode(layout, isa, 3, wires, out);
        const std::uint64_t after_decode = float_mode();
        set_float_mode(usual);

        const std::string where = describe(call, isa) + " kind " + std::to_string(kind);
        CHECK(after_encode == kOddMode && after_decode == kOddMode, where);
        CHECK(got.wire == expected.wire && got.residuals == expected.residuals, where);
        CHECK(out == sum, where);
      }
    }
  }
}

void test_idle_segments_keep_their_residuals() {
  for (int isa : isas()) {
    for (int codec = kNone; codec < kCodecs; ++codec) {
      for (int type : {kResidualF32, kResidualBf16, kResidualInt8}) {
        if (!is_chosen()) continue;
        // The first is idle, but for the second call; the second never is.
        const Layout layout = make_layout({part(codec, 7, 70001), part(codec, 7, 300)});
        Call call{layout, kGradF32, static_cast<ResidualType>(type), true, 2, 1};
        const std::vector<Bytes> before = make_residuals(call, 6);
        const Bytes grad = make_grad(span(layout), kGradF32, kGaussian, 11, 1);
        std::memset(grad.data(), 0, 70001 * sizeof(float));
        const Encoded busy = run(call, isa, grad, before);
        call.keep_idle = true;
        const Encoded got = run(call, isa, grad, before);
        CHECK(got.residuals[0] == before[0], describe(call, isa));
        CHECK(got.residuals[1] == busy.residuals[1], describe(call, isa));
        grad.data()[70000 * sizeof(float)] = 1;
        const Encoded awake = run(call, isa, grad, before);
        call.keep_idle = false;
        CHECK(awake.residuals == run(call, isa, grad, before).residuals, describe(call, isa));
      }
    }
  }
}

// Encodes and decodes with several threads; whether the bytes are the expected ones.
class Exercise {
 public:
  Exercise()
      : layout_(make_layout({part(kLm4, 7, 200001), part(kTopk, 0, 150000)})),
        grad_(make_grad(span(layout_), kGradF32, kGaussian, 9, 0)),
        expected_(run(call(1), isas().back(), grad_, before())),
        sum_(make_output(layout_)) {
    decode(layout_, isas().back(), 1, {expected_.wire.data(), expected_.wire.data()}, sum_);
  }
  bool works() const {
    const Encoded got = run(call(3), isas().back(), grad_, before());
    const Bytes out = make_output(layout_);
    const bool accepted =
        !decode(layout_, isas().back(), 3, {got.wire.data(), got.wire.data()}, out);
    return accepted && got.wire == expected_.wire && got.residuals == expected_.residuals &&
           out == sum_;
  }

 private:
  Call call(int threads) const { return {layout_, kGradF32, kResidualF32, false, threads}; }
  std::vector<Bytes> before() const { return make_residuals(call(1), 21); }

  Layout layout_;
  Bytes grad_;
  Encoded expected_;
  Bytes sum_;
};

void test_works_after_fork() {
  const Exercise exercise;
  CHECK(exercise.works(), "parent, before");
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    alarm(300);
    const bool first = exercise.works();
    _exit(first && exercise.works() ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child, "wait");
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "child");
  CHECK(exercise.works(), "parent, after");
}

void test_concurrent_calls() {
  const Exercise exercise;
  std::vector<std::thread> threads;
  std::vector<int> good(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 5; ++i) good[t] += exercise.works();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int t = 0; t < 4; ++t) CHECK(good[t] == 5, "thread " + std::to_string(t));
}

}  // namespace
}  // namespace zcomm::test

int main(int argc, char** argv) {
  using namespace zcomm::test;
  if (argc > 1) every = std::atol(argv[1]);
  return run_all({
      {"every kind of input", test_every_kind_of_input},
      {"every encoder", test_every_encoder},
      {"every sum", test_every_sum},
      {"sums of the largest scales", test_sums_of_the_largest_scales},
      {"many segments and frames", test_many_segments_and_frames},
      {"decoder leaves gaps alone", test_decoder_leaves_gaps_alone},
      {"topk of any k", test_topk_of_any_k},
      {"large outputs", test_large_outputs},
      {"float mode is kept and ignored", test_float_mode_is_kept_and_ignored},
      {"idle segments keep their residuals", test_idle_segments_keep_their_residuals},
      {"works after fork", test_works_after_fork},
      {"concurrent calls", test_concurrent_calls},
  });
}
