// int8 and int4 in one formula: absmax, symmetric.
//
//   s = min(bf16(absmax / Q), cap)    code = clamp(rne(v / s), -Q, Q)    d = code * s (exact)
#pragma once

#include "codec/block.h"

namespace zcomm {

template <int Width, int Q, std::uint16_t Cap>
struct Uniform {
  static constexpr int kWidth = Width;
  static constexpr float kMax = Q;
  static constexpr int kUnused = -Q - 1;  // the code that does not occur

  ZC_FN static std::uint16_t scale(float absmax) {
    const std::uint16_t s = bf16_round(absmax / kMax);
    return scale_or_zero(s < Cap ? s : Cap);
  }

  ZC_FN static float code(float v, float inverse) {
    const float c = std::nearbyintf(v * inverse) + 0.0f;  // no -0: codes are integers
    return c > kMax ? kMax : c < -kMax ? -kMax : c;
  }

  ZC_FN static unsigned to_wire(float code) {
    return static_cast<unsigned>(static_cast<int>(code));
  }

  ZC_FN static float value(unsigned code) {
    return static_cast<float>(static_cast<int>(code << (32 - Width)) >> (32 - Width));
  }
};

}  // namespace zcomm
