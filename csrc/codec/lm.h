// lm4, lm3, lm2: scales (bf16), then 4, 3 or 2 bits per element, lowest bits first.
//
//   y = H(sign * v * 2^-e)    t = floor(y * (48 / sqrt(tree(y*y) / b)))    code: t's cell
//   q = level[code]           S = bf16(tree(y*q) / tree(q*q) / b * 2^e)    d = sign * H(q * S)
#pragma once

#include "codec/block.h"
#include "codec/lm_tables.h"

namespace zcomm {

template <int Width>
struct Lm {
  static constexpr int kWidth = Width;
  static constexpr int kLevels = 1 << Width;

  ZC_FN static float level(unsigned code) { return levels()[code]; }
  ZC_FN static constexpr const float* levels() {
    return Width == 4 ? kLm4Levels : Width == 3 ? kLm3Levels : kLm2Levels;
  }
  ZC_FN static constexpr const signed char* thresholds() {
    return Width == 4 ? kLm4Thresholds : Width == 3 ? kLm3Thresholds : kLm2Thresholds;
  }

  // steps = y * lm_gain(...). Codes count up from the lowest level.
  ZC_FN static unsigned code(float steps) {
    const float floored = std::floor(steps);
    // A NaN (of a block whose codes will not count) must not reach the conversion.
    const int t = !(floored > -128.0f) ? -128 : floored > 127.0f ? 127 : static_cast<int>(floored);
    const int magnitude = t < 0 ? -1 - t : t;
    int cell = 0;
    for (int i = 0; i < kLevels / 2 - 1; ++i) cell += magnitude >= thresholds()[i];
    return static_cast<unsigned>(t < 0 ? kLevels / 2 - 1 - cell : kLevels / 2 + cell);
  }
};

ZC_FN std::uint32_t lm_sign_bit(int i) {
  return static_cast<std::uint32_t>(kSignWords[i / 64] >> (i % 64) & 1u) << 31;
}
ZC_FN float lm_flip(float x, int i) { return from_bits(bits(x) ^ lm_sign_bit(i)); }

// Steps of the threshold table per unit of y.
ZC_FN float lm_gain(float sum_of_squares, int log2_size) {
  return kLmSteps / std::sqrt(sum_of_squares * pow2_biased(127 - log2_size));
}

// Values of 2^122 and more are sent 64 times smaller, so that H(q * S) stays finite.
ZC_FN bool lm_is_large(const Exponent& exponent) { return exponent.biased >= 249; }

ZC_FN std::uint16_t lm_scale(float yq, float qq, int log2_size, const Exponent& exponent) {
  if (exponent.biased == 0) return kScaleZero;
  const float up = lm_is_large(exponent) ? exponent.up * pow2_biased(127 - 6) : exponent.up;
  return scale_or_zero(bf16_round(yq / qq * pow2_biased(127 - log2_size) * up));
}

// The residual of a large value stays finite too.
ZC_FN float lm_residual(float v, float d) {
  const float e = v - d;
  return finite(e) ? e : from_bits((bits(e) & ~kAbsMask) | (kInfBits - 1));
}

// The unnormalized Hadamard transform in place; b is a power of two.
ZC_FN void hadamard(float* t, int b) {
  for (int h = 1; h < b; h *= 2) {
    for (int i = 0; i < b; i += 2 * h) {
      for (int j = i; j < i + h; ++j) {
        const float x = t[j], y = t[j + h];
        t[j] = x + y;
        t[j + h] = x - y;
      }
    }
  }
}

}  // namespace zcomm
