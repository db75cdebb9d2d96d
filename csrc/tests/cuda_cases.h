// Random layouts, gradients and residuals for the CUDA kernels: mostly small, and at the borders of
// strips, tiles and topk's ranges. And what the CPU makes of them.
#pragma once

#include "tests/cuda_device.h"

namespace zcomm::test {

// `large` lets a size reach several tiles, once.
inline std::int64_t random_size(Random& random, bool& large) {
  const std::int64_t around = random.below(9) - 4;
  switch (random.below(16)) {
    case 0:
      return 0;
    case 1:
      return cuda::kStripElements + around;
    case 2:
      if (!large) return random.below(2000);
      large = false;
      return random.below(3) ? cuda::kTileElements + around : kTopkRange + around;
    default:
      return random.below(301);
  }
}

inline std::int64_t random_k(Random& random, std::int64_t n) {
  const std::int64_t ks[] = {1, n, n / 100 + 1, n / 2 + 1, 1 + random.below(n + 1)};
  return std::min(ks[random.below(5)], n);
}

// One codec for all segments, or any for each.
inline Layout random_layout(Random& random) {
  const int frames = static_cast<int>(1 + random.below(4));
  // topk has the most kernels, and the most to check.
  const auto any_codec = [&] {
    return random.below(8) ? static_cast<int>(1 + random.below(kCodecs - 1)) : int{kTopk};
  };
  const int only = random.below(4) ? 0 : any_codec();
  bool large = true;
  std::vector<Part> parts;
  for (int f = 0; f < frames; ++f) {
    for (std::int64_t count = random.below(5); count > 0; --count) {
      const std::int64_t n = random_size(random, large);
      const int codec = only ? only : any_codec(),
                log2_block = static_cast<int>(5 + random.below(6));
      parts.push_back(part(codec, log2_block, n, random_k(random, n)));
      parts.back().frame = f;
      parts.back().gap = random.below(3) ? 0 : random.below(20);
    }
  }
  return make_layout(parts, frames);
}

inline std::size_t grad_width(GradType type) { return type == kGradF32 ? 4 : 2; }

// The first byte of what elements of this width lie in: any multiple of it.
inline std::size_t random_shift(Random& random, std::size_t width) {
  return random.below(2) ? 0 : width * static_cast<std::size_t>(random.below(16 / width));
}

inline Call random_call(Random& random, const Layout& layout) {
  constexpr double prescales[] = {1.0, 1.0, 1.0 / 3, 0.25, -1.5, 1e-39, 1e9};
  Call call{layout};
  call.grad_type = static_cast<GradType>(random.below(3));
  call.residual_type = static_cast<ResidualType>(random.below(4));
  call.shift = random_shift(random, call.residual_type == kResidualF32 ? 4 : 2);
  call.prescale = prescales[random.below(7)];
  call.checksum = random.below(6) > 0;
  call.keep_idle = random.below(2) > 0;
  return call;
}

// All zero, of both signs; now and then but for the last element.
inline void silence(Random& random, const Segment& s, GradType type, const Bytes& grad) {
  const std::size_t width = grad_width(type), nbytes = static_cast<std::size_t>(s.n) * width;
  if (nbytes == 0) return;
  std::uint8_t* at = grad.data() + static_cast<std::size_t>(s.offset) * width;
  std::memset(at, 0, nbytes);
  at[width * static_cast<std::size_t>(random.below(s.n)) + width - 1] = 0x80;
  if (random.below(3) == 0) at[nbytes - width] = 1;
}

// Half of the time a finite one: a number that is not hides the sums of topk's whole segment.
inline int random_kind(Random& random) {
  return static_cast<int>(random.below(random.below(2) ? int{kAnyBits} : kKinds + 1));
}

inline Bytes random_grad(Random& random, const Call& call) {
  Bytes grad = make_grad(span(call.layout), call.grad_type, random_kind(random), random.next(),
                         random_shift(random, grad_width(call.grad_type)));
  for (const Segment& s : call.layout.segments) {
    if (random.below(6) == 0) silence(random, s, call.grad_type, grad);
  }
  return grad;
}

// As encode_calls.h makes them, or with numbers that no encoder leaves.
inline std::vector<Bytes> random_residuals(Random& random, const Call& call) {
  std::vector<Bytes> residuals = make_residuals(call, random.next() >> 8);
  if (call.residual_type == kResidualInt8 || random.below(3)) return residuals;
  const GradType type = call.residual_type == kResidualF32 ? kGradF32 : kGradBf16;
  for (std::size_t i = 0; i < residuals.size(); ++i) {
    const std::int64_t n = call.layout.segments[i].n;
    residuals[i] = make_grad(n, type, kKinds, random.next(), call.shift);
  }
  return residuals;
}

enum class Feedback { kNone, kInPlace, kSeparate };  // a segment's residual

inline std::vector<Feedback> random_feedback(Random& random, const Call& call) {
  std::vector<Feedback> feedback;
  for (std::size_t i = 0; i < call.layout.segments.size(); ++i) {
    const auto choice = call.residual_type == kResidualNone ? 0 : random.below(9);
    feedback.push_back(choice == 0  ? Feedback::kNone
                       : choice < 5 ? Feedback::kInPlace
                                    : Feedback::kSeparate);
  }
  return feedback;
}

struct Encoding {
  Call call;
  std::vector<Feedback> feedback;  // of each segment
  Bytes grad;
  std::vector<Bytes> before;  // residuals, if the call has any
};

// run(from, to, wire) encodes; `from` and `to` hold an address for each segment.
template <class Run>
Encoded encode_by(const Encoding& encoding, const Run& run) {
  Encoded result{Bytes(static_cast<std::size_t>(wire_nbytes(encoding.call.layout))), {}};
  std::vector<std::uint64_t> from, to;
  for (std::size_t i = 0; i < encoding.before.size(); ++i) {
    const Bytes& before = encoding.before[i];
    const Feedback feedback = encoding.feedback[i];
    Bytes after(before.size(), encoding.call.shift);
    if (feedback != Feedback::kSeparate) std::memcpy(after.data(), before.data(), before.size());
    const bool none = feedback == Feedback::kNone, in_place = feedback == Feedback::kInPlace;
    from.push_back(none ? 0 : address(in_place ? after : before));
    to.push_back(none ? 0 : address(after));
    result.residuals.push_back(std::move(after));
  }
  run(bytes_of(from), bytes_of(to), result.wire);
  return result;
}

inline Encoded encode_on_cpu(const Encoding& encoding) {
  const Call& call = encoding.call;
  return encode_by(encoding, [&](const Bytes& from, const Bytes& to, const Bytes& wire) {
    encode({&call.layout, kernels(kIsaScalar), 1, encoding.grad.data(), call.grad_type,
            call.prescale, reinterpret_cast<const std::uint64_t*>(from.data()),
            reinterpret_cast<const std::uint64_t*>(to.data()), call.residual_type, wire.data(),
            call.checksum, call.keep_idle});
  });
}

inline Bytes wire_of(const Layout& layout, int kind, std::uint64_t seed) {
  return encode_on_cpu({Call{layout}, {}, make_grad(span(layout), kGradF32, kind, seed, 0), {}})
      .wire;
}

}  // namespace zcomm::test
