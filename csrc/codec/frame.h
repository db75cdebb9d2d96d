// The frame: header, checksum, and where a segment's sections lie.
#pragma once

#include "codec/block.h"
#include "codec/topk.h"

namespace zcomm {

enum CodecId : std::uint8_t {
  kNone = 1,
  kBf16,
  kFp16,
  kInt8,
  kFp8,
  kInt4,
  kLm4,
  kLm3,
  kLm2,
  kSign,
  kTopk,
  kCodecs,  // one past the last
  kMixed = 255
};

struct Header {
  std::uint8_t magic[4];
  std::uint16_t version;
  std::uint8_t codec, flags;
  std::uint64_t elements;
  std::uint32_t units, layout;
  std::uint64_t checksum;
};
static_assert(sizeof(Header) == 32);

inline constexpr std::uint8_t kMagic[4] = {'Z', 'C', 'O', 'M'};
inline constexpr std::uint16_t kVersion = 1;
inline constexpr std::uint8_t kHasChecksum = 1;

ZC_FN std::int64_t align16(std::int64_t n) { return (n + 15) & ~std::int64_t{15}; }

ZC_FN int code_width(std::uint8_t codec) {
  constexpr int widths[kCodecs] = {0, 32, 16, 16, 8, 8, 4, 4, 3, 2, 1, 0};
  return widths[codec];
}

ZC_FN bool is_lm(std::uint8_t codec) { return codec >= kLm4 && codec <= kLm2; }
ZC_FN bool has_blocks(std::uint8_t codec) { return codec >= kInt8 && codec <= kSign; }

// How many codes a block of m elements sends.
ZC_FN int codes_in_block(std::uint8_t codec, int m) {
  return is_lm(codec) && m > 0 ? 1 << log2_ceil(m) : m;
}

// Bytes before padding of the sections of a segment.
struct Sections {
  std::int64_t used[3] = {0, 0, 0};

  ZC_FN std::int64_t start(int i) const {
    std::int64_t at = 0;
    for (int j = 0; j < i; ++j) at += align16(used[j]);
    return at;
  }
  ZC_FN std::int64_t nbytes() const { return start(3); }
};

ZC_FN Sections sections(std::uint8_t codec, int log2_block, std::int64_t n, std::int64_t k) {
  Sections s;
  if (codec == kTopk) {
    s.used[0] = (n + kTopkRange - 1) / kTopkRange * 4;
    s.used[1] = s.used[2] = 2 * k;
  } else if (has_blocks(codec)) {
    const std::int64_t block = std::int64_t{1} << log2_block, full = n >> log2_block;
    const int rest = static_cast<int>(n - full * block), width = code_width(codec);
    s.used[0] = 2 * (full + (rest > 0));
    s.used[1] = full * block * width / 8 + (codes_in_block(codec, rest) * width + 7) / 8;
  } else {
    s.used[0] = n * code_width(codec) / 8;
  }
  return s;
}

}  // namespace zcomm
