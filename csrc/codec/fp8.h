// fp8: scales (bf16), then one E4M3 byte per element.
//
//   s = min(bf16(absmax / 448), cap)    code = E4M3(v / s)    d = value(code) * s (exact)
#pragma once

#include "codec/block.h"

namespace zcomm {

struct Fp8 {
  static constexpr int kWidth = 8;
  static constexpr float kMax = 448.0f;
  static constexpr std::uint16_t kCap = 0x7b12;
  static constexpr std::uint32_t kMaxCode = 0x7e;
  static constexpr float kLeastNormal = 0.015625f;             // 2^-6
  static constexpr float kSubnormalMagic = 16384.0f;           // ulp 2^-9, the subnormal step
  static constexpr std::uint32_t kRebias = 120u << 3;          // 127 - 7, above three mantissa bits
  static constexpr float kValueScale = 1.329227995784916e36f;  // 2^120

  ZC_FN static std::uint16_t scale(float absmax) {
    const std::uint16_t s = bf16_round(absmax / kMax);
    return scale_or_zero(s < kCap ? s : kCap);
  }

  ZC_FN static unsigned encode(float x) {
    const std::uint32_t u = bits(x) & kAbsMask;
    const std::uint32_t normal = (u + 0x7ffffu + ((u >> 20) & 1u)) >> 20;
    const std::uint32_t small = bits(from_bits(u) + kSubnormalMagic) - bits(kSubnormalMagic);
    std::uint32_t code = from_bits(u) < kLeastNormal ? small : normal - kRebias;
    if (code > kMaxCode) code = kMaxCode;
    return code | ((bits(x) >> 24) & 0x80u);
  }

  ZC_FN static float value(unsigned code) {
    const float magnitude = from_bits((code & 0x7fu) << 20) * kValueScale;
    return from_bits(bits(magnitude) | ((code & 0x80u) << 24));
  }
};

}  // namespace zcomm
