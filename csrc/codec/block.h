// What all codecs with blocks share: scales, the halving tree, code positions.
#pragma once

#include "codec/float.h"

namespace zcomm {

inline constexpr int kMaxBlock = 1024;
inline constexpr std::uint16_t kScaleZero = 0x0000;  // a zero block
inline constexpr std::uint16_t kScaleMin = 0x0080;   // the least normal bf16

ZC_FN bool scale_is_valid(std::uint16_t s) {
  return s == kScaleZero || (s >= kScaleMin && s <= kBf16Max) || s == kBf16Nan;
}

// A scale below the least normal bf16 makes a zero block.
ZC_FN std::uint16_t scale_or_zero(std::uint16_t s) { return s < kScaleMin ? kScaleZero : s; }

ZC_FN int log2_ceil(int m) {
  int k = 0;
  while ((1 << k) < m) ++k;
  return k;
}

// The exponent that brings a block's absmax into [1, 2), or [2, 4) where 2^-127 would be needed.
struct Exponent {
  std::uint32_t biased;  // of absmax; 0: too small for a scale
  float down, up;        // exact inverses of each other
};

ZC_FN Exponent block_exponent(std::uint32_t absmax_bits) {
  const std::uint32_t e = absmax_bits >> 23;
  const std::uint32_t p = e < 253 ? 254 - e : 1;
  return {e, pow2_biased(p), pow2_biased(254 - p)};
}

// Sums t[0..b) in place by halving strides; b is a power of two.
ZC_FN float tree_sum(float* t, int b) {
  for (int h = b / 2; h > 0; h /= 2) {
    for (int i = 0; i < h; ++i) t[i] = t[i] + t[i + h];
  }
  return t[0];
}

// Writes code i of a block whose bytes were cleared before.
ZC_FN void put_code(std::uint8_t* codes, int width, int i, unsigned code) {
  const int at = i * width;
  const unsigned shifted = (code & ((1u << width) - 1u)) << (at % 8);
  codes[at / 8] |= static_cast<std::uint8_t>(shifted);
  if (at % 8 + width > 8) codes[at / 8 + 1] |= static_cast<std::uint8_t>(shifted >> 8);
}

ZC_FN unsigned get_code(const std::uint8_t* codes, int width, int i) {
  const int at = i * width;
  unsigned pair = codes[at / 8];
  if (at % 8 + width > 8) pair |= unsigned{codes[at / 8 + 1]} << 8;
  return (pair >> (at % 8)) & ((1u << width) - 1u);
}

}  // namespace zcomm
