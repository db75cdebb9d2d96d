// Malformed wires for the CUDA kernels: a few changes to a valid wire, aimed at headers, sections
// and paddings, with a checksum that fits or not.
#pragma once

#include "tests/cuda_cases.h"

namespace zcomm::test {

inline std::uint64_t frame_checksum(const std::uint8_t* frame, std::int64_t nbytes) {
  std::uint64_t sum = 0;
  for (std::int64_t i = 0; i < nbytes / 8; ++i) {
    if (i != 3) sum += load<std::uint64_t>(frame + 8 * i) * static_cast<std::uint64_t>(2 * i + 1);
  }
  return sum;
}

enum class Seal { kLeft, kRecomputed, kDropped };  // what happens to checksums

inline void seal_wire(const Layout& layout, Seal seal, std::uint8_t* wire) {
  if (seal == Seal::kLeft) return;
  for (const Frame& f : layout.frames) {
    std::uint8_t* frame = wire + f.start;
    if (seal == Seal::kDropped) frame[7] = 0;
    store(frame + 24, seal == Seal::kDropped ? 0 : frame_checksum(frame, f.nbytes));
  }
}

struct Stretch {
  std::int64_t begin, end;
};

// A section with its padding, or where it begins (topk's count may be no more than that), its last
// byte (not all of its bits may be used), or what shares 16 bytes with the padding.
inline Stretch random_part(Random& random, const Segment& s) {
  const int i = static_cast<int>(random.below(s.codec == kTopk ? 3 : 2));
  const std::int64_t begin = s.section(i), used = s.sections.used[i], end = begin + align16(used);
  switch (random.below(5)) {
    case 0:
      return {begin, std::min(begin + 4, end)};
    case 1:
      return {begin + std::max<std::int64_t>(used - 1, 0), begin + used};
    case 2:
      return {begin + (used & ~std::int64_t{15}), end};
    default:
      return {begin, end};
  }
}

inline Stretch random_target(Random& random, const Layout& layout) {
  const std::int64_t frames = static_cast<std::int64_t>(layout.frames.size());
  const std::int64_t segments = static_cast<std::int64_t>(layout.segments.size());
  const std::int64_t aim = random.below(16);
  if (aim == 0) {
    const std::int64_t start = layout.frames[random.below(frames)].start;
    return {start, start + static_cast<std::int64_t>(sizeof(Header))};
  }
  if (aim < 15 && segments > 0) {
    const Stretch found = random_part(random, layout.segments[random.below(segments)]);
    if (found.begin < found.end) return found;
  }
  return {0, wire_nbytes(layout)};
}

template <class T>
void change_piece(Random& random, const T (&values)[9], std::uint8_t* at) {
  const T old = load<T>(at);
  const T news[] = {values[random.below(9)], static_cast<T>(old + 1), static_cast<T>(old - 1),
                    static_cast<T>(random.next())};
  store(at, news[random.below(6) < 3 ? 0 : 1 + random.below(3)]);
}

inline void change_wire(Random& random, const Layout& layout, const Bytes& other,
                        std::uint8_t* wire) {
  constexpr std::uint16_t halves[] = {0, 1, 0x007f, 0x0080, 0x7f7f, 0x7f80, 0x7fc0, 0x8000, 0xffff};
  constexpr std::uint32_t words[] = {0,       1,          0xffff,     0x10000,   0x10001,
                                     0x80000, 0x7fffffff, 0x80000000, 0xffffffff};
  const Stretch target = random_target(random, layout);
  const std::int64_t at = target.begin + random.below(target.end - target.begin);
  std::uint8_t* const half = wire + (at & ~std::int64_t{1});
  const std::int64_t length = 1 + random.below(std::min<std::int64_t>(target.end - at, 40));
  switch (random.below(7)) {
    case 0:
    case 1:
      wire[at] ^= static_cast<std::uint8_t>(1 << random.below(8));
      break;
    case 2:
      change_piece(random, halves, half);
      break;
    case 3:
      change_piece(random, words, wire + (at & ~std::int64_t{3}));
      break;
    case 4:  // neighbours change places
      std::swap_ranges(half, half + 2, wire + ((at & ~std::int64_t{1}) ^ 2));
      break;
    case 5:
      std::memcpy(wire + at, other.data() + at, static_cast<std::size_t>(length));
      break;
    default:
      std::generate(wire + at, wire + at + length,
                    [&] { return static_cast<std::uint8_t>(random.next()); });
  }
}

}  // namespace zcomm::test
